"""Summarize many runs: statistics over seeds, and the averages under which papers report GLUE.

Averages of different papers cannot be compared, because each takes other columns (`AVERAGES`). All four are
computed here from scores on the dev sets, whereas BERT's published ones are on the secret test sets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]
Column = tuple[tuple[str, str], ...]
"""One or more scores (task, name of the metric), whose mean counts once."""


class Average(NamedTuple):
    """A paper's rule for averaging GLUE."""

    title: str
    columns: tuple[Column, ...]
    protocol: str


def _columns(*columns: str) -> tuple[Column, ...]:
    scores = ([score.split() for score in column.split(" + ")] for column in columns)
    return tuple(tuple((task, metric) for task, metric in column) for column in scores)


_MATCHED, _MISMATCHED = "mnli accuracy", "mnli accuracy_mismatched"
_SAME = ("cola matthews_correlation", "sst2 accuracy", "qnli accuracy", "rte accuracy")
_F1 = ("mrpc f1", "qqp f1")

AVERAGES = {
    "official_nine": Average(
        "nine columns",
        _columns(*_SAME, *_F1, "stsb spearman", _MATCHED, _MISMATCHED),
        "mean of nine columns as in BERT: both MNLI sets, F1 of MRPC and QQP, STS-B Spearman; no WNLI",
    ),
    "eight_tasks": Average(
        "eight tasks",
        _columns(
            *_SAME,
            "mrpc accuracy + mrpc f1",
            "qqp accuracy + qqp f1",
            "stsb pearson + stsb spearman",
            f"{_MATCHED} + {_MISMATCHED}",
        ),
        "mean of eight tasks, the two scores of a task averaged first, as on the GLUE server; no WNLI",
    ),
    "accuracy_rule": Average(
        "accuracy rule",
        _columns(*_SAME, "mrpc accuracy", "qqp accuracy", "stsb spearman", _MATCHED),
        "mean of eight tasks as in ELECTRA: accuracy of MRPC, QQP and matched MNLI, STS-B Spearman",
    ),
    "cramming_rule": Average(
        "cramming rule",
        _columns(*_SAME, *_F1, "stsb pearson", _MATCHED, _MISMATCHED),
        "mean of nine columns as in Cramming: both MNLI sets, F1 of MRPC and QQP, STS-B Pearson; no WNLI",
    ),
}
"""The rules, checked against published rows (see the tests); Geiping and Goldstein 2022, arXiv:2212.14034."""


def summarize(runs: Mapping[str, Sequence[Json]]) -> Json:
    """Return the statistics of every task and the averages.

    Args:
        runs: the summaries of the runs of each task. The scores of a failed run count like any others; a run
            without scores counts as failed only.

    Returns:
        `tasks`: for each its seeds, failed runs, selection, examples and, for each metric, mean, std (of a
        sample; None of a single run), median, n, values, the same by seed, and the mean without failed runs
        (None if none or all have failed). `averages`: for each the value from the means and from the medians,
        the missing scores, title and protocol.
    """
    tasks = {name: _task_facts(summaries) for name, summaries in runs.items()}
    return {"tasks": tasks, "averages": {name: _average(rule, tasks) for name, rule in AVERAGES.items()}}


def _task_facts(summaries: Sequence[Json]) -> Json:
    names = dict.fromkeys(name for summary in summaries for name in summary["metrics"])
    first: Json = next((one for one in summaries if one.get("validation_examples")), {})
    return {
        "seeds": [summary["seed"] for summary in summaries],
        "failed": {str(one["seed"]): one["failed"] for one in summaries if one.get("failed")},
        "selection": "; ".join(dict.fromkeys(str(one.get("selection", "")) for one in summaries)),
        "num_train_examples": max(one["num_train_examples"] for one in summaries),
        "num_validation_examples": max(one["num_validation_examples"] for one in summaries),
        "validation_examples": first.get("validation_examples", ""),
        "dev_sizes": first.get("dev_sizes", []),
        "metrics": {name: _statistics(summaries, name) for name in names},
    }


def _statistics(summaries: Sequence[Json], name: str) -> Json:
    scored = [summary for summary in summaries if name in summary["metrics"]]
    values = [summary["metrics"][name] for summary in scored]
    good = [summary["metrics"][name] for summary in scored if not summary.get("failed")]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "median": statistics.median(values),
        "n": len(values),
        "values": values,
        "by_seed": {str(summary["seed"]): summary["metrics"][name] for summary in scored},
        "mean_without_failed": statistics.fmean(good) if 0 < len(good) < len(values) else None,
    }


def _average(rule: Average, tasks: Json) -> Json:
    scores = [score for column in rule.columns for score in column]
    missing = [
        f"{task} {metric}" for task, metric in scores if metric not in tasks.get(task, {}).get("metrics", {})
    ]

    def mean_of(statistic: str) -> float | None:
        if missing:
            return None
        columns = (
            statistics.fmean(tasks[task]["metrics"][metric][statistic] for task, metric in column)
            for column in rule.columns
        )
        return statistics.fmean(columns)

    return {
        "value": mean_of("mean"),
        "of_medians": mean_of("median"),
        "missing": missing,
        "title": rule.title,
        "protocol": rule.protocol,
    }
