"""Every score against scikit-learn or scipy, then the cases in which a formula divides by 0."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import scipy.stats
import sklearn.metrics
import torch

from mlm.evaluation.metrics import (
    LabelledPredictions,
    accuracy,
    class_counts,
    class_scores,
    class_table,
    confusion_matrix,
    counts_of_classes,
    matthews_correlation,
    pearson,
    spearman,
    task_metrics,
)
from mlm.evaluation.predictor import softmax

DRAW = np.random.default_rng(0)


def f1(counts):
    return class_scores(counts)["f1"][1]


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
        options = {"labels": classes, "average": None, "zero_division": 0}
        for name, found in class_scores(counts).items():
            expected = getattr(sklearn.metrics, f"{name}_score")(labels, predictions, **options)
            assert found == pytest.approx(expected, abs=1e-9)
        found = task_metrics("classification", labels, np.eye(num_classes)[predictions])
        expected = sklearn.metrics.f1_score(labels, predictions, average="macro", zero_division=0)
        assert found["f1_macro"] == pytest.approx(expected, abs=1e-9)
        if num_classes == 2:
            expected = sklearn.metrics.f1_score(labels, predictions, zero_division=0)
            assert found["f1"] == pytest.approx(expected, abs=1e-9)


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
        if all(0 < column.sum() < size for column in labels.T):
            expected["roc_auc"] = sklearn.metrics.roc_auc_score(labels, logits, average="macro")
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
        "f1_macro": pytest.approx(2 / 3),
        "roc_auc": pytest.approx(0.75),
    }
    assert list(found) == ["accuracy", "f1", "matthews_correlation", "f1_macro", "roc_auc"]
    three = task_metrics("classification", np.array([0, 1, 2]), np.eye(3))
    assert three == dict.fromkeys(("accuracy", "matthews_correlation", "f1_macro", "roc_auc"), 1.0)
    scores = task_metrics("regression", np.array([0.0, 1.0, 2.0]), np.array([[1.0], [2.0], [9.0]]))
    assert list(scores) == ["pearson", "spearman", "mae", "rmse"]
    assert scores["spearman"] == pytest.approx(1.0)
    assert scores["pearson"] < 0.96


@pytest.mark.parametrize("size", [1, 2, 400])
def test_errors_of_numbers_equal_scikit_learn(size):
    for _ in range(20):
        targets, scores = DRAW.normal(size=(2, size))
        found = task_metrics("regression", targets, scores[:, None])
        expected = sklearn.metrics.mean_absolute_error(targets, scores)
        assert found["mae"] == pytest.approx(expected, abs=1e-9)
        expected = sklearn.metrics.root_mean_squared_error(targets, scores)
        assert found["rmse"] == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("num_classes", [2, 3, 9])
@pytest.mark.parametrize("tied", [False, True])
def test_roc_auc_equals_scikit_learn(num_classes, tied):
    for _ in range(20):
        labels = np.r_[np.arange(num_classes), DRAW.integers(num_classes, size=80)]
        logits = DRAW.normal(size=(len(labels), num_classes))
        logits = logits.round() if tied else logits
        # of two classes the difference, as the probabilities of equal differences are not always equal
        scores = logits[:, 1] - logits[:, 0] if num_classes == 2 else softmax(logits)
        expected = sklearn.metrics.roc_auc_score(labels, scores, multi_class="ovr", average="macro")
        found = task_metrics("classification", labels, logits)["roc_auc"]
        assert found == pytest.approx(expected, abs=1e-9)


def test_roc_auc_is_left_out_where_it_is_undefined():
    logits = DRAW.normal(size=(4, 3))
    assert "roc_auc" not in task_metrics("classification", np.array([0, 1, 1, 0]), logits)
    assert "roc_auc" not in task_metrics("classification", np.zeros(4, np.int64), logits[:, :2])
    many = task_metrics("classification", np.arange(101), np.eye(101))
    assert "roc_auc" not in many
    logits[2, 1] = np.nan
    assert task_metrics("classification", np.array([0, 1, 1, 0]), logits[:, :2])["roc_auc"] == 0.0


def test_table_and_summary_show_precision_and_recall_of_each_class():
    labels, logits = np.array([0, 0, 0, 1]), np.eye(3)[[0, 0, 1, 1]]
    counts = counts_of_classes(("a", "bb", "c"), labels, logits)
    assert counts["class_precision"] == {"a": 1.0, "bb": 0.5, "c": 0.0}
    assert counts["class_recall"] == {"a": pytest.approx(2 / 3), "bb": 1.0, "c": 0.0}
    assert class_table(counts)[1:] == [
        "  class  examples  predicted  right  precision  recall      f1",
        "  a             3          2      2     1.0000  0.6667  0.8000",
        "  bb            1          2      1     0.5000  1.0000  0.6667",
        "  c             0          0      0     0.0000  0.0000  0.0000",
    ]


def test_collected_predictions_come_in_order_and_once():
    logits, predictions = torch.randn(7, 3), LabelledPredictions()
    for rows in ([5, 0], [6, 2, 1], [3, 4, 0]):
        predictions.update(torch.tensor(rows), logits[rows])
    found = predictions.compute()
    assert found.dtype == np.float64
    assert np.array_equal(found, logits.numpy().astype(np.float64))
    predictions.reset()
    predictions.update(torch.arange(7), logits)
    assert np.array_equal(predictions.compute(), found)


TWO_RANKS = """
import sys, numpy as np, torch, torch.distributed as dist
from mlm.evaluation.metrics import MaskedLMScores
from mlm.evaluation.metrics import LabelledPredictions
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=int(sys.argv[2]), world_size=2)
logits, labels = torch.arange(15.0).view(5, 3).sin(), torch.tensor([0, 2, -100, 1, 1])
for shares in ([[0, 2, 4], [1, 3, 0]], [[0, 1, 2, 3, 4], []], [[], [3, 1, 0, 2, 4]]):
    predictions, scores = LabelledPredictions(), MaskedLMScores()
    for row in shares[dist.get_rank()]:
        predictions.update(torch.tensor([row]), logits[[row]])
    assert np.array_equal(predictions.compute(), logits.double().numpy()), shares
    rows = list(dict.fromkeys(shares[0] + shares[1]))
    for row in [row for row in shares[dist.get_rank()] if dist.get_rank() == 0 or row not in shares[0]]:
        scores.update(logits[[row]], labels[[row]])
    whole = MaskedLMScores(sync_on_compute=False)
    whole.update(logits, labels)
    expected, found = whole.compute(), scores.compute()
    assert all(abs(found[name] - value) < 1e-6 for name, value in expected.items()), (found, expected)
dist.barrier()
dist.destroy_process_group()  # else its threads may still run when the process ends
"""


@pytest.mark.slow
def test_ranks_of_any_share_come_to_the_same_scores(tmp_path):
    """Real processes: a rank with repeated examples, and one without any batch."""
    command = [sys.executable, "-c", TWO_RANKS, str(tmp_path / "store")]
    processes = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    try:
        assert [process.wait(300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
