"""The task that needs no file of the user's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from mlm.data.python_docs import python_docs_digest
from mlm.data.tasks import read_docs_task

LARGE = ["numpy", "python", "torch", "pandas", "sympy", "networkx"]


@pytest.fixture
def cached():
    """Documentation of seven packages where the cache keeps it."""
    rows = [
        {
            "package": package,
            "text": f"{package} paragraph {number} {'word ' * 12}\u2028end.\nToo short to tell.",
        }
        for package in [*LARGE, "small"]
        for number in range(40 if package == "small" else 60)
    ]
    path = Path(os.environ["MLM_CACHE"]) / f"python-docs-{python_docs_digest()[:16]}.jsonl"
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")


@pytest.mark.usefixtures("cached")
def test_largest_packages_are_told_apart():
    task = read_docs_task()
    assert task.labels == tuple(sorted(LARGE))
    for part in (task.train, task.validation):
        names = [text.split()[0] for text in part.texts]
        assert names == [task.labels[number] for number in part.labels]
    assert np.bincount(np.concatenate([task.train.labels, task.validation.labels])).tolist() == [60] * 6
    assert 30 < len(task.validation) < 120
    assert read_docs_task().train.texts == task.train.texts
