"""Data sets of the `datasets` library: those on the hub, and folders that `save_to_disk` wrote.

Hub data sets are streamed; before reading, only their current commit is known.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlm.config.data import HUB_PREFIX, HubName
from mlm.config.errors import InputError
from mlm.data.formats import one_line, readable

HUB_TIMEOUT_S = 10.0
"""Seconds the hub may take to report the current version of a data set."""
SPLITS, STATE, INFO = "dataset_dict.json", "state.json", "dataset_info.json"
"""Files that `save_to_disk` writes beside the data: the list of splits; state and features of each."""

log = logging.getLogger(__name__)


def is_saved(names: set[str]) -> bool:
    """Return whether files of these names make a folder of `save_to_disk`."""
    return SPLITS in names or {STATE, INFO} <= names


def is_data_set(path: str) -> bool:
    """Return whether a path is a hub data set or a folder of `save_to_disk`."""
    return path.startswith(HUB_PREFIX) or (os.path.isdir(path) and is_saved(set(os.listdir(path))))


def hub_revision(path: str) -> str:
    """Return the current commit of a hub data set.

    It is also a quick test whether the hub can be reached: `load_dataset` retries for half a minute.

    Raises:
        InputError: the hub cannot be reached, or has no such data set.
    """
    from huggingface_hub import HfApi

    name = HubName.parse(path).repository
    try:
        return str(HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha)
    except Exception as error:  # the library has a different one for each way to fail
        raise InputError(f"{path}: the hub cannot be reached or has no {name}: {one_line(error)}") from error


def open_data_set(path: str) -> Any:
    """Open a data set: stream it from the hub, or map a saved folder into memory.

    Of a folder with several splits it is `train`.

    Raises:
        InputError: it cannot be opened, or has several splits and no `train`.
    """
    import datasets

    if path.startswith(HUB_PREFIX):
        name, revision = HubName.parse(path), hub_revision(path)
        split = name.split or "train"
        with readable(path, Exception):
            return datasets.load_dataset(
                name.repository, name.config, split=split, streaming=True, revision=revision
            )
    with readable(path, Exception):
        data = datasets.load_from_disk(path)
    if not isinstance(data, dict):
        return data
    splits = list(data)
    if "train" not in splits and len(splits) > 1:
        raise InputError(f"{path}: has the splits {', '.join(splits)}; name one: {Path(path, splits[0])}")
    split = "train" if "train" in splits else splits[0]
    log.info("%s: reading the split %s of %s", path, split, ", ".join(splits))
    return data[split]


def data_set_rows(path: str, named: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield place and cells of each row.

    Args:
        path: a hub data set or a saved folder.
        named: whether the ids of classes become their names.
    """
    import datasets

    data = open_data_set(path)
    features = (data.features or {}) if named else {}
    classes = {key: label.names for key, label in features.items() if isinstance(label, datasets.ClassLabel)}
    with readable(path, Exception):
        for number, row in enumerate(data, 1):
            for key, names in classes.items():
                if row[key] in range(len(names)):
                    row[key] = names[row[key]]
            yield f"row {number}", row
