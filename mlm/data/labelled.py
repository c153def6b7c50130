"""Read labelled files: rows to texts, labels to ids of classes, sets of classes or numbers; hold out a part.

- files are read as text, as pretraining reads them: `NA`, `007` and quotes survive (`tables.py`)
- the id of a class is the index of its name in sorted order, whole numbers by value: the same for any order
  of the rows; nothing is guessed from the type of a column
- a name is one line of text that can be written: no control characters, no lone surrogates
- errors name file, row (counted from 1, without the header) and value, before anything is trained

N examples, C classes.
"""

import hashlib
import logging
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlm.config.data import SourceConfig
from mlm.config.errors import InputError, require
from mlm.config.labelled import LabelledConfig
from mlm.config.model import LabelType
from mlm.data.formats import ReadReport, format_of, open_file, readable, split_lines, text_blocks
from mlm.data.labels import (
    NO_CLASS,
    Cell,
    holds,
    is_missing,
    label_array,
    label_names,
    label_numbers,
    sort_labels,
)
from mlm.data.sources import data_set_rows, is_data_set, source_files
from mlm.data.splits import by_hash, fold_of, last_rows
from mlm.data.tables import ARROW_FORMATS, Row, arrow_rows, joined, paths_of, text_rows, value_at
from mlm.files import shorten

FEW_EXAMPLES = 30  # of validation; with fewer a warning says that scores mean little
MANY_CLASSES = 100  # from so many a warning asks whether the labels are numbers
TABLE_FORMATS = ("csv", "tsv", "jsonl", "json", "parquet", "arrow")


log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Texts, and their labels if known."""

    texts: list[str]
    pairs: list[str] | None = None  # the second text of each; None: single texts
    labels: npt.NDArray[Any] | None = None
    """(N,) ids of classes int64 or numbers float64, or (N, C) bool for multilabel; None: not known."""
    groups: npt.NDArray[np.uint64] | None = None
    """(N,) a hash of the group of each, such as its author; None: there are no groups."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: npt.NDArray[np.int64]) -> "Examples":
        """Return some of them, in this order."""
        texts = [self.texts[row] for row in rows]
        pairs = None if self.pairs is None else [self.pairs[row] for row in rows]
        arrays = (None if array is None else array[rows] for array in (self.labels, self.groups))
        return Examples(texts, pairs, *arrays)


class Division(NamedTuple):
    """The two parts of divided examples."""

    train: Examples
    held_out: Examples
    where: str  # how the held-out part was chosen, in words
    rows: npt.NDArray[np.int64]  # (N,) numbers of the held-out examples among all, from 0


class PartSize(NamedTuple):
    """Number of examples of one part of a benchmark."""

    part: str
    rows: int
    official: int  # number that the benchmark has

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
    labels: tuple[str, ...]  # names of the classes by their ids; for regression the name of the quantity
    train: Examples
    validation: Examples
    validation_is: str  # source of the validation examples, in words
    test: Examples | None = None
    metrics: tuple[str, ...] = ()  # requested scores, first the one that ranks epochs; none: all
    scored: dict[str, Examples] = field(default_factory=dict)
    """Further sets to score once, at the end, by the suffix of their scores' names."""
    scored_is: str = ""  # source of the set without a suffix, in words; empty: there is none
    dev_sizes: tuple[PartSize, ...] = ()  # of the development sets of GLUE; empty: other data
    validation_rows: npt.NDArray[np.int64] | None = None
    """(N,) numbers of the validation examples among the rows of the file; None: of another file."""


