"""Labelled files as people have them: quotes, columns, labels, and what is held out."""

from __future__ import annotations

import csv
import gzip
import json
import re
import subprocess
import sys

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from sklearn.utils.class_weight import compute_class_weight

from mlm.config.errors import InputError
from mlm.config.finetune import LabelledConfig
from mlm.data.examples import class_weights, label_counts
from mlm.data.labelled import Examples, hold_out, read_table, read_task, read_texts
from mlm.data.labels import sort_labels

ROWS = [("quiet lane", "calm"), ("loud street", "noisy"), ("still pond", "calm"), ("market day", "busy")]


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return str(path)

    return write


@pytest.fixture
def labelled(write):
    return write("labelled.csv", "text,label\n" + "".join(f"{text},{label}\n" for text, label in ROWS))


def task(train, **options):
    return read_task(LabelledConfig(train=train, **options))


def refusal(*arguments, **options):
    with pytest.raises(InputError) as caught:
        task(*arguments, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["a.csv", "a.tsv", "a.jsonl", "a.json", "a.parquet", "a.csv.gz", "a.parquet.gz"]
)
def test_every_format_gives_the_same(name, tmp_path):
    path = tmp_path / name
    texts, labels = zip(*ROWS, strict=True)
    objects = [{"text": text, "label": label} for text, label in ROWS]
    if "parquet" in name:
        pq.write_table(pa.table({"text": texts, "label": labels}), path)
    elif "json" in name:
        lines = "\n".join(map(json.dumps, objects))
        path.write_text(lines if name.endswith("l") else json.dumps(objects))
    else:
        separator = "," if "csv" in name else "\t"
        path.write_text("".join(f"{separator.join(row)}\r\n" for row in [("text", "label"), *ROWS]))
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(path.read_bytes()))
    found = task(str(path), validation=str(path))
    assert found.labels == ("busy", "calm", "noisy")
    assert found.train.texts == found.validation.texts == list(texts)
    assert found.train.labels.tolist() == [1, 2, 1, 0]
    assert found.name == "a"


def test_saved_data_set_is_a_table_with_the_names_of_its_classes(tmp_path):
    features = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["calm", "busy"]),
        n=datasets.Value("int8"),
    )
    rows = {
        "text": ["quiet lane", "market day", "no label", None],
        "label": [0, 1, -1, None],
        "n": [1, 0, 1, 0],
    }
    data = datasets.Dataset.from_dict(rows, features=features)
    data.save_to_disk(tmp_path / "a", num_shards=2)
    datasets.DatasetDict(train=data.select([0, 1]), test=data).save_to_disk(tmp_path / "splits")
    table = read_table(str(tmp_path / "a"))
    assert [row["label"] for _, row in table.rows] == ["calm", "busy", -1, None]
    assert table.rows[1] == ("row 2", {"text": "market day", "label": "busy", "n": 0})
    path = str(tmp_path / "splits")
    found = task(path, validation=path)
    assert (found.labels, found.train.labels.tolist(), found.name) == (("busy", "calm"), [1, 0], "splits")
    assert read_texts(path, "text") == ["quiet lane", "market day"]
    assert "a, row 4: text is missing" in refusal(str(tmp_path / "a"))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_table_may_be_a_url_or_an_arrow_file(tmp_path, suffix):
    table = pa.table({"text": [text for text, _ in ROWS], "label": [label for _, label in ROWS]})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    path = tmp_path / f"a.arrow{suffix}"
    path.write_bytes(gzip.compress(data) if suffix else data)
    expected = [(f"row {number}", row) for number, row in enumerate(table.to_pylist(), 1)]
    assert read_table(str(path)).rows == read_table(f"file://{path}").rows == expected


def test_text_is_text(write):
    path = write("a.csv", '\ufefftext,label\nNA,1\n007,0\n"He said ""go"", then\nleft",1\nnull,0\n,1\n')
    found = task(path, validation=path)
    assert found.train.texts == ["NA", "007", 'He said "go", then\nleft', "null", ""]
    assert found.labels == ("0", "1")
    assert found.train.labels.tolist() == [1, 0, 1, 0, 1]


