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
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.finetune import LabelledConfig
from mlm.config.model import LabelType
from mlm.counter import uniform
from mlm.data.formats import ReadReport, format_of, open_file, readable, split_lines, text_blocks
from mlm.data.sources import data_set_rows, is_data_set
from mlm.data.tables import ARROW_FORMATS, Row, arrow_rows, text_rows
from mlm.files import shorten

MANY_CLASSES = 100  # from so many a warning asks whether the labels are numbers
TABLE_FORMATS = "csv, tsv, jsonl, json, parquet and arrow"
NO_CLASS = "-1"  # written by data sets in place of a secret label
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,99}")  # sorted by value; longer ones are sorted as text
UNWRITABLE = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # they break lines, tables and files

Cell = tuple[str, Any]  # place of a value ("a.csv, row 3 (line 4): label"), and the value

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Examples:
    """Texts, and their labels if known."""

    texts: list[str]
    pairs: list[str] | None = None  # the second text of each; None: single texts
    labels: npt.NDArray[Any] | None = None
    """(N,) ids of classes int64 or numbers float64, or (N, C) bool for multilabel; None: not known."""

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, rows: npt.NDArray[np.int64]) -> "Examples":
        """Return some of them, in this order."""
        texts = [self.texts[row] for row in rows]
        pairs = None if self.pairs is None else [self.pairs[row] for row in rows]
        return Examples(texts, pairs, None if self.labels is None else self.labels[rows])


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


@dataclass(frozen=True)
class Table:
    """A file of rows, in memory."""

    name: str
    rows: list[Row]  # place ("row 3 (line 4)") and cells of each row, at least one

    @property
    def columns(self) -> list[str]:
        """All columns, in the order of their first row."""
        return list(dict.fromkeys(key for _, row in self.rows for key in row))

    def texts(self, column: str, option: str) -> list[str]:
        """Return the cells of a column of texts, which the flag `option` sets; they may be empty."""
        texts = []
        for place, value in self.cells(column, option):
            if not isinstance(value, str):
                found = "is missing" if value is None else f"is {str(value)[:60]!r}, which is not text"
                raise InputError(f"{place} {found}")
            texts.append(value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8"))
        return texts

    def cells(self, column: str, option: str) -> list[Cell]:
        """Return place and value of each cell of a column, which the flag `option` sets."""
        if column not in self.columns:
            remedy = f"; name it with {option}" if option else ""
            raise InputError(f"{self.name}: has no column {column}, but {shorten(self.columns)}{remedy}")
        return [(f"{self.name}, {place}: {column}", row.get(column)) for place, row in self.rows]


def read_table(path: str, encoding: str = "utf-8", option: str = "--encoding") -> Table:
    """Read a table from a file, a URL, a saved data set or the hub; the flag `option` sets the encoding."""
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
                blocks = text_blocks(stored, path, encoding, advice=f"give {option} {{}}")
                numbered = enumerate(text_rows(blocks, str(kind), path, ReadReport(path)), 1)
                rows = [(f"row {number} ({place})", cells) for number, (place, cells) in numbered]
    if not rows:
        raise InputError(f"{path}: has no rows")
    return Table(path, rows)


def read_texts(path: str, column: str, encoding: str = "utf-8") -> list[str]:
    """Read the texts of a file in their order: the lines of a text file, or a column of a table."""
    if is_data_set(path) or format_of(path) != "text":
        return read_table(path, encoding).texts(column, "--text_column")
    with open_file(path) as stored, readable(path):
        texts = list(split_lines(text_blocks(stored, path, encoding, advice="give --encoding {}")))
    if not texts:
        raise InputError(f"{path}: is empty")
    return texts


def read_task(config: LabelledConfig) -> LabelledTask:
    """Read the labelled files of a configuration."""
    assert config.train, "a run without a file has a built-in task"
    table, train = _read(config, config.train)
    labels, values = _labels(config, table)
    train = replace(train, labels=values)
    if config.validation:
        table, validation = _read(config, config.validation)
        validation = replace(validation, labels=_labels(config, table, labels)[1])
        where = config.validation
    else:
        train, validation = hold_out(train, config.validation_fraction, config.train)
        where = f"{config.validation_fraction:.0%} of {config.train}, chosen by a hash of the text"
    test = None
    if config.test:
        table, test = _read(config, config.test)
        if _is_labelled(config, table):
            test = replace(test, labels=_labels(config, table, labels)[1])
    name = Path(config.train).name.partition(".")[0]
    return LabelledTask(name, config.label_type, labels, train, validation, where, test)


def _read(config: LabelledConfig, path: str) -> tuple[Table, Examples]:
    table, pair = read_table(path, config.encoding, "--data.encoding"), config.text_pair_column
    texts = table.texts(config.text_column, "--data.text_column")
    return table, Examples(texts, table.texts(pair, "--data.text_pair_column") if pair else None)


def _labels(
    config: LabelledConfig, table: Table, labels: tuple[str, ...] = ()
) -> tuple[tuple[str, ...], npt.NDArray[Any]]:
    """Return the names of the classes, `labels` or else all in the table, and the labels of its rows."""
    column, is_set = config.label_column, config.label_type == "multilabel"
    cells = table.cells(column, "--data.label_column")
    if config.label_type == "regression":
        return (column,), label_numbers(cells)
    names = label_names(cells, config.label_separator if is_set else None)
    if not labels:
        labels = sort_labels([name for row in names for name in row])
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
    values = [row.get(config.label_column) for _, row in table.rows]
    missing = [is_missing(value) or str(value).strip() in unknown for value in values]
    # A text may have no label at all, but a whole file without any was never labelled.
    if not (all if config.label_type == "multilabel" else any)(missing):
        return True
    text = "%s: not every row has a %s, so it is predicted and not scored"
    log.info(text, table.name, config.label_column)
    return False


def hold_out(examples: Examples, fraction: float, name: str) -> tuple[Examples, Examples]:
    """Divide the examples of the file `name` into a training part and a held-out part.

    An example is held out when the hash of its texts falls under `fraction`: duplicates stay on one side, and
    rows added later move none. Every class keeps an example to train on.
    """
    share, labels = uniform(text_hashes(examples).view(np.int64)), examples.labels
    assert labels is not None, "only labelled examples are divided"
    held_out = share < fraction
    for members in _members(labels):
        if held_out[members].all():
            held_out &= ~members
    if not held_out.any():  # the first text in the order of hashes without which no class is empty
        texts = (share == value for value in np.unique(share))
        fits = (text for text in texts if all((members & ~text).any() for members in _members(labels)))
        held_out = next(fits, held_out)
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


def text_hashes(examples: Examples) -> npt.NDArray[np.uint64]:
    """Return a hash of the texts of each example, (N,): the same on any machine."""
    pairs = examples.pairs or [""] * len(examples)
    contents = (f"{text}\0{pair}" for text, pair in zip(examples.texts, pairs, strict=True))
    hashes = [hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8) for text in contents]
    return np.frombuffer(b"".join(found.digest() for found in hashes), "<u8").astype(np.uint64)


