"""The Markdown report: whole tables, reasons against a comparison, failed runs, settings."""

from __future__ import annotations

import json

import pytest

from mlm.evaluation.glue import AVERAGES, summarize, to_markdown

SCORES = {
    "cola": ["matthews_correlation"],
    "sst2": ["accuracy"],
    "mrpc": ["accuracy", "f1"],
    "stsb": ["pearson", "spearman"],
    "qqp": ["accuracy", "f1"],
    "mnli": ["accuracy", "accuracy_mismatched"],
    "qnli": ["accuracy"],
    "rte": ["accuracy"],
    "wnli": ["accuracy"],
}


def run(value, *names, seed=1, failed=None, rows="the official dev set", sizes=(("dev", 2000, 2000),)):
    return {
        "seed": seed,
        "metrics": dict.fromkeys(names, value),
        "failed": failed,
        "selection": "last epoch",
        "num_train_examples": 1000,
        "num_validation_examples": 2000,
        "validation_examples": rows,
        "dev_sizes": [dict(zip(("part", "rows", "official"), size, strict=True)) for size in sizes],
    }


def table(runs, common=None, tasks=None):
    settings = {
        "common": {"model": "runs/one/model", "parameters of the encoder": 1234567, **(common or {})},
        "tasks": tasks or {task: {"optimizer.lr": 3e-4, "seeds": [1, 1000]} for task in runs},
    }
    head = {"title": "suite", "model": "runs/one/model", "protocol": "Runs.", "settings": settings}
    return to_markdown(json.loads(json.dumps(head | summarize(runs))))


def all_tasks(*left_out):
    return {task: [run(0.5, *names)] for task, names in SCORES.items() if task not in left_out}


def test_all_scores_and_averages_are_in_whole_tables():
    text = table(all_tasks())
    lines = text.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 3 + 13 + len(AVERAGES) + 9
    for start, end in ((4, 19), (20, 26)):
        assert len({line.count("|") for line in lines[start:end]}) == 1
    assert "| nine columns | 50.00 | 50.00 | mean of nine columns" in text
    assert "need" not in text
    assert "official" not in text
    assert "**" not in text


def test_averages_without_all_scores_are_one_line():
    lines = table({"rte": [run(0.6, "accuracy")], "mnli": [run(0.6, "accuracy")]}).splitlines()
    found = [line for line in lines if "verage" in line]
    assert found == ["Averages need cola, sst2, qnli, mrpc, qqp, stsb, mnli accuracy_mismatched too."]
    runs = all_tasks("mnli") | {"mnli": [run(0.5, "accuracy")]}
    lines = table(runs).splitlines()
    assert sum(line.startswith(("| accuracy rule", "| eight", "| nine", "| cramming")) for line in lines) == 1
    needs = "The averages nine columns, eight tasks, cramming rule need mnli accuracy_mismatched too."
    assert needs in lines


def test_failed_runs_are_shown_with_reason_and_whether_they_are_in_the_mean():
    reason = "only one class is predicted"
    runs = [run(0.8, "accuracy"), run(0.4, "accuracy", seed=2, failed=reason), run(0, seed=3, failed="lost")]
    text = table({"rte": runs})
    assert (
        f"| rte | accuracy | 60.00 | 28.28 | 60.00 | 2 | seed 2: {reason} (in the mean); seed 3: lost; "
        "mean without: 80.00 | last epoch | 80.00, 40.00, - |"
    ) in text
    same = [run(0.8, "accuracy"), run(0.8, "accuracy", seed=2, failed=reason)]
    assert f"| 2 | seed 2: {reason} (in the mean) | last epoch | 80.00, 80.00 |" in table({"rte": same})
    assert "| rte | no score | - | - | - | 0 | seed 3: lost | last epoch | - |" in table({"rte": runs[2:]})


def test_settings_that_differ_by_task_are_columns_and_shared_ones_lines():
    grid = {"one of": [2e-5, 5e-5], "chosen by seed": [5e-5, 2e-5]}
    tasks = {
        "rte": {"optimizer.lr": grid, "trainer.max_epochs": 3},
        "sst2": {"optimizer.lr": 3e-4, "trainer.max_epochs": 3},
    }
    text = table({task: [run(0.5, "accuracy")] for task in tasks}, {"commit": None}, tasks)
    assert "- parameters of the encoder: 1,234,567\n- trainer.max_epochs: 3\n" in text
    assert "| task | train | validation | optimizer.lr |\n|---|--:|--:|---|\n" in text
    assert "| rte | 1,000 | 2,000 | one of 2e-05, 5e-05; chosen by seed 5e-05, 2e-05 |" in text
    assert "| sst2 | 1,000 | 2,000 | 0.0003 |" in text
    assert "- seeds: 1, 1000\n" in table({"rte": [run(0.5, "accuracy")]})


@pytest.mark.parametrize(("most", "told"), [(1000, True), (5000, False), ("all", False)])
def test_reasons_against_a_comparison_are_bold(most, told):
    runs = {
        "rte": [run(0.5, "accuracy")],
        "mnli": [run(0.5, "accuracy", sizes=[("dev_matched", 9, 9815), ("dev_mismatched", 9832, 9832)])],
    }
    text = table(runs, {"data.max_train_examples": most})
    assert "\n**Not the official dev sets: mnli 9 of 9,815 rows of dev_matched.**\n" in text
    bold = "\n**Trained on 1,000 examples only (data.max_train_examples): rte, mnli.**\n"
    assert (bold in text) == told
    assert "| mnli | 1,000 | 9 of 9,815 rows of dev_matched |" in text
    own = table({"own.csv": [run(0.5, "accuracy", rows="10% of own.csv, chosen by a hash", sizes=())]})
    assert "| own.csv | 1,000 | 2,000 (10% of own.csv, chosen by a hash) |" in own
    assert "Not the official" not in own


def test_words_of_a_file_name_are_not_taken_for_a_size():
    rows = "9 of 10 rows of dev.csv"
    text = table({"own.csv": [run(0.5, "accuracy", rows=rows, sizes=())]})
    assert f"| own.csv | 1,000 | 2,000 ({rows}) |" in text
    assert "Not the official" not in text
