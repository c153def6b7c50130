"""Read labelled files: rows to texts, labels to ids, and the held-out part.

- files are read as text, as pretraining reads them: `NA`, `007` and quotes survive (`tables.py`)
- `labels.py` decides what a label is
- errors name file, row (counted from 1, without the header) and value, before anything is trained
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.finetune import LabelledConfig
from mlm.config.model import LabelType
from mlm.counter import uniform
from mlm.data.data_sets import data_set_rows, is_data_set
from mlm.data.formats import decompressed, format_of, open_file, readable, split_lines, text_blocks
from mlm.data.labels import (
    NO_CLASS,
    is_missing,
    label_array,
    label_ids,
    label_names,
    label_numbers,
    sort_labels,
)
from mlm.data.report import ReadReport
from mlm.data.tables import ARROW_FORMATS, Row, arrow_rows, text_rows
from mlm.files import shorten

MANY_CLASSES = 100
"""Classes from which a warning asks whether the labels are numbers."""
TABLE_FORMATS = "csv, tsv, jsonl, json, parquet and arrow"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Texts, and their labels if known."""

    texts: list[str]
    pairs: list[str] | None = None
    """The second text of each; None: single texts."""
    labels: npt.NDArray[Any] | None = None
    """(N,) ids of classes int64 or numbers float64, or (N, C) bool for multilabel; None: not known."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: npt.NDArray[np.int64]) -> Examples:
        """Return some of them, in this order."""
        texts = [self.texts[row] for row in rows]
        pairs = None if self.pairs is None else [self.pairs[row] for row in rows]
        return Examples(texts, pairs, None if self.labels is None else self.labels[rows])


class PartSize(NamedTuple):
    """Number of examples of one part of a benchmark."""

    part: str
    rows: int
    official: int
    """Number that the benchmark has."""

    @property
    def is_official(self) -> bool:
        """Whether all examples are there, so that scores can be compared with those of others."""
        return self.rows == self.official

    def __str__(self) -> str:
        return f"{self.rows:,} of {self.official:,} rows of {self.part}"


@dataclass(frozen=True)
class LabelledTask:
    """Examples, labels and scores of a fine-tuning run."""

    name: str
    label_type: LabelType
    labels: tuple[str, ...]
    """Names of the classes in the order of their ids; for regression the one name of the quantity."""
    train: Examples
    validation: Examples
    validation_is: str
    """Source of the validation examples, in words."""
    test: Examples | None = None
    metrics: tuple[str, ...] = ()
    """Requested scores, first the one that ranks epochs; none: all."""
    scored: dict[str, Examples] = field(default_factory=dict)
    """Further sets to score once, at the end, by the suffix of their scores' names."""
    scored_is: str = ""
    """Source of the set without a suffix, in words; empty: there is none."""
    dev_sizes: tuple[PartSize, ...] = ()
    """Sizes of the development sets of GLUE; empty: other data."""


