"""Read a part of a GLUE task as a table: an official file, a parquet copy of the hub's, or the hub itself.

- an official file is split at tabs only: quotes are text, except in QQP, which quotes cells as CSV does
- errors name file, line or row (counted from 1) and value
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.data.formats import READ_ERRORS, one_line, split_lines, text_blocks
from mlm.data.labelled import Table, read_table
from mlm.data.remote import HUB_TIMEOUT_S
from mlm.data.tables import without_quotes

HUB_NAME = "nyu-mll/glue"
HUB_LABEL = "label"
"""Column of the label on the hub."""

Classes = tuple[str, ...] | None
"""Names of the classes by the ids that a table uses; None: it has no names."""

log = logging.getLogger(__name__)


def read_official(
    path: Path, columns: Sequence[str], header: Sequence[str] = (), quoted: bool = False
) -> Table:
    """Read some columns of an official file.

    Args:
        path: the file.
        columns: the columns to read.
        header: all columns of a file without a header line.
        quoted: undo the quoting of cells, and skip rows with too few or too many cells, with a warning.

    Raises:
        InputError: the file cannot be read, or lacks a column, cells or rows.
    """
    try:
        with path.open("rb") as file:
            blocks = text_blocks(file, str(path), "utf-8", advice="convert it: iconv -f {} -t utf-8")
            lines = list(enumerate(split_lines(blocks), 1))
    except READ_ERRORS as error:
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    rows = [(number, line.split("\t")) for number, line in lines if line.strip()]
    names = list(header) or [name.strip() for name in (rows.pop(0)[1] if rows else [])]
    if not rows:
        raise InputError(f"{path}: has no rows")
    check_columns(f"{path}, line 1", names, columns)
    places = [names.index(column) for column in columns]
    whole = [row for row in rows if max(places) < len(row[1]) <= len(names)]
    if len(whole) < len(rows):
        number, cells = next(row for row in rows if not max(places) < len(row[1]) <= len(names))
        problem = f"{path}, line {number}: {len(cells)} cells under {len(names)} columns"
        if not quoted:
            raise InputError(problem)
        log.warning("%s; %d such row(s) are skipped", problem, len(rows) - len(whole))
    clean = without_quotes if quoted else str
    picked = (
        (f"line {number}", dict(zip(columns, (clean(cells[place]) for place in places), strict=True)))
        for number, cells in whole
    )
    return Table(str(path), list(picked))


def check_columns(place: str, there: Sequence[str], wanted: Sequence[str]) -> None:
    """Check that all wanted columns are there.

    Raises:
        InputError: names the first missing column, and all that are there.
    """
    for column in wanted:
        if column not in there:
            raise InputError(f"{place}: has no column {column}, but {', '.join(there)}")


def read_parquet(path: Path) -> tuple[Table, Classes]:
    """Read a parquet file of a downloaded copy, and the names of its classes.

    Raises:
        InputError: it cannot be read, or has no rows.
    """
    from datasets import Features

    table = read_table(str(path))
    return table, _classes(Features.from_arrow_schema(pq.read_schema(path)))


def read_hub(name: str, split: str) -> tuple[Table, Classes]:
    """Read a split of a task from the hub, or from the cache of `datasets`, and the names of its classes.

    Raises:
        InputError: the hub cannot be reached and the cache does not have it, or it has no rows.
    """
    import datasets

    where = f"{HUB_NAME}, {name}, {split}"
    try:
        with _cache_only_if_unreachable():
            data = datasets.load_dataset(HUB_NAME, name, split=split)
    except Exception as error:  # the library has a different one for each way to fail
        raise InputError(
            f"the hub's {HUB_NAME} cannot be reached, and {name} is not in the cache "
            f"({type(error).__name__}); give the folder of the official files with --glue_dir"
        ) from error
    rows = [(f"row {number}", row) for number, row in enumerate(data.to_list(), 1)]
    if not rows:
        raise InputError(f"{where}: has no rows")
    return Table(where, rows), _classes(data.features)


def _classes(features: Any) -> Classes:
    names = getattr(features.get(HUB_LABEL), "names", None)
    return None if names is None else tuple(names)


@contextmanager
def _cache_only_if_unreachable() -> Iterator[None]:
    """Read from the cache alone if the hub does not answer: `load_dataset` would retry for half a minute."""
    import datasets
    import huggingface_hub

    settings = (datasets.config, huggingface_hub.constants)
    before = [module.HF_HUB_OFFLINE for module in settings]
    try:
        huggingface_hub.HfApi().dataset_info(HUB_NAME, timeout=HUB_TIMEOUT_S)
    except Exception:  # as in read_hub
        for module in settings:
            module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in zip(settings, before, strict=True):
            module.HF_HUB_OFFLINE = value
