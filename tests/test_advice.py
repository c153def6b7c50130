"""Advice in a message is no dead end: each is followed as it is printed, until the command works."""

import csv
import json
import re
import shlex
from functools import partial

import pytest

from mlm.__main__ import main
from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.data.tasks import choose_task
from mlm.startup.command import parse_config

WORDS = [f"the harbour waits for boat {number}" for number in range(60)]
CURLY, ACCENTS = (
    [f"“café” n° {number} – bon" for number in range(60)],
    [f"café n° {number} bon" for number in range(60)],
)


def jsonl(rows):
    return "\n".join(map(json.dumps, rows)).encode()


def table(header, rows, encoding="utf-8", delimiter=","):
    return "\n".join(delimiter.join(row) for row in [header, *rows]).encode(encoding)


PRETRAINING = {
    "two columns.jsonl": jsonl([{"id": n, "title": text, "story": text} for n, text in enumerate(WORDS)]),
    "columns, with a comma.csv": table(["title", "story"], [[text, text] for text in WORDS]),
    "nested [1].jsonl": jsonl([{"doc": {"body": text, "head": text}} for text in WORDS]),
    "curly.txt": "\n".join(CURLY).encode("cp1252"),
    "accents.txt": "\n".join(ACCENTS).encode("latin-1"),
    "wide.txt": "\n".join(ACCENTS).encode("utf-16"),
    "run.log": "\n".join(WORDS).encode(),
    "notes": "\n".join(WORDS).encode(),
    "logs/run.log": "\n".join(WORDS).encode(),
}
"""File to its bytes; a folder is given as its name."""
RATED = [[text, str(number % 2)] for number, text in enumerate(WORDS)]
LABELLED = {
    "reviews.csv": table(["review", "stars"], RATED),
    "reviews.jsonl": jsonl([{"review": text, "stars": stars} for text, stars in RATED]),
    "messages.jsonl": jsonl(
        [{"talk": [{"role": "user", "content": text}], "stars": stars} for text, stars in RATED]
    ),
    "curly.csv": table(["text", "label"], list(zip(CURLY, "01" * 30, strict=True)), "cp1252"),
    "accents.csv": table(["text", "label"], list(zip(ACCENTS, "01" * 30, strict=True)), "latin-1"),
    "one label.csv": table(
        ["body", "label"], [[text, "01"[number == 0]] for number, text in enumerate(WORDS)]
    ),
}


def message_of(capsys, run):
    """Return the mistake that `run` ends with, in one line; None: it works."""
    try:
        run()
    except InputError as error:
        return str(error)
    except SystemExit:
        return re.split(r"error: ", capsys.readouterr().err.strip().splitlines()[-1], maxsplit=1)[1]
    return None


def read_labelled(words):
    choose_task(parse_config(FinetuneConfig, words, prog="finetune.py"))


def mended(source, message):
    """Return a source of pretraining as the message advises."""
    if "as in --data.sources " in message:  # pasted into a shell
        return shlex.split(message.rpartition("--data.sources ")[2])[0]
    key = re.search(r"(encoding: \S+|format: text)", message)
    assert key, f"no advice: {message}"
    assert key[1] not in source, f"the advice was followed: {message}"
    return (
        f"{source.rstrip('}')}, {key[1]}}}" if source.startswith("{") else f"{{path: '{source}', {key[1]}}}"
    )


@pytest.mark.parametrize("name", PRETRAINING)
def test_advice_about_sources(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(PRETRAINING[name])
    source = name.partition("/")[0]
    source = f"{{path: '{source}'}}" if "," in source else source
    for _ in range(3):
        words = ["prepare", "--data.sources", source, "--tokenizer.vocab_size", "200"]
        if (message := message_of(capsys, partial(main, words))) is None:
            break
        source = mended(source, message)
    assert message is None


@pytest.mark.parametrize("name", LABELLED)
def test_advice_about_labelled_files(name, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(LABELLED[name])
    words = ["--model", "scratch", "--model_config", "bert-tiny", "--tokenizer", ".", "--data.train", name]
    for _ in range(4):
        read = partial(read_labelled, words)
        if (message := message_of(capsys, read)) is None:
            break
        if found := re.search(r"has no column \w+, but (.*?); name it with (--data\.\w+)", message):
            column = next(
                column
                for column in csv.reader([found[1].replace(", ", ",")]).__next__()
                if column not in words
            )
            added = [found[2], column]
        else:
            found = re.search(r"give (--[\w.]+) (\S+)", message)
            assert found, f"no advice: {message}"
            added = [found[1], found[2]]
        assert not set(added) <= set(words), f"the advice was followed: {message}"
        words = [*words, *added]
    assert message is None
