"""Labelled data in several files: lists, globs, folders and saved data sets; their order and columns."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm.config.commands import PredictConfig
from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.labelled import LabelledConfig
from mlm.config.parse import dump_config, read_group
from mlm.data.labelled import read_table, read_task
from mlm.startup.command import parse_config
from mlm.startup.suite import data_digests

ROWS = [(f"text {number}", "ab"[number % 2]) for number in range(12)]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The rows in four files of different formats, in a folder that has other files too."""
    monkeypatch.chdir(tmp_path)
    Path("reviews/more").mkdir(parents=True)
    write("reviews/1.csv", ROWS[:3])
    write("reviews/2.jsonl", ROWS[3:6])
    write("reviews/more/3.tsv", ROWS[6:9])
    table = pa.table({"text": [text for text, _ in ROWS[9:]], "label": [label for _, label in ROWS[9:]]})
    pq.write_table(table, "reviews/more/4.parquet")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("reviews/README.md").write_text("not a table\n")
    Path("reviews/.hidden.csv").write_text("nothing\n")


def write(name, rows, columns=("text", "label")):
    path = Path(name)
    if path.suffix == ".jsonl":
        objects = [dict(zip(columns, row, strict=True)) for row in rows]
        path.write_text("".join(json.dumps(one) + "\n" for one in objects))
    else:
        separator = "\t" if path.suffix == ".tsv" else ","
        path.write_text("".join(separator.join(row) + "\n" for row in [columns, *rows]))
    return name


def texts(*train):
    found = read_task(LabelledConfig(train=list(train), validation=list(train)))
    assert found.train.texts == found.validation.texts
    assert [found.labels[number] for number in found.train.labels] == [
        "ab"[int(text.split()[1]) % 2] for text in found.train.texts
    ]
    return [int(text.split()[1]) for text in found.train.texts]


def refusal(*train, **options):
    with pytest.raises(InputError) as caught:
        read_task(LabelledConfig(train=list(train), **options))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_folder_glob_and_list_give_the_rows_of_their_files_in_order():
    every = list(range(12))
    files = ["reviews/1.csv", "reviews/2.jsonl", "reviews/more/3.tsv", "reviews/more/4.parquet"]
    assert texts("reviews") == texts("reviews/") == texts("reviews/**/[0-9].*") == texts(*files) == every
    assert texts("reviews/*.csv", "reviews/more") == [*every[:3], *every[6:]]
    assert texts(*reversed(files)) == [*every[9:], *every[6:9], *every[3:6], *every[:3]]  # as given
    assert texts("reviews/1.csv", "reviews/2.jsonl", "reviews/*.csv") == every[:6]  # a file is read once


def test_saved_data_set_and_files_may_be_one_list():
    features = datasets.Features(text=datasets.Value("string"), label=datasets.ClassLabel(names=["b", "a"]))
    rows = {"text": ["text 20", "text 21"], "label": [1, 0]}
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("saved")
    assert texts("reviews/1.csv", "saved") == [0, 1, 2, 20, 21]


def test_places_name_the_file_and_its_own_line():
    write("reviews/2.jsonl", [("text 3", None)])
    assert refusal("reviews").startswith("reviews/2.jsonl, row 1 (line 1): label is missing")
    write("other.csv", [("text 1", "maybe")])
    found = refusal("reviews/1.csv", validation=["reviews/1.csv", "other.csv"])
    assert found == "other.csv, row 1 (line 2): label maybe is not among the labels of training: a, b"