def sort_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names in the order of their ids: sorted, whole numbers by value."""
    distinct = sorted(set(names))
    if all(WHOLE_NUMBER.fullmatch(name) for name in distinct):
        distinct.sort(key=int)
    return tuple(distinct)


def label_names(cells: Sequence[Cell], separator: str | None) -> list[list[str]]:
    """Return the names of each row's labels; refuse rows with a missing or invalid one, or with -1.

    With a `separator` a row may have any number of labels, in one text or a list; without, it has one.
    """
    rows = []
    for where, value in cells:
        if separator is None:
            rows.append([_name(value, where)])
            continue
        if is_missing(value):
            raise InputError(f"{where} is missing; leave it empty, or write [], for a text without labels")
        if isinstance(value, str):
            value = [part for part in value.split(separator) if part.strip()]
        names = [_name(entry, where) for entry in (value if isinstance(value, list) else [value])]
        for name in names:
            if separator in name:
                problem = f"{where} {name} has {separator} in it, which separates labels"
                raise InputError(f"{problem}; choose another label_separator")
        rows.append(names)
    return rows


def is_missing(value: Any) -> bool:
    """Return whether a cell is null, or NaN, which is how pandas writes null."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def _name(value: Any, where: str) -> str:
    if isinstance(value, list | dict):
        raise InputError(f"{where} is {str(value)[:60]!r}, not one name; lists are for label_type multilabel")
    if isinstance(value, bytes):
        raise InputError(f"{where} is {value[:20]!r}, bytes and not text; store the column as text")
    name = str(value).lower() if isinstance(value, bool) else "" if is_missing(value) else str(value).strip()
    if not name:
        raise InputError(f"{where} is missing")
    if name == NO_CLASS:
        raise InputError(f"{where} is -1, which means 'no label'; leave the row out, or rename the class")
    if found := UNWRITABLE.search(name):
        rule = f"a label is one line of text and cannot contain {found[0]!r}; replace that character"
        raise InputError(f"{where} is {name[:60]!r}: {rule}")
    return name


def label_array(
    names: list[list[str]], labels: Sequence[str], label_type: LabelType, cells: list[Cell], known: str
) -> npt.NDArray[Any]:
    """Return the ids of the classes in `names`, (N,) int64, or for multilabel (N, C) bool.

    Refuses a name that is not among the `labels` of the owner `known`; `cells` have the places of the rows.
    """
    ids = {label: number for number, label in enumerate(labels)}
    for (place, _), row in zip(cells, names, strict=True):
        for name in row:
            if name not in ids:
                raise InputError(f"{place} {name} is not among the labels {known}: {shorten(labels)}")
    if label_type == "classification":
        return np.array([ids[row[0]] for row in names], np.int64)
    has = np.zeros((len(names), len(labels)), bool)
    for number, of_row in enumerate(names):
        has[number, [ids[name] for name in of_row]] = True
    return has


def label_numbers(cells: Sequence[Cell]) -> npt.NDArray[np.float64]:
    """Return the finite number of each row, (N,)."""
    numbers = []
    for place, value in cells:
        try:
            number = math.nan if isinstance(value, bool | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            found = f"is {str(value)[:60]!r}, which is not a finite number"
            found = "is missing" if is_missing(value) else found
            raise InputError(f"{place} {found}; regression needs one in every row")
        numbers.append(number)
    return np.array(numbers, np.float64)
