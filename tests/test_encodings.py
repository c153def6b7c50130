"""Files are UTF-8 whatever the locale, and a locale that cannot show a text ends no run."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "mlm").rglob("*.py")), ROOT / "train.py", ROOT / "finetune.py"]
TEXT = {"read_text": 0, "write_text": 1, "open": 2}
"""Methods of paths that read or write text, and the position of their encoding."""
ASCII = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
"""Python's encoding is ASCII here: the narrowest of all locales."""


def names_no_encoding(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", None))
    if name not in TEXT or "encoding" in {word.arg for word in call.keywords}:
        return False
    if isinstance(call.func, ast.Name) and name != "open":
        return False  # our own write_text, which is UTF-8
    given = [*call.args, *(word.value for word in call.keywords)]
    modes = [node.value for node in given if isinstance(node, ast.Constant)]
    is_binary = name == "open" and any(isinstance(mode, str) and "b" in mode for mode in modes)
    owner = getattr(getattr(call.func, "value", None), "id", None)
    return not (is_binary or owner in ("os", "gzip", "tarfile") or "utf-8" in modes)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_text_file_has_an_encoding(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.Call)]
    assert [ast.unparse(call) for call in calls if names_no_encoding(call)] == []


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("path.read_text()", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(text, encoding='utf-8')", False),
        ("path.open('a', newline='')", True),
        ("path.open('rb')", False),
        ("open(path)", True),
        ("os.open(path, 0)", False),
    ],
)
def test_the_check_finds_what_it_should(code, found):
    assert names_no_encoding(ast.parse(code).body[0].value) == found


def run(*words, cwd):
    environment = {**os.environ, **ASCII, "PYTHONPATH": str(ROOT), "WANDB_MODE": "disabled"}
    command = [sys.executable, "-m", "mlm", *map(str, words)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, timeout=300)


TINY = (
    *("--tokenizer.vocab_size", 200, "--model.num_hidden_layers", 1, "--model.hidden_size", 32),
    *("--model.num_attention_heads", 2, "--model.intermediate_size", 64, "--trainer.max_steps", 2),
)


@pytest.mark.slow
def test_a_locale_of_ascii_trains_tunes_and_answers(tmp_path):
    lines = [f"Łódź płynie ζωή перевод {number}" for number in range(300)]
    (tmp_path / "t.txt").write_text("\n".join(lines), encoding="utf-8")
    rows = [f"слово {number},{'да' if number % 2 else 'нет'}" for number in range(60)]
    (tmp_path / "l.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    done = run("pretrain", "--data.sources", "t.txt", "--name", "a", *TINY, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    vocabulary = (tmp_path / "runs/a/tokenizer/tokenizer.json").read_text("utf-8")
    assert "ź" in vocabulary
    tune = (
        "finetune",
        "--model",
        "runs/a/model",
        "--data.train",
        "l.csv",
        "--trainer.max_epochs",
        1,
        "--name",
        "b",
    )
    done = run(*tune, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"\\u0434\\u0430" in done.stdout  # the screen shows what it can
    predict = ("predict", "--model", "runs/b/model", "--input", "l.csv", "--output", "out.csv")
    done = run(*predict, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "нет" in (tmp_path / "out.csv").read_text("utf-8")


def test_a_word_that_the_locale_cannot_read_is_one_line(tmp_path):
    done = run("pretrain", "--name", "zażółć", *TINY, cwd=tmp_path)
    assert done.returncode == 2
    (line,) = done.stderr.decode().splitlines()
    assert "za\\udcc5" in line
    assert "set PYTHONUTF8=1" in line
    assert not any(tmp_path.iterdir())