@dataclass(frozen=True)
class Table:
    """A file of rows, in memory."""

    name: str
    """Its path."""
    rows: list[Row]
    """Place ("row 3 (line 4)") and cells of each row, at least one."""

    @property
    def columns(self) -> list[str]:
        """All columns, in the order of their first row."""
        return list(dict.fromkeys(key for _, row in self.rows for key in row))

    def texts(self, column: str, option: str) -> list[str]:
        """Return the cells of a column of texts, which the flag `option` sets; they may be empty.

        Raises:
            InputError: the column does not exist, or a cell is not text.
        """
        texts = []
        for place, value in self.cells(column, option):
            if not isinstance(value, str):
                found = "is missing" if value is None else f"is {str(value)[:60]!r}, which is not text"
                raise InputError(f"{place}: {column} {found}")
            texts.append(value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8"))
        return texts

    def cells(self, column: str, option: str) -> Iterator[tuple[str, Any]]:
        """Yield place and value of each cell of a column, which the flag `option` sets.

        Raises:
            InputError: the column does not exist; lists the columns.
        """
        columns = self.columns
        if column not in columns:
            raise InputError(
                f"{self.name} has no column {column}, but {shorten(columns)}; name it with {option}"
            )
        for place, row in self.rows:
            yield f"{self.name}, {place}", row.get(column)


def read_table(path: str, encoding: str = "utf-8", option: str = "--encoding") -> Table:
    """Read a file of rows, a URL, a folder of `save_to_disk` or a data set of the hub.

    The flag `option` sets the encoding.

    Raises:
        InputError: it is not a table, is empty, or cannot be read; names file and line.
    """
    if is_data_set(path):
        rows = list(data_set_rows(path, named=True))
    else:
        kind = format_of(path)
        if kind in ("text", None):
            raise InputError(f"{path}: is not a file of rows; {TABLE_FORMATS} are, each also compressed")
        with open_file(path) as stored, readable(path):
            if kind in ARROW_FORMATS:
                rows = list(arrow_rows(kind, stored))
            else:
                blocks = text_blocks(decompressed(stored), path, encoding, advice=f"give {option} {{}}")
                numbered = enumerate(text_rows(blocks, str(kind), path, ReadReport(path)), 1)
                rows = [(f"row {number} ({place})", cells) for number, (place, cells) in numbered]
    if not rows:
        raise InputError(f"{path}: has no rows")
    return Table(path, rows)


def read_texts(path: str, column: str, encoding: str = "utf-8") -> list[str]:
    """Read the texts of a file in their order: the lines of a text file, or a column of a table.

    Raises:
        InputError: it is empty or cannot be read, or a row has no text there; names file and line.
    """
    if is_data_set(path) or format_of(path) != "text":
        return read_table(path, encoding).texts(column, "--text_column")
    with open_file(path) as stored, readable(path):
        blocks = text_blocks(decompressed(stored), path, encoding, advice="give --encoding {}")
        texts = list(split_lines(blocks))
    if not texts:
        raise InputError(f"{path}: is empty")
    return texts


def read_task(config: LabelledConfig) -> LabelledTask:
    """Read the labelled files of a configuration.

    Raises:
        InputError: a file, column, text or label is invalid.
    """
    assert config.train, "a run without a file has a built-in task"
    table = _read(config, config.train)
    examples = _examples(table, config)
    labels = (config.label_column,) if config.label_type == "regression" else _all_labels(table, config)
    train = replace(examples, labels=_labels(table, config, labels))
    name = Path(config.train).name.partition(".")[0]
    if config.validation:
        validation = _labelled(_read(config, config.validation), config, labels)
        where = config.validation
    else:
        train, validation = hold_out(train, config.validation_fraction, config.train)
        where = f"{config.validation_fraction:.0%} of {config.train}, chosen by a hash of the text"
    test = _test(config, labels) if config.test else None
    return LabelledTask(name, config.label_type, labels, train, validation, where, test)


def _read(config: LabelledConfig, path: str) -> Table:
    return read_table(path, config.encoding, "--data.encoding")


def _all_labels(table: Table, config: LabelledConfig) -> tuple[str, ...]:
    """Return the names of the classes by their ids."""
    labels = sort_labels([name for row in _names(table, config) for name in row])
    is_set = config.label_type == "multilabel"
    if is_set and not labels:
        raise InputError(f"{table.name}: no row has a {config.label_column}; nothing can be learnt")
    if not is_set and len(labels) < 2:
        every = f"{table.name}: every {config.label_column} is {labels[0]}"
        raise InputError(f"{every}; a classifier needs two classes")
    if len(labels) > MANY_CLASSES and not is_set:
        text = "%s holds %d different labels; for numbers set --data.label_type regression"
        log.warning(text, table.name, len(labels))
    return labels


def _cells(table: Table, config: LabelledConfig) -> list[tuple[str, Any]]:
    return list(table.cells(config.label_column, "--data.label_column"))


def _names(table: Table, config: LabelledConfig) -> list[list[str]]:
    """Return the names of each row's labels."""
    separator = config.label_separator if config.label_type == "multilabel" else None
    return label_names(_cells(table, config), config.label_column, separator)


def _examples(table: Table, config: LabelledConfig) -> Examples:
    texts = table.texts(config.text_column, "--data.text_column")
    pair = config.text_pair_column
    return Examples(texts, table.texts(pair, "--data.text_pair_column") if pair else None)


def _labelled(table: Table, config: LabelledConfig, labels: tuple[str, ...]) -> Examples:
    """Return the examples of a table, whose labels must be among those of training."""
    return replace(_examples(table, config), labels=_labels(table, config, labels))


def _labels(table: Table, config: LabelledConfig, labels: tuple[str, ...]) -> npt.NDArray[Any]:
    cells, column = _cells(table, config), config.label_column
    if config.label_type == "regression":
        return label_numbers(cells, column)
    ids = label_ids(_names(table, config), labels, cells, column)
    return label_array(ids, config.label_type, len(labels))


def _test(config: LabelledConfig, labels: tuple[str, ...]) -> Examples:
    """Return the test examples: with labels if every row has one."""
    table = _read(config, str(config.test))
    unknown = {"", NO_CLASS} if config.label_type == "classification" else {""}
    values = [row.get(config.label_column) for _, row in table.rows]
    missing = [is_missing(value) or str(value).strip() in unknown for value in values]
    # A text may have no label at all, but a whole file without any was never labelled.
    if (all if config.label_type == "multilabel" else any)(missing):
        text = "%s: not every row has a %s, so it is predicted and not scored"
        log.info(text, table.name, config.label_column)
        return _examples(table, config)
    return _labelled(table, config, labels)


def hold_out(examples: Examples, fraction: float, name: str) -> tuple[Examples, Examples]:
    """Divide examples into a training part and a held-out part.

    An example is held out when the hash of its texts falls under `fraction`: duplicates stay on one side, and
    rows added later move none. Every class keeps an example to train on.

    Raises:
        InputError: there are too few different texts to divide.
    """
    share = uniform(text_hashes(examples).view(np.int64))
    assert examples.labels is not None, "only labelled examples are divided"
    held_out = share < fraction
    for members in _members(examples.labels):
        if held_out[members].all():
            held_out &= ~members
    if not held_out.any():
        held_out = _smallest(share, examples.labels)
    if not held_out.any():
        raise InputError(f"{name}: too few rows to hold some out; give a file with --data.validation")
    return examples.take(np.flatnonzero(~held_out)), examples.take(np.flatnonzero(held_out))


def _members(labels: npt.NDArray[Any]) -> Iterator[npt.NDArray[np.bool_]]:
    """Yield a mask of the examples of each class, (N,); numbers are one class."""
    if labels.ndim == 2:
        yield from (column for column in labels.T if column.any())
    elif labels.dtype.kind == "f":
        yield np.ones(len(labels), bool)
    else:
        yield from (labels == label for label in np.unique(labels))


def _smallest(share: npt.NDArray[np.float64], labels: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return the first text in the order of hashes without which every class still has an example."""
    for value in np.unique(share):
        chosen = share == value
        if all((members & ~chosen).any() for members in _members(labels)):
            return chosen
    return np.zeros(len(share), bool)


def text_hashes(examples: Examples) -> npt.NDArray[np.uint64]:
    """Return a hash of the texts of each example, (N,): the same on any machine."""
    pairs = examples.pairs or [""] * len(examples)
    contents = (f"{text}\0{pair}" for text, pair in zip(examples.texts, pairs, strict=True))
    hashes = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8) for text in contents]
    return np.frombuffer(b"".join(found.digest() for found in hashes), "<u8").astype(np.uint64)
