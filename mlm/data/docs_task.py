"""A small built-in task: from which package is this paragraph of documentation?

It is made from the Python documentation that `train.py` reads by default, so that fine-tuning works offline
right after it. An encoder that learnt anything is far above chance, 1 / NUM_PACKAGES.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict

import numpy as np

from mlm.data.cache import cache_folder
from mlm.data.labelled import Examples, LabelledTask, hold_out
from mlm.data.text import python_docs_file

TASK_NAME = "python-docs"
NUM_PACKAGES = 6
"""Classes: the packages with the most paragraphs."""
NUM_PARAGRAPHS = 500
"""Paragraphs of each, held-out ones included."""
MIN_WORDS = 12
"""Shorter paragraphs are left out."""
VALIDATION_FRACTION = 0.2


def read_docs_task() -> LabelledTask:
    """Return the task, made from the cached documentation; hashes decide which paragraphs are taken."""
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
    train, validation = hold_out(examples, VALIDATION_FRACTION, TASK_NAME)
    where = f"{VALIDATION_FRACTION:.0%} of the paragraphs, chosen by a hash of the text"
    return LabelledTask(TASK_NAME, "classification", labels, train, validation, where)


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()
