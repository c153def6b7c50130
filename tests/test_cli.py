from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import pytest

from mlm.__main__ import COMMANDS, Command, main, run

ROOT = Path(__file__).parent.parent

RUN_WITHOUT_TORCH = """
import runpy, sys
try:
    runpy.run_path({script!r}, run_name="__main__")
finally:
    print("torch" in sys.modules)
"""


def run_script(cwd, *words, script="train.py"):
    """Run a script in a process of its own; its last line says whether torch was imported."""
    code = RUN_WITHOUT_TORCH.format(script=str(ROOT / script))
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=cwd, capture_output=True, text=True, timeout=60
    )


def test_mistake_is_one_line_without_torch_and_leaves_nothing(tmp_path):
    done = run_script(tmp_path, "--model.hiden_size", "3")
    assert done.returncode == 2
    assert (
        done.stderr == "train.py: error: unknown key --model.hiden_size; did you mean --model.hidden_size?\n"
    )
    assert done.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_fine_tuning_without_a_run_names_train_py_without_torch(tmp_path):
    done = run_script(tmp_path, script="finetune.py")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "finetune.py: error: model=null: runs holds no finished pretraining run; run python train.py"
    )
    assert done.stderr.count("\n") == 1
    assert done.stdout == "False\n"
    assert list(tmp_path.iterdir()) == []


def test_mistake_found_while_a_bar_is_shown_has_a_line_of_its_own(tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"title": "x", "body": "y"}\n' * 9)
    words = ["--data.sources", "a.jsonl", "--tokenizer.path", "tokenizer.json"]
    done = subprocess.run(
        [sys.executable, "-m", "mlm", "prepare", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ | {"MLM_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
    assert done.returncode == 2
    assert "tokenizing:   0%" in done.stderr
    *_, last = re.split(r"[\r\n]", done.stderr.rstrip("\n"))
    assert last.startswith("mlm prepare: error: a.jsonl: cannot tell which column holds the text; ")


@pytest.mark.parametrize("script", ["train.py", "finetune.py"])
def test_help_needs_no_torch(tmp_path, script):
    done = run_script(tmp_path, "--help", script=script)
    assert done.returncode == 0
    assert done.stdout.startswith(f"usage: {script}")
    assert done.stdout.endswith("False\n")
    assert done.stderr == ""


def test_module_and_console_script_are_the_same(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mlm", "--help"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert all(f"  {name} " in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_overview_has_a_line_for_each_command(capsys, words):
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    for name, command in COMMANDS.items():
        assert any(line.split() == [*name.split(), *command.help.split()] for line in lines)


def test_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mlm {version('mlm')}\n"


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("pretrian", "mlm: error: unknown command pretrian; did you mean pretrain?\n"),
        ("fill_mask", "mlm: error: unknown command fill_mask; did you mean fill-mask?\n"),
        ("qqq", f"mlm: error: unknown command qqq; there are {', '.join(COMMANDS)}\n"),
        ("tokenizer", "mlm: error: unknown command tokenizer; did you mean tokenizer train?\n"),
    ],
)
def test_unknown_command(capsys, word, message):
    with pytest.raises(SystemExit) as stop:
        main([word])
    assert stop.value.code == 2
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_command_has_help(capsys, name):
    with pytest.raises(SystemExit) as stop:
        main([*name.split(), "--help"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: mlm {name} ")


def test_mistake_names_the_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--model", "nowhere"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("mlm evaluate: error: model=nowhere is not a model folder")


@dataclass
class ProbeConfig:
    positional: ClassVar[str] = "do"
    do: list[str]


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """Add a command of our own, as one entry of the table, whose function does what its first word says."""
    source = """
        import logging

        from mlm.config.errors import InputError

        def probe(config):
            logging.getLogger("mlm.probe").info("working")
            if config.do == ["refuse"]:
                raise InputError("line 3 of x.txt:\\n not UTF-8")
            if config.do == ["interrupt"]:
                raise KeyboardInterrupt
            return None if config.do == ["nothing"] else int(config.do[0])
    """
    (tmp_path / "mlm_probe.py").write_text(textwrap.dedent(source))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(COMMANDS, "probe", Command(ProbeConfig, "mlm_probe:probe"))


@pytest.mark.usefixtures("probe")
def test_exit_status_of_the_work(capsys, caplog):
    assert main(["probe", "nothing"]) == 0
    assert main(["probe", "143"]) == 143
    assert "working" in caplog.text
    for word, code in (("refuse", 2), ("interrupt", 130)):
        with pytest.raises(SystemExit) as stop:
            main(["probe", word])
        assert stop.value.code == code
    assert capsys.readouterr().err.startswith(
        "mlm probe: error: line 3 of x.txt: not UTF-8\nmlm probe: interrupted\n"
    )


@pytest.mark.parametrize("words", [["--help"], ["--version"], ["pretrain", "--help"], ["plan"], ["qqq"]])
def test_windows_is_refused_before_anything_else(capsys, monkeypatch, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", "mlm: error: mlm runs on Linux and macOS; on Windows, use WSL\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("script", "name"), [("train.py", "pretrain"), ("finetune.py", "finetune")])
def test_scripts_refuse_windows_too(capsys, monkeypatch, tmp_path, script, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(SystemExit) as stop:
        run(name, ["--help"], prog=script)
    assert stop.value.code == 2
    assert capsys.readouterr() == ("", f"{script}: error: mlm runs on Linux and macOS; on Windows, use WSL\n")