@dataclass(frozen=True)
class Table:
    """A file of rows, in memory, or several on end."""

    name: str
    rows: list[Row]  # place ("row 3 (line 4)") and cells of each row, at least one
    parts: tuple["Table", ...] = ()
    """The files, if they are several: each has all columns that are asked for."""

    @cached_property
    def columns(self) -> list[str]:
        """All columns, in the order of their first row."""
        return list(dict.fromkeys(path for _, row in self.rows for path in paths_of(row)))

    def texts(self, column: str, option: str) -> list[str]:
        """Return the cells of a column of texts, which the flag `option` sets; they may be empty."""
        texts = []
        for place, cell in self.cells(column, option):
            value = joined(cell)
            if not isinstance(value, str):
                found = "is missing" if value is None else f"is {str(value)[:60]!r}, which is not text"
                raise InputError(f"{place} {found}")
            texts.append(value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8"))
        return texts

    def cells(self, column: str, option: str) -> list[Cell]:
        """Return place and value of each cell of a column, which the flag `option` sets."""
        if self.parts:
            return [cell for part in self.parts for cell in part.cells(column, option)]
        if column not in self.columns:
            remedy = f"; name it with {option}" if option else ""
            parts = [part.strip() for part in column.split(",")]
            there = [part for part in parts if part in self.columns]
            if there and there == parts:
                raise InputError(
                    f"{self.name}: {option}={column} are several columns; a column for each label needs "
                    "label_type multilabel, and each column once"
                )
            column = next((part for part in parts if part not in there), column) if there else column
            raise InputError(f"{self.name}: has no column {column}, but {shorten(self.columns)}{remedy}")
        return [(f"{self.name}, {place}: {column}", value_at(row, column)) for place, row in self.rows]

    def label_columns(self, column: str) -> list[str]:
        """Return the columns that `a,b,c` names, one for each label; empty if it is one column."""
        names = [name.strip() for name in column.split(",")]
        known = column not in self.columns and {*names} <= {*self.columns}
        return names if known and len({*names}) == len(names) else []

    def label_cells(self, column: str, option: str) -> list[Cell]:
        """Return place and label of each row: of a column, or as a list of those of `a,b,c` that hold."""
        names = self.label_columns(column)
        if not names:
            return self.cells(column, option)
        if self.parts:
            return [cell for part in self.parts for cell in part.label_cells(column, option)]
        found: list[Cell] = [(f"{self.name}, {place}: {column}", []) for place, _ in self.rows]
        for name in names:
            for (_, labels), cell in zip(found, self.cells(name, option), strict=True):
                labels += [name] if holds(cell) else []
        return found


def read_table(
    paths: str | Sequence[str],
    encoding: str = "utf-8",
    option: str = "--encoding",
    text_column: str | None = None,
) -> Table:
    """Read the rows of files, folders, globs, URLs, saved data sets and the hub, in the order given.

    The files of a folder or glob come sorted, and a file that is named twice is read once. The flag `option`
    sets the encoding. With `text_column` a plain text is a table too, unless it is found in a folder: each
    line is a cell of that column.
    """
    files: list[str] = []
    for path in [paths] if isinstance(paths, str) else paths:
        whole = is_data_set(path) or os.path.isfile(path)
        texts = () if text_column is None or os.path.isdir(path) else ("text",)
        files += [path] if whole else source_files(SourceConfig(path), (*TABLE_FORMATS, *texts))
    tables = [_read_file(path, encoding, option, text_column) for path in dict.fromkeys(files)]
    rows = [row for table in tables for row in table.rows]
    return tables[0] if len(tables) == 1 else Table(shorten(files, 3), rows, tuple(tables))


def _read_file(path: str, encoding: str, option: str, text_column: str | None) -> Table:
    if is_data_set(path):
        return _filled(path, data_set_rows(path, named=True))
    kind = format_of(path)
    if kind not in TABLE_FORMATS and (kind is None or text_column is None):
        *others, last = TABLE_FORMATS
        known = f"{', '.join(others)} and {last} are, each also compressed"
        raise InputError(f"{path}: is not a file of rows; {known}")
    with open_file(path) as stored, readable(path):
        if kind in ARROW_FORMATS:
            return _filled(path, arrow_rows(str(kind), stored))
        blocks = text_blocks(stored, path, encoding, advice=f"give {option} {{}}")
        if kind == "text":
            lines = enumerate(split_lines(blocks), 1)
            return _filled(path, ((f"line {number}", {str(text_column): line}) for number, line in lines))
        numbered = enumerate(text_rows(blocks, str(kind), path, ReadReport(path)), 1)
        return _filled(path, ((f"row {number} ({place})", cells) for number, (place, cells) in numbered))


def _filled(path: str, rows: Iterable[Row]) -> Table:
    if table := list(rows):
        return Table(path, table)
    raise InputError(f"{path}: has no rows")


def read_texts(paths: str | Sequence[str], column: str, encoding: str = "utf-8") -> list[str]:
    """Read texts in their order: the lines of text files, or a column of tables."""
    return read_table(paths, encoding, text_column=column).texts(column, "--text_column")


def read_task(config: LabelledConfig) -> LabelledTask:
    """Read the labelled files of a configuration."""
    assert config.train, "a run without a file has a built-in task"
    table, train = _read(config, config.train)
    labels, values = _labels(config, table)
    train, rows = replace(train, labels=values), None
    if config.validation:
        given, validation = _read(config, config.validation)
        validation = replace(validation, labels=_labels(config, given, labels)[1])
        where = shorten(config.validation, 3)
    else:
        train, validation, where, rows = divide(config, replace(train, groups=_groups(config, table)))
    test = None
    if config.test:
        table, test = _read(config, config.test)
        if _is_labelled(config, table):
            test = replace(test, labels=_labels(config, table, labels)[1])
    can_fold = config.validation is None and config.folds is None
    report_overlap(train, validation, test, "; --data.folds 5 scores every row" if can_fold else "")
    name = config.title.partition(".")[0]
    return LabelledTask(name, config.label_type, labels, train, validation, where, test, validation_rows=rows)


def report_overlap(train: Examples, validation: Examples, test: Examples | None, remedy: str = "") -> None:
    """Warn of texts with several labels, of texts in several parts, and of too few examples to score."""
    known = text_hashes(train)
    assert train.labels is not None, "training examples have labels"
    assert validation.labels is not None, "validation examples have labels"
    by_text: dict[int, set[bytes]] = defaultdict(set)
    for text, label in zip(known.tolist(), train.labels, strict=True):
        by_text[text].add(label.tobytes())
    if conflicts := sum(len(labels) > 1 for labels in by_text.values()):
        log.warning("%d of %d texts of training have more than one label", conflicts, len(by_text))
    for name, part in (("validation", validation), ("test", test)):
        if part is not None and (shared := int(np.isin(text_hashes(part), known).sum())):
            text = "%d of %d %s texts are in training too: their scores show what was learnt by heart"
            log.warning(text, shared, len(part), name)
    if len(validation) < FEW_EXAMPLES:
        text = "only %d validation examples: their scores are hardly more than chance%s"
        log.warning(text, len(validation), remedy)
    if train.labels.ndim == 1 and train.labels.dtype.kind != "f":
        classes = np.unique(train.labels)
        if absent := len(np.setdiff1d(classes, validation.labels)):
            log.warning("%d of %d classes have no validation example", absent, len(classes))


def _read(config: LabelledConfig, paths: list[str]) -> tuple[Table, Examples]:
    table, pair = read_table(paths, config.encoding, "--data.encoding"), config.text_pair_column
    texts = table.texts(config.text_column, "--data.text_column")
    return table, Examples(texts, table.texts(pair, "--data.text_pair_column") if pair else None)


def _groups(config: LabelledConfig, table: Table) -> npt.NDArray[np.uint64] | None:
    if config.group_column is None:
        return None
    cells = table.cells(config.group_column, "--data.group_column")
    for place, value in cells:
        if is_missing(value) or not str(value).strip():
            raise InputError(f"{place} is missing; every row needs its group, such as a name or a number")
    return _hashes(str(value).strip() for _, value in cells)


def _labels(
    config: LabelledConfig, table: Table, labels: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], npt.NDArray[Any]]:
    """Return the names of the classes, `labels` or else all in the table, and the labels of its rows."""
    column, is_set = config.label_column, config.label_type == "multilabel"
    cells = (table.label_cells if is_set else table.cells)(column, "--data.label_column")
    if config.label_type == "regression":
        return (column,), label_numbers(cells)
    names = label_names(cells, config.label_separator if is_set else None)
    if not labels:
        labels = tuple(table.label_columns(column)) if is_set else ()
        labels = labels or sort_labels([name for row in names for name in row])
        if is_set and not labels:
            raise InputError(f"{table.name}: no row has a {column}; nothing can be learnt")
        if not is_set and len(labels) < 2:
            raise InputError(f"{table.name}: every {column} is {labels[0]}; a classifier needs two classes")
        if len(labels) > MANY_CLASSES and not is_set:
            text = "%s holds %d different labels; for numbers set --data.label_type regression"
            log.warning(text, table.name, len(labels))
    return labels, label_array(names, labels, config.label_type, cells, "of training")


