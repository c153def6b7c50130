"""Choose the task of a run: the user's own files, a task of GLUE, or the built-in documentation task.

The built-in one asks from which package a paragraph of the Python documentation is. `train.py` reads that by
default, so fine-tuning works offline right after it; an encoder that learnt anything is far above chance.
"""

import hashlib
import json
from collections import defaultdict
from dataclasses import replace

import numpy as np

from mlm.config.finetune import FinetuneConfig
from mlm.data.cache import cache_folder
from mlm.data.glue import read_glue
from mlm.data.labelled import Examples, LabelledTask, hold_out, read_task, text_hashes
from mlm.data.text import python_docs_file

NUM_PACKAGES = 6  # classes of the documentation task: the packages with the most paragraphs
NUM_PARAGRAPHS = 500  # of each, held-out ones included
MIN_WORDS = 12  # shorter paragraphs are left out
VALIDATION_FRACTION = 0.2


def choose_task(config: FinetuneConfig, selects: bool = False) -> LabelledTask:
    """Read the task of a configuration.

    With `selects` the validation scores choose an epoch or a point of a grid. With GLUE and
    `selection=holdout` a part held out of train is then validated on, and dev is scored at the end.
    """
    if config.data.train:
        task = read_task(config.data)
    elif config.task:
        task = read_glue(config.task[0], config.glue_dir)
    else:
        task = read_docs_task()
    if config.task and selects and config.selection == "holdout":
        fraction = config.data.validation_fraction
        train, held_out = hold_out(task.train, fraction, task.name)
        where = f"{fraction:.0%} of train, chosen by a hash of the text"
        scored = {"": task.validation, **task.scored}
        task = replace(task, scored=scored, scored_is=task.validation_is)
        task = replace(task, train=train, validation=held_out, validation_is=where)
    most = config.data.max_train_examples
    if most is not None and most < len(task.train):
        chosen = np.argsort(text_hashes(task.train), kind="stable")[:most]
        task = replace(task, train=task.train.take(np.sort(chosen)))
    return task


def read_docs_task() -> LabelledTask:
    """Return the documentation task, made from the cached text; hashes decide which paragraphs are taken."""
    paragraphs: dict[str, list[str]] = defaultdict(list)
    with python_docs_file(cache_folder(None)).open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            long = (text for text in row["text"].split("\n") if len(text.split()) >= MIN_WORDS)
            paragraphs[row["package"]] += long
    largest = sorted(paragraphs, key=lambda package: (-len(paragraphs[package]), package))[:NUM_PACKAGES]
    labels = tuple(sorted(largest))
    chosen = {label: sorted(paragraphs[label], key=_digest)[:NUM_PARAGRAPHS] for label in labels}
    texts = [text for label in labels for text in chosen[label]]
    ids = [number for number, label in enumerate(labels) for _ in chosen[label]]
    examples = Examples(texts, None, np.array(ids, np.int64))
    train, validation = hold_out(examples, VALIDATION_FRACTION, "python-docs")
    where = f"{VALIDATION_FRACTION:.0%} of the paragraphs, chosen by a hash of the text"
    return LabelledTask("python-docs", "classification", labels, train, validation, where)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
