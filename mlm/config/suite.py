"""The runs that one configuration of fine-tuning stands for: tasks and seeds, and the grid of each.

units: a configuration for every task and seed --points, at_point--> one for every point of its grid
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm.config.errors import InputError
from mlm.config.glue import DIAGNOSTIC, MNLI, Point, TaskRecipe

if TYPE_CHECKING:
    from mlm.config.finetune import FinetuneConfig

OWN_DATA = "own-data"
"""Folder of the runs on labelled files of the user's own."""


def is_suite(config: FinetuneConfig) -> bool:
    """Return whether there are several tasks or seeds, each with a folder of its own."""
    return len(config.task) > 1 or len(units(config)) > 1


def goes_on(config: FinetuneConfig) -> bool:
    """Return whether a stopped run goes on when it is started again: it is made of several."""
    return is_suite(config) or len(points(config)) > 1


def units(config: FinetuneConfig) -> list[FinetuneConfig]:
    """Return a configuration for every task and seed, in the order in which they run.

    MNLI comes first if others need it; the diagnostic set, on which nothing is trained, has none.
    """
    tasks: list[str] = [task for task in config.task if task != DIAGNOSTIC] or [""]
    if config.start_from_mnli:
        tasks.sort(key=lambda task: task != MNLI)
    pairs = [(task, seed) for task in tasks for seed in seeds_of(config, task)]
    several = len(pairs) > 1 or len(config.task) > 1
    return [_unit(config, task, seed, several) for task, seed in pairs]


def _unit(config: FinetuneConfig, task: str, seed: int, several: bool) -> FinetuneConfig:
    recipe = _recipe_of(config, task)
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
        name=f"seed-{seed}" if several else config.name,
    )


def seeds_of(config: FinetuneConfig, task: str) -> list[int]:
    """Return the seeds of a task: those given, else those of its recipe, else the one of the run."""
    recipe = _recipe_of(config, task)
    return config.seeds or (recipe.seeds if recipe else []) or [config.seed]


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
    """Check every value of every recipe, before the first of them is used.

    Raises:
        InputError: names the entry and the value.
    """
    for recipe in config.recipes:
        for point in recipe.points():
            try:
                at_point(config, point)
            except InputError as error:
                raise InputError(f"recipes: task={recipe.task}: {error}", "recipes") from None
