"""Choose the task of a run: the user's own files, a task of GLUE, or the built-in documentation task."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mlm.config.finetune import FinetuneConfig
from mlm.data.docs_task import read_docs_task
from mlm.data.glue import read_glue
from mlm.data.labelled import LabelledTask, hold_out, read_task, text_hashes


def choose_task(config: FinetuneConfig, selects: bool = False) -> LabelledTask:
    """Read the task of a configuration.

    Args:
        config: the run.
        selects: whether the validation scores choose an epoch or a point of a grid. With GLUE and
            `selection=holdout` a part held out of train is then validated on, and dev is scored at the end.

    Raises:
        InputError: the examples cannot be read.
    """
    if config.data.train:
        task = read_task(config.data)
    elif config.task:
        task = read_glue(config.task[0], config.glue_dir)
    else:
        task = read_docs_task()
    if config.task and selects and config.selection == "holdout":
        task = with_holdout(task, config.data.validation_fraction)
    return with_fewer(task, config.data.max_train_examples)


def with_holdout(task: LabelledTask, fraction: float) -> LabelledTask:
    """Return the task with a part of train as validation set; the original one is scored at the end."""
    train, held_out = hold_out(task.train, fraction, task.name)
    where = f"{fraction:.0%} of train, chosen by a hash of the text"
    scored = {"": task.validation, **task.scored}
    task = replace(task, scored=scored, scored_is=task.validation_is)
    return replace(task, train=train, validation=held_out, validation_is=where)


def with_fewer(task: LabelledTask, most: int | None) -> LabelledTask:
    """Return the task with at most `most` training examples, those with the smallest hashes; None: all."""
    if most is None or most >= len(task.train):
        return task
    chosen = np.argsort(text_hashes(task.train), kind="stable")[:most]
    return replace(task, train=task.train.take(np.sort(chosen)))
