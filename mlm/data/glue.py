"""The tasks of GLUE (Wang et al. 2019, arXiv:1804.07461): the official folders, or the copy on the hub.

- `read_glue` gives a task for training, `read_part` one of its files
- an official file is cut at tabs and nowhere else: a quote is a character of its text. Only QQP quotes cells
  as CSV does, and is read so
- CoLA's files of training and validation have no header; MRPC may come as Microsoft publishes it
- ids of classes are those of the hub's copy, in the order of `GlueTask.labels`
- mistakes name file, line and column
"""

from __future__ import annotations

import io
import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.glue import DIAGNOSTIC, MNLI
from mlm.config.model import LabelType
from mlm.data.formats import READ_ERRORS, one_line, split_lines, text_blocks
from mlm.data.glue_hub import read_hub_part
from mlm.data.glue_sizes import OFFICIAL_DEV, dev_in_words, odd_size
from mlm.data.labelled import Examples, LabelledTask
from mlm.data.tables import without_quotes

ENTAILMENT = ("entailment", "neutral", "contradiction")
TWO_WAY = ("entailment", "not_entailment")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GlueTask:
    """What is particular about a task."""

    folder: str
    """Official name of the folder."""
    texts: tuple[str, ...]
    """Official columns of the one or two texts; also the hub's, where `hub_texts` does not say otherwise."""
    label: str
    """Official column of the label."""
    spelling: tuple[str, ...]
    """The labels in the official files and in a submission, in the order of their ids; none: a number."""
    labels: tuple[str, ...]
    """Names of the same classes."""
    metrics: tuple[str, ...]
    """Official scores; the first one ranks epochs and settings."""
    submission: str = ""
    """Official name of the file of answers; empty: that of the folder."""
    hub_texts: tuple[str, ...] = ()

    @property
    def label_type(self) -> LabelType:
        """Whether a label is a class or a number."""
        return "classification" if self.spelling else "regression"


_BITS = ("0", "1")
_PAIR = ("sentence1", "sentence2")
_BOTH = ("accuracy", "f1")

TASKS = {
    "cola": GlueTask(
        "CoLA", ("sentence",), "label", _BITS, ("unacceptable", "acceptable"), ("matthews_correlation",)
    ),
    "sst2": GlueTask("SST-2", ("sentence",), "label", _BITS, ("negative", "positive"), ("accuracy",)),
    "mrpc": GlueTask(
        "MRPC",
        ("#1 String", "#2 String"),
        "Quality",
        _BITS,
        ("not_equivalent", "equivalent"),
        _BOTH,
        hub_texts=_PAIR,
    ),
    "stsb": GlueTask("STS-B", _PAIR, "score", (), ("score",), ("pearson", "spearman")),
    "qqp": GlueTask(
        "QQP", ("question1", "question2"), "is_duplicate", _BITS, ("not_duplicate", "duplicate"), _BOTH
    ),
    "mnli": GlueTask(
        "MNLI",
        _PAIR,
        "gold_label",
        ENTAILMENT,
        ENTAILMENT,
        ("accuracy",),
        submission="MNLI-m",
        hub_texts=("premise", "hypothesis"),
    ),
    "qnli": GlueTask("QNLI", ("question", "sentence"), "label", TWO_WAY, TWO_WAY, ("accuracy",)),
    "rte": GlueTask("RTE", _PAIR, "label", TWO_WAY, TWO_WAY, ("accuracy",)),
    "wnli": GlueTask("WNLI", _PAIR, "label", _BITS, ("not_entailment", "entailment"), ("accuracy",)),
    "ax": GlueTask("AX", _PAIR, "label", ENTAILMENT, ENTAILMENT, (), hub_texts=("premise", "hypothesis")),
}

MISMATCHED = "_mismatched"
"""What the second validation and test set of MNLI, from other genres, add to names."""
_COLA_COLUMNS = ["source", "label", "mark", "sentence"]
_FILES = {
    "train": ["train.tsv"],
    "dev": ["dev.tsv"],
    "test": ["test.tsv"],
    "dev_matched": ["dev_matched.tsv"],
    "dev_mismatched": ["dev_mismatched.tsv"],
    "test_matched": ["test_matched.tsv"],
    "test_mismatched": ["test_mismatched.tsv"],
    "diagnostic": ["diagnostic.tsv", "AX.tsv", "test.tsv"],
}
"""Names that the file of a part goes by."""
_HUB_SPLITS = {"dev": "validation", "diagnostic": "test"}


