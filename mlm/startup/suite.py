"""Whether a stopped suite of fine-tuning runs may continue: with the same options and the same data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from mlm.config.errors import InputError, in_words
from mlm.config.finetune import FinetuneConfig
from mlm.config.glue import plain_name
from mlm.config.parse import flatten, read_group, to_plain
from mlm.config.suite import is_suite, units

DATA_FILE = "data.json"
"""In the folder of a suite: what its runs read, see `data_digests`."""
DATA_SUFFIXES = (".tsv", ".txt", ".parquet")
"""Files of GLUE."""
MAY_CHANGE = ("name", "runs_dir", "resume", "task", "seed", "submit", "logging.")
"""Keys, `seeds` among them, by which a suite that was started may be made larger, or reported otherwise."""


def is_unbegun(folder: Path) -> bool:
    """Return whether a folder holds no more than a run that was killed while it wrote its configuration."""
    left = r"\.lock|config\.new\.yaml|\.config\.new\.yaml\.\d+"
    return folder.is_dir() and all(re.fullmatch(left, path.name) for path in folder.iterdir())


def check_same(config: FinetuneConfig, folder: Path) -> None:
    """Raise InputError if a suite starts with other options than those stored in `folder`; it may grow."""
    stored = _stored(config, folder / "config.yaml")
    before, now = flatten(to_plain(stored)), flatten(to_plain(config))
    for key in sorted(before.keys() | now.keys()):
        if not key.startswith(MAY_CHANGE) and before.get(key) != now.get(key):
            raise InputError(
                f"{key}={now.get(key)}, but {folder} was started with {before.get(key)}; "
                "continue with that, or take another --name"
            )
    lost = [task for task in stored.task if task not in config.task]
    _refuse_fewer("task", config.task, lost, folder)
    had, has = ([(unit.task, unit.seed) for unit in units(one)] for one in (stored, config))
    _refuse_fewer("seeds", [run[1] for run in has], [run[1] for run in had if run not in has], folder)
    if is_suite(stored) != is_suite(config):
        raise InputError(f"{folder} is one run and no suite of several; take another --name")


def data_digests(config: FinetuneConfig) -> dict[str, str]:
    """Return a hash of the content of every file that the runs read, by its path as it was given."""
    paths = [getattr(config.data, name) for name in ("train", "validation", "test")]
    files = [Path(path) for path in paths if path]
    if config.task and config.glue_dir:
        found = (path for path in Path(config.glue_dir).glob("*/*") if path.suffix in DATA_SUFFIXES)
        files += sorted(path for path in found if plain_name(path.parent.name) in config.task)
    return {str(path): _digest(path) for path in files}


def read_digests(folder: Path) -> dict[str, str]:
    """Return the stored hashes of a suite's data; empty if it was stopped before its first run."""
    path = folder / DATA_FILE
    try:
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except ValueError:
        stored = None
    if not isinstance(stored, dict):
        raise InputError(f"{path} is damaged; take another --name, or remove it if the data are the same")
    return stored


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "blake2b").hexdigest()[:32]
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def check_data(config: FinetuneConfig, folder: Path) -> None:
    """Raise InputError if a file that the suite in `folder` reads has changed: no mean is of two versions."""
    now = data_digests(config)
    for path, digest in read_digests(folder).items():
        if now.get(path) != digest:
            changed = "has changed" if path in now else "is gone"
            raise InputError(
                f"{path} {changed} since {folder} was started, and its runs are of what it was; "
                "put that back, or take another --name"
            )


def _stored(config: FinetuneConfig, path: Path) -> FinetuneConfig:
    try:
        stored = read_group(type(config), path)
    except InputError as error:
        raise InputError(f"{error}; {path.parent} cannot continue without it, take another --name") from None
    if stored.name is None:
        raise InputError(f"{path} is damaged, it names no run; take another --name")
    return stored


def _refuse_fewer(key: str, given: Sequence[object], lost: Sequence[object], folder: Path) -> None:
    if lost:
        now, left = (in_words(list(dict.fromkeys(values))) for values in (given, lost))
        raise InputError(
            f"{key}={now} leaves out {left}, with which {folder} was started, and its table would lose it; "
            f"add {left}, or take another --name"
        )
