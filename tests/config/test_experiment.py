from __future__ import annotations

import math
import os
import re
from dataclasses import fields

import pytest

from mlm.config.commands import EvaluateConfig, FillMaskConfig, PretrainConfig
from mlm.config.data import CorpusConfig, MaskingConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.config.training import OptimizerConfig, ScheduleConfig, TrainerConfig
from mlm.startup.checks import check_files, check_model_folder, check_run
from mlm.startup.command import choose_name

GROUPS = {
    "data": CorpusConfig,
    "tokenizer": TokenizerConfig,
    "masking": MaskingConfig,
    "model": ModelConfig,
    "optimizer": OptimizerConfig,
    "schedule": ScheduleConfig,
    "trainer": TrainerConfig,
}

COUNTS = [
    "data.max_documents",
    "data.max_validation_tokens",
    "data.num_proc",
    "data.seq_len",
    "model.hidden_size",
    "model.intermediate_size",
    "model.max_position_embeddings",
    "model.num_attention_heads",
    "model.num_hidden_layers",
    "model.vocab_size",
    "tokenizer.vocab_size",
    "trainer.devices",
    "trainer.global_batch_size",
    "trainer.max_steps",
    "trainer.max_tokens",
    "trainer.micro_batch_size",
    "trainer.num_nodes",
    "trainer.save_every",
    "trainer.val_every",
]

RATES = [
    "data.validation_fraction",
    "masking.final_mask_rate",
    "masking.mask_rate",
    "masking.mask_token_fraction",
    "masking.random_token_fraction",
    "masking.validation_mask_rate",
    "model.attention_dropout",
    "model.embedding_dropout",
    "model.hidden_dropout",
    "optimizer.momentum",
    "schedule.decay_fraction",
    "schedule.warmup_fraction",
]


def refuse(key, value):
    group, name = key.split(".")
    with pytest.raises(InputError) as error:
        GROUPS[group](**{name: value})
    assert "\n" not in str(error.value)
    assert str(error.value).startswith(group)
    return str(error.value)


@pytest.mark.parametrize("key", COUNTS)
def test_counts_are_above_zero(key):
    for value in (0, -1):
        assert refuse(key, value).startswith(f"{key}={value} must be at least")


@pytest.mark.parametrize("key", RATES)
def test_rates_lie_between_zero_and_one(key):
    for value in (-0.1, 1.5, math.nan, math.inf):
        assert re.match(rf"{key}( \+ |=)", refuse(key, value))


def test_every_number_is_finite():
    for group, cls in GROUPS.items():
        for field in fields(cls):
            if isinstance(field.default, float):
                for value in (math.nan, math.inf, -math.inf):
                    refuse(f"{group}.{field.name}", value)
    for beta in (math.nan, 1.0, -0.1):
        refuse("optimizer.betas", (0.9, beta))


@pytest.mark.parametrize(
    "key", ["optimizer.lr", "optimizer.muon_lr", "optimizer.eps", "model.norm_eps", "model.rotary_theta"]
)
def test_sizes_of_steps_are_above_zero(key):
    for value in (0.0, -1.0):
        assert refuse(key, value).startswith(f"{key}={value} must be above 0")


def test_fractions_of_the_masked_tokens_add_up():
    both = "masking.mask_token_fraction + masking.random_token_fraction=1.5 must not exceed 1"
    with pytest.raises(InputError, match=re.escape(both)):
        MaskingConfig(mask_token_fraction=0.75, random_token_fraction=0.75)
    MaskingConfig(mask_token_fraction=0.9, random_token_fraction=0.1)


def test_heads_divide_the_width():
    with pytest.raises(InputError, match=r"model.hidden_size=250 must be a multiple .*=4; try 248 or 252"):
        ModelConfig(hidden_size=250)
    with pytest.raises(InputError, match="odd width 3"):
        ModelConfig(hidden_size=12, num_attention_heads=4)
    ModelConfig(hidden_size=12, num_attention_heads=4, position_embedding="learned")


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_rows_fit_the_positions(position):
    model = ModelConfig(max_position_embeddings=64, position_embedding=position)
    with pytest.raises(InputError, match=r"data.seq_len=128 is longer than model.max_position_embeddings=64"):
        PretrainConfig(model=model)
    PretrainConfig(model=model, data=CorpusConfig(seq_len=64))


def test_warmup_fits_the_run():
    with pytest.raises(
        InputError, match=r"schedule.warmup_steps=200 is longer than the run of trainer.max_steps=20"
    ):
        PretrainConfig(schedule=ScheduleConfig(warmup_steps=200), trainer=TrainerConfig(max_steps=20))
    PretrainConfig(schedule=ScheduleConfig(warmup_steps=20), trainer=TrainerConfig(max_steps=20))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"global_batch_size": 7, "micro_batch_size": 2},
            "multiple of trainer.micro_batch_size=2 x 1 device.*try 6 or 8",
        ),
        (
            {"global_batch_size": 6, "devices": 4},
            "global_batch_size=6 must be a multiple of 4 device.*try 4 or 8",
        ),
        (
            {"global_batch_size": 8, "devices": 2, "num_nodes": 2, "micro_batch_size": 4},
            "x 4 device.*try 16 or 32",
        ),
        ({"max_time": "soon"}, "trainer.max_time=soon is not a duration"),
        ({"max_time": "0s"}, "trainer.max_time=0s must be above 0"),
    ],
)
def test_trainer_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        TrainerConfig(**arguments)


