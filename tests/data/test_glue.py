"""The official GLUE folders with their quirks, the hub's schema, and errors in damaged files."""

from __future__ import annotations

import csv
import time

import huggingface_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, Features
from glue_folder import write_glue

from mlm.config.errors import InputError
from mlm.config.finetune import GLUE_TASKS
from mlm.data.glue import (
    TASKS,
    check_parts,
    has_part,
    read_glue,
    read_part,
    size_of,
    submitted_parts,
)


def rewrite(path, change):
    path.write_bytes(change(path.read_bytes()))
    return path


@pytest.mark.parametrize("name", [name for name in TASKS if name != "ax"])
def test_all_rows_of_every_task_are_read(glue_dir, name):
    task = read_glue(name, str(glue_dir))
    assert (len(task.train), len(task.validation)) == (24, 12)
    assert (task.train.pairs is None) == (name in ("cola", "sst2"))
    assert set(task.train.labels.tolist()) == ({0.0, 5.0} if name == "stsb" else set(range(len(task.labels))))
    assert task.metrics == TASKS[name].metrics
    assert [(suffix, len(part)) for suffix, part in task.scored.items()] == (
        [("_mismatched", 13)] if name == "mnli" else []
    )
    for part in submitted_parts(name):
        unlabelled = read_part(name, part, str(glue_dir))
        assert len(unlabelled) == 5 + (part == "test_mismatched")
        assert unlabelled.labels is None


def test_tasks_are_those_of_the_command_line_and_ax_is_a_part_of_its_own(glue_dir):
    assert tuple(TASKS) == GLUE_TASKS
    assert len(read_part("ax", "diagnostic", str(glue_dir))) == 7
    (glue_dir / "AX").rename(glue_dir / "diagnostic")
    assert len(read_part("ax", "diagnostic", str(glue_dir))) == 7


def test_labels_have_the_ids_of_the_hub(glue_dir):
    assert read_glue("mnli", str(glue_dir)).labels == ("entailment", "neutral", "contradiction")
    task = read_glue("rte", str(glue_dir))
    assert task.labels == ("entailment", "not_entailment")
    assert task.train.labels[:2].tolist() == [0, 1]
    assert read_glue("wnli", str(glue_dir)).labels == ("not_entailment", "entailment")
    assert read_glue("cola", str(glue_dir)).train.texts[1] == "the boat waits"


@pytest.mark.parametrize("quirk", ["bom", "crlf", "no final newline", "blank line"])
def test_quirks_of_a_file_change_nothing(glue_dir, quirk):
    plain = read_glue("mrpc", str(glue_dir))
    changes = {
        "bom": lambda content: b"\xef\xbb\xbf" + content,
        "crlf": lambda content: content.replace(b"\n", b"\r\n"),
        "no final newline": lambda content: content.rstrip(b"\n"),
        "blank line": lambda content: content + b"\n",
    }
    rewrite(glue_dir / "MRPC" / "train.tsv", changes[quirk])
    read = read_glue("mrpc", str(glue_dir))
    assert (read.train.texts, read.train.pairs) == (plain.train.texts, plain.train.pairs)
    assert np.array_equal(read.train.labels, plain.train.labels)


def test_quotes_are_text_except_in_qqp(glue_dir):
    stray = '1\t7\t8\t" The lamp " waits\t"the gull"\n2'
    rewrite(glue_dir / "MRPC" / "dev.tsv", lambda content: content + stray[:-2].encode())
    task = read_glue("mrpc", str(glue_dir))
    assert (task.validation.texts[-1], task.validation.pairs[-1]) == ('" The lamp " waits', '"the gull"')
    rows = [["9", "1", "2", 'What does "it" mean?', "Is 5'6\" tall?", "1"]]
    with (glue_dir / "QQP" / "dev.tsv").open("a", newline="") as file:
        csv.writer(file, delimiter="\t", lineterminator="\n").writerows(rows)
    task = read_glue("qqp", str(glue_dir))
    assert [task.validation.texts[-1], task.validation.pairs[-1]] == rows[0][3:5]


def test_odd_rows_of_qqp_are_skipped_with_a_warning_and_elsewhere_an_error(glue_dir, caplog):
    rewrite(glue_dir / "QQP" / "train.tsv", lambda content: content + b"7\t1\t2\tthe lamp\tthe gull 0\n")
    assert len(read_glue("qqp", str(glue_dir)).train) == 24
    assert "train.tsv, line 26: 5 cells under 6 columns; 1 such row(s) are skipped" in caplog.text
    rewrite(glue_dir / "RTE" / "train.tsv", lambda content: content + b"7\tthe lamp\n")
    with pytest.raises(InputError, match=r"RTE/train\.tsv, line 26: 2 cells under 4 columns"):
        read_glue("rte", str(glue_dir))