def test_ids_do_not_depend_on_the_hash_of_strings(labelled):
    code = f"""
from mlm.config.finetune import LabelledConfig
from mlm.data.labelled import read_task
task = read_task(LabelledConfig(train={labelled!r}))
print(task.labels, task.train.texts)
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in "12"
    }
    assert len(seen) == 1
    assert "('busy', 'calm', 'noisy')" in seen.pop()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["b", "a", "b"], ("a", "b")),
        (["10", "9", "1"], ("1", "9", "10")),
        (["10", "9", "01"], ("01", "10", "9")),
        (["1", "-2", "0"], ("-2", "0", "1")),
        (["1.5", "-", "²"], ("-", "1.5", "²")),
        (["2", "--1", "10"], ("--1", "10", "2")),
        (["-0", "10", "9"], ("-0", "10", "9")),
        (["9", "1" + "0" * 5000], ("1" + "0" * 5000, "9")),
    ],
)
def test_labels_are_sorted_whole_numbers_by_value(names, expected):
    assert sort_labels(names) == expected


def test_labels_of_json_and_parquet_are_named_as_in_csv(write, tmp_path):
    truths = write("a.jsonl", '{"text": "a", "label": true}\n{"text": "b", "label": false}\n')
    assert task(truths, validation=truths).labels == ("false", "true")
    pq.write_table(pa.table({"text": ["a", "b"], "label": [1, 0]}), tmp_path / "a.parquet")
    numbers = write("a.csv", "text,label\nc,0\nd,1\n")
    found = task(str(tmp_path / "a.parquet"), validation=numbers)
    assert (found.labels, found.validation.labels.tolist()) == (("0", "1"), [0, 1])


def test_missing_column_lists_those_there_are_and_the_option(write):
    path = write("a.csv", "headline,category\nquiet lane,calm\nmarket day,busy\n")
    assert refusal(path).endswith(
        "a.csv: has no column text, but headline, category; name it with --data.text_column"
    )
    message = refusal(path, text_column="headline")
    assert message.endswith("has no column label, but headline, category; name it with --data.label_column")
    message = refusal(path, text_column="headline", text_pair_column="b", label_column="category")
    assert message.endswith("has no column b, but headline, category; name it with --data.text_pair_column")
    found = task(path, text_column="headline", label_column="category", validation=path)
    assert found.train.texts == ["quiet lane", "market day"]


def test_label_of_validation_only_is_refused_with_its_row(write):
    train = write("train.csv", "text,label\nship leaves,yes\nship stays,no\nboat leaves,yes\n")
    valid = write("valid.csv", "text,label\nraft leaves,yes\nraft stays,no\nraft waits,maybe\n")
    message = refusal(train, validation=valid)
    assert message == f"{valid}, row 3 (line 4): label maybe is not among the labels of training: no, yes"
    assert refusal(train, test=valid) == message


def test_minus_1_is_no_label(write):
    train = write("train.csv", "text,label\na,1\nb,0\nc,-1\n")
    assert "train.csv, row 3 (line 4): label is -1, which means 'no label'" in refusal(train)
    good = write("good.csv", "text,label\na,1\nb,0\nc,1\n")
    assert "train.csv, row 3 (line 4): label is -1" in refusal(good, validation=train)


@pytest.mark.parametrize("text", ["text\nx\ny\n", "text,label\nx,-1\ny,-1\n", "text,label\nx,1\ny,\n"])
def test_test_file_without_labels_is_only_predicted(write, text):
    train = write("train.csv", "text,label\na,1\nb,0\nc,1\n")
    found = task(train, test=write("test.csv", text))
    assert found.test.texts == ["x", "y"]
    assert found.test.labels is None
    scored = task(train, test=write("scored.csv", "text,label\nx,0\ny,1\n"))
    assert scored.test.labels.tolist() == [0, 1]


def test_numbers_are_read_from_any_spelling(write):
    lines = '{"a": "x", "b": "y", "score": "4.6"}\n{"a": "z", "b": "", "score": 2}\n'
    path = write("a.jsonl", lines)
    columns = {
        "text_column": "a",
        "text_pair_column": "b",
        "label_column": "score",
        "label_type": "regression",
    }
    found = task(path, validation=path, **columns)
    assert found.labels == ("score",)
    assert found.train.labels.tolist() == [4.6, 2.0]
    assert found.train.labels.dtype == np.float64
    assert found.train.pairs == ["y", ""]
    for bad in ('"high"', "null", "true", '"nan"', '""', "NaN", "1" + "0" * 400):
        path = write("bad.jsonl", lines + f'{{"a": "x", "b": "y", "score": {bad}}}\n')
        assert "bad.jsonl, row 3 (line 3): score is" in refusal(path, **columns)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,label\na,1\nb,\n", "a.csv, row 2 (line 3): label is missing"),
        ("a.csv", "text,label\na,1\nb\n", "a.csv, row 2 (line 3): label is missing"),
        ("a.jsonl", '{"text": "a", "label": NaN}', "a.jsonl, row 1 (line 1): label is missing"),
        (
            "a.jsonl",
            r'{"text": "a", "label": "a\ud800"}',
            r"row 1 (line 1): label is 'a\ud800': a label is one",
        ),
        (
            "a.jsonl",
            r'{"text": "a", "label": "a\nb"}',
            r"is one line of text and cannot contain '\n'; replace",
        ),
        ("a.jsonl", r'{"text": "a", "label": "a\u0000b"}', r"label is 'a\x00b': a label is one line of text"),
        ("a.csv", 'text,label\na,"x\ny"\n', r"a.csv, row 1 (line 3): label is 'x\ny': a label is one line"),
        ("a.csv", "text,label\na,1\nb,1\n", "every label is 1; a classifier needs two classes"),
        ("a.csv", "text,label\n", "a.csv: has no rows"),
        ("a.csv", "", "a.csv: has no rows"),
        ("a.jsonl", '{"text": 7, "label": 1}', "a.jsonl, row 1 (line 1): text is '7', which is not text"),
        ("a.jsonl", '{"text": null, "label": 1}', "a.jsonl, row 1 (line 1): text is missing"),
        ("a.jsonl", '{"text": "a"', "a.jsonl, line 1, column 13: not valid JSON"),
        ("a.csv", b"text,label\n\xff,1\n", "a.csv, line 2, byte 11: 0xff is not valid utf-8"),
        ("a.parquet", b"PAR1 no", "a.parquet: cannot be read:"),
        ("a.txt", "text", "a.txt: is not a file of rows; csv, tsv, jsonl, json, parquet and arrow are"),
        ("a.xlsx", "text", "a.xlsx: is not a file of rows"),
        (
            "a.csv",
            "text,label\na,1\nb,0\n",
            "too few rows to hold some out; give a file with --data.validation",
        ),
    ],
)
def test_mistakes_are_one_line(write, name, text, message):
    assert message in refusal(write(name, text))


@pytest.mark.parametrize(
    ("labels", "label_type", "message"),
    [
        ([b"a", b"b"], "classification", "a.parquet, row 1: label is b'a', bytes and not text; store"),
        ([b"1", b"2"], "regression", "a.parquet, row 1: label is .*, which is not a finite number"),
        ([1.0, float("nan")], "classification", "a.parquet, row 2: label is missing"),
        ([1.0, float("nan")], "regression", "a.parquet, row 2: label is missing; regression needs"),
        ([1.0, float("nan")], "multilabel", "a.parquet, row 2: label is missing; leave it empty"),
    ],
)
def test_bytes_and_nan_are_no_labels(tmp_path, labels, label_type, message):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", "b"], "label": labels}), path)
    assert re.search(message, refusal(str(path), label_type=label_type))


def test_test_file_with_nan_for_labels_is_only_predicted(write):
    train = write("train.csv", "text,label\na,1\nb,0\nc,1\n")
    test = write("test.jsonl", '{"text": "x", "label": NaN}\n{"text": "y", "label": 1}\n')
    assert task(train, test=test).test.labels is None


def test_encoding_is_an_option(write):
    path = write("a.csv", "text,label\ncafé,1\nthé,0\n".encode("latin-1"))
    assert task(path, validation=path, encoding="latin-1").train.texts == ["café", "thé"]


def test_bytes_of_another_encoding_name_the_option_that_there_is(write):
    good, latin = write("good.csv", "text,label\na,1\nb,0\n"), "text,label\ncafé,1\nthé,0\n".encode("latin-1")
    path, wide = write("a.csv", latin), write("b.csv", "text,label\na,1\n".encode("utf-16"))
    both = {"train": good, "validation": good}
    for files in ({"train": path}, both | {"validation": path}, both | {"test": path}):
        assert "0xe9 is not valid utf-8; if it is latin-1, give --data.encoding latin-1" in refusal(**files)
    assert "this is utf-16 and not utf-8; give --data.encoding utf-16" in refusal(wide)
    lines = write("a.txt", latin)
    for read in (lambda: read_table(path), lambda: read_texts(path, "text"), lambda: read_texts(lines, "")):
        with pytest.raises(InputError, match="if it is latin-1, give --encoding latin-1"):
            read()


def test_many_labels_make_us_ask(write, caplog):
    path = write("a.csv", "text,label\n" + "".join(f"text {n},{n / 7}\n" for n in range(150)))
    task(path, validation=path)
    assert "150 different labels; for numbers set --data.label_type regression" in caplog.text


def examples(texts, labels):
    return Examples(texts, None, np.array(labels))


def test_held_out_part_is_decided_by_the_text_alone():
    texts = [f"text {number}" for number in range(1000)]
    labels = np.arange(1000) % 2
    train, held_out = hold_out(examples(texts, labels), 0.1, "a")
    assert 70 < len(held_out) < 130
    assert sorted(train.texts + held_out.texts) == sorted(texts)
    assert not set(train.texts) & set(held_out.texts)
    for part in (train, held_out):
        assert all(
            int(text.split()[1]) % 2 == label for text, label in zip(part.texts, part.labels, strict=True)
        )
    _, again = hold_out(examples([*texts[::-1], "new"], [*labels[::-1], 0]), 0.1, "a")
    assert set(again.texts) - {"new"} == set(held_out.texts)


def test_duplicates_stay_on_one_side_and_every_class_is_trained():
    texts = [f"text {number // 3}" for number in range(300)]
    train, held_out = hold_out(examples(texts, [0] * 300), 0.3, "a")
    assert not set(train.texts) & set(held_out.texts)
    labels = list(range(50)) + [50, 51] * 125
    train, held_out = hold_out(examples([f"text {number}" for number in range(300)], labels), 0.5, "a")
    assert set(train.labels) == set(range(52))
    assert len(held_out) > 50


def test_a_few_rows_still_give_one_to_validate_on():
    train, held_out = hold_out(examples(["a", "b", "c"], [0, 1, 1]), 0.01, "a")
    assert len(held_out) == 1
    assert set(train.labels) == {0, 1}
    pairs = Examples(["a", "a"], ["x", "y"], np.array([0.5, 1.0]))
    train, held_out = hold_out(pairs, 0.01, "a")
    assert sorted(train.pairs + held_out.pairs) == ["x", "y"]
    with pytest.raises(InputError, match="too few rows"):
        hold_out(examples(["a", "a"], [0, 0]), 0.5, "a")


def test_counts_of_labels_are_by_name():
    assert label_counts(("a", "b", "c"), np.array([2, 0, 2])) == {"a": 1, "b": 0, "c": 2}


def test_table_knows_all_columns(write):
    table = read_table(write("a.jsonl", '{"a": 1}\n\n{"b": 2}\n'))
    assert table.columns == ["a", "b"]
    assert [place for place, _ in table.rows] == ["row 1 (line 1)", "row 2 (line 3)"]


def test_a_row_may_have_any_number_of_labels(write):
    path = write("a.csv", "text,label\na,red|green\nb,\nc,green| blue |\nd,red\ne,red|red\n")
    found = task(path, validation=path, label_type="multilabel")
    assert found.labels == ("blue", "green", "red")
    expected = [[0, 1, 1], [0, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert found.train.labels.astype(int).tolist() == expected
    assert label_counts(found.labels, found.train.labels) == {"blue": 1, "green": 2, "red": 3}
    lists = [["red", "green"], [], ["green", "blue"], ["red"], "red"]
    rows = [{"text": text, "label": labels} for text, labels in zip("abcde", lists, strict=True)]
    other = write("a.jsonl", "\n".join(map(json.dumps, rows)))
    again = task(other, validation=path, label_type="multilabel")
    assert (again.labels, again.train.labels.tolist()) == (found.labels, found.train.labels.tolist())
    semicolons = write("b.csv", "text,label\na,1;10;2\nb,2\n")
    found = task(semicolons, validation=semicolons, label_type="multilabel", label_separator=";")
    assert found.labels == ("1", "2", "10")


def test_of_several_labels_every_one_keeps_an_example(write):
    rows = "".join(f"text {n},{'|'.join(name for name in 'abc' if n % ord(name) == 0)}\n" for n in range(120))
    found = task(write("a.csv", f"text,label\n{rows}"), label_type="multilabel", validation_fraction=0.5)
    assert found.train.labels.any(0).all()
    assert len(found.train) + len(found.validation) == 120
    assert 30 < len(found.validation) < 90
    two = Examples(["x", "y"], None, np.array([[True], [True]]))
    assert [len(part) for part in hold_out(two, 1e-9, "two")] == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"text": "a", "label": null}', r"row 1 \(line 1\): label is missing; leave it empty, or write"),
        ('{"text": "a", "label": ["x", "-1"]}', "row 1 .*: label is -1, which means 'no label'"),
        ('{"text": "a", "label": ["x|y"]}', r"label x\|y has \| in it, which separates labels"),
        ('{"text": "a", "label": [["x"]]}', "row 1 .*: label is .* not one name"),
        ('{"text": "a", "label": ["x", " "]}', "row 1 .*: label is missing"),
        ('{"text": "a", "label": []}', "no row has a label; nothing can be learnt"),
    ],
)
def test_labels_that_are_none_are_refused(write, text, message):
    with pytest.raises(InputError, match=message):
        task(write("a.jsonl", text), label_type="multilabel")


def test_label_of_validation_only_is_refused_among_several_too(write):
    train, other = write("a.csv", "text,label\na,x|y\n"), write("b.csv", "text,label\na,x\nb,y|maybe\n")
    assert refusal(train, validation=other, label_type="multilabel") == (
        f"{other}, row 2 (line 3): label maybe is not among the labels of training: x, y"
    )


def test_list_of_labels_needs_the_type_for_it(write):
    path = write("a.jsonl", '{"text": "a", "label": ["x"]}')
    assert "lists are for label_type multilabel" in refusal(path)


def test_test_file_without_any_label_is_not_scored_of_several_labels(write):
    train, test = write("a.csv", "text,label\na,x|y\nb,\n"), write("b.csv", "text,label\na,\nb,\n")
    options = {"validation": train, "label_type": "multilabel"}
    assert task(train, test=test, **options).test.labels is None
    assert task(train, test=train, **options).test.labels.tolist() == [[True, True], [False, False]]


def test_balanced_weights_are_scikit_learn_s():
    ids = np.array([0, 0, 0, 2, 2, 1])
    expected = compute_class_weight("balanced", classes=np.arange(3), y=ids)
    assert class_weights("balanced", ("a", "b", "c"), ids) == pytest.approx(expected)
    sets = np.array([[True, False], [False, False], [False, False], [True, True]])
    assert class_weights("balanced", ("a", "b"), sets).tolist() == [1.0, 3.0]


def test_weights_go_by_name():
    ids = np.array([0, 1, 2])
    assert class_weights(None, ("a", "b=c", "d"), ids) is None
    assert class_weights(["d=0.5", "b=c=4"], ("a", "b=c", "d"), ids).tolist() == [1.0, 4.0, 0.5]
    with pytest.raises(InputError, match=r"head.class_weights: e is not among the labels of training: a, d"):
        class_weights(["e=2"], ("a", "d"), ids)


def task_of(tmp_path, train, validation=None, **options):
    for name, text in (("train", train), ("validation", validation)):
        if text is not None:
            (tmp_path / f"{name}.csv").write_text(text)
            options[name] = str(tmp_path / f"{name}.csv")
    return read_task(LabelledConfig(**options))


ONE_HOT = "text,rude,spam,threat\na b,1,1,0\nc d,0,0,0\ne f,0,0,1\ng h,True,no,\n"


def test_a_column_for_each_label(tmp_path):
    options = {"label_type": "multilabel", "label_column": "rude,spam,threat"}
    task = task_of(tmp_path, ONE_HOT, ONE_HOT, **options)
    assert task.labels == ("rude", "spam", "threat")
    expected = [[1, 1, 0], [0, 0, 0], [0, 0, 1], [1, 0, 0]]
    assert task.train.labels.astype(int).tolist() == expected == task.validation.labels.astype(int).tolist()
    with pytest.raises(InputError, match=r"row 2 .*: spam is '2'; a column that is one label holds"):
        task_of(tmp_path, "text,rude,spam\na,1,0\nb,0,2\n", **options | {"label_column": "rude,spam"})
    with pytest.raises(InputError, match="has no column spam, but"):
        task_of(tmp_path, "text,rude\na,1\n", **options)


@pytest.mark.parametrize("cell", ["['food', 'room']", '["room", "food"]', "room|food"])
def test_a_list_written_as_text_is_a_list(tmp_path, cell):
    rows = [("a b", cell), ("c d", "['food']"), ("e f", "[]"), ("g h", "")]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    path = str(tmp_path / "train.csv")
    task = read_task(LabelledConfig(train=path, validation=path, label_type="multilabel"))
    assert task.labels == ("food", "room")
    assert task.train.labels.astype(int).tolist() == [[1, 1], [1, 0], [0, 0], [0, 0]]


def test_every_class_is_held_out_if_it_can_be(tmp_path, caplog):
    counts = {"repair": 40, "billing": 6, "praise": 4, "once": 1}
    rows = [f"text {label} {number},{label}" for label, count in counts.items() for number in range(count)]
    task = task_of(tmp_path, "text,label\n" + "\n".join(rows))
    assert {task.labels[label] for label in task.validation.labels} == {"repair", "billing", "praise"}
    assert {task.labels[label] for label in task.train.labels} == set(counts)
    assert f"only {len(task.validation)} validation examples" in caplog.text
    assert "1 of 4 classes have no validation example" in caplog.text


def test_shared_texts_and_conflicting_labels_are_told(tmp_path, caplog):
    train = "text,label\n" + "".join(f"t{number % 20},{number % 3}\n" for number in range(60))
    validation = "text,label\n" + "".join(f"t{number},0\n" for number in range(10, 21))
    task_of(tmp_path, train, validation)
    assert "20 of 20 texts of training have more than one label" in caplog.text
    assert "10 of 11 validation texts are in training too" in caplog.text
    caplog.clear()
    clean = "text,label\n" + "".join(f"u{number},{number % 2}\n" for number in range(60))
    task_of(tmp_path, clean.replace("u", "t"), clean)
    assert "training" not in caplog.text


@pytest.mark.parametrize(
    ("cell", "label_type", "message"),
    [
        ("['pos' 'z']", "multilabel", "begins like a list and is none; write"),
        ("['pos', 'z'", "multilabel", "begins like a list and is none; write"),
        ("['pos', 'z']", "classification", "lists are for label_type multilabel"),
    ],
)
def test_a_cell_that_looks_like_a_list_is_never_a_name(tmp_path, cell, label_type, message):
    with (tmp_path / "train.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), ("a b", "pos"), ("c d", "neg"), ("e f", cell)])
    with pytest.raises(InputError, match=rf"row 3 .*: label is .*{message}"):
        read_task(LabelledConfig(train=str(tmp_path / "train.csv"), label_type=label_type))


@pytest.mark.parametrize(
    ("column", "message"),
    [("rude,nope", "has no column nope, but"), ("rude,spam,rude", "each column once")],
)
def test_mistakes_in_the_columns_of_labels_are_named(tmp_path, column, message):
    with pytest.raises(InputError, match=message):
        task_of(tmp_path, ONE_HOT, label_type="multilabel", label_column=column)


def test_several_label_columns_need_multilabel(tmp_path):
    with pytest.raises(InputError, match="needs label_type multilabel"):
        task_of(tmp_path, ONE_HOT, label_column="rude,spam")
