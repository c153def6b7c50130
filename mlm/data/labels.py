"""Convert the labels of files to training targets: ids of classes, sets of classes, numbers.

- the id of a class is the index of its name in sorted order, whole numbers by value: the same for any order
  of the rows; nothing is guessed from the type of a column
- a name is one line of text that can be written: no control characters, no lone surrogates
- errors name file, row (counted from 1, without the header) and value, before anything is trained

N examples, C classes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.model import LabelType
from mlm.files import shorten

NO_CLASS = "-1"
"""Written by data sets in place of a secret label."""
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,99}")
"""A name that is sorted by its value; longer ones are sorted as text."""
UNWRITABLE = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Characters that no name may have: they break lines, tables and files."""

Cell = tuple[str, Any]
"""Place of a label, in words, and its value."""


def sort_labels(names: Sequence[str]) -> tuple[str, ...]:
    """Return the distinct names in the order of their ids: sorted, whole numbers by value."""
    distinct = sorted(set(names))
    if all(WHOLE_NUMBER.fullmatch(name) for name in distinct):
        distinct.sort(key=int)
    return tuple(distinct)


def label_names(cells: Sequence[Cell], column: str, separator: str | None) -> list[list[str]]:
    """Return the names of each row's labels.

    Args:
        cells: cells of the column.
        column: its name, for messages.
        separator: separates the labels of a row, which may have none; None: each row has one label.

    Raises:
        InputError: a label is missing, is -1, or is not a valid name; names the row.
    """
    if separator is None:
        return [[_name(value, f"{place}: {column}")] for place, value in cells]
    return [_names(value, f"{place}: {column}", separator) for place, value in cells]


def _names(value: Any, where: str, separator: str) -> list[str]:
    if is_missing(value):
        raise InputError(f"{where} is missing; leave it empty, or write [], for a text without labels")
    if isinstance(value, str):
        value = [part for part in value.split(separator) if part.strip()]
    names = [_name(entry, where) for entry in (value if isinstance(value, list) else [value])]
    for name in names:
        if separator in name:
            raise InputError(
                f"{where} {name} has {separator} in it, which separates labels; choose another "
                "label_separator"
            )
    return names


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
        raise InputError(
            f"{where} is -1, which means 'no label'; leave such rows out, or give the class another name"
        )
    if found := UNWRITABLE.search(name):
        raise InputError(
            f"{where} is {name[:60]!r}: a label is one line of text and cannot contain {found[0]!r}; "
            "replace that character"
        )
    return name


def label_ids(
    names: Sequence[Sequence[str]],
    labels: Sequence[str],
    cells: Sequence[Cell],
    column: str,
    known: str = "of training",
) -> list[list[int]]:
    """Return the ids of each row's labels: their indices in `labels`.

    Args:
        names: names of each row's labels.
        labels: names of the classes by their ids.
        cells: places of the rows, for messages.
        column: name of the column, for messages.
        known: owner of `labels`, for messages.

    Raises:
        InputError: a name is not in `labels`.
    """
    ids = {label: number for number, label in enumerate(labels)}
    for (place, _), row in zip(cells, names, strict=True):
        for name in row:
            if name not in ids:
                where = f"{place}: {column} {name}"
                raise InputError(f"{where} is not among the labels {known}: {shorten(labels)}")
    return [[ids[name] for name in row] for row in names]


def label_array(ids: Sequence[Sequence[int]], label_type: LabelType, num_classes: int) -> npt.NDArray[Any]:
    """Return the ids of classes, (N,) int64, or for multilabel (N, C) bool."""
    if label_type == "classification":
        return np.array([row[0] for row in ids], np.int64)
    has = np.zeros((len(ids), num_classes), bool)
    for row, of_row in zip(has, ids, strict=True):
        row[list(of_row)] = True
    return has


def label_numbers(cells: Sequence[Cell], column: str) -> npt.NDArray[np.float64]:
    """Return the finite number of each row, (N,).

    Raises:
        InputError: a row has none.
    """
    numbers = []
    for place, value in cells:
        try:
            number = math.nan if isinstance(value, bool | bytes) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            found = (
                "is missing" if is_missing(value) else f"is {str(value)[:60]!r}, which is not a finite number"
            )
            raise InputError(f"{place}: {column} {found}; regression needs one in every row")
        numbers.append(number)
    return np.array(numbers, np.float64)


def class_weights(
    wanted: Literal["balanced"] | Sequence[str] | None, labels: tuple[str, ...], values: npt.NDArray[Any]
) -> npt.NDArray[np.float64] | None:
    """Return the loss weight of each class, (C,); None: all the same.

    Balanced weights are N / (C * examples of the class), so that every class has the same total; for
    multilabel, of each label the texts with and without it have the same total.

    Args:
        wanted: `balanced`, or `label=weight` for some of the labels; the others weigh 1.
        labels: C names.
        values: (N,) ids of classes, or (N, C) bool.

    Raises:
        InputError: a weight is given for an unknown label.
    """
    if wanted is None:
        return None
    if wanted == "balanced":
        counts = np.maximum(np.array(list(label_counts(labels, values).values())), 1)
        return (len(values) - counts) / counts if values.ndim == 2 else len(values) / (len(labels) * counts)
    weights = {name: float(weight) for name, _, weight in (entry.rpartition("=") for entry in wanted)}
    for name in weights:
        if name not in labels:
            raise InputError(
                f"head.class_weights: {name} is not among the labels of training: {shorten(labels)}"
            )
    return np.array([weights.get(label, 1.0) for label in labels])


def label_counts(labels: tuple[str, ...], values: npt.NDArray[Any]) -> dict[str, int]:
    """Return the number of examples of each class, by name; see `class_weights` for the arguments."""
    counts = values.sum(0) if values.ndim == 2 else np.bincount(values, minlength=len(labels))
    return dict(zip(labels, counts.tolist(), strict=True))
