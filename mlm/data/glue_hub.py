"""The tasks of GLUE in the schema of the hub's copy: a column a text, classes as ids, numbers as they are.

- a part is a data set of the `datasets` library, or the parquet files of a downloaded folder
- where the data name their classes, ids are matched by those names
- mistakes name file, row (counted from 1) and value
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig
from mlm.data.data_sets import HUB_TIMEOUT_S
from mlm.data.formats import one_line
from mlm.data.labelled import Examples
from mlm.data.labels import Cell, is_missing, label_numbers

HUB_NAME = "nyu-mll/glue"
LABEL = "label"


@dataclass(frozen=True)
class Piece:
    """A file, or what the library gives."""

    where: str
    columns: Mapping[str, Sequence[Any]]
    classes: tuple[str, ...] | None
    """Names of the classes by the ids that they have here; None: it does not say."""

    def cells(self, column: str) -> Iterator[Cell]:
        """Yield place and value of each row."""
        if column not in self.columns:
            raise InputError(f"{self.where}: has no column {column}, but {', '.join(self.columns)}")
        return ((f"{self.where}, row {row}", value) for row, value in enumerate(self.columns[column], 1))


def read_hub_part(
    name: str, split: str, files: Sequence[Path], texts: Sequence[str], labels: Sequence[str] | None
) -> Examples:
    """Read a split of a task.

    Args:
        name: the task.
        split: the hub's name of the part.
        files: parquet files of a downloaded copy; none: the hub, or what is in the library's cache.
        texts: columns of the one or two texts.
        labels: names of the classes in the order of their ids, or none for numbers; None: they are secret.

    Raises:
        InputError: it cannot be read, a row is not as it must be, or the hub cannot be reached.
    """
    pieces = [_from_file(file) for file in files] or [_from_hub(name, split)]
    columns = [[_text(cell, column) for piece in pieces for cell in piece.cells(column)] for column in texts]
    if not columns[0]:
        raise InputError(f"{pieces[0].where}: has no rows")
    ids = None if labels is None else np.concatenate([_label_ids(piece, labels) for piece in pieces])
    return Examples(columns[0], columns[1] if len(columns) > 1 else None, ids)


def _from_file(path: Path) -> Piece:
    try:
        table = pq.read_table(path)
        columns, classes = table.to_pydict(), _classes(table.schema.metadata or {})
    except Exception as error:  # the library has a different one for each way to fail
        raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
    return Piece(str(path), columns, classes)


def _classes(metadata: Mapping[bytes, bytes]) -> tuple[str, ...] | None:
    """Return the names of the classes in what the `datasets` library writes into a schema."""
    described = json.loads(metadata.get(b"huggingface", b"{}"))
    names = described.get("info", {}).get("features", {}).get(LABEL, {}).get("names")
    return None if names is None else tuple(names)


def _from_hub(name: str, split: str) -> Piece:
    where = f"{HUB_NAME}, {name}, {split}"
    try:
        rows = _load_hub(name, split)
        columns = {column: list(rows[column]) for column in rows.column_names}
        names = getattr(rows.features.get(LABEL), "names", None)
    except InputError:
        raise
    except Exception as error:  # as in _from_file
        raise InputError(f"{where}: cannot be read: {one_line(error)}") from error
    return Piece(where, columns, None if names is None else tuple(names))


def _text(cell: Cell, column: str) -> str:
    place, value = cell
    if not isinstance(value, str):
        found = "is missing" if is_missing(value) else f"is {str(value)[:60]!r}, which is not text"
        raise InputError(f"{place}: {column} {found}")
    return value


def _label_ids(piece: Piece, labels: Sequence[str]) -> npt.NDArray[Any]:
    """Return the ids of classes (N,) int64, or where there are none the numbers (N,) float64."""
    cells = list(piece.cells(LABEL))
    if not labels:
        return label_numbers(cells, LABEL)
    order: list[int] | None = list(range(len(labels)))
    if piece.classes not in (None, tuple(map(str, range(len(labels))))):
        order = ClassifierConfig(tuple(labels)).order_of(piece.classes or ())
    if order is None:
        theirs = ", ".join(piece.classes or ())
        raise InputError(f"{piece.where}: its classes are {theirs}, those of the task {', '.join(labels)}")
    for place, value in cells:
        if is_missing(value):
            raise InputError(f"{place}: {LABEL} is missing")
        if isinstance(value, bool) or value not in range(len(labels)):  # a float may be a whole number
            raise InputError(f"{place}: {LABEL} is {str(value)[:60]}, which is no class")
    return np.array([order[int(value)] for _, value in cells], np.int64)


def _load_hub(config: str, split: str) -> Any:
    """Return a split as a data set, from the library's cache if the hub cannot be reached."""
    import datasets
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(HUB_NAME, timeout=HUB_TIMEOUT_S)
        mode: AbstractContextManager[None] = nullcontext()
    except Exception:  # as in _from_file; the library alone would try for half a minute
        mode = _cache_only(datasets.config, huggingface_hub.constants)
    try:
        with mode:
            return datasets.load_dataset(HUB_NAME, config, split=split)
    except Exception as error:  # as in _from_file
        raise InputError(
            f"the hub's {HUB_NAME} cannot be reached, nor is {config} in the cache ({type(error).__name__}); "
            "give the folder of the official files with --glue_dir"
        ) from error


@contextmanager
def _cache_only(*modules: Any) -> Iterator[None]:
    """Switch the offline mode of libraries on, for one call."""
    before = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.HF_HUB_OFFLINE = value