def read_glue(name: str, glue_dir: str | None) -> LabelledTask:
    """Read training and validation examples of a task; with MNLI the second validation set, if it is there.

    Args:
        name: the task.
        glue_dir: folder of the official folders; None: the hub's copy.

    Raises:
        InputError: a file is missing, or a line of it is not as it must be; or the hub cannot be reached.
    """
    spec = TASKS[name]
    dev = "dev_matched" if name == MNLI else "dev"
    train, validation = (read_part(name, part, glue_dir) for part in ("train", dev))
    extra = {}
    if name == MNLI and has_part(name, "dev_mismatched", glue_dir):
        extra[MISMATCHED] = read_part(name, "dev_mismatched", glue_dir)
    elif name == MNLI:
        log.warning("mnli: there is no dev_mismatched.tsv, so accuracy_mismatched is left out")
    rows = {dev: len(validation)} | {f"dev{suffix}": len(part) for suffix, part in extra.items()}
    dev_is = dev_in_words(name, rows)
    if dev_is != OFFICIAL_DEV:
        log.warning("%s: there are %s, so scores cannot be compared with those of others", name, dev_is)
    return LabelledTask(
        name,
        spec.label_type,
        spec.labels,
        train,
        validation,
        dev_is,
        metrics=spec.metrics,
        scored=extra,
    )


def submitted_parts(name: str) -> dict[str, str]:
    """Return the parts of a task whose answers are submitted, and the official name of each file."""
    spec = TASKS[name]
    if name == MNLI:
        return {"test_matched": "MNLI-m", "test_mismatched": "MNLI-mm"}
    return {"diagnostic" if name == DIAGNOSTIC else "test": spec.submission or spec.folder}


def warn_of_sizes(name: str, glue_dir: str | None, with_test: bool) -> None:
    """Tell, before anything is trained, what is missing in the averages and wrong in a submission.

    Args:
        name: the task.
        glue_dir: folder of the official folders; None: the hub, which has all.
        with_test: whether the answers are submitted.

    Raises:
        InputError: a file cannot be read.
    """
    if glue_dir is None:
        return
    if name == MNLI and not has_part(name, "dev_mismatched", glue_dir):
        log.warning("mnli: without dev_mismatched the averages over nine columns cannot be given")
    for part in submitted_parts(name) if with_test else ():
        odd = odd_size(name, part, len(read_part(name, part, glue_dir)))
        if odd:
            file = find_part(name, part, glue_dir)[0]
            log.warning("submit=true: %s has %s; the server refuses that", file, odd)


def check_parts(name: str, glue_dir: str | None, with_test: bool = False) -> None:
    """Check that the files of a task are there, before anything is trained.

    Args:
        name: the task.
        glue_dir: folder of the official folders; None: the hub, which has all.
        with_test: also those whose answers are submitted.

    Raises:
        InputError: names the folder and the file that is missing.
    """
    if glue_dir is None:
        return
    of_training = [] if name == DIAGNOSTIC else ["train", "dev_matched" if name == MNLI else "dev"]
    asked = list(submitted_parts(name)) if with_test or name == DIAGNOSTIC else []
    for part in of_training + asked:
        find_part(name, part, glue_dir)


def has_part(name: str, part: str, glue_dir: str | None) -> bool:
    """Tell whether a part is there; the hub has all."""
    try:
        return glue_dir is None or bool(find_part(name, part, glue_dir))
    except InputError:
        return False


def find_part(name: str, part: str, glue_dir: str) -> list[Path]:
    """Return the official file of a part, or the parquet files of a copy of the hub's.

    Raises:
        InputError: it is not there; says where it was looked for.
    """
    copies = [folder for folder in _folders(name, glue_dir) if any(folder.glob("*.parquet"))]
    if not copies:
        return [_official_file(name, part, glue_dir)]
    files = sorted(copies[0].glob(f"{_hub_split(part)}-*.parquet"))
    if not files:
        raise InputError(f"{copies[0]} has no {_hub_split(part)}-*.parquet")
    return files


def _hub_split(part: str) -> str:
    stem, _, rest = part.partition("_")
    return _HUB_SPLITS.get(stem, stem) + (f"_{rest}" if rest else "")


def read_part(name: str, part: str, glue_dir: str | None) -> Examples:
    """Read one part of a task: train, dev, test, with MNLI also _matched or _mismatched, diagnostic.

    The parts of which the answers are secret have no labels.

    Raises:
        InputError: as in `read_glue`.
    """
    files = [] if glue_dir is None else find_part(name, part, glue_dir)
    if files and files[0].suffix != ".parquet":
        return _official_part(name, part, files[0])
    spec = TASKS[name]
    labels = spec.labels if spec.spelling else ()
    texts = spec.hub_texts or spec.texts
    return read_hub_part(name, _hub_split(part), files, texts, labels if _has_labels(part) else None)


def _official_part(name: str, part: str, path: Path) -> Examples:
    spec = TASKS[name]
    is_cola = name == "cola" and part != "test"
    columns, rows = _read_rows(path, _COLA_COLUMNS if is_cola else None, quoted=name == "qqp")
    wanted = [*spec.texts, *([spec.label] if _has_labels(part) else [])]
    for column in wanted:
        if column not in columns:
            raise InputError(f"{path}, line 1: has no column {column}, but {', '.join(columns)}")
    rows = _whole_rows(path, rows, len(columns), max(map(columns.index, wanted)) + 1, may_skip=name == "qqp")
    if path.name.startswith("msr_paraphrase_train"):
        rows = _of_mrpc_part(path, rows, columns, is_dev=part == "dev")
    if not rows:
        raise InputError(f"{path}: has no row of {part} that can be read")
    texts, *pairs = ([cells[columns.index(column)] for _, cells in rows] for column in spec.texts)
    labels = None
    if _has_labels(part):
        values = [(line, cells[columns.index(spec.label)]) for line, cells in rows]
        labels = _label_ids(path, spec, values)
    return Examples(texts, pairs[0] if pairs else None, labels)


