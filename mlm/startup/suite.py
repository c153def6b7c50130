"""The runs of one configuration of fine-tuning: tasks, seeds, folds and grids; whether a suite may continue.

units: a configuration for every task and seed, or fold --points, at_point--> one for every point of its grid
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.config.data import HUB_PREFIX
from mlm.config.errors import InputError, in_words
from mlm.config.finetune import DIAGNOSTIC, MNLI, FinetuneConfig, Point, TaskRecipe, plain_name
from mlm.config.parse import flatten, read_group, to_plain

OWN_DATA = "own-data"
"""Folder of the runs on labelled files of the user's own."""
DATA_FILE = "data.json"
"""In the folder of a suite: hashes of its data, see `data_digests`."""
DATA_SUFFIXES = (".tsv", ".txt", ".parquet")
"""Files of GLUE."""
MAY_CHANGE = ("name", "runs_dir", "resume", "task", "seed", "submit", "logging.")
"""Keys, `seeds` among them, by which a suite that was started may be made larger, or reported otherwise."""


def is_suite(config: FinetuneConfig) -> bool:
    """Return whether there are several tasks, seeds or folds, each with a folder of its own."""
    return len(config.task) > 1 or len(units(config)) > 1


def continues_by_itself(config: FinetuneConfig) -> bool:
    """Return whether a stopped run continues when it is started again: it consists of several."""
    return is_suite(config) or len(points(config)) > 1


def units(config: FinetuneConfig) -> list[FinetuneConfig]:
    """Return a configuration for every task and seed, or for every fold, in the order in which they run.

    MNLI comes first if others need it; the diagnostic set, on which nothing is trained, has none.
    """
    tasks: list[str] = [task for task in config.task if task != DIAGNOSTIC] or [""]
    if config.start_from_mnli:
        tasks.sort(key=lambda task: task != MNLI)
    recipes = {task: _recipe_of(config, task) for task in tasks}
    if config.data.folds and not config.data.fold:
        return [_unit(config, "", recipes[""], config.seed, fold) for fold in range(1, config.data.folds + 1)]
    runs = [
        (task, recipe, seed)
        for task, recipe in recipes.items()
        for seed in config.seeds or (recipe.seeds if recipe else []) or [config.seed]
    ]
    several = len(runs) > 1 or len(config.task) > 1
    return [_unit(config, *run, several=several) for run in runs]


def _unit(
    config: FinetuneConfig,
    task: str,
    recipe: TaskRecipe | None,
    seed: int,
    fold: int | None = None,
    several: bool = True,
) -> FinetuneConfig:
    folder = Path(config.runs_dir, config.name or "", task or OWN_DATA)
    return replace(
        config,
        task=[task] if task else [],
        seed=seed,
        seeds=[],
        recipes=[replace(recipe, seeds=[])] if recipe else [],
        start_from_mnli=False,
        submit=False,
        resume=config.resume and not several,
        runs_dir=str(folder) if several else config.runs_dir,
        name=(f"fold-{fold}" if fold else f"seed-{seed}") if several else config.name,
        data=replace(config.data, fold=fold or config.data.fold),
    )


def _recipe_of(config: FinetuneConfig, task: str) -> TaskRecipe | None:
    entries = {recipe.task: recipe for recipe in config.recipes}
    return entries.get(task, entries.get("all"))


def points(unit: FinetuneConfig) -> list[Point]:
    """Return the settings that one task is tried with, [{}] without a grid."""
    recipe = _recipe_of(unit, unit.task[0] if unit.task else "")
    return recipe.points() if recipe else [{}]


def at_point(unit: FinetuneConfig, point: Point) -> FinetuneConfig:
    """Return the configuration of one point of a grid."""
    groups: dict[str, dict[str, Any]] = {"optimizer": {}, "trainer": {}}
    for key, value in point.items():
        group, _, name = key.partition(".")
        groups[group][name] = value
    changed: dict[str, Any] = {group: replace(getattr(unit, group), **new) for group, new in groups.items()}
    return replace(unit, recipes=[], **changed)


