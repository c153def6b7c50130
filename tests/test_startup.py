"""What happens before torch: names of runs, `load_config`, and how an error ends a program."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mlm
from mlm.config.commands import PretrainConfig
from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.parse import dump_config
from mlm.startup.command import RUN_NAME, one_line_errors, parse_config

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_load_config_takes_the_words_of_a_command_line(tmp_path):
    before = dict(os.environ)
    words = ["--trainer.max_steps=60", "--optimizer.lr", "1e-3", "-c", "bert-mini"]
    config = mlm.load_config("pretrain", *words)
    assert type(config) is PretrainConfig
    assert (config.trainer.max_steps, config.optimizer.lr, config.model.activation) == (60, 1e-3, "gelu")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    tuned = mlm.load_config("finetune", "--model", "model", "--trainer.global_batch_size=8")
    assert type(tuned) is FinetuneConfig
    assert (tuned.model, tuned.trainer.batch_size) == ("model", 8)
    assert dict(os.environ) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_load_config_reads_a_run_that_exists():
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/config.yaml").write_text(dump_config(PretrainConfig(name="mine", seed=3)))
    assert mlm.load_config("pretrain", "--name", "mine").seed == 0
    assert mlm.load_config("pretrain", "--name", "mine", "--resume").seed == 3
    assert mlm.load_config("pretrain", "--config", "runs/mine/config.yaml").seed == 3


@pytest.mark.parametrize(
    ("kind", "words", "message"),
    [
        ("pretrain", ["--seed"], "--seed: a value is missing"),
        (
            "pretrain",
            ["--model.hiden_size=3"],
            "unknown key --model.hiden_size; did you mean --model.hidden_size?",
        ),
        (
            "pretrain",
            ["--data.sources", "nowhere.txt"],
            "data.sources: no file, folder or glob match 'nowhere.txt'",
        ),
        ("pretrain", ["--optimizer.lr", "fast"], "--optimizer.lr: expected a number, got 'fast'"),
        ("pretrain", ["--help"], "--help is for the command line; see `mlm pretrain --help`"),
        ("pretrain", ["-h"], "--help is for the command line"),
        ("pretrain", ["--resume"], "--resume: runs holds no unfinished run; name one with --name"),
        ("finetune", [], "model=null: runs holds no finished pretraining run"),
        ("pretain", [], "kind=pretain is neither pretrain nor finetune; did you mean pretrain?"),
    ],
)
def test_load_config_raises_and_never_exits(capsys, tmp_path, kind, words, message):
    with pytest.raises(InputError, match="^" + re.escape(message)):
        mlm.load_config(kind, *words)
    assert capsys.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_a_second_unnamed_run_in_one_process_gets_a_name_of_its_own():
    """As in a notebook: the name of the first is not left in the environment."""
    first = parse_config(PretrainConfig, [], prog="train.py")
    assert RUN_NAME not in os.environ
    Path("runs", first.name).mkdir(parents=True)
    second = parse_config(PretrainConfig, [], prog="train.py")
    assert first.name != second.name


def end(prog, error, config=None):
    """Return the exit status of a program that this error ends."""
    with pytest.raises(SystemExit) as stop, one_line_errors(prog, config):
        raise error
    return stop.value.code


def test_mistakes_and_interrupts_are_one_line(capsys):
    assert end("prog", InputError("line 3:\n  not UTF-8")) == 2
    assert end("prog", KeyboardInterrupt()) == 130
    assert capsys.readouterr().err == "prog: error: line 3: not UTF-8\nprog: interrupted\n"


@pytest.mark.parametrize(
    "error",
    [RuntimeError("a bug\nin two lines"), OSError(5, "Input/output error", "x.bin"), RecursionError("deep")],
)
def test_any_other_error_keeps_its_traceback_in_a_file(capsys, monkeypatch, tmp_path, error):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert end("prog", error) == 1
    (file,) = tmp_path.glob("error-*.txt")
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert line.startswith(f"prog: unexpected error: {type(error).__name__}: ")
    assert str(file) in line
    assert "in end\n    raise error" in file.read_text()


def test_traceback_goes_to_the_run_folder_if_there_is_one(capsys, tmp_path):
    config = PretrainConfig(name="mine")
    Path("runs/mine").mkdir(parents=True)
    assert end("prog", RuntimeError("a bug"), config) == 1
    (file,) = Path("runs/mine").glob("error-*.txt")
    assert str(file) in capsys.readouterr().err


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("MLM_DEBUG", "1")
    with pytest.raises(RuntimeError), one_line_errors("prog"):
        raise RuntimeError("a bug")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  sources: &x [*x]\n", "my.yaml: a YAML value contains itself, or is nested too deeply"),
        ("name: " + "[" * 5000, "my.yaml: YAML that is nested too deeply"),
    ],
)
def test_yaml_that_contains_itself_is_a_mistake_of_the_user(capsys, text, message):
    Path("my.yaml").write_text(text)
    with pytest.raises(SystemExit) as stop:
        parse_config(PretrainConfig, ["-c", "my.yaml"], prog="train.py")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"train.py: error: {message}\n"


def test_closed_output_is_no_error():
    code = (
        "from mlm.startup.command import one_line_errors\n"
        "with one_line_errors('prog'):\n"
        "    print('x' * 100_000, flush=True)\n"
    )
    command = f'{sys.executable} -c "{code}" | head -c 1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (1, "x", "")


@pytest.mark.parametrize(
    ("make", "words", "message"),
    [
        (Path.touch, [], "runs_dir=there cannot be a folder: {path} is none; name another"),
        (Path.touch, ["--runs_dir", "there/runs"], "runs_dir=there/runs cannot be a folder: {path} is none"),
        (lambda path: path.symlink_to("nowhere"), [], "runs_dir=there cannot be a folder: {path} is none"),
    ],
)
def test_place_of_runs_that_is_no_folder_is_a_mistake_of_the_user(capsys, tmp_path, make, words, message):
    make(Path("there"))
    with pytest.raises(SystemExit) as stop:
        parse_config(PretrainConfig, ["--runs_dir", "there", *words], prog="train.py")
    assert stop.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith("train.py: error: " + message.format(path=tmp_path / "there"))
    assert line.count("\n") == 1


def test_files_and_folders_without_permission_are_a_mistake_of_the_user(capsys, monkeypatch):
    """A superuser may read and write everything: the answer of the system is made up."""
    Path("data.csv").write_text("text,label\n")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    words = ["--model", "model", "--data.train", "data.csv"]
    for config, given, message in (
        (FinetuneConfig, words, "data.train=data.csv cannot be read: no permission"),
        (PretrainConfig, [], "runs_dir=runs cannot be written: no permission in "),
    ):
        with pytest.raises(SystemExit) as stop:
            parse_config(config, given, prog="prog")
        assert stop.value.code == 2
        assert capsys.readouterr().err.startswith(f"prog: error: {message}")


def test_configuration_that_cannot_be_read_is_a_mistake_of_the_user(capsys, monkeypatch):
    Path("my.yaml").write_text("seed: 1\n")

    def refuse(path, *args, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(SystemExit) as stop:
        parse_config(PretrainConfig, ["-c", "my.yaml"], prog="prog")
    assert stop.value.code == 2
    assert capsys.readouterr().err == "prog: error: my.yaml: cannot be read: Permission denied\n"