@pytest.mark.parametrize(
    ("name", "file", "change", "message"),
    [
        (
            "rte",
            "RTE/dev.tsv",
            (b"not_entailment", b"maybe"),
            "line 3: label is 'maybe', not entailment or not",
        ),
        (
            "stsb",
            "STS-B/dev.tsv",
            (b"5.000", b"high"),
            "line 3: score is 'high', which is not a finite number",
        ),
        ("stsb", "STS-B/dev.tsv", (b"5.000", b"nan"), "line 3: score is 'nan', which is not a finite number"),
        (
            "qnli",
            "QNLI/train.tsv",
            (b"question", b"Question"),
            "line 1: has no column question, but index, Q",
        ),
        (
            "sst2",
            "SST-2/train.tsv",
            (b"the", b"th\xe9"),
            "line 2, byte 17: .*convert it: iconv -f latin-1 -t",
        ),
    ],
)
def test_errors_name_file_and_line(glue_dir, name, file, change, message):
    rewrite(glue_dir / file, lambda content: content.replace(*change, 1))
    with pytest.raises(InputError, match=f"{file}, {message}"):
        read_glue(name, str(glue_dir))


def test_errors_name_missing_rows_files_and_folders(glue_dir, tmp_path, caplog):
    (glue_dir / "RTE" / "dev.tsv").write_text("index\tsentence1\tsentence2\tlabel\n")
    with pytest.raises(InputError, match=r"RTE/dev\.tsv: has no rows"):
        read_glue("rte", str(glue_dir))
    (glue_dir / "RTE" / "dev.tsv").unlink()
    with pytest.raises(InputError, match=r"RTE has no dev\.tsv"):
        read_glue("rte", str(glue_dir))
    with pytest.raises(InputError, match="has no folder WNLI; it must hold the official folders of GLUE"):
        read_glue("wnli", str(tmp_path))
    with pytest.raises(InputError, match=r"glue_dir=.*nothing is not a folder"):
        read_glue("wnli", str(tmp_path / "nothing"))
    (glue_dir / "MNLI" / "dev_mismatched.tsv").unlink()
    assert read_glue("mnli", str(glue_dir)).scored == {}
    assert "accuracy_mismatched is left out" in caplog.text
    assert not has_part("mnli", "dev_mismatched", str(glue_dir))


def test_mrpc_as_microsoft_publishes_it(glue_dir):
    expected = read_glue("mrpc", str(glue_dir))
    folder = glue_dir / "MRPC"
    header, *train = (folder / "train.tsv").read_text().splitlines()
    train = ["\t".join(["1", str(row), f"{row}00", *line.split("\t")[3:]]) for row, line in enumerate(train)]
    dev = (folder / "dev.tsv").read_text().splitlines()[1:]
    dev = ["\t".join(["0", str(row), f"{row}99", *line.split("\t")[3:]]) for row, line in enumerate(dev)]
    (folder / "msr_paraphrase_train.txt").write_text("\ufeff" + "\n".join([header, *dev, *train]))
    (folder / "msr_paraphrase_test.txt").write_text("\n".join([header, *dev[:3]]))
    for name in ("train", "dev", "test"):
        (folder / f"{name}.tsv").unlink()
    with pytest.raises(InputError, match=r"MRPC has no dev_ids\.tsv, which tells dev from train"):
        read_glue("mrpc", str(glue_dir))
    (folder / "dev_ids.tsv").write_text("\n".join(f"{row}\t{row}99" for row in range(12)))
    task = read_glue("mrpc", str(glue_dir))
    assert (task.train.texts, task.validation.pairs) == (expected.train.texts, expected.validation.pairs)
    assert set(task.validation.labels.tolist()) == {0}
    assert len(read_part("mrpc", "test", str(glue_dir))) == 3