def _has_labels(part: str) -> bool:
    return not part.startswith(("test", "diagnostic"))


def _official_file(name: str, part: str, glue_dir: str) -> Path:
    """Return the file of a part, wherever the layouts in use have it.

    Raises:
        InputError: it is not there; says where it was looked for.
    """
    spec = TASKS[name]
    folders = _folders(name, glue_dir)
    if not folders:
        raise InputError(f"{glue_dir} has no folder {spec.folder}; it holds the official folders of GLUE")
    names = list(_FILES[part])
    if name == "mrpc":
        names.append(f"msr_paraphrase_{'test' if part == 'test' else 'train'}.txt")
    found = [folder / file for folder in folders for file in names if (folder / file).is_file()]
    if not found:
        raise InputError(f"{folders[0]} has no {' or '.join(names)}")
    return found[0]


def _folders(name: str, glue_dir: str) -> list[Path]:
    """Return the folders that are called like a task, in whatever spelling: SST-2, sst2."""
    names = {name, "diagnostic"} if name == DIAGNOSTIC else {name}
    if not Path(glue_dir).is_dir():
        raise InputError(f"glue_dir={glue_dir} is no folder; looked in {Path.cwd()}")
    plain = {path: path.name.lower().replace("-", "").replace("_", "") for path in Path(glue_dir).iterdir()}
    return sorted(path for path, found in plain.items() if found in names and path.is_dir())


def _read_rows(
    path: Path, columns: list[str] | None, quoted: bool
) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Return the columns of a file, and the line number and cells of each row.

    Args:
        path: the file.
        columns: those of a file without a header.
        quoted: undo the quoting of cells that are quoted as a whole.
    """
    try:
        content = io.BytesIO(path.read_bytes().removeprefix(b"\xef\xbb\xbf"))
        blocks = text_blocks(content, str(path), "utf-8", advice="convert it: iconv -f {} -t utf-8")
        lines = list(enumerate(split_lines(blocks), 1))
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    rows = [(number, line.split("\t")) for number, line in lines if line.strip()]
    if columns is None:
        columns = [name.strip() for name in rows.pop(0)[1]] if rows else []
    if not rows:
        raise InputError(f"{path}: has no rows")
    if quoted:
        rows = [(number, [without_quotes(cell) for cell in cells]) for number, cells in rows]
    return columns, rows


def _whole_rows(
    path: Path, rows: list[tuple[int, list[str]]], num_columns: int, needed: int, may_skip: bool
) -> list[tuple[int, list[str]]]:
    """Return the rows that have all the cells needed; the official QQP has others, which are left out."""
    odd = [(number, cells) for number, cells in rows if not needed <= len(cells) <= num_columns]
    if odd:
        number, cells = odd[0]
        text = f"{path}, line {number}: {len(cells)} cells under {num_columns} columns"
        if not may_skip:
            raise InputError(text)
        log.warning("%s; %d such row(s) are left out", text, len(odd))
        rows = [(number, cells) for number, cells in rows if needed <= len(cells) <= num_columns]
    return rows


def _of_mrpc_part(
    path: Path, rows: list[tuple[int, list[str]]], columns: list[str], is_dev: bool
) -> list[tuple[int, list[str]]]:
    """Divide Microsoft's training file as GLUE does: dev_ids.tsv beside it lists the pairs of dev."""
    lists = [path.with_name(f"{prefix}dev_ids.tsv") for prefix in ("", "mrpc_")]
    found = next((file for file in lists if file.is_file()), None)
    if found is None:
        raise InputError(f"{path.parent} has no dev_ids.tsv, which tells dev from train in {path.name}")
    of_dev = {tuple(line.split()) for line in found.read_text(encoding="utf-8-sig").splitlines()}
    first, second = columns.index("#1 ID"), columns.index("#2 ID")
    return [row for row in rows if ((row[1][first], row[1][second]) in of_dev) == is_dev]


def _label_ids(path: Path, spec: GlueTask, values: list[tuple[int, str]]) -> npt.NDArray[Any]:
    """Return the ids of classes (N,) int64, or the numbers (N,) float64."""
    ids = {spelling: number for number, spelling in enumerate(spec.spelling)}
    if not ids:
        return np.array([_number(path, spec, line, value) for line, value in values], np.float64)
    for line, value in values:
        if value.strip() not in ids:
            raise InputError(
                f"{path}, line {line}: {spec.label} is {value.strip()[:60]!r}, not {' or '.join(ids)}"
            )
    return np.array([ids[value.strip()] for _, value in values], np.int64)


def _number(path: Path, spec: GlueTask, line: int, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"{path}, line {line}: {spec.label} is {value.strip()[:60]!r}, which is no number")
    return number
