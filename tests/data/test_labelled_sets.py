"""Labelled rows from several files, and what is held out of them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from mlm.__main__ import main
from mlm.config.errors import InputError
from mlm.config.finetune import LabelledConfig
from mlm.data.labelled import read_table, read_task

ROWS = [(f"text number {number}", "ab"[number % 2], f"writer {number // 7}") for number in range(120)]


def write(path, rows, header="text,label,author"):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("\n".join([header, *(",".join(row) for row in rows)]), encoding="utf-8")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("reviews/b.csv"), ROWS[40:80])
    write(Path("reviews/a.csv"), ROWS[:40])
    lines = [json.dumps(dict(zip(("text", "label", "author"), row, strict=True))) for row in ROWS[80:]]
    Path("reviews/c.jsonl").write_text("\n".join(lines), encoding="utf-8")
    Path("reviews/README.md").write_text("not rows")
    write(Path("all.csv"), ROWS)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    ["reviews", "reviews/", "reviews/a.csv,reviews/b.csv,reviews/c.jsonl", "reviews/*.csv, reviews/*.jsonl"],
)
def test_several_files_are_the_rows_of_one(folder, path):
    assert [row for _, row in read_table(path).rows] == [row for _, row in read_table("all.csv").rows]
    ours, whole = (read_task(LabelledConfig(train=name)) for name in (path, "all.csv"))
    assert ours.train.texts == whole.train.texts
    assert ours.validation.texts == whole.validation.texts


def test_a_list_keeps_its_order_and_a_name_may_have_a_comma(folder):
    write(Path("x, y.csv"), ROWS[:3])
    rows = [row["text"] for _, row in read_table("reviews/b.csv,x, y.csv".replace("x, y", "all")).rows]
    assert rows == [row[0] for row in [*ROWS[40:80], *ROWS]]
    assert len(read_table("x, y.csv").rows) == 3


def test_errors_name_the_file_of_several(folder):
    write(Path("reviews/d.csv"), [("a text", "a")], header="body,label")
    with pytest.raises(InputError, match=r"reviews, reviews/d.csv, row 1 .*: text is missing"):
        read_task(LabelledConfig(train="reviews"))
    Path("notes").mkdir()
    Path("notes/a.txt").write_text("x")
    with pytest.raises(InputError, match="notes: has no file of rows"):
        read_table("notes")


@pytest.mark.parametrize("path", ["none.csv", "all.csv,none.csv", "none/*.csv"])
def test_what_is_not_there_is_one_line(folder, path, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            [
                "finetune",
                "--model",
                "scratch",
                "--model_config",
                "bert-tiny",
                "--tokenizer",
                ".",
                "--data.train",
                path,
            ]
        )
    assert end.value.code == 2
    assert "is neither file, folder nor glob; looked in" in capsys.readouterr().err


def test_no_group_is_on_both_sides(folder):
    task = read_task(LabelledConfig(train="all.csv", group_column="author", validation_fraction=0.3))
    author = {text: group for text, _, group in ROWS}
    train, held_out = ({author[text] for text in part.texts} for part in (task.train, task.validation))
    assert not train & held_out
    assert len(train | held_out) == 18
    assert len(task.train) + len(task.validation) == 120
    assert "18 groups" in task.validation_is


def test_order_holds_out_the_last_rows(folder):
    task = read_task(LabelledConfig(train="reviews", split="order", validation_fraction=0.25))
    assert task.train.texts == [row[0] for row in ROWS[:90]]
    assert task.validation.texts == [row[0] for row in ROWS[90:]]
    assert np.array_equal(task.validation.labels, [number % 2 for number in range(90, 120)])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"group_column": "writer"}, "has no column writer"),
        ({"group_column": "one"}, "one has one group only"),
        ({"group_column": "author", "split": "order"}, "does not go with data.split=order"),
        ({"group_column": "author", "validation": "all.csv"}, "is not used with data.validation"),
        ({"split": "order", "validation": "all.csv"}, "is not used with data.validation"),
        ({"group_column": "hole"}, "row 2 .*hole is missing; every row needs a group"),
    ],
)
def test_mistakes_about_what_is_held_out(folder, keys, message):
    rows = [
        (text, label, author, "x", "" if number == 1 else "y")
        for number, (text, label, author) in enumerate(ROWS)
    ]
    write(Path("wide.csv"), rows, header="text,label,author,one,hole")
    with pytest.raises(InputError, match=message):
        read_task(LabelledConfig(train="wide.csv", **keys))
