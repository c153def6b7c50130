"""When a run of fine-tuning counts as failed."""

from __future__ import annotations

import numpy as np
import pytest

from mlm.training.outcome import failure

CLASSES, NUMBERS = np.array([0, 1, 1]), np.array([0.0, 2.5, 5.0])
DIFFERENT, SAME = np.eye(2)[[0, 1, 1]], np.eye(2)[[1, 1, 1]]


@pytest.mark.parametrize(
    ("losses", "labels", "logits", "expected"),
    [
        ([0.7, 0.6], CLASSES, DIFFERENT, None),
        ([0.7], CLASSES, DIFFERENT, None),
        ([0.7, 0.6], CLASSES, SAME, "only one class is predicted"),
        ([0.7, 0.6], CLASSES[1:], SAME[1:], None),
        ([0.7, 0.71], CLASSES, DIFFERENT, "the training loss did not fall"),
        ([0.7, 0.1, 0.7], CLASSES, DIFFERENT, "the training loss did not fall"),
        ([2.0, 1.0], NUMBERS, np.array([[1.0], [2.0], [3.0]]), None),
        ([2.0, 1.0], NUMBERS, np.full((3, 1), 2.5), "every text gets the same score"),
    ],
)
def test_reasons(losses, labels, logits, expected):
    assert failure(losses, labels, logits) == expected
