"""Labels: from the cells of a table to names, and from names to ids."""

import ast
import io
import math
import re
import tokenize
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.model import LabelType
from mlm.files import shorten

NO_CLASS = "-1"  # written by data sets in place of a secret label
WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,99}")  # sorted by value; longer ones are sorted as text
UNWRITABLE = re.compile(r"[\0-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")  # they break lines, tables and files
LIST = re.compile(r"\s*\[\s*(['\"]|\]\s*$)")  # begin of a list that is written as text, or an empty one
Cell = tuple[str, Any]  # place of a value ("a.csv, row 3 (line 4): label"), and the value


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
            if isinstance(value, str) and LIST.match(value):
                value = [value]  # which is refused
            rows.append([_name(value, where)])
            continue
        if is_missing(value):
            raise InputError(f"{where} is missing; leave it empty, or write [], for a text without labels")
        if isinstance(value, str):
            parts = [part for part in value.split(separator) if part.strip()]
            value = _literal_list(value, where) if LIST.match(value) else parts
        names = [_name(entry, where) for entry in (value if isinstance(value, list) else [value])]
        for name in names:
            if separator in name:
                problem = f"{where} {name} has {separator} in it, which separates labels"
                raise InputError(f"{problem}; choose another label_separator")
        rows.append(names)
    return rows


def _literal_list(text: str, where: str) -> list[Any]:
    """Return the list that a cell such as `['a', 'b']` spells in Python or JSON."""
    try:
        value = ast.literal_eval(text.strip())
        words = sum(
            token.type == tokenize.STRING for token in tokenize.generate_tokens(io.StringIO(text).readline)
        )
        # Python joins strings without a comma between them, as numpy prints them.
        if isinstance(value, list) and words == sum(isinstance(entry, str) for entry in value):
            return value
    except (ValueError, SyntaxError, MemoryError, RecursionError, tokenize.TokenError):
        pass
    raise InputError(f"{where} is {text[:60]!r}, which begins like a list and is none; write ['a', 'b']")


def holds(cell: Cell) -> bool:
    """Return whether the label of a column holds: 1, true, yes; refuse what is not their opposite either."""
    place, value = cell
    text = str(value).strip().lower()
    if text in ("1", "1.0", "true", "yes"):
        return True
    if is_missing(value) or text in ("", "0", "0.0", "false", "no"):
        return False
    raise InputError(f"{place} is {str(value)[:60]!r}; a column that is one label holds 0 or 1")


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