def test_copy_of_the_hub_gives_the_same_examples(glue_dir, tmp_path):
    """As `huggingface-cli download` lays it out: a folder a task, a parquet file a split, labels as ids."""
    for name, spec in TASKS.items():
        splits = {"train": "train", "validation": "dev", "test": "test"}
        if name == "mnli":
            both = [f"{stem}_{kind}" for stem in ("validation", "test") for kind in ("matched", "mismatched")]
            splits = {"train": "train"} | {split: split.replace("validation", "dev") for split in both}
        elif name == "ax":
            splits = {"test": "diagnostic"}
        (tmp_path / "hub" / name).mkdir(parents=True)
        for split, part in splits.items():
            examples = read_part(name, part, str(glue_dir))
            columns = dict(zip(spec.hub_texts or spec.texts, (examples.texts, examples.pairs), strict=False))
            labels = [-1] * len(examples) if examples.labels is None else examples.labels.tolist()
            table = pa.table(columns | {"label": labels, "idx": range(len(examples))})
            pq.write_table(table, tmp_path / "hub" / name / f"{split}-00000-of-00001.parquet")
    for name in TASKS:
        if name != "ax":
            ours, hubs = read_glue(name, str(glue_dir)), read_glue(name, str(tmp_path / "hub"))
            assert (hubs.train.texts, hubs.validation.pairs) == (ours.train.texts, ours.validation.pairs)
            assert np.array_equal(hubs.train.labels, ours.train.labels)
            assert hubs.scored.keys() == ours.scored.keys()
        for part in submitted_parts(name):
            assert has_part(name, part, str(tmp_path / "hub"))
            assert read_part(name, part, str(tmp_path / "hub")) == read_part(name, part, str(glue_dir))
    (tmp_path / "hub" / "rte" / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(InputError, match=r"rte has no test-\*\.parquet"):
        read_part("rte", "test", str(tmp_path / "hub"))
    table = pa.table({"sentence1": ["a"], "sentence2": ["b"], "label": [-1]})
    pq.write_table(table, tmp_path / "hub" / "rte" / "validation-00000-of-00001.parquet")
    with pytest.raises(InputError, match=r"rte/validation-0.*\.parquet, row 1: label is -1, not 0 or 1"):
        read_glue("rte", str(tmp_path / "hub"))


@pytest.fixture
def copy(tmp_path):
    """Writes columns as a split of a copy of the hub's, as `datasets` does, and reads it."""

    def copy(name, columns, split="train", classes=None, file="0"):
        folder = tmp_path / "copy" / name
        folder.mkdir(parents=True, exist_ok=True)
        features = Features.from_arrow_schema(pa.table(columns).schema)
        if classes:
            features["label"] = ClassLabel(names=classes)
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"{split}-{file}.parquet")
        return read_part(name, split.replace("validation", "dev"), str(tmp_path / "copy"))

    return copy


PAIRS = {"sentence1": ["a", "b"], "sentence2": ["c", "d"]}


@pytest.mark.parametrize(
    ("name", "columns", "message"),
    [
        ("rte", {"label": [0.0, 0.7]}, "row 2: label is 0.7, not 0 or 1"),
        ("rte", {"label": [1.2, 0.0]}, "row 1: label is 1.2, not 0 or 1"),
        ("rte", {"label": ["entailment", "x"]}, "row 1: label is 'entailment', not 0 or 1"),
        ("rte", {"label": [True, False]}, "row 1: label is True, not 0 or 1"),
        ("rte", {"label": [0, None]}, "row 2: label is missing"),
        ("rte", {"label": [0, 1], "sentence2": ["c", None]}, "row 2: sentence2 is missing"),
        ("rte", {"label": [0, 1], "sentence1": [7, 8]}, "row 1: sentence1 is '7', which is not text"),
        ("rte", {"labels": [0, 1]}, "has no column label, but sentence1, sentence2, labels"),
        ("rte", {"label": [], "sentence1": [], "sentence2": []}, "has no rows"),
        ("stsb", {"label": [0.5, None]}, "row 2: label is missing"),
        ("stsb", {"label": [0.5, float("nan")]}, "row 2: label is missing"),
        ("stsb", {"label": ["high", "low"]}, "row 1: label is 'high', which is not a finite number"),
    ],
)
def test_rows_of_a_copy_of_the_hub_are_checked(copy, name, columns, message):
    with pytest.raises(InputError, match=rf"{name}/train-0\.parquet(,|:) {message}"):
        copy(name, PAIRS | columns)


def test_whole_numbers_are_ids_however_they_are_stored(copy):
    assert copy("rte", PAIRS | {"label": [1.0, 0.0]}).labels.tolist() == [1, 0]
    assert copy("rte", PAIRS | {"label": [0, 1]}, file="1").labels.tolist() == [1, 0, 0, 1]


def test_classes_of_a_copy_are_matched_by_the_names_that_it_gives_them(copy):
    plain, labels = TASKS["rte"].labels, {"label": [0, 1]}
    assert copy("rte", PAIRS | labels, classes=list(plain)).labels.tolist() == [0, 1]
    assert copy("rte", PAIRS | labels, classes=list(plain[::-1])).labels.tolist() == [1, 0]
    assert copy("rte", PAIRS | labels, classes=["0", "1"]).labels.tolist() == [0, 1]
    # Another file may number them in its own way.
    assert copy("rte", PAIRS | labels, classes=list(plain[::-1]), file="1").labels.tolist() == [0, 1, 1, 0]
    with pytest.raises(InputError, match="its classes are yes, no, those of the task entailment, not_entail"):
        copy("rte", PAIRS | labels, classes=["yes", "no"])


