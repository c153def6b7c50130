"""The configuration of fine-tuning and prediction: what is refused, and which model is taken."""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import pytest
import yaml

from mlm.config.data import CorpusConfig, SourceConfig
from mlm.config.errors import InputError
from mlm.config.evaluation import EvaluateConfig, PredictConfig
from mlm.config.experiment import PretrainConfig
from mlm.config.files import config_folder
from mlm.config.finetune import (
    FinetuneConfig,
    FinetuneOptimizerConfig,
    FinetuneTrainerConfig,
    HeadConfig,
    LabelledConfig,
    newest_pretrained_model,
)
from mlm.config.keys import Keys, read_file
from mlm.config.parse import parse_config, save_config, to_plain
from mlm.config.training import OptimizerConfig


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


def test_resume_takes_the_newest_unfinished_fine_tuning(capsys):
    """Not a stopped pretraining run, nor a text that only looks like a key of fine-tuning."""
    make_run("pre", {})
    assert "holds no unfinished run" in refusal(capsys, "--resume")
    for name, config in (
        ("stopped", PretrainConfig(name="stopped")),
        ("tuned", FinetuneConfig(name="tuned")),
    ):
        Path("runs", name).mkdir()
        save_config(config, f"runs/{name}/config.yaml")
    Path("runs/odd").mkdir()
    Path("runs/odd/config.yaml").write_text('name: |\n  x\nrecipes: "a\nhead: b"\n')
    config = parse_config(FinetuneConfig, ["--resume"], prog="finetune.py")
    assert (config.name, config.resume) == ("tuned", True)
    assert parse_config(PretrainConfig, ["--resume"], prog="train.py").name == "stopped"


def test_pretraining_does_not_go_on_with_a_stopped_fine_tuning(capsys):
    Path("runs/tuned").mkdir(parents=True)
    save_config(FinetuneConfig(name="tuned"), "runs/tuned/config.yaml")
    assert "holds no unfinished run" in refusal(capsys, "--resume", cls=PretrainConfig)


def test_existing_run_folder_is_refused(capsys):
    make_run("pre", {})
    message = refusal(capsys, "--name", "pre")
    assert "the run folder runs/pre exists; take another --name, or use --resume\n" in message


def test_what_is_named_has_to_be_there(capsys):
    make_run("pre", {})
    assert "did you mean runs/pre/model?" in refusal(capsys, "--model", "runs/pre")
    assert "data.train=no.csv is no file; looked in" in refusal(capsys, "--data.train", "no.csv")
    Path("a.csv").write_text("text,label\n")
    words = ["--data.train", "a.csv", "--data.test", "b.csv"]
    assert "data.test=b.csv is no file" in refusal(capsys, *words)
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


def test_batch_size_has_two_spellings(capsys):
    make_run("pre", {})
    config = parse_config(FinetuneConfig, ["--trainer.global_batch_size", "8"], prog="finetune.py")
    assert config.trainer.rows_per_step == 8
    assert FinetuneConfig().trainer.rows_per_step == 32
    words = ["--trainer.global_batch_size", "8", "--trainer.batch_size", "16"]
    assert "trainer.global_batch_size=8 and trainer.batch_size=16 differ" in refusal(capsys, *words)
    assert "trainer.val_every=5 is not used" in refusal(capsys, "--trainer.val_every", "5")
    words = ["--trainer.batch_size", "10", "--trainer.devices", "4"]
    assert "trainer.batch_size=10 must be a multiple of 4 device(s); try 8 or 12" in refusal(capsys, *words)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LabelledConfig(max_length=3), "data.max_length=3 must be at least 8, or null"),
        (
            lambda: LabelledConfig(validation_fraction=1.0),
            r"data.validation_fraction=1.0 must lie in \(0, 1\)",
        ),
        (lambda: LabelledConfig(encoding="klingon"), "data.encoding=klingon is not a text encoding"),
        (lambda: LabelledConfig(label_separator=" "), "data.label_separator=' ' must be a character"),
        (lambda: HeadConfig(dropout=1.0), r"head.dropout=1.0 must lie in \[0, 1\)"),
        (lambda: HeadConfig(label_smoothing=-0.1), r"head.label_smoothing=-0.1 must lie in \[0, 1\)"),
        (lambda: HeadConfig(class_weights=["a"]), "head.class_weights=a must be label=weight"),
        (lambda: HeadConfig(class_weights=["a=1", "b=0"]), "head.class_weights=b=0 must be label=weight"),
        (lambda: HeadConfig(class_weights=["=2"]), "head.class_weights==2 must be label=weight"),
        (
            lambda: HeadConfig(class_weights=["yes=3", "no=2", "yes=1"]),
            "head.class_weights=yes=3,yes=1 weighs one class twice; keep one",
        ),
        (lambda: FinetuneOptimizerConfig(layer_decay=0), r"optimizer.layer_decay=0 must lie in \(0, 1\]"),
        (lambda: FinetuneOptimizerConfig(lr=-1.0), "optimizer.lr=-1.0 must be above 0"),
        (lambda: FinetuneTrainerConfig(freeze=0), "trainer.freeze=0 must be at least 1, embeddings, encoder"),
        (
            lambda: FinetuneTrainerConfig(keep="best", early_stopping=0),
            "early_stopping=0 must be at least 1",
        ),
        (lambda: FinetuneTrainerConfig(early_stopping=2), "early_stopping=2 keeps the best epoch: add --tr"),
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
    with pytest.raises(InputError, match=r"input=no\.csv is no file"):
        PredictConfig(model, "no.csv", "out.csv").check_files()
    Path("in.csv").write_text("text\n")
    with pytest.raises(InputError, match=r"output=no/out.csv cannot be written: there is no folder .*/no"):
        PredictConfig(model, "in.csv", "no/out.csv").check_files()
    PredictConfig(model, "in.csv", "out.csv").check_files()
    for config in (
        PredictConfig(model, "in.csv", "./in.csv"),
        EvaluateConfig(model, "in.csv", output="./in.csv"),
        EvaluateConfig(model, data=CorpusConfig(sources=[SourceConfig("*.csv")]), output="./in.csv"),
    ):
        with pytest.raises(InputError, match=r"output=\./in\.csv is what is read \(in\.csv\), which"):
            config.check_files()


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
    save_config(config, tmp_path / "saved.yaml")
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
    save_config(config, tmp_path / "saved.yaml")
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
    build().check_files()
    with pytest.raises(InputError, match="devices=3 stands beside torchrun, which started 2; leave it out"):
        build(devices=3).check_files()
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    for name, value in {"PROCID": "0", "STEP_ID": "0", "NTASKS": "2", "NNODES": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    with pytest.raises(InputError, match="srun=2 does not divide a file; start the processes with torchrun"):
        build().check_files()
