"""Labelled files: rows to texts, labels to ids, and the part that is held out.

- files are read as text, as the corpus is: `NA`, `007` and quotes survive (`formats.py`, `tables.py`)
- the ids of classes are the places of their names in sorted order, whole numbers by value: the same for any
  order of the rows; nothing is guessed from the type of a column
- mistakes name file, row (counted from 1, without the header) and value, before anything is trained
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.config.finetune import LabelledConfig, LabelType
from mlm.counter import uniform
from mlm.data.formats import (
    BLOCK_BYTES,
    READ_ERRORS,
    ReadReport,
    decompressed,
    format_of,
    one_line,
    split_lines,
    text_blocks,
)
from mlm.data.tables import Row, csv_rows, json_rows

NO_CLASS = "-1"
"""What data sets write in place of a label that is kept secret."""
MANY_CLASSES = 100
"""From this many classes on we ask whether the labels are not numbers."""
TABLE_FORMATS = "csv, tsv, jsonl, json and parquet"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Texts and what is known of them."""

    texts: list[str]
    pairs: list[str] | None = None
    """The second text of each; None: single texts."""
    labels: npt.NDArray[Any] | None = None
    """(N,) ids of classes int64, or numbers float64; None: not known."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: npt.NDArray[np.int64]) -> Examples:
        """Return some of them, in this order."""
        texts = [self.texts[row] for row in rows]
        pairs = None if self.pairs is None else [self.pairs[row] for row in rows]
        return Examples(texts, pairs, None if self.labels is None else self.labels[rows])


@dataclass(frozen=True)
class LabelledTask:
    """All that a fine-tuning run is about."""

    name: str
    label_type: LabelType
    labels: tuple[str, ...]
    """Names of the classes in the order of their ids; for numbers the one name of what they measure."""
    train: Examples
    validation: Examples
    validation_is: str
    """Where the validation examples are from, in words."""
    test: Examples | None = None
    metrics: tuple[str, ...] = ()
    """The scores asked for, the one that ranks epochs first; none: all that there are."""
    scored: dict[str, Examples] = field(default_factory=dict)
    """Further sets to score once, at the end: what each adds to the names of its scores."""


@dataclass(frozen=True)
class Table:
    """A file of rows, in memory."""

    name: str
    """Its path."""
    rows: list[Row]
    """Place ("row 3 (line 4)") and cells of each row, at least one."""

    @property
    def columns(self) -> list[str]:
        """The columns there are."""
        return list(dict.fromkeys(key for _, row in self.rows for key in row))

    def texts(self, column: str, option: str) -> list[str]:
        """Return the cells of a column of texts; they may be empty.

        Args:
            column: its name.
            option: the flag that chooses it.

        Raises:
            InputError: there is no such column, or a cell is no text.
        """
        texts = []
        for place, value in self.cells(column, option):
            if not isinstance(value, str):
                found = "is missing" if value is None else f"is {str(value)[:60]!r}, which is not text"
                raise InputError(f"{place}: {column} {found}")
            texts.append(value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8"))
        return texts

    def cells(self, column: str, option: str) -> Iterator[tuple[str, Any]]:
        """Yield place and value of each cell of a column.

        Raises:
            InputError: there is no such column; lists those there are, and the option.
        """
        columns = self.columns
        if column not in columns:
            raise InputError(
                f"{self.name} has no column {column}, but {', '.join(columns[:20])}; name it with {option}"
            )
        for place, row in self.rows:
            yield f"{self.name}, {place}", row.get(column)


def read_table(path: str, encoding: str = "utf-8") -> Table:
    """Read a file of rows.

    Raises:
        InputError: it is none, is empty, or cannot be read; names file and line.
    """
    kind = format_of(path)
    if kind in ("text", None):
        raise InputError(f"{path}: is no file of rows; {TABLE_FORMATS} are, each also compressed")
    try:
        with Path(path).open("rb") as file:
            content = decompressed(io.BufferedReader(file, BLOCK_BYTES))
            rows = list(_rows(str(kind), content, path, encoding))
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    if not rows:
        raise InputError(f"{path}: has no rows")
    return Table(path, [(f"row {number}{place}", row) for number, (place, row) in enumerate(rows, 1)])


def read_texts(path: str, column: str, encoding: str = "utf-8") -> list[str]:
    """Read the texts of a file in their order: the lines of a text file, or a column of a file of rows.

    Raises:
        InputError: it is empty or cannot be read, or a row has no text there; names file and line.
    """
    if format_of(path) != "text":
        return read_table(path, encoding).texts(column, "--text_column")
    try:
        with Path(path).open("rb") as file:
            content = decompressed(io.BufferedReader(file, BLOCK_BYTES))
            texts = list(split_lines(text_blocks(content, path, encoding)))
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    if not texts:
        raise InputError(f"{path}: is empty")
    return texts


def _rows(kind: str, content: Any, path: str, encoding: str) -> Iterator[Row]:
    if kind == "parquet":
        for row in pq.read_table(io.BytesIO(content.read())).to_pylist():
            yield "", row
        return
    blocks = text_blocks(content, path, encoding)
    if kind in ("csv", "tsv"):
        rows = csv_rows(blocks, path, tabs=kind == "tsv")
    else:
        rows = json_rows(blocks, path, array_allowed=kind == "json", report=ReadReport(path))
    for place, cells in rows:
        yield f" ({place})", cells


def read_task(config: LabelledConfig) -> LabelledTask:
    """Read the labelled files of a configuration.

    Raises:
        InputError: a file, column, text or label is not as it must be.
    """
    assert config.train, "a run without a file has a task of its own"
    table = read_table(config.train, config.encoding)
    train = _examples(table, config)
    if config.label_type == "regression":
        labels: tuple[str, ...] = (config.label_column,)
        train = replace(train, labels=_numbers(table, config))
    else:
        found = _classes(table, config)
        labels = sort_labels(found)
        if len(labels) < 2:
            every = f"{table.name}: every {config.label_column} is {labels[0]}"
            raise InputError(f"{every}; a classifier needs two classes")
        if len(labels) > MANY_CLASSES:
            text = "%s holds %d different labels; for numbers set --data.label_type regression"
            log.warning(text, table.name, len(labels))
        train = replace(train, labels=_ids(found, labels, table, config))
    name = Path(config.train).name.partition(".")[0]
    if config.validation:
        validation = _labelled(read_table(config.validation, config.encoding), config, labels)
        where = config.validation
    else:
        train, validation = hold_out(train, config.validation_fraction, config.train)
        where = f"{config.validation_fraction:.0%} of {config.train}, chosen by a hash of the text"
    test = _test(config, labels) if config.test else None
    return LabelledTask(name, config.label_type, labels, train, validation, where, test)


def sort_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names in the order of their ids: sorted, whole numbers by value."""
    distinct = sorted(set(names))
    if all(name.lstrip("-").isdecimal() and name.isascii() and str(int(name)) == name for name in distinct):
        distinct.sort(key=int)
    return tuple(distinct)


