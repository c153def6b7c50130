"""Statistics against the standard library and numpy, averages against published rows."""

from __future__ import annotations

import numpy as np
import pytest

from mlm.evaluation.glue import summarize

HF_ROW = {
    "cola": {"matthews_correlation": 56.53},
    "sst2": {"accuracy": 92.32},
    "mrpc": {"f1": 88.85, "accuracy": 84.07},
    "stsb": {"pearson": 88.64, "spearman": 88.48},
    "qqp": {"accuracy": 90.71, "f1": 87.49},
    "mnli": {"accuracy": 83.91, "accuracy_mismatched": 84.10},
    "qnli": {"accuracy": 90.66},
    "rte": {"accuracy": 65.70},
    "wnli": {"accuracy": 56.34},
}
"""bert-base-cased on the dev sets, as transformers' text-classification example documents it."""
BERT_ROW = {
    "cola": {"matthews_correlation": 52.1},
    "sst2": {"accuracy": 93.5},
    "mrpc": {"f1": 88.9},
    "stsb": {"spearman": 85.8},
    "qqp": {"f1": 71.2},
    "mnli": {"accuracy": 84.6, "accuracy_mismatched": 83.4},
    "qnli": {"accuracy": 90.5},
    "rte": {"accuracy": 66.4},
}
"""BERT-base on the test sets (Devlin et al. 2019, table 1), whose average is called 79.6."""


def run(metrics, seed=1, failed=None):
    return {
        "seed": seed,
        "metrics": metrics,
        "failed": failed,
        "selection": "last epoch",
        "num_train_examples": 100,
        "num_validation_examples": 10,
    }


def averages_of(row):
    return summarize({task: [run(metrics)] for task, metrics in row.items()})["averages"]


def test_averages_of_published_rows():
    found = {name: facts["value"] for name, facts in averages_of(HF_ROW).items()}
    assert found["cramming_rule"] == pytest.approx(82.02, abs=0.005)
    assert found["eight_tasks"] == pytest.approx(81.67, abs=0.005)
    assert found["accuracy_rule"] == pytest.approx(81.55, abs=0.005)
    assert averages_of(BERT_ROW)["official_nine"]["value"] == pytest.approx(79.6, abs=0.005)


def test_average_that_lacks_scores_is_null_and_lists_them():
    row = {task: metrics for task, metrics in HF_ROW.items() if task != "qnli"}
    row["mnli"] = {"accuracy": 83.91}
    found = averages_of(row)
    assert found["accuracy_rule"]["value"] is None
    assert found["accuracy_rule"]["missing"] == ["qnli accuracy"]
    assert found["cramming_rule"]["missing"] == ["qnli accuracy", "mnli accuracy_mismatched"]
    assert all("mean of" in facts["protocol"] for facts in found.values())


def test_statistics_over_seeds():
    values = [0.5, 0.7, 0.6, 0.9]
    runs = [run({"accuracy": value}, seed) for seed, value in enumerate(values)]
    facts = summarize({"rte": runs})["tasks"]["rte"]
    figures = facts["metrics"]["accuracy"]
    assert figures["mean"] == pytest.approx(np.mean(values))
    assert figures["std"] == pytest.approx(np.std(values, ddof=1))
    assert figures["median"] == pytest.approx(np.median(values))
    assert (figures["n"], figures["values"], facts["seeds"]) == (4, values, [0, 1, 2, 3])
    assert figures["by_seed"] == {"0": 0.5, "1": 0.7, "2": 0.6, "3": 0.9}
    assert figures["mean_without_failed"] is None
    assert summarize({"rte": runs[:1]})["tasks"]["rte"]["metrics"]["accuracy"]["std"] is None


def test_average_of_medians():
    row = {task: [run(metrics, 1), run(metrics, 2)] for task, metrics in HF_ROW.items()}
    row["rte"] = [run({"accuracy": value}, value) for value in (0.0, 65.70, 65.70)]
    found = summarize(row)["averages"]["accuracy_rule"]
    assert found["of_medians"] == pytest.approx(81.55, abs=0.005)
    assert found["value"] == pytest.approx(81.55 - 65.70 / 24, abs=0.005)


def test_failed_runs_count_and_the_mean_without_them_is_there_too():
    reason = "only one class is predicted"
    runs = [run({"accuracy": 0.8}, 1), run({"accuracy": 0.4}, 2, reason), run({}, 3, "the loss is lost")]
    figures = summarize({"rte": runs})["tasks"]["rte"]["metrics"]["accuracy"]
    assert (figures["mean"], figures["n"]) == (pytest.approx(0.6), 2)
    assert figures["mean_without_failed"] == 0.8
    figures = summarize({"rte": runs[1:]})["tasks"]["rte"]["metrics"]["accuracy"]
    assert figures["mean_without_failed"] is None, "there is no other run"
