"""Results on GLUE: a submission for its server, statistics over runs and papers' averages, and their report.

Averages of different papers cannot be compared, because each takes other columns (`AVERAGES`). All four are
computed here from scores on the dev sets, whereas BERT's published ones are on the secret test sets.
"""

from __future__ import annotations

import statistics
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig
from mlm.cores import share_cores
from mlm.data.glue import TASKS, read_part
from mlm.data.labelled import PartSize
from mlm.evaluation.predictor import Predictor, warn_truncated
from mlm.files import replacing
from mlm.hub.pretrained import read_classifier

Json = dict[str, Any]

_SAME = "cola matthews_correlation, sst2 accuracy, qnli accuracy, rte accuracy"
_MNLI = "mnli accuracy, mnli accuracy_mismatched"
AVERAGES = {
    "official_nine": (
        "nine columns",
        f"{_SAME}, mrpc f1, qqp f1, stsb spearman, {_MNLI}",
        "mean of nine columns as in BERT: both MNLI sets, F1 of MRPC and QQP, STS-B Spearman; no WNLI",
    ),
    "eight_tasks": (
        "eight tasks",
        f"{_SAME}, mrpc accuracy + mrpc f1, qqp accuracy + qqp f1, stsb pearson + stsb spearman, "
        "mnli accuracy + mnli accuracy_mismatched",
        "mean of eight tasks, the two scores of a task averaged first, as on the GLUE server; no WNLI",
    ),
    "accuracy_rule": (
        "accuracy rule",
        f"{_SAME}, mrpc accuracy, qqp accuracy, stsb spearman, mnli accuracy",
        "mean of eight tasks as in ELECTRA: accuracy of MRPC, QQP and matched MNLI, STS-B Spearman",
    ),
    "cramming_rule": (
        "cramming rule",
        f"{_SAME}, mrpc f1, qqp f1, stsb pearson, {_MNLI}",
        "mean of nine columns as in Cramming: both MNLI sets, F1 of MRPC and QQP, STS-B Pearson; no WNLI",
    ),
}
"""Title, columns and description of papers' rules, checked against published rows (see the tests; Cramming:
Geiping and Goldstein 2022, arXiv:2212.14034). The mean of two scores joined by + counts as one column."""


def summarize(runs: Mapping[str, Sequence[Json]]) -> Json:
    """Return the statistics of every task over the summaries of its runs, and the averages.

    Scores of a failed run count like any others; a run without scores counts as failed only. The std is of a
    sample, None of a single run; the mean without failed runs is None if none or all have failed. An average
    has a value from the means and one from the medians, None if scores are missing. The runs differ in their
    seed, or in their fold if the summaries have different ones.
    """
    tasks = {name: _task_facts(summaries) for name, summaries in runs.items()}
    return {"tasks": tasks, "averages": {name: _average(tasks, *rule) for name, rule in AVERAGES.items()}}


def _task_facts(summaries: Sequence[Json]) -> Json:
    names = dict.fromkeys(name for summary in summaries for name in summary["metrics"])
    first: Json = next((one for one in summaries if one.get("validation_examples")), {})
    kind = "fold" if len({one.get("fold") for one in summaries}) > 1 else "seed"
    return {
        "runs": kind,
        f"{kind}s": [summary[kind] for summary in summaries],
        "failed": {str(one[kind]): one["failed"] for one in summaries if one.get("failed")},
        "selection": "; ".join(dict.fromkeys(str(one.get("selection", "")) for one in summaries)),
        "num_train_examples": max(one["num_train_examples"] for one in summaries),
        "num_validation_examples": max(one["num_validation_examples"] for one in summaries),
        "sizes": [[one["num_train_examples"], one["num_validation_examples"]] for one in summaries],
        "validation_examples": "" if kind == "fold" else first.get("validation_examples", ""),
        "dev_sizes": first.get("dev_sizes", []),
        "metrics": {name: _statistics(summaries, name, kind) for name in names},
    }


def _statistics(summaries: Sequence[Json], name: str, kind: str) -> Json:
    scored = [summary for summary in summaries if name in summary["metrics"]]
    values = [summary["metrics"][name] for summary in scored]
    good = [summary["metrics"][name] for summary in scored if not summary.get("failed")]
    return {
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "median": statistics.median(values),
        "n": len(values),
        "values": values,
        f"by_{kind}": {str(summary[kind]): summary["metrics"][name] for summary in scored},
        "mean_without_failed": statistics.fmean(good) if 0 < len(good) < len(values) else None,
    }


