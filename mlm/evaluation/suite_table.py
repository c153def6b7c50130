"""Write the report of a suite in Markdown: scores, averages and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlm.data.labelled import PartSize

Json = dict[str, Any]


def to_markdown(report: Json) -> str:
    """Return the report as Markdown tables, scores times 100.

    Args:
        report: the result of `summarize`, with `title`, `model`, `protocol` and `settings`; `settings` has
            `common`, for all runs, and `tasks`, by task, in plain values.
    """
    tasks, settings = report["tasks"], report["settings"]
    lines = [
        f"# {report['title']}",
        "",
        f"Started from {report['model']}. Scores times 100. {report['protocol']}",
        *_reservations(tasks, settings),
        "",
        *_scores(tasks),
        *_averages(report["averages"], tasks),
        "",
        "## Settings",
        "",
        *_settings(tasks, settings),
    ]
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
    lines = _head("task", "score", "mean:", "std:", "median:", "n:", "failed", "selection", "each seed")
    for task, facts in tasks.items():
        for metric, figures in facts["metrics"].items() or [("no score", {"n": 0})]:
            numbers = (_shown(figures.get(key)) for key in ("mean", "std", "median"))
            by_seed = figures.get("by_seed", {})
            each = ", ".join(_shown(by_seed.get(str(seed))) for seed in facts["seeds"])
            words = _failed(facts["failed"], figures), facts["selection"], each
            lines.append(_row(task, metric, *numbers, figures["n"], *words))
    return lines


def _failed(failed: Mapping[str, str], figures: Json) -> str:
    """Return the failed runs and reasons, whether they are in the mean, and the mean without them."""
    by_seed = figures.get("by_seed", {})
    notes = []
    for reason in dict.fromkeys(failed.values()):
        seeds = [seed for seed, why in failed.items() if why == reason]
        where = " (in the mean)" if any(seed in by_seed for seed in seeds) else ""
        notes.append(f"seed {', '.join(seeds)}: {reason}{where}")
    without = figures.get("mean_without_failed")
    if without is not None and _shown(without) != _shown(figures["mean"]):
        notes.append(f"mean without: {_shown(without)}")
    return "; ".join(notes) or "none"


def _averages(averages: Json, tasks: Json) -> list[str]:
    """Return the averages with all their scores, and in one line the scores that the others lack."""
    given = {name: facts for name, facts in averages.items() if not facts["missing"]}
    others = [facts for name, facts in averages.items() if name not in given]
    lines = []
    if given:
        lines += ["", *_head("average", "of means:", "of medians:", "rule")]
        for facts in given.values():
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
        lines.append(_row(task, f"{facts['num_train_examples']:,}", _validation(facts), *values))
    return lines


def _validation(facts: Json) -> str:
    words, number = facts["validation_examples"], f"{facts['num_validation_examples']:,}"
    return _odd_sizes(facts) or (f"{number} ({words})" if words and not facts["dev_sizes"] else number)


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
