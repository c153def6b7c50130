"""Labelled files: rows to texts, labels to ids, and the part that is held out.

- files are read as text, as the corpus is: `NA`, `007` and quotes survive (`formats.py`, `tables.py`)
- what a label is, `labels.py` decides
- mistakes name file, row (counted from 1, without the header) and value, before anything is trained
"""

from __future__ import annotations

import hashlib
import io
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.config.finetune import LabelledConfig
from mlm.config.model import LabelType
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
from mlm.data.labels import (
    NO_CLASS,
    is_missing,
    label_array,
    label_ids,
    label_names,
    label_numbers,
    sort_labels,
)
from mlm.data.tables import Row, csv_rows, json_rows

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
    scored_is: str = ""
    """Where those are from that add nothing to the names, in words; empty: there are none."""
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


def read_table(path: str, encoding: str = "utf-8", option: str = "--encoding") -> Table:
    """Read a file of rows.

    Args:
        path: the file.
        encoding: its encoding.
        option: the flag that chooses it.

    Raises:
        InputError: it is none, is empty, or cannot be read; names file and line.
    """
    kind = format_of(path)
    if kind in ("text", None):
        raise InputError(f"{path}: is no file of rows; {TABLE_FORMATS} are, each also compressed")
    try:
        with Path(path).open("rb") as file:
            content = decompressed(io.BufferedReader(file, BLOCK_BYTES))
            rows = list(_rows(str(kind), content, path, encoding, option))
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
            blocks = text_blocks(content, path, encoding, advice="give --encoding {}")
            texts = list(split_lines(blocks))
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    if not texts:
        raise InputError(f"{path}: is empty")
    return texts


def _rows(kind: str, content: Any, path: str, encoding: str, option: str) -> Iterator[Row]:
    if kind == "parquet":
        for row in pq.read_table(io.BytesIO(content.read())).to_pylist():
            yield "", row
        return
    blocks = text_blocks(content, path, encoding, advice=f"give {option} {{}}")
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
    rows = label_names(_label_cells(table, config), config.label_column, _separator(config))
    labels = sort_labels([name for row in rows for name in row])
    is_set = config.label_type == "multilabel"
    if len(labels) < (1 if is_set else 2):
        if is_set:
            raise InputError(f"{table.name}: no row has a {config.label_column}; nothing can be learnt")
        every = f"{table.name}: every {config.label_column} is {labels[0]}"
        raise InputError(f"{every}; a classifier needs two classes")
    if len(labels) > MANY_CLASSES and not is_set:
        text = "%s holds %d different labels; for numbers set --data.label_type regression"
        log.warning(text, table.name, len(labels))
    return labels


def _separator(config: LabelledConfig) -> str | None:
    return config.label_separator if config.label_type == "multilabel" else None


def _label_cells(table: Table, config: LabelledConfig) -> list[tuple[str, Any]]:
    return list(table.cells(config.label_column, "--data.label_column"))


def _examples(table: Table, config: LabelledConfig) -> Examples:
    texts = table.texts(config.text_column, "--data.text_column")
    pair = config.text_pair_column
    return Examples(texts, table.texts(pair, "--data.text_pair_column") if pair else None)


def _labelled(table: Table, config: LabelledConfig, labels: tuple[str, ...]) -> Examples:
    """Return the examples of a table whose labels have to be among those known from training."""
    return replace(_examples(table, config), labels=_labels(table, config, labels))


def _labels(table: Table, config: LabelledConfig, labels: tuple[str, ...]) -> npt.NDArray[Any]:
    cells, column = _label_cells(table, config), config.label_column
    if config.label_type == "regression":
        return label_numbers(cells, column)
    names = label_names(cells, column, _separator(config))
    ids = label_ids(names, labels, cells, column)
    return label_array(ids, config.label_type, len(labels))


def _test(config: LabelledConfig, labels: tuple[str, ...]) -> Examples:
    """Return the test examples: with labels if every row has one."""
    table = _read(config, str(config.test))
    unknown = {"", NO_CLASS} if config.label_type == "classification" else {""}
    values = [row.get(config.label_column) for _, row in table.rows]
    missing = [is_missing(value) or str(value).strip() in unknown for value in values]
    # A text may have no label at all, but a whole file without any is one that nobody labelled.
    if (all if config.label_type == "multilabel" else any)(missing):
        text = "%s: not every row has a %s, so it is predicted and not scored"
        log.info(text, table.name, config.label_column)
        return _examples(table, config)
    return _labelled(table, config, labels)


def hold_out(examples: Examples, fraction: float, name: str) -> tuple[Examples, Examples]:
    """Divide examples into what is trained on and what is held out.

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
    """Yield for each class there is which examples have it, (N,); numbers are one class."""
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
    hashes = [_text_hash(text, pair) for text, pair in zip(examples.texts, pairs, strict=True)]
    return np.array(hashes, np.uint64)


def _text_hash(text: str, pair: str) -> int:
    content = b"\0".join(part.encode("utf-8", "surrogatepass") for part in (text, pair))
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
