"""Many runs in one report: statistics over seeds, and the averages under which papers report GLUE.

Averages of different papers cannot be compared, since each takes other columns; `AVERAGES` says which. All
four are given side by side, of whatever examples the scores are: those of the dev sets here, whereas BERT's
are of the secret test sets.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Json = dict[str, Any]
Column = tuple[tuple[str, str], ...]
"""One or more scores (task, name of the metric), whose mean counts once."""


class Average(NamedTuple):
    """A rule by which a paper condenses GLUE into one number."""

    title: str
    columns: tuple[Column, ...]
    protocol: str


def _column(*scores: str) -> Column:
    return tuple((task, metric) for task, metric in (score.split() for score in scores))


_MATCHED, _MISMATCHED = "mnli accuracy", "mnli accuracy_mismatched"
_SAME = (_column("cola matthews_correlation"), _column("sst2 accuracy"), _column("qnli accuracy"))
_RTE = _column("rte accuracy")
_F1 = (_column("mrpc f1"), _column("qqp f1"))

AVERAGES = {
    "official_nine": Average(
        "nine columns",
        (*_SAME, _RTE, *_F1, _column("stsb spearman"), _column(_MATCHED), _column(_MISMATCHED)),
        "mean of nine columns as in BERT: both MNLI sets, F1 of MRPC and QQP, STS-B Spearman; no WNLI",
    ),
    "eight_tasks": Average(
        "eight tasks",
        (
            *_SAME,
            _RTE,
            _column("mrpc accuracy", "mrpc f1"),
            _column("qqp accuracy", "qqp f1"),
            _column("stsb pearson", "stsb spearman"),
            _column(_MATCHED, _MISMATCHED),
        ),
        "mean of eight tasks, the two scores of a task averaged first, as on the GLUE server; no WNLI",
    ),
    "accuracy_rule": Average(
        "accuracy rule",
        (
            *_SAME,
            _RTE,
            _column("mrpc accuracy"),
            _column("qqp accuracy"),
            _column("stsb spearman"),
            _column(_MATCHED),
        ),
        "mean of eight tasks as ELECTRA gives them: accuracy of MRPC, QQP and matched MNLI, STS-B Spearman",
    ),
    "cramming_rule": Average(
        "cramming rule",
        (*_SAME, _RTE, *_F1, _column("stsb pearson"), _column(_MATCHED), _column(_MISMATCHED)),
        "mean of nine columns as in Cramming: both MNLI sets, F1 of MRPC and QQP, STS-B Pearson; no WNLI",
    ),
}
"""The rules, checked against published rows (see the tests); Geiping and Goldstein 2022, arXiv:2212.14034."""


def summarize(runs: Mapping[str, Sequence[Json]]) -> Json:
    """Return the statistics of every task and the averages.

    Args:
        runs: the summaries of the runs of each task. A run that failed counts like any other; one that came
            to no score at all is counted as failed only.

    Returns:
        `tasks`: for each its seeds, failed runs, selection, examples and, for each metric, mean, std (of a
        sample; None of a single run), median, n, values, the same by seed, and the mean without failed runs
        (None where that is no other). `averages`: for each the value from the means, the one from the
        medians, what is missing, and the protocol in words.
    """
    tasks = {name: _task_facts(summaries) for name, summaries in runs.items()}
    return {"tasks": tasks, "averages": {name: _average(rule, tasks) for name, rule in AVERAGES.items()}}


def _task_facts(summaries: Sequence[Json]) -> Json:
    names = dict.fromkeys(name for summary in summaries for name in summary["metrics"])
    failed = {str(one["seed"]): one["failed"] for one in summaries if one.get("failed")}
    return {
        "seeds": [summary["seed"] for summary in summaries],
        "failed": failed,
        "selection": "; ".join(dict.fromkeys(str(one.get("selection", "")) for one in summaries)),
        "num_train_examples": max(one["num_train_examples"] for one in summaries),
        "num_validation_examples": max(one["num_validation_examples"] for one in summaries),
        "validation_examples": next(filter(None, (one.get("validation_examples") for one in summaries)), ""),
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
    missing = [
        f"{task} {metric}"
        for column in rule.columns
        for task, metric in column
        if metric not in tasks.get(task, {}).get("metrics", {})
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