def test_accumulation_is_derived():
    trainer = TrainerConfig(global_batch_size=32, micro_batch_size=4)
    assert [trainer.accumulation(devices) for devices in (1, 2, 8)] == [8, 4, 1]
    assert [TrainerConfig(global_batch_size=32).accumulation(devices) for devices in (1, 2, 32)] == [1, 1, 1]
    with pytest.raises(InputError, match=r"multiple of trainer.micro_batch_size=4 x 3"):
        trainer.accumulation(3)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("5m", 300), ("1.5h", 5400), ("2d", 172800), ("01:02:03:04", 93784), ("7", 7)],
)
def test_durations(text, seconds):
    assert TrainerConfig(max_time=text).max_seconds == seconds


def test_model_folder(tmp_path):
    with pytest.raises(InputError, match=r"init=.*run is not a model folder .*looked in .*run"):
        check_model_folder("init", str(tmp_path / "run"))
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "model" / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"did you mean .*run/model\?"):
        check_model_folder("init", str(tmp_path / "run"))
    check_model_folder("init", str(tmp_path / "run" / "model"))


def test_other_commands_check_their_input(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    check_files(EvaluateConfig(model=str(tmp_path)))
    check_files(FillMaskConfig(model=str(tmp_path), text=["[MASK]"]))
    for config in (EvaluateConfig(model="nowhere"), FillMaskConfig(model="nowhere", text=["[MASK]"])):
        with pytest.raises(InputError, match="model=nowhere is not a model folder"):
            check_files(config)
    with pytest.raises(InputError, match="batch_size=0 must be at least 1"):
        EvaluateConfig(model="x", batch_size=0)
    with pytest.raises(InputError, match="top_k=0 must be at least 1"):
        FillMaskConfig(model="x", text=["[MASK]"], top_k=0)
    with pytest.raises(InputError, match=r"text=.* is empty"):
        FillMaskConfig(model="x", text=[])


@pytest.mark.parametrize("name", ["a/b", "..", ".", "", "a\\b", ".hidden", "a\nb"])
def test_names_of_runs_are_plain(name):
    with pytest.raises(InputError, match="must be a plain folder name"):
        PretrainConfig(name=name)


def test_name_is_given_handed_over_or_made(tmp_path, monkeypatch):
    made, handed_over, given = (
        PretrainConfig(name=name, runs_dir=str(tmp_path)) for name in (None, None, "mine")
    )
    choose_name(made, "default")
    assert re.fullmatch(r"default-\d{8}-\d{6}", made.name)
    assert "MLM_RUN_NAME" not in os.environ  # a second run of this process gets its own
    monkeypatch.setenv("MLM_RUN_NAME", "from-rank-0")
    choose_name(handed_over, "default")
    assert handed_over.name == "from-rank-0"
    choose_name(given, "default")
    assert given.name == "mine"
    monkeypatch.setenv("MLM_RUN_NAME", "a/b")
    with pytest.raises(InputError, match="name=a/b must be a plain folder name"):
        choose_name(PretrainConfig(runs_dir=str(tmp_path)), "default")
    monkeypatch.delenv("MLM_RUN_NAME")
    resumed = PretrainConfig(resume=True)
    choose_name(resumed, "default")
    assert resumed.name is None


def test_made_names_differ_within_a_second(tmp_path, monkeypatch):
    names = set()
    for _ in range(3):
        monkeypatch.delenv("MLM_RUN_NAME", raising=False)
        config = PretrainConfig(runs_dir=str(tmp_path))
        choose_name(config, "default")
        (tmp_path / config.name).mkdir()
        names.add(config.name)
    assert len(names) == 3


@pytest.mark.parametrize(
    "environment",
    [
        {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "0"},
        {"SLURM_NTASKS": "2", "SLURM_NNODES": "2", "SLURM_PROCID": "0"},
        {"RANK": "1"},
    ],
    ids=["torchrun", "srun", "another rank"],
)
def test_processes_of_a_launcher_need_a_name(tmp_path, monkeypatch, environment):
    for variable, value in environment.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(InputError, match=r"name=null cannot be agreed on by several processes; give --name"):
        choose_name(PretrainConfig(runs_dir=str(tmp_path)), "default")
    monkeypatch.setenv("MLM_RUN_NAME", "agreed")
    config = PretrainConfig(runs_dir=str(tmp_path))
    choose_name(config, "default")
    assert config.name == "agreed"


def test_existing_run_folder_is_refused_by_the_first_process_only(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    config = PretrainConfig(name="mine", runs_dir=str(tmp_path))
    for rank in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(rank, "0")
        with pytest.raises(
            InputError, match=r"the run folder .*mine exists; take another --name, or .*--resume"
        ):
            check_run(config)
        monkeypatch.setenv(rank, "1")
        check_run(config)
        monkeypatch.delenv(rank)
    check_run(PretrainConfig(name="mine", runs_dir=str(tmp_path), resume=True))


def test_a_run_that_nobody_bounded_has_500_steps_and_one_with_another_bound_has_no_step_limit():
    assert TrainerConfig().max_steps == 500
    assert TrainerConfig(max_time="5m").max_steps is None
    assert TrainerConfig(max_tokens=1000).max_steps is None
    assert TrainerConfig(max_steps=7, max_time="5m").max_steps == 7


def test_a_tokenizer_beside_the_model_that_has_one_is_refused():
    with pytest.raises(InputError, match=r"tokenizer\.path=words conflicts with init"):
        PretrainConfig(init="owner/model", tokenizer=TokenizerConfig(path="words"))
