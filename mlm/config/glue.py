"""GLUE in the configuration: the names of its tasks, and what a recipe may set for each of them.

A recipe is a file of `configs/finetune/` for `--config`: keys of fine-tuning, and under `recipes` an entry
for each task that wants something else. Several values of a key make a grid. No torch here.
"""

from __future__ import annotations

from dataclasses import field
from itertools import product
from typing import Literal

from mlm.config.errors import InputError, require
from mlm.config.schema import schema
from mlm.config.values import nearest

GLUE_TASKS = ("cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli", "ax")
"""As they are called here and on the Hugging Face hub; the last is the diagnostic set of MNLI's model."""
DIAGNOSTIC = "ax"
MNLI = "mnli"
SCORES = "stsb"
"""The task whose labels are numbers."""
FROM_MNLI = ("rte", "mrpc", "stsb")
"""The small tasks that gain most from starting at the model of MNLI (Liu et al. 2019, arXiv:1907.11692)."""

Selection = Literal["holdout", "dev"]
Point = dict[str, float]
"""One combination of the values of a grid, by dotted key."""


@schema("recipes: ")
class TaskRecipe:
    """What one task is trained with; several values of a key make a grid, none leave the key as it is."""

    task: str
    """Name of the task, or `all`: the entry for those without one of their own."""
    lr: list[float] = field(default_factory=list)
    """optimizer.lr"""
    weight_decay: list[float] = field(default_factory=list)
    """optimizer.weight_decay"""
    step_decay: list[float] = field(default_factory=list)
    """The same as a share lost at each step at the peak rate, whatever that is: weight_decay = this / lr."""
    batch_size: list[int] = field(default_factory=list)
    """trainer.batch_size"""
    max_epochs: list[int] = field(default_factory=list)
    """trainer.max_epochs"""
    seeds: list[int] = field(default_factory=list)
    """The seeds of this task."""

    def __post_init__(self) -> None:
        known = self.task in (*GLUE_TASKS, "all")
        require(known, "recipes: task", self.task, f"is none of {', '.join(GLUE_TASKS)} or all")
        both = bool(self.weight_decay and self.step_decay)
        require(not both, "recipes: step_decay", self.step_decay, "conflicts with weight_decay; keep one")
        alone = bool(self.step_decay and not self.lr)
        require(not alone, "recipes: step_decay", self.step_decay, "needs lr in the same entry")
        divides = not self.step_decay or all(rate > 0 for rate in self.lr)
        require(divides, "recipes: lr", self.lr, "must be above 0: step_decay is divided by it")
        check_seeds(f"recipes: task={self.task}: seeds", self.seeds)

    def without(self, keys: set[str]) -> None:
        """Leave to the command line what it gives: forget the values of these dotted keys."""
        for key in keys:
            name = key.rpartition(".")[2]
            if key in (*_KEYS.values(), "seeds"):
                setattr(self, name, [])
        if "seed" in keys:
            self.seeds = []
        if keys & {"optimizer.weight_decay", "optimizer.lr"}:
            self.step_decay = []

    def points(self) -> list[Point]:
        """Return every combination of the values, [{}] where none is given."""
        given = {key: getattr(self, name) for name, key in _KEYS.items() if getattr(self, name)}
        if self.step_decay:
            given["step_decay"] = self.step_decay
        points = [dict(zip(given, values, strict=True)) for values in product(*given.values())]
        for point in points:
            if "step_decay" in point:
                # Rounded, so that 5e-6 / 5e-5 is 0.1 in the files too.
                decay = point.pop("step_decay") / point["optimizer.lr"]
                point["optimizer.weight_decay"] = float(f"{decay:.6g}")
        return points


_KEYS = {
    "lr": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "batch_size": "trainer.batch_size",
    "max_epochs": "trainer.max_epochs",
}


def check_seeds(key: str, seeds: list[int]) -> None:
    """Check that every seed is a run of its own: a mean over the same run twice would look certain.

    Raises:
        InputError: a seed is below 0, or is given twice.
    """
    require(len(set(seeds)) == len(seeds), key, seeds, "names one twice")
    require(min(seeds, default=0) >= 0, key, seeds, "must be at least 0")


def plain_name(name: str) -> str:
    """Return the name of a task without the marks of its other spellings: SST-2 is sst2."""
    return name.lower().replace("-", "").replace("_", "")


def check_tasks(tasks: list[str]) -> list[str]:
    """Return the tasks asked for, `all` spelt out.

    Raises:
        InputError: an unknown task, one that is named twice, or the diagnostic set without MNLI.
    """
    tasks = [plain_name(name) for name in tasks]
    if "all" in tasks:
        require(len(tasks) == 1, "task", ",".join(tasks), "names all tasks and one of them; keep all")
        return list(GLUE_TASKS)
    for name in tasks:
        if name not in GLUE_TASKS:
            fix = nearest(name, list(GLUE_TASKS)) or f"; there are {', '.join(GLUE_TASKS)} and all"
            raise InputError(f"task={name} is not a task of GLUE{fix}", "task")
    require(len(set(tasks)) == len(tasks), "task", ",".join(tasks), "names a task twice")
    alone = DIAGNOSTIC in tasks and MNLI not in tasks
    require(not alone, "task", DIAGNOSTIC, "has nothing to train on: MNLI's model answers it; add mnli")
    return tasks
