"""Statistics against the standard library and numpy, averages against published rows."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mlm.evaluation.glue_table import AVERAGES, summarize, to_markdown

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


def test_average_with_a_hole_is_null_and_says_what_is_missing():
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
    assert summarize({"rte": runs[:1]})["tasks"]["rte"]["metrics"]["accuracy"]["std"] is None


def test_average_of_medians():
    row = {task: [run(metrics, 1), run(metrics, 2)] for task, metrics in HF_ROW.items()}
    row["rte"] = [run({"accuracy": value}, value) for value in (0.0, 65.70, 65.70)]
    found = summarize(row)["averages"]["accuracy_rule"]
    assert found["of_medians"] == pytest.approx(81.55, abs=0.005)
    assert found["value"] == pytest.approx(81.55 - 65.70 / 24, abs=0.005)


def test_failed_runs_count_and_are_shown_those_without_a_score_only_shown():
    reason = "only one class is predicted"
    runs = [run({"accuracy": 0.8}, 1), run({"accuracy": 0.4}, 2, reason), run({}, 3, "the loss is lost")]
    report = summarize({"rte": runs})
    figures = report["tasks"]["rte"]["metrics"]["accuracy"]
    assert (figures["mean"], figures["n"]) == (pytest.approx(0.6), 2)
    text = to_markdown({"name": "x", "model": "m", "protocol": "Runs.", **report})
    assert (
        f"| rte | accuracy | 60.00 | 28.28 | 60.00 | 2 | seed 2: {reason}; seed 3: the loss is lost |" in text
    )
    report = summarize({"rte": [run({}, 3, "lost")]})
    text = to_markdown({"name": "x", "model": "m", "protocol": "Runs.", **report})
    assert "| rte | no score | - | - | - | 0 | seed 3: lost |" in text


def test_table_names_what_an_average_lacks_by_task():
    row = {"rte": {"accuracy": 0.6}, "mnli": {"accuracy": 0.8}}
    report = summarize({task: [run(metrics)] for task, metrics in row.items()})
    text = to_markdown({"name": "x", "model": "m", "protocol": "Runs.", **report})
    assert "; missing: cola, sst2, qnli, mrpc, qqp, stsb, mnli accuracy_mismatched |" in text


def test_table_has_all_scores_and_averages_and_is_plain_json():
    report = summarize({task: [run(metrics)] for task, metrics in HF_ROW.items()})
    text = to_markdown({"name": "x", "model": "m", "protocol": "Runs.", **json.loads(json.dumps(report))})
    lines = text.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 13 + len(AVERAGES)
    assert len({line.count("|") for line in lines[4:19]}) == 1