def _examples(table: Table, config: LabelledConfig) -> Examples:
    texts = table.texts(config.text_column, "--data.text_column")
    pair = config.text_pair_column
    return Examples(texts, table.texts(pair, "--data.text_pair_column") if pair else None)


def _labelled(table: Table, config: LabelledConfig, labels: tuple[str, ...]) -> Examples:
    """Return the examples of a table whose labels have to be among those known from training."""
    examples = _examples(table, config)
    if config.label_type == "regression":
        return replace(examples, labels=_numbers(table, config))
    return replace(examples, labels=_ids(_classes(table, config), labels, table, config))


def _test(config: LabelledConfig, labels: tuple[str, ...]) -> Examples:
    """Return the test examples: with labels if every row has one."""
    table = read_table(str(config.test), config.encoding)
    unknown = {"", NO_CLASS} if config.label_type == "classification" else {""}
    values = [row.get(config.label_column) for _, row in table.rows]
    if any(value is None or str(value).strip() in unknown for value in values):
        text = "%s: not every row has a %s, so it is predicted and not scored"
        log.info(text, table.name, config.label_column)
        return _examples(table, config)
    return _labelled(table, config, labels)


def _classes(table: Table, config: LabelledConfig) -> list[str]:
    """Return the name of each row's class."""
    names = []
    for place, value in table.cells(config.label_column, "--data.label_column"):
        name = str(value).lower() if isinstance(value, bool) else "" if value is None else str(value).strip()
        if not name:
            raise InputError(f"{place}: {config.label_column} is missing")
        if name == NO_CLASS:
            raise InputError(
                f"{place}: {config.label_column} is -1, which stands for 'no label'; leave such rows out, "
                "or call the class otherwise"
            )
        names.append(name)
    return names