def _average(tasks: Json, title: str, names: str, protocol: str) -> Json:
    found = {f"{task} {name}": figures for task in tasks for name, figures in tasks[task]["metrics"].items()}
    columns = [column.split(" + ") for column in names.split(", ")]
    missing = [score for column in columns for score in column if score not in found]

    def mean_of(statistic: str) -> float | None:
        means = (statistics.fmean(found[score][statistic] for score in column) for column in columns)
        return None if missing else statistics.fmean(means)

    values = {"value": mean_of("mean"), "of_medians": mean_of("median"), "missing": missing}
    return values | {"title": title, "protocol": protocol}


def to_markdown(report: Json) -> str:
    """Return the result of `summarize` as Markdown tables, scores times 100.

    It also needs `title`, `model`, `protocol` and `settings`: `common`, for all runs, and `tasks`, by task.
    """
    tasks, settings = report["tasks"], report["settings"]
    started = f"Started from {report['model']}. Scores times 100. {report['protocol']}"
    lines = [f"# {report['title']}", "", started, *_reservations(tasks, settings), "", *_scores(tasks)]
    if pooled := report.get("pooled"):
        scores = ", ".join(f"{name} {_shown(value)}" for name, value in pooled["metrics"].items())
        lines += ["", f"All {pooled['num_examples']:,} held-out predictions together: {scores}."]
    lines += [*_averages(report["averages"], tasks), "", "## Settings", "", *_settings(tasks, settings)]
    return "\n".join(lines) + "\n"


def _reservations(tasks: Json, settings: Json) -> list[str]:
    """Return in bold lines the reasons why the scores cannot be compared with those of others."""
    lines = []
    odd = [f"{task} {_odd_sizes(facts)}" for task, facts in tasks.items() if _odd_sizes(facts)]
    if odd:
        lines += ["", f"**Not the official dev sets: {'; '.join(odd)}.**"]
    most = settings["common"].get("data.max_train_examples")
    cut = [task for task, facts in tasks.items() if facts["num_train_examples"] == most]
    if cut:
        lines += ["", f"**Trained on {most:,} examples only (data.max_train_examples): {', '.join(cut)}.**"]
    return lines


def _odd_sizes(facts: Json) -> str:
    """Return the sizes of the dev sets of GLUE that are not official; empty: all are, or other data."""
    sizes = (PartSize(**size) for size in facts["dev_sizes"])
    return " and ".join(str(size) for size in sizes if not size.is_official)


def _scores(tasks: Json) -> list[str]:
    kind = next(iter(tasks.values()))["runs"]
    lines = _head("task", "score", "mean:", "std:", "median:", "n:", "failed", "selection", f"each {kind}")
    for task, facts in tasks.items():
        for metric, figures in facts["metrics"].items() or [("no score", {"n": 0})]:
            numbers = (_shown(figures.get(key)) for key in ("mean", "std", "median"))
            by_run = figures.get(f"by_{kind}", {})
            each = ", ".join(_shown(by_run.get(str(number))) for number in facts[f"{kind}s"])
            words = _failed(facts["failed"], figures, kind), facts["selection"], each
            lines.append(_row(task, metric, *numbers, figures["n"], *words))
    return lines


def _failed(failed: Mapping[str, str], figures: Json, kind: str) -> str:
    """Return the failed runs and reasons, whether they are in the mean, and the mean without them."""
    by_run = figures.get(f"by_{kind}", {})
    notes = []
    for reason in dict.fromkeys(failed.values()):
        runs = [run for run, why in failed.items() if why == reason]
        where = " (in the mean)" if any(run in by_run for run in runs) else ""
        notes.append(f"{kind} {', '.join(runs)}: {reason}{where}")
    without = figures.get("mean_without_failed")
    if without is not None and _shown(without) != _shown(figures["mean"]):
        notes.append(f"mean without: {_shown(without)}")
    return "; ".join(notes) or "none"


