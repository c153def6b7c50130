"""Read a part of a GLUE task as a table: an official file, or parquet files of the hub's copy.

- an official file is split at tabs only: quotes are text, except in QQP, which quotes cells as CSV does
- errors name file, line or row (counted from 1) and value
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.data.formats import READ_ERRORS, one_line, split_lines, text_blocks
from mlm.data.labelled import Table, read_table
from mlm.data.tables import without_quotes

HUB_NAME = "nyu-mll/glue"
HUB_LABEL = "label"
"""Column of the label on the hub."""

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


def read_parquet(path: Path) -> tuple[Table, tuple[str, ...] | None]:
    """Read a parquet file of the hub's copy, and the names of its classes by id; None: it has no names.

    Raises:
        InputError: the file cannot be read, or has no rows.
    """
    from datasets import Features

    table, features = read_table(str(path)), Features.from_arrow_schema(pq.read_schema(path))
    names = getattr(features.get(HUB_LABEL), "names", None)
    return table, None if names is None else tuple(names)


def download(name: str, split: str) -> list[Path]:
    """Return the parquet files of a split on the hub, from the local cache if the hub cannot be reached.

    Raises:
        InputError: the hub cannot be reached and the cache does not have them.
    """
    from huggingface_hub import snapshot_download

    pattern, problem = f"{name}/{split}-*.parquet", "no such files"
    try:
        folder = snapshot_download(HUB_NAME, repo_type="dataset", allow_patterns=[pattern])
        files = sorted(Path(folder).glob(pattern))
    except Exception as error:  # the library has a different one for each way to fail
        files, problem = [], type(error).__name__
    if not files:
        raise InputError(
            f"the hub's {HUB_NAME} cannot be reached, and {name} is not in the cache ({problem}); "
            "give the folder of the official files with --glue_dir"
        )
    return files