def _ids(
    names: list[str], labels: tuple[str, ...], table: Table, config: LabelledConfig
) -> npt.NDArray[np.int64]:
    """Return the ids of the classes."""
    ids = {label: number for number, label in enumerate(labels)}
    for (place, _), name in zip(table.rows, names, strict=True):
        if name not in ids:
            known = ", ".join(labels[:20]) + (", ..." if len(labels) > 20 else "")
            where = f"{table.name}, {place}: {config.label_column} {name}"
            raise InputError(f"{where} is not among the labels of training: {known}")
    return np.array([ids[name] for name in names], np.int64)


def _numbers(table: Table, config: LabelledConfig) -> npt.NDArray[np.float64]:
    """Return the number of each row."""
    numbers = []
    for place, value in table.cells(config.label_column, "--data.label_column"):
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            found = "is missing" if value is None else f"is {str(value)[:60]!r}, which is no number"
            raise InputError(f"{place}: {config.label_column} {found}; regression needs one in every row")
        numbers.append(number)
    return np.array(numbers, np.float64)


def hold_out(examples: Examples, fraction: float, name: str) -> tuple[Examples, Examples]:
    """Divide examples into what is trained on and what is held out.

    An example is held out when the hash of its texts falls under `fraction`: duplicates stay on one side, and
    rows added later move none. Every class keeps an example to train on.

    Raises:
        InputError: there are too few different texts to divide.
    """
    share = uniform(text_hashes(examples).view(np.int64))
    assert examples.labels is not None, "only labelled examples are divided"
    is_number = examples.labels.dtype.kind == "f"
    classes = np.zeros(len(share), np.int64) if is_number else examples.labels
    held_out = share < fraction
    for label in np.unique(classes):
        if held_out[classes == label].all():
            held_out &= classes != label
    if not held_out.any():
        held_out = _smallest(share, classes)
    if not held_out.any():
        raise InputError(f"{name}: too few rows to hold some out; give a file with --data.validation")
    return examples.take(np.flatnonzero(~held_out)), examples.take(np.flatnonzero(held_out))


def _smallest(share: npt.NDArray[np.float64], classes: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return the first text in the order of hashes without which every class still has an example."""
    for value in np.unique(share):
        chosen = share == value
        if len(np.unique(classes[~chosen])) == len(np.unique(classes)):
            return chosen
    return np.zeros(len(share), bool)


def text_hashes(examples: Examples) -> npt.NDArray[np.uint64]:
    """Return a hash of the texts of each example, (N,): the same on any machine."""
    pairs = examples.pairs or [""] * len(examples)
    hashes = [_text_hash(text, pair) for text, pair in zip(examples.texts, pairs, strict=True)]
    return np.array(hashes, np.uint64)


def _text_hash(text: str, pair: str) -> int:
    content = b"\0".join(part.encode("utf-8", "surrogatepass") for part in (text, pair))
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def label_counts(labels: tuple[str, ...], ids: npt.NDArray[np.int64]) -> dict[str, int]:
    """Return how often each class occurs, by name."""
    counts = Counter(ids.tolist())
    return {label: counts[number] for number, label in enumerate(labels)}
