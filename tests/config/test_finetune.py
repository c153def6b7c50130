"""The configuration of fine-tuning and prediction: what is refused, and which model is taken."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import yaml

from mlm.config.commands import EvaluateConfig, PredictConfig, PretrainConfig
from mlm.config.data import CorpusConfig, SourceConfig
from mlm.config.errors import InputError
from mlm.config.files import config_folder
from mlm.config.finetune import (
    FinetuneConfig,
    FinetuneOptimizerConfig,
    FinetuneTrainerConfig,
    HeadConfig,
    LabelledConfig,
)
from mlm.config.parse import Keys, dump_config, read_file, to_plain
from mlm.config.training import OptimizerConfig
from mlm.startup.checks import check_files
from mlm.startup.command import newest_pretrained_model, parse_config


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def make_run(name, facts, model=True, age=0):
    folder = Path("runs") / name
    (folder / "model").mkdir(parents=True)
    if model:
        (folder / "model" / "config.json").write_text("{}")
    summary = folder / "summary.json"
    summary.write_text(facts if isinstance(facts, str) else json.dumps(facts))
    os.utime(summary, (1e9 - age, 1e9 - age))


def test_newest_finished_pretraining_run_is_taken():
    make_run("old", {"val_loss": 2.0}, age=100)
    make_run("good", {"val_loss": 2.0}, age=50)
    make_run("tuned", {"task": "mine"}, age=10)
    make_run("without-model", {"val_loss": 2.0}, model=False, age=5)
    make_run("damaged", "{", age=1)
    assert newest_pretrained_model("runs") == "runs/good/model"
    config = parse_config(FinetuneConfig, [], prog="finetune.py")
    assert config.model == "runs/good/model"
    assert config.name.startswith("finetune-")


def test_default_file_lists_every_key_and_equals_the_defaults():
    make_run("pre", {})
    path = config_folder() / "finetune" / "default.yaml"
    assert yaml.safe_load(path.read_text()).keys() == to_plain(FinetuneConfig()).keys()
    assert read_file(path, Keys.of(FinetuneConfig)).keys() == Keys.of(FinetuneConfig).types.keys()
    config = parse_config(FinetuneConfig, ["--config", "default", "--name", "a"], prog="finetune.py")
    assert config == FinetuneConfig(name="a", model="runs/pre/model")


def refusal(capsys, *words, cls=FinetuneConfig):
    os.environ.pop("MLM_RUN_NAME", None)
    with pytest.raises(SystemExit) as stop:
        parse_config(cls, list(words), prog="finetune.py")
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_without_a_run_train_py_is_named(capsys):
    message = "finetune.py: error: model=null: runs holds no finished pretraining run; run mlm pretrain first"
    assert refusal(capsys).startswith(message)


def leave(name, config):
    """Leave the configuration of a run that was stopped."""
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "config.yaml").write_text(dump_config(replace(config, name=name)))


def test_each_command_resumes_the_newest_stopped_run_of_its_own(capsys):
    Path("head: x.csv").write_text("text,label\n")
    make_run("pre", {})
    leave("tuned", FinetuneConfig(model="runs/pre/model", seed=3, data=LabelledConfig(train="head: x.csv")))
    assert "holds no unfinished run" in refusal(capsys, "--resume", cls=PretrainConfig)
    # The same values, but no line begins with "head:".
    path = Path("runs/tuned/config.yaml")
    path.write_text(json.dumps(yaml.safe_load(path.read_text())))
    assert "holds no unfinished run" in refusal(capsys, "--resume", cls=PretrainConfig)
    leave("first", PretrainConfig(seed=5))
    for name, content in (("damaged", "masking: ["), ("empty", ""), ("text", "masking\n")):
        Path("runs", name).mkdir()
        Path("runs", name, "config.yaml").write_text(content)
    tuned = parse_config(FinetuneConfig, ["--resume"], prog="finetune.py")
    assert (tuned.name, tuned.seed, tuned.resume, tuned.data.train) == ("tuned", 3, True, ["head: x.csv"])
    assert parse_config(PretrainConfig, ["--resume"], prog="train.py").name == "first"
    again = parse_config(FinetuneConfig, ["--resume", "auto", "--name", "tuned"], prog="finetune.py")
    assert again == tuned
    new = parse_config(FinetuneConfig, ["--resume", "auto", "--name", "new"], prog="finetune.py")
    assert new.resume is False


def test_existing_run_folder_is_refused(capsys):
    make_run("pre", {})
    message = refusal(capsys, "--name", "pre")
    assert "the run folder runs/pre exists; take another --name, or use --resume\n" in message


def test_what_is_named_has_to_be_there(capsys):
    make_run("pre", {})
    assert "did you mean runs/pre/model?" in refusal(capsys, "--model", "runs/pre")
    assert "data.train=no.csv is neither file, folder nor glob" in refusal(capsys, "--data.train", "no.csv")
    Path("a.csv").write_text("text,label\n")
    words = ["--data.train", "a.csv", "--data.test", "b.csv"]
    assert "data.test=b.csv is neither file" in refusal(capsys, *words)
    assert "data.validation=a.csv needs data.train beside it" in refusal(capsys, "--data.validation", "a.csv")
    assert "expected classification, regression or multilabel, got 'multi'" in refusal(
        capsys, "--data.label_type", "multi"
    )


OF_OWN_FILES = [
    ["--data.text_column", "t"],
    ["--data.text_pair_column", "t"],
    ["--data.label_column", "l"],
    ["--data.label_type", "regression"],
    ["--data.label_separator", ";"],
    ["--data.encoding", "latin-1"],
    ["--data.split", "order"],
    ["--data.group_column", "g"],
    ["--data.folds", "3"],
]


@pytest.mark.parametrize("words", OF_OWN_FILES, ids=lambda words: words[0])
def test_what_is_said_of_files_that_are_not_read_is_refused(capsys, words):
    make_run("pre", {})
    found = refusal(capsys, *words)
    assert f"{words[0][2:]}={words[1]} is about files of your own; name them with --data.train, or" in found
    assert "is about files of your own; GLUE's are known; leave it out" in refusal(
        capsys, *words, "--task", "cola"
    )
    Path("a.csv").write_text("text,label\n")
    parse_config(FinetuneConfig, [*words, "--data.train", "a.csv"], prog="x")


def test_what_is_about_glue_is_refused_with_other_files_but_a_recipe_may_be_used(capsys):
    make_run("pre", {})
    Path("a.csv").write_text("text,label\n")
    own = ["--data.train", "a.csv"]
    hint = "is about GLUE; name its tasks with --task, or set it to"
    assert f"selection=dev {hint} holdout" in refusal(capsys, *own, "--selection", "dev")
    assert f"submit=true {hint} false" in refusal(capsys, *own, "--submit")
    hint = "start_from_mnli=true is about rte, mrpc, stsb; name one of them with --task, or leave it out"
    assert hint in refusal(capsys, *own, "--start_from_mnli")
    assert hint in refusal(capsys, "--task", "cola", "--start_from_mnli")
    parse_config(FinetuneConfig, ["--config", "mosaicbert", *own], prog="x")


def test_processes_of_a_launcher_are_checked(capsys, monkeypatch):
    make_run("pre", {})
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    parse_config(FinetuneConfig, ["--name", "x"], prog="finetune.py")
    found = refusal(capsys, "--name", "x", "--trainer.batch_size", "7")
    assert "trainer.batch_size=7 must be a multiple of 2 device(s); try 6 or 8" in found
    found = refusal(capsys, "--name", "x", "--trainer.devices", "4")
    assert "trainer.devices=4 but torchrun started 2 process(es) a node" in found


def tuned(*words):
    return parse_config(FinetuneConfig, ["--name", "x", *words], prog="finetune.py").trainer


def test_batch_has_two_spellings(capsys):
    make_run("pre", {})
    for flag in ("--trainer.batch_size", "--trainer.global_batch_size"):
        trainer = tuned(flag, "48")
        assert (trainer.batch_size, trainer.rows_per_step) == (48, 48)
    Path("old.yaml").write_text("trainer:\n  batch_size: 16\n")
    assert tuned("-c", "old.yaml", "--trainer.global_batch_size", "8").batch_size == 8
    Path("new.yaml").write_text("trainer:\n  global_batch_size: 24\n")
    assert tuned("-c", "old.yaml", "-c", "new.yaml").batch_size == 24
    both = ["--trainer.batch_size", "8", "--trainer.global_batch_size"]
    assert tuned(*both, "8").batch_size == 8
    assert refusal(capsys, *both, "16") == (
        "finetune.py: error: --trainer.batch_size 8 and --trainer.global_batch_size 16 are one setting; "
        "keep one\n"
    )
    Path("null.yaml").write_text("trainer:\n  batch_size: 8\n  global_batch_size: null\n")
    assert tuned("-c", "null.yaml").batch_size == 8
    Path("both.yaml").write_text("trainer:\n  global_batch_size: 24\n  batch_size: 8\n")
    assert "both.yaml:3: trainer.batch_size is given twice in this file" in refusal(capsys, "-c", "both.yaml")
    Path("wrong.yaml").write_text("trainer:\n  global_batch_size: 0\n")
    assert "wrong.yaml:2: trainer.batch_size=0 must be at least 1" in refusal(capsys, "-c", "wrong.yaml")


def test_what_fine_tuning_does_not_use_and_devices_that_do_not_fit(capsys):
    make_run("pre", {})
    assert "trainer.val_every=5 is not used" in refusal(capsys, "--trainer.val_every", "5")
    words = ["--trainer.batch_size", "10", "--trainer.devices", "4"]
    assert "trainer.batch_size=10 must be a multiple of 4 device(s); try 8 or 12" in refusal(capsys, *words)


def test_fine_tuning_has_the_settings_of_the_common_engine():
    make_run("pre", {})
    trainer = tuned()
    assert trainer.bounds == (None, None, None, 3)
    assert (trainer.save_every, trainer.max_epochs, trainer.devices, trainer.strategy) == (
        None,
        3,
        "auto",
        "auto",
    )
    words = (
        "--trainer.micro_batch_size 4 --trainer.max_steps 9 --trainer.max_time 1m --trainer.strategy fsdp2"
    )
    trainer = tuned(*words.split())
    assert (trainer.bounds, trainer.max_seconds, trainer.accumulation(2)) == ((9, None, "1m", 3), 60, 4)


def test_muon_needs_whole_matrices_in_fine_tuning_too(capsys):
    words = ["--optimizer.name", "muon", "--trainer.strategy", "fsdp2"]
    assert "optimizer.name=muon needs whole matrices, which trainer.strategy=fsdp2" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LabelledConfig(max_length=3), "data.max_length=3 must be at least 8, or null"),
        (
            lambda: LabelledConfig(validation_fraction=1.0),
            r"data.validation_fraction=1.0 must be in \(0, 1\)",
        ),
        (lambda: LabelledConfig(encoding="klingon"), "data.encoding=klingon is not a text encoding"),
        (lambda: LabelledConfig(label_separator=" "), "data.label_separator=' ' must be a character"),
        (lambda: HeadConfig(dropout=1.0), r"head.dropout=1.0 must be in \[0, 1\)"),
        (lambda: HeadConfig(label_smoothing=-0.1), r"head.label_smoothing=-0.1 must be in \[0, 1\)"),
        (lambda: HeadConfig(class_weights=["a"]), "head.class_weights=a must be label=weight"),
        (lambda: HeadConfig(class_weights=["a=1", "b=0"]), "head.class_weights=b=0 must be label=weight"),
        (lambda: HeadConfig(class_weights=["=2"]), "head.class_weights==2 must be label=weight"),
        (
            lambda: HeadConfig(class_weights=["yes=3", "no=2", "yes=1"]),
            "head.class_weights=yes=3,yes=1 weighs one class twice; keep one",
        ),
        (lambda: FinetuneOptimizerConfig(layer_decay=0), r"optimizer.layer_decay=0 must be in \(0, 1\]"),
        (lambda: FinetuneOptimizerConfig(lr=-1.0), "optimizer.lr=-1.0 must be above 0"),
        (lambda: FinetuneTrainerConfig(freeze=0), "trainer.freeze=0 must be at least 1, embeddings, encoder"),
        (
            lambda: FinetuneTrainerConfig(keep="best", early_stopping=0),
            "early_stopping=0 must be at least 1",
        ),
        (lambda: FinetuneTrainerConfig(early_stopping=2), "early_stopping=2 keeps the best model: add --tr"),
        (
            lambda: FinetuneConfig(
                data=LabelledConfig(label_type="regression"), head=HeadConfig(class_weights="balanced")
            ),
            "head.class_weights=balanced is about classes, not numbers",
        ),
        (
            lambda: FinetuneConfig(task=["mrpc", "stsb"], head=HeadConfig(label_smoothing=0.1)),
            "head.label_smoothing=0.1 needs labels of which one holds",
        ),
        (
            lambda: FinetuneConfig(
                data=LabelledConfig(label_type="multilabel"), head=HeadConfig(label_smoothing=0.1)
            ),
            "head.label_smoothing=0.1 needs labels of which one holds",
        ),
        (lambda: FinetuneTrainerConfig(max_epochs=0), "trainer.max_epochs=0 must be at least 1"),
        (lambda: FinetuneTrainerConfig(batch_size=0), "trainer.batch_size=0 must be at least 1"),
        (lambda: PredictConfig("m", "i", "o", devices=0), "devices=0 must be at least 1"),
        (lambda: EvaluateConfig("m", "i", max_length=1), "max_length=1 must be at least 8"),
        (lambda: PredictConfig("m", "i", "o", batch_size=0), "batch_size=0 must be at least 1"),
        (lambda: PredictConfig("m", "i", "o", max_length=1), "max_length=1 must be at least 8"),
        (lambda: PredictConfig("m", "i", "o", encoding="klingon"), "encoding=klingon is not a text encoding"),
        (lambda: PredictConfig("m", "i", "o", encoding="base64"), "encoding=base64 is not a text encoding"),
        (lambda: LabelledConfig(encoding="rot13"), "data.encoding=rot13 is not a text encoding"),
        (lambda: LabelledConfig(encoding="hex"), "data.encoding=hex is not a text encoding"),
    ],
)
def test_values_out_of_range(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_prediction_checks_its_files():
    make_run("pre", {})
    model = "runs/pre/model"
    with pytest.raises(InputError, match=r"input=no\.csv is neither file"):
        check_files(PredictConfig(model, "no.csv", "out.csv"))
    Path("in.csv").write_text("text\n")
    with pytest.raises(InputError, match=r"output=no/out.csv cannot be written: there is no folder .*/no"):
        check_files(PredictConfig(model, "in.csv", "no/out.csv"))
    check_files(PredictConfig(model, "in.csv", "out.csv"))
    for config in (
        PredictConfig(model, "in.csv", "./in.csv"),
        EvaluateConfig(model, "in.csv", output="./in.csv"),
        EvaluateConfig(model, data=CorpusConfig(sources=[SourceConfig("*.csv")]), output="./in.csv"),
    ):
        with pytest.raises(InputError, match=r"output=\./in\.csv is an input \(in\.csv\), which"):
            check_files(config)


def test_groups_have_their_own_defaults_from_the_command_line_too():
    make_run("pre", {})
    config = parse_config(FinetuneConfig, ["--optimizer.weight_decay", "0"], prog="finetune.py")
    assert (config.optimizer.name, config.optimizer.lr) == ("adamw", FinetuneConfig().optimizer.lr)
    assert config.schedule.name == "linear"
    assert isinstance(config.optimizer, OptimizerConfig)
    trainer = config.trainer
    assert (trainer.max_steps, trainer.rows_per_step, trainer.accumulation(1)) == (None, 32, 1)


def test_configuration_is_read_back(tmp_path):
    make_run("pre", {})
    Path("a.csv").write_text("text,&x\n")
    words = ["--data.train", "a.csv", "--data.label_column", "&x", "--seed", "3", "--name", "a"]
    config = parse_config(FinetuneConfig, words, prog="finetune.py")
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert parse_config(FinetuneConfig, ["-c", str(tmp_path / "saved.yaml")], prog="finetune.py") == config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["balanced"], "balanced"),
        (["no=1,yes=2.5"], ["no=1", "yes=2.5"]),
        (["null"], None),
    ],
)
def test_class_weights_are_given_in_one_word(words, expected, tmp_path):
    make_run("pre", {})
    config = parse_config(FinetuneConfig, ["--head.class_weights", *words, "--name", "a"], prog="finetune.py")
    assert config.head.class_weights == expected
    (tmp_path / "saved.yaml").write_text(dump_config(config))
    assert parse_config(FinetuneConfig, ["-c", str(tmp_path / "saved.yaml")], prog="finetune.py") == config


@pytest.mark.parametrize(("word", "expected"), [("2", 2), ("encoder", "encoder"), ("null", None)])
def test_what_is_frozen_is_a_word_or_a_number(word, expected):
    make_run("pre", {})
    config = parse_config(FinetuneConfig, ["--trainer.freeze", word], prog="finetune.py")
    assert config.trainer.freeze == expected


def test_prediction_goes_with_torchrun_only(monkeypatch):
    make_run("pre", {})
    Path("in.csv").write_text("text\n")
    build = partial(PredictConfig, "runs/pre/model", "in.csv", "out.csv")
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    check_files(build())
    with pytest.raises(InputError, match="devices=3 conflicts with torchrun, which started 2; leave it out"):
        check_files(build(devices=3))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    for name, value in {"PROCID": "0", "STEP_ID": "0", "NTASKS": "2", "NNODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(InputError, match="srun=2 does not divide a file; start the processes with torchrun"):
        check_files(build())