def test_file_with_other_columns_is_named():
    write("reviews/more/3.tsv", ROWS[6:9], columns=("body", "label"))
    found = refusal("reviews")
    assert found == "reviews/more/3.tsv: has no column text, but body, label; name it with --data.text_column"
    write("reviews/more/3.tsv", [("x", "0", "1")], columns=("text", "rude", "spam"))
    write("reviews/1.csv", [("y", "1", "0")], columns=("text", "rude", "ham"))
    options = {"label_column": "rude,spam", "label_type": "multilabel"}
    assert refusal("reviews/more/3.tsv", "reviews/1.csv", **options).startswith("reviews/1.csv: ")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("*.xml", "data.train=*.xml is neither file, folder nor glob; looked in"),
        ("no.csv", "data.train=no.csv is neither file, folder nor glob; looked in"),
        ("hub:one", "data.train: hub:one is not of the form hub:OWNER/NAME"),
        ("[]", "data.train=[] names no file; leave it out"),
    ],
)
def test_places_that_do_not_exist_are_one_line(capsys, path, message):
    with pytest.raises(SystemExit) as stop:
        parse_config(FinetuneConfig, ["--model", "model", "--data.train", path], prog="finetune.py")
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_folder_without_tables_and_text_files_are_refused():
    Path("empty").mkdir()
    assert "empty: has no documents: an empty folder" in refusal("empty")
    Path("empty/a.txt").write_text("a\n")
    only = "empty: has no documents: only .txt; files of csv, tsv, jsonl, json, parquet, arrow are read"
    assert refusal("empty") == only
    with pytest.raises(InputError, match=only):
        read_table("empty", text_column="text")
    assert read_table("empty/*.txt", text_column="text").rows == [("line 1", {"text": "a"})]
    assert "empty/a.txt: is not a file of rows; csv, tsv, jsonl, json, parquet and arrow are" in refusal(
        "empty/a.txt"
    )


def test_lists_on_the_command_line_and_in_files():
    one, two = "reviews/1.csv", "reviews/2.jsonl"

    def trained(*words):
        flags = ["--model", "model", "--data.train", *words, "--name", "x"]
        return parse_config(FinetuneConfig, flags, prog="finetune.py").data

    assert trained(f"{one},{two}").train == trained(one, two).train == trained(f"[{one}, {two}]").train
    assert trained(one, two).train == [one, two]
    write("a,b.csv", ROWS)
    assert trained("a,b.csv").train == ["a,b.csv"]
    for train, title in (
        ([one], "1.csv"),
        ([one, two], "1.csv and 1 more"),
        (["reviews/*.csv"], "reviews"),
        (["hub:stanfordnlp/imdb@plain:train[:1%]"], "imdb"),
    ):
        assert LabelledConfig(train=train).title == title
    config = FinetuneConfig(data=LabelledConfig(train=[one, two]))
    Path("kept.yaml").write_text(dump_config(config))
    assert read_group(FinetuneConfig, Path("kept.yaml")) == config
    Path("kept.yaml").write_text(f"data: {{train: {one}}}\n")  # as earlier versions wrote it
    assert read_group(FinetuneConfig, Path("kept.yaml")).data.train == [one]


def test_a_suite_notices_changes_of_any_file_that_it_reads():
    config = FinetuneConfig(data=LabelledConfig(train=["reviews/*.csv"], test=["reviews/more"]))
    before = data_digests(config)
    assert sorted(before) == ["reviews/1.csv", "reviews/more/3.tsv", "reviews/more/4.parquet"]
    write("reviews/5.csv", ROWS)
    assert data_digests(config).keys() - before.keys() == {"reviews/5.csv"}
    write("reviews/1.csv", ROWS)
    assert data_digests(config)["reviews/1.csv"] != before["reviews/1.csv"]


def test_lines_of_a_text_are_rows_where_only_texts_are_needed():
    Path("a.txt").write_text("one\n\nthree, four\n")
    assert PredictConfig("m", "a.txt", "o.csv").input == ["a.txt"]
    table = read_table(["a.txt", "reviews/1.csv"], text_column="text")
    assert table.texts("text", "") == ["one", "", "three, four", "text 0", "text 1", "text 2"]
    with pytest.raises(InputError, match=r"a.txt: has no column b, but text"):
        table.cells("b", "")