def _is_labelled(config: LabelledConfig, table: Table) -> bool:
    """Return whether the rows of a test file have labels, so that it can be scored."""
    unknown = {"", NO_CLASS} if config.label_type == "classification" else {""}
    if config.label_type == "multilabel" and table.label_columns(config.label_column):
        return True
    values = [value_at(row, config.label_column) for _, row in table.rows]
    missing = [is_missing(value) or str(value).strip() in unknown for value in values]
    # A text may have no label at all, but a whole file without any was never labelled.
    if not (all if config.label_type == "multilabel" else any)(missing):
        return True
    text = "%s: not every row has a %s, so it is predicted and not scored"
    log.info(text, table.name, config.label_column)
    return False


def divide(config: LabelledConfig, examples: Examples) -> Division:
    """Divide the training examples of a configuration into two parts, as its options say."""
    name, column, fraction = shorten(config.train or [], 3), config.group_column, config.validation_fraction
    if config.folds is None and config.split == "order":
        held_out, where = last_rows(len(examples), fraction), f"the last {fraction:.0%} of the rows of {name}"
        return _divided(examples, held_out, where, name)
    keys, units = text_hashes(examples), "different texts"
    if column is not None:
        assert examples.groups is not None, "a column of groups is read"
        keys, units = examples.groups, f"groups by {column}"
    assert examples.labels is not None, "only labelled examples are divided"
    total = len(np.unique(keys))
    if column is not None and total < 2:
        raise InputError(f"{name}: every row has the same {column}; a split needs two groups or more")
    if config.folds is None:
        held_out = by_hash(keys, examples.labels, fraction, grouped=column is not None)
        where = f"{fraction:.0%} of {name}, chosen by a hash of the {'text' if column is None else column}"
    else:
        require(
            config.folds <= total, "data.folds", config.folds, f"is more than the {total} {units} of {name}"
        )
        require(config.fold is not None, "data.fold", "null", f"is not one of the {config.folds} folds")
        held_out = fold_of(keys, examples.labels, config.folds) == int(config.fold or 0) - 1
        where = f"fold {config.fold} of {config.folds} of {name}"
    if column is not None:
        where += f": {len(np.unique(keys[held_out])):,} of {total:,} {units}"
    return _divided(examples, held_out, where, name)


def hold_out(examples: Examples, fraction: float, name: str) -> tuple[Examples, Examples]:
    """Divide the examples of `name` by a hash of their texts into a training part and a held-out part."""
    assert examples.labels is not None, "only labelled examples are divided"
    return _divided(examples, by_hash(text_hashes(examples), examples.labels, fraction), "", name)[:2]


def _divided(examples: Examples, held_out: npt.NDArray[np.bool_], where: str, name: str) -> Division:
    rows = np.flatnonzero(held_out)
    if not 0 < len(rows) < len(examples):
        raise InputError(f"{name}: too few rows to hold some out; give a file with --data.validation")
    return Division(examples.take(np.flatnonzero(~held_out)), examples.take(rows), where, rows)


def text_hashes(examples: Examples) -> npt.NDArray[np.uint64]:
    """Return a hash of the texts of each example, (N,): the same on any machine."""
    pairs = examples.pairs or [""] * len(examples)
    return _hashes(f"{text}\0{pair}" for text, pair in zip(examples.texts, pairs, strict=True))


def _hashes(contents: Iterable[str]) -> npt.NDArray[np.uint64]:
    hashes = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8) for text in contents]
    return np.frombuffer(b"".join(found.digest() for found in hashes), "<u8").astype(np.uint64)
