"""When a run of fine-tuning counts as failed."""

from __future__ import annotations

import numpy as np
import pytest

from mlm.training.results import failure, warn_of_failure

CLASSES, NUMBERS = np.array([0, 1, 1]), np.array([0.0, 2.5, 5.0])
SETS = np.array([[False, True], [True, True], [False, False]])
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
        ([2.0, 1.0], SETS, DIFFERENT - 0.5, None),
        ([2.0, 1.0], SETS, SAME - 0.5, "every text gets the same labels"),
        ([2.0, 1.0], SETS[:1], SAME[:1], None),
    ],
)
def test_reasons(losses, labels, logits, expected):
    assert failure(losses, labels, logits) == expected


@pytest.mark.parametrize(
    ("kind", "failed", "counts", "message"),
    [
        (
            "multilabel",
            "every text gets the same labels",
            {"a": 0, "b": 0},
            "same labels: none; the learning",
        ),
        (
            "multilabel",
            "every text gets the same labels",
            {"a": 3, "b": 3},
            "same labels: a, b; the learning",
        ),
        (
            "classification",
            "only one class is predicted",
            {"a": 3, "b": 0},
            "predicted: a; the learning rate",
        ),
        ("classification", "the training loss did not fall", {"a": 2, "b": 1}, "did not fall; the learning"),
        ("classification", None, {"a": 2, "b": 1}, ""),
    ],
)
def test_warning_of_a_model_that_learnt_nothing(kind, failed, counts, message, caplog):
    facts = {
        "predicted_counts": counts,
        "examples_counts": {"a": 2, "b": 1},
        "right_counts": {"a": 2, "b": 1},
    }
    warn_of_failure({"label_type": kind, "failed": failed, **facts})
    assert message in caplog.text
    assert bool(caplog.text) == bool(message)


@pytest.mark.parametrize(
    ("right", "warns"), [({"a": 1, "b": 1}, True), ({"a": 2, "b": 0}, True), ({"a": 2, "b": 1}, False)]
)
def test_warning_of_a_model_no_better_than_the_most_frequent_class(right, warns, caplog):
    counts = {
        "predicted_counts": {"a": 2, "b": 1},
        "examples_counts": {"a": 2, "b": 1},
        "right_counts": right,
    }
    warn_of_failure({"label_type": "classification", "failed": None, **counts})
    text = "accuracy 0.6667 is not above the 0.6667 of always answering a; the learning rate may be too high"
    assert (text in caplog.text) == warns == bool(caplog.text)


def test_warning_of_a_model_that_gives_every_text_the_same_score(caplog):
    warn_of_failure({"label_type": "regression", "failed": None})
    assert not caplog.text
    warn_of_failure({"label_type": "regression", "failed": "every text gets the same score"})
    assert "every text gets the same score; the learning rate may be too high" in caplog.text
