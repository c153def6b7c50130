"""Every score against scikit-learn or scipy, then the cases in which a formula divides by 0."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics

from mlm.evaluation.metrics import (
    accuracy,
    class_counts,
    confusion_matrix,
    f1,
    matthews_correlation,
    pearson,
    spearman,
    task_metrics,
)

DRAW = np.random.default_rng(0)


def two_classes(labels, predictions):
    return class_counts(np.array(labels), np.eye(2)[predictions])


@pytest.mark.parametrize("num_classes", [2, 3, 7])
@pytest.mark.parametrize("size", [1, 5, 400])
@pytest.mark.filterwarnings("ignore")
def test_class_scores_equal_scikit_learn(num_classes, size):
    for _ in range(20):
        labels, predictions = DRAW.integers(num_classes, size=(2, size))
        confusion = confusion_matrix(labels, predictions, num_classes)
        classes = list(range(num_classes))
        assert (confusion == sklearn.metrics.confusion_matrix(labels, predictions, labels=classes)).all()
        counts = class_counts(labels, np.eye(num_classes)[predictions])
        assert (counts == np.c_[confusion.sum(1), confusion.sum(0), confusion.diagonal()]).all()
        expected = sklearn.metrics.accuracy_score(labels, predictions)
        assert accuracy(counts) == pytest.approx(expected, abs=1e-9)
        expected = sklearn.metrics.matthews_corrcoef(labels, predictions)
        assert matthews_correlation(counts) == pytest.approx(expected, abs=1e-9)
        if num_classes == 2:
            expected = sklearn.metrics.f1_score(labels, predictions, zero_division=0)
            assert f1(counts) == pytest.approx(expected, abs=1e-9)


def test_tens_of_thousands_of_classes_are_scored_as_scikit_learn_does():
    labels, logits = DRAW.integers(40_000, size=60), DRAW.normal(size=(60, 40_000))
    logits[np.arange(30), labels[:30]] = 9.0
    found, said = task_metrics("classification", labels, logits), logits.argmax(1)
    assert found["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, said), abs=1e-9)
    expected = sklearn.metrics.matthews_corrcoef(labels, said)
    assert found["matthews_correlation"] == pytest.approx(expected, abs=1e-9)
    assert 0.4 < expected < 0.6


@pytest.mark.parametrize("size", [1e-308, 1e-300, 1e-200, 1.0, 1e200, 3e307])
def test_correlation_does_not_depend_on_the_size_of_the_numbers(size):
    targets, scores = np.array([1.0, 2.0, 5.0]), np.array([1.0, 3.0, 4.0])
    expected = scipy.stats.pearsonr(targets, scores).statistic
    for pair in ((size * targets, scores), (targets, size * scores), (size * targets, size * scores)):
        assert pearson(*pair) == pytest.approx(expected, abs=1e-9)
    assert pearson(size * targets, targets) == pytest.approx(1.0, abs=1e-9)


@pytest.mark.parametrize("size", [2, 3, 500])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_correlations_equal_scipy(size, tied):
    for _ in range(20):
        targets, scores = DRAW.normal(size=(2, size))
        if tied:
            targets, scores = targets.round(), scores.round()
        expected = np.nan_to_num(scipy.stats.pearsonr(targets, scores).statistic)
        assert pearson(targets, scores) == pytest.approx(expected, abs=1e-9)
        expected = np.nan_to_num(scipy.stats.spearmanr(targets, scores).statistic)
        assert spearman(targets, scores) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("labels", "predictions"), [([1, 1, 1], [1, 1, 1]), ([0, 0, 0], [1, 1, 1]), ([0, 1, 0], [1, 1, 1])]
)
def test_one_class_correlates_with_nothing(labels, predictions):
    assert matthews_correlation(two_classes(labels, predictions)) == 0.0


def test_the_score_is_that_of_the_whole_set():
    predictions, labels = [1, 1, 0, 0, 1, 1, 1, 0], [1, 0, 0, 0, 1, 1, 0, 1]
    assert matthews_correlation(two_classes(labels, predictions)) == pytest.approx(0.2582, abs=1e-4)


def test_f1_is_that_of_class_1():
    counts = two_classes([1, 1, 1, 0, 0, 1], [1, 1, 1, 1, 0, 0])
    assert (f1(counts), accuracy(counts)) == (0.75, pytest.approx(0.66667, abs=1e-5))
    assert f1(two_classes([0, 1, 1, 1], [0, 0, 1, 1])) == pytest.approx(0.8)
    assert f1(two_classes([0, 0], [0, 0])) == 0.0


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e300])
def test_constant_series_correlate_with_nothing(constant):
    series, other = np.full(7, constant), np.arange(7.0)
    for function in (pearson, spearman):
        assert function(series, other) == function(other, series) == function(series, series) == 0.0
        assert function(other[:1], other[:1]) == function(other[:0], other[:0]) == 0.0
        assert function(other, np.where(other > 3, np.nan, other)) == 0.0


def test_large_counts_do_not_overflow():
    counts = np.array([[300_000_100, 300_000_100, 300_000_000]] * 2)
    assert matthews_correlation(counts) == pytest.approx(1 - 2 * 100 / 300_000_100, abs=1e-9)


@pytest.mark.parametrize("num_classes", [1, 2, 6])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.filterwarnings("ignore")
def test_scores_of_several_labels_equal_scikit_learn(num_classes, share):
    for size in (1, 5, 300):
        labels = DRAW.random((size, num_classes)) < share
        logits = DRAW.normal(size=(size, num_classes))
        found = task_metrics("multilabel", labels, logits)
        said = logits > 0
        expected = {
            "f1_micro": sklearn.metrics.f1_score(labels, said, average="micro", zero_division=0),
            "f1_macro": sklearn.metrics.f1_score(labels, said, average="macro", zero_division=0),
            "subset_accuracy": sklearn.metrics.accuracy_score(labels, said),
        }
        if num_classes == 1:  # scikit-learn takes one column for two classes
            both = np.c_[labels, np.zeros(size, bool)], np.c_[said, np.zeros(size, bool)]
            expected["f1_micro"] = sklearn.metrics.f1_score(*both, average="micro", zero_division=0)
            expected["f1_macro"] = expected["f1_micro"]
        assert found == pytest.approx(expected, abs=1e-9)
        matrices = sklearn.metrics.multilabel_confusion_matrix(labels, said) if num_classes > 1 else []
        for counts, matrix in zip(class_counts(labels, logits), matrices, strict=False):
            assert counts.tolist() == [matrix[1].sum(), matrix[:, 1].sum(), matrix[1, 1]]


def test_metrics_of_a_task():
    logits = np.array([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    found = task_metrics("classification", np.array([0, 1, 1]), logits)
    assert found == {
        "accuracy": pytest.approx(2 / 3),
        "f1": pytest.approx(2 / 3),
        "matthews_correlation": pytest.approx(0.5),
    }
    three = task_metrics("classification", np.array([0, 1, 2]), np.eye(3))
    assert three == {"accuracy": 1.0, "matthews_correlation": 1.0}
    scores = task_metrics("regression", np.array([0.0, 1.0, 2.0]), np.array([[1.0], [2.0], [9.0]]))
    assert list(scores) == ["pearson", "spearman"]
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] < 0.96