def check_recipes(config: FinetuneConfig) -> None:
    """Check every value of every recipe, before the first of them is used; InputError names the entry."""
    for recipe in config.recipes:
        for point in recipe.points():
            try:
                at_point(config, point)
            except InputError as error:
                raise InputError(f"recipes: task={recipe.task}: {error}", "recipes") from None


def is_unbegun(folder: Path) -> bool:
    """Return whether a folder holds no more than a run that was killed while it wrote its configuration."""
    left = r"\.lock|config\.new\.yaml|\.config\.new\.yaml\.\d+"
    return folder.is_dir() and all(re.fullmatch(left, path.name) for path in folder.iterdir())


def check_same(config: FinetuneConfig, folder: Path) -> None:
    """Raise InputError if options or data differ from those of the suite started in `folder`; it may grow."""
    path = folder / "config.yaml"
    try:
        stored = read_group(type(config), path)
    except InputError as error:
        raise InputError(f"{error}; {folder} cannot continue without it, take another --name") from None
    if stored.name is None:
        raise InputError(f"{path} is damaged, it names no run; take another --name")
    before, now = flatten(to_plain(stored)), flatten(to_plain(config))
    for key in sorted(before.keys() | now.keys()):
        if not key.startswith(MAY_CHANGE) and before.get(key) != now.get(key):
            raise InputError(
                f"{key}={in_words(now.get(key))}, but {folder} was started with {in_words(before.get(key))}; "
                "continue with that, or take another --name"
            )
    lost = [task for task in stored.task if task not in config.task]
    _refuse_fewer("task", config.task, lost, folder)
    had, has = ([(unit.task, unit.seed) for unit in units(one)] for one in (stored, config))
    _refuse_fewer("seeds", [run[1] for run in has], [run[1] for run in had if run not in has], folder)
    if is_suite(stored) != is_suite(config):
        raise InputError(f"{folder} is one run and no suite of several; take another --name")
    check_data(config, folder)


def check_data(config: FinetuneConfig, folder: Path) -> None:
    """Raise InputError if a file differs from what the suite started in `folder` has read."""
    digests = data_digests(config)
    for name, digest in read_digests(folder).items():
        if digests.get(name) != digest:
            changed = "has changed" if name in digests else "is gone"
            raise InputError(
                f"{name} {changed} since {folder} was started, which would mix runs on different data; "
                "restore it, or take another --name"
            )


def _refuse_fewer(key: str, given: Sequence[object], lost: Sequence[object], folder: Path) -> None:
    if lost:
        now, left = (in_words(list(dict.fromkeys(values))) for values in (given, lost))
        raise InputError(
            f"{key}={now} leaves out {left}, with which {folder} was started, and its table would lose it; "
            f"add {left}, or take another --name"
        )


def data_digests(config: FinetuneConfig) -> dict[str, str]:
    """Return a hash of the content of every file of this machine that the runs read, by its path.

    Of a folder or glob these are all files below it that are not hidden; data of the hub or a URL have none.
    """
    given = [getattr(config.data, name) or () for name in ("train", "validation", "test")]
    files = [file for paths in given for path in paths for file in _files_of(path)]
    if config.task and config.glue_dir:
        found = (path for path in Path(config.glue_dir).glob("*/*") if path.suffix in DATA_SUFFIXES)
        files += sorted(path for path in found if plain_name(path.parent.name) in config.task)
    digests = {}
    for path in files:
        try:
            with path.open("rb") as file:
                digests[str(path)] = hashlib.file_digest(file, "blake2b").hexdigest()[:32]
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    return digests


def _files_of(path: str) -> list[Path]:
    if path.startswith(HUB_PREFIX) or "://" in path:
        return []
    found = [path] if os.path.exists(path) or not glob.has_magic(path) else glob.glob(path, recursive=True)
    below = (name for place in found for name in glob.glob(f"{glob.escape(place)}/**", recursive=True))
    return [Path(name) for name in sorted({*found, *below}) if not os.path.isdir(name)]


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