def _averages(averages: Json, tasks: Json) -> list[str]:
    """Return the averages with all their scores, and in one line the scores that the others lack."""
    given = [facts for facts in averages.values() if not facts["missing"]]
    others = [facts for facts in averages.values() if facts["missing"]]
    lines = ["", *_head("average", "of means:", "of medians:", "rule")] if given else []
    for facts in given:
        numbers = _shown(facts["value"]), _shown(facts["of_medians"])
        lines.append(_row(facts["title"], *numbers, facts["protocol"]))
    if others:
        scores = dict.fromkeys(score for facts in others for score in facts["missing"])
        lacking = dict.fromkeys(score if score.split()[0] in tasks else score.split()[0] for score in scores)
        which = f"The averages {', '.join(facts['title'] for facts in others)}" if given else "Averages"
        lines += ["", f"{which} need {', '.join(lacking)} too."]
    return lines


def _settings(tasks: Json, settings: Json) -> list[str]:
    """Return the settings shared by all runs as a list, and a row for every task."""
    of_tasks = settings["tasks"]
    keys = list(dict.fromkeys(key for one in of_tasks.values() for key in one))
    first = next(iter(of_tasks.values()))
    same = [key for key in keys if all(one.get(key) == first.get(key) for one in of_tasks.values())]
    common = settings["common"] | {key: first[key] for key in same}
    columns = [key for key in keys if key not in same]
    lines = [f"- {key}: {_plain(value)}" for key, value in common.items() if value is not None]
    lines += ["", *_head("task", "train:", "validation:", *columns)]
    for task, facts in tasks.items():
        values = (_plain(of_tasks[task][key]) for key in columns)
        own = "" if facts["dev_sizes"] else facts["validation_examples"]
        train, size = (_range([*filter(None, column)]) for column in zip(*facts["sizes"], strict=True))
        size += f" ({own})" if own else ""
        lines.append(_row(task, train, _odd_sizes(facts) or size, *values))
    return lines


def _range(sizes: Sequence[int]) -> str:
    """Return the only size or the least and the largest; failed runs, which have none, are left out."""
    least, largest = min(sizes, default=0), max(sizes, default=0)
    return f"{least:,}" if least == largest else f"{least:,} to {largest:,}"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name} {_plain(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, list):
        return ", ".join(f"{one:g}" if isinstance(one, float) else str(one) for one in value)
    if isinstance(value, float):
        return f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _head(*names: str) -> list[str]:
    """Return the header of a table; a name that ends in a colon is a column of numbers."""
    rules = ("--:" if name.endswith(":") else "---" for name in names)
    return [_row(*(name.removesuffix(":") for name in names)), f"|{'|'.join(rules)}|"]


def _row(*cells: object) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _shown(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def answer(
    model: str, task: str, part: str, glue_dir: str | None, longest: int | None, batch_size: int
) -> list[str]:
    """Return the answers of a fine-tuned model to a part of a task, in the server's spelling.

    `glue_dir` is the folder of the official files (None: the hub), `longest` the most tokens of an example.
    """
    share_cores(1)
    predictor = Predictor(model, batch_size=batch_size, max_length=longest)
    classifier = read_classifier(predictor.folder)
    encoded = predictor.encode(read_part(task, part, glue_dir))
    warn_truncated(encoded.num_truncated, len(encoded), f"{task}, {part}", predictor.max_length)
    return spell(task, predictor.logits(encoded), classifier)


def spell(task: str, logits: npt.NDArray[np.float64], classifier: ClassifierConfig) -> list[str]:
    """Return the answers (N) of logits (N, C), classes matched by name; InputError: the model has others."""
    spec = TASKS[task]
    if spec.label_type == "regression":
        return [f"{score:.3f}" for score in logits[:, 0].clip(0, 5)]  # the scale of STS-B
    order = classifier.order_of(spec.labels)
    if order is None:
        names = ", ".join(classifier.labels)
        raise InputError(f"the model's classes are {names}, those of {task} {', '.join(spec.labels)}")
    words = spec.spelling or spec.labels
    return [words[best] for best in logits[:, order].argmax(1)]


def answer_table(answers: list[str]) -> str:
    """Return the content of one file of a submission."""
    rows = [f"{index}\t{prediction}\n" for index, prediction in enumerate(answers)]
    return "".join(["index\tprediction\n", *rows])


def write_submission(path: Path, answers: Mapping[str, list[str]]) -> None:
    """Write the zip file for the server atomically; answers by the official name, such as `MNLI-mm`."""
    with replacing(path, "place") as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(answers):
            archive.writestr(zipfile.ZipInfo(f"{name}.tsv"), answer_table(answers[name]))