def test_missing_part_of_a_copy_is_an_error_before_training(copy, tmp_path):
    for split in ("train", "validation"):
        copy("rte", PAIRS | {"label": [0, 1]}, split)
    where = str(tmp_path / "copy")
    check_parts("rte", where)
    assert has_part("rte", "dev", where)
    assert not has_part("rte", "test", where)
    with pytest.raises(InputError, match=r"rte has no test-\*\.parquet"):
        check_parts("rte", where, with_test=True)
    for split in ("train", "validation_matched"):
        (tmp_path / "copy" / "mnli").mkdir(exist_ok=True)
        table = pa.table({"premise": ["a"], "hypothesis": ["b"], "label": [2]})
        pq.write_table(table, tmp_path / "copy" / "mnli" / f"{split}-0.parquet")
    assert read_glue("mnli", where).scored == {}


def test_file_of_which_every_row_is_left_out_is_refused(glue_dir):
    header = (glue_dir / "QQP" / "train.tsv").read_text().splitlines()[0]
    (glue_dir / "QQP" / "train.tsv").write_text(f"{header}\n1\t2\n")
    with pytest.raises(InputError, match=r"QQP/train\.tsv: has no row of train that can be read"):
        read_glue("qqp", str(glue_dir))


def test_unreachable_hub_is_an_error_within_seconds_and_the_process_stays_online(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    start = time.monotonic()
    with pytest.raises(
        InputError, match=r"nyu-mll/glue cannot be reached, and rte is not .* with --glue_dir"
    ):
        read_glue("rte", None)
    assert time.monotonic() - start < 10
    assert not huggingface_hub.constants.HF_HUB_OFFLINE


def test_task_in_the_cache_of_the_hub_needs_no_network(glue_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    stored = tmp_path / "cache" / "datasets--nyu-mll--glue"
    (stored / "refs").mkdir(parents=True)
    (stored / "refs" / "main").write_text("a" * 40)
    folder = stored / "snapshots" / ("a" * 40) / "wnli"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        examples = read_part("wnli", split.replace("validation", "dev"), str(glue_dir))
        columns = {"sentence1": examples.texts, "sentence2": examples.pairs, "label": examples.labels}
        pq.write_table(pa.table(columns), folder / f"{split}-00000-of-00001.parquet")
    ours, cached = read_glue("wnli", str(glue_dir)), read_glue("wnli", None)
    assert (cached.train.texts, cached.validation.pairs) == (ours.train.texts, ours.validation.pairs)
    assert np.array_equal(cached.train.labels, ours.train.labels)
    with pytest.raises(InputError, match=r"rte is not in the cache \(no such files\); give the folder"):
        read_glue("rte", None)


def test_set_of_another_size_is_not_called_official(tmp_path, caplog):
    for spec in TASKS.values():
        assert all(part.rows or part.split == "train" for part in spec.parts.values())
    assert size_of("rte", "test", 3000).is_official
    assert str(size_of("mnli", "dev_matched", 1000)) == "1,000 of 9,815 rows of dev_matched"
    folder = str(write_glue(tmp_path / "rte", dev=277))
    task = read_glue("rte", folder)
    assert (task.validation_is, task.dev_sizes) == ("the official dev set", (("dev", 277, 277),))
    assert "cannot be compared" not in caplog.text
    task = read_glue("sst2", folder)
    assert (task.validation_is, task.dev_sizes) == ("277 of 872 rows of dev", (("dev", 277, 872),))
    assert "sst2: there are 277 of 872 rows of dev, so scores cannot be compared" in caplog.text
    task = read_glue("mnli", folder)
    both = "277 of 9,815 rows of dev_matched and 278 of 9,832 rows of dev_mismatched"
    assert task.validation_is == both
    assert task.dev_sizes == (("dev_matched", 277, 9815), ("dev_mismatched", 278, 9832))


def test_warnings_of_missing_averages_and_an_invalid_submission(tmp_path, glue_dir, caplog):
    whole = str(write_glue(tmp_path / "whole", test=1102))
    check_parts("ax", whole, with_test=True)
    check_parts("mnli", whole, with_test=False)
    assert not caplog.text
    check_parts("mnli", str(glue_dir), with_test=True)
    for part, words in (("test_matched", "5 of 9,796 rows of"), ("test_mismatched", "6 of 9,847 rows of")):
        told = f"submit=true: {glue_dir}/MNLI/{part}.tsv has {words} {part}; the server refuses that"
        assert told in caplog.text
    (glue_dir / "MNLI" / "dev_mismatched.tsv").unlink()
    check_parts("mnli", str(glue_dir), with_test=False)
    assert "mnli: without dev_mismatched the averages over nine columns cannot be given" in caplog.text


@pytest.mark.network
def test_copy_on_the_hub(monkeypatch):
    task = read_glue("rte", None)
    assert (len(task.train), len(task.validation)) == (2490, 277)
