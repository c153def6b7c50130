"""Report the runs of a suite: a table, the same in JSON, a picture, and a tracked run."""

from __future__ import annotations

import importlib.metadata
import logging
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mlm
from mlm.config.errors import InputError
from mlm.config.files import config_folder, shipped_names
from mlm.config.finetune import DIAGNOSTIC, GLUE_TASKS, MNLI, FinetuneConfig
from mlm.config.parse import read_group, to_plain
from mlm.data.glue import size_of, submitted_parts
from mlm.evaluation.commands import write_predictions
from mlm.evaluation.glue import answer, summarize, to_markdown, write_submission
from mlm.evaluation.metrics import task_metrics
from mlm.files import write_json, write_text
from mlm.hub.pretrained import read_classifier
from mlm.launch import command_for
from mlm.startup.suite import OWN_DATA, points
from mlm.training.plots import plot_scores
from mlm.training.results import HELD_OUT
from mlm.training.run_folder import git_commit
from mlm.training.tracking import build_tracker, pretraining_run, track_table

Json = dict[str, Any]
RECIPE = ("selection", "start_from_mnli", "recipes", "head", "optimizer", "schedule", "trainer")
"""Keys that a file of `configs/finetune` sets, with `data.max_length`."""

log = logging.getLogger(__name__)


def report(config: FinetuneConfig, folder: Path, runs: Sequence[tuple[FinetuneConfig, Json]]) -> None:
    """Write, print and track table, picture and submission of a suite, whose `runs` have summaries.

    Table and picture are called `glue`, or `seeds` or `folds` for the user's own data.
    """
    own = config.data.title if config.data.train else OWN_DATA
    by_task: dict[str, list[tuple[FinetuneConfig, Json]]] = {}
    for run, summary in runs:
        by_task.setdefault(run.task[0] if run.task else own, []).append((run, summary))
    names = [task for task in (*GLUE_TASKS, own) if task in by_task]
    units = {task: by_task[task][0][0] for task in names}
    summaries = {task: [summary for _, summary in by_task[task]] for task in names}
    submission = _submit(config, folder, summaries) if config.submit else None
    stem, subject = ("glue", "GLUE") if config.task else ("seeds", next(iter(summaries)))
    from_mnli = "RTE, MRPC and STS-B from the model tuned on MNLI"
    protocol = f"Runs: {from_mnli if config.start_from_mnli else 'every task alone'}."
    protocol = protocol if config.task else "Runs: the same data, another seed."
    folds = config.data.folds if config.data.fold is None else None
    if folds:
        stem, protocol = "folds", f"Runs: each of {folds} folds is held out once."
    result: Json = {
        "name": config.name,
        "title": config.name if config.task else subject,
        "model": config.model,
        "protocol": protocol,
        "settings": settings_of(config, units, summaries),
        **summarize(summaries),
    }
    if not config.task:
        result["averages"] = {}
    if submission:
        result["submission"] = submission
    if pooled := _pool(config, folder, runs) if folds else {}:
        result["pooled"] = pooled
    text = to_markdown(result)
    table, picture = folder / f"{stem}.md", folder / "plots" / f"{stem}.png"
    write_text(table, text)
    write_json(table.with_suffix(".json"), result)
    model = "/".join(Path(str(config.model)).parts[-2:])
    plot_scores(result["tasks"], result["averages"], picture, f"{model}: {subject}")
    print(f"\n{text}\ntable           {table}, {table.with_suffix('.json')}")
    print(f"picture         {picture}")
    _track(config, folder, stem, result)
    if folds:
        print(_next_steps(config, folder, pooled))
    if submission:
        print(f"submission      {submission['file']}")
        if submission["refused"]:
            log.warning("the server will refuse it: %s", ", ".join(submission["refused"]))


def _pool(config: FinetuneConfig, folder: Path, runs: Sequence[tuple[FinetuneConfig, Json]]) -> Json:
    """Score the held-out predictions of all folds together, and write them; {} if a fold has none."""
    files = [Path(run.runs_dir, str(run.name), HELD_OUT) for run, _ in runs]
    models = [summary["model_dir"] for _, summary in runs]
    if not all(models) or not all(file.exists() for file in files):
        return {}
    parts = [dict(np.load(file)) for file in files]
    rows, logits, labels = (
        np.concatenate([part[key] for part in parts]) for key in ("rows", "logits", "labels")
    )
    order, path = np.argsort(rows), folder / "held_out.csv"
    classifier = read_classifier(Path(models[0]))
    ids = (str(row + 1) for row in rows[order])
    write_predictions(path, ids, logits[order], classifier, config.data.label_separator)
    scores = task_metrics(classifier.label_type, labels, logits)
    return {"metrics": scores, "num_examples": len(rows), "file": str(path)}


def _next_steps(config: FinetuneConfig, folder: Path, pooled: Json) -> str:
    """Return where the held-out predictions are, and how to train the model to use."""
    settings, name = shlex.quote(f"{folder}/config.yaml"), shlex.quote(f"{config.name}-final")
    change = f"--data.folds null --data.validation_fraction 0.01 --name {name}"
    places = (
        f"held out        {pooled['file']}  (each row by the model that had not seen it)\n" if pooled else ""
    )
    return f"""{places}
next
  final model     {command_for("finetune.py")} --config {settings} {change}
                  (trains on nearly all rows; the models of the folds only measure the settings)"""


def answers_of(config: FinetuneConfig, task: str, model: str) -> dict[str, list[str]]:
    """Return the answers of a model to all submitted parts of a task, by the official name of the file."""
    longest, batch = config.data.max_length, 2 * config.trainer.batch_size
    return {
        name: answer(model, task, part, config.glue_dir, longest, batch)
        for part, name in submitted_parts(task).items()
    }


def _submit(config: FinetuneConfig, folder: Path, summaries: dict[str, list[Json]]) -> Json:
    """Write the zip file for the server, with the best model of each task by its first score on dev."""
    models = {}
    for task, runs in summaries.items():
        scored = [run for run in runs if run["metrics"]]
        if not scored:
            raise InputError(f"submit=true: every run of {task} failed, so there is no model to answer with")
        models[task] = max(scored, key=lambda run: next(iter(run["metrics"].values())))["model_dir"]
    models[DIAGNOSTIC] = models[MNLI]
    answers: dict[str, list[str]] = {}
    refused = []
    for task, model in models.items():
        answers |= answers_of(config, task, model)
        for part, name in submitted_parts(task).items():
            size = size_of(task, part, len(answers[name]))
            if not size.is_official:
                refused.append(f"{name} answers {size}")
    write_submission(folder / "submission.zip", answers)
    return {"file": str(folder / "submission.zip"), "models": models, "refused": refused}


def settings_of(
    config: FinetuneConfig, units: Mapping[str, FinetuneConfig], runs: Mapping[str, Sequence[Json]]
) -> Json:
    """Return the settings shared by all runs, and those that may differ by task."""
    sizes = (summary.get("num_encoder_parameters") for summaries in runs.values() for summary in summaries)
    versions = {"mlm": importlib.metadata.version("mlm"), "torch": torch.__version__}
    return {
        "common": {
            "model": config.model,
            "parameters of the encoder": next(filter(None, sizes), None),
            "recipe": recipe_of(config) or "no file of configs/finetune as it is; see config.yaml",
            "data.max_length": config.data.max_length or "as far as the model reads",
            "data.max_train_examples": config.data.max_train_examples or "all",
            "versions": versions | {"commit": git_commit(Path(mlm.__file__).parent)},
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        },
        "tasks": {task: settings_of_task(unit, runs[task]) for task, unit in units.items()},
    }


def settings_of_task(unit: FinetuneConfig, runs: Sequence[Json]) -> Json:
    """Return the settings of a task; of a grid the values tried, and the one chosen with each seed."""
    optimizer, trainer = ("name", "lr", "weight_decay"), ("batch_size", "max_epochs")
    settings: Json = {f"optimizer.{name}": getattr(unit.optimizer, name) for name in optimizer}
    settings |= {f"trainer.{name}": getattr(unit.trainer, name) for name in trainer}
    if unit.optimizer.lr is None:  # chosen by the encoder, the same in every run
        settings["optimizer.lr"] = next((run["lr"] for run in runs if "lr" in run), None)
    grid = points(unit)
    each = "fold" if unit.data.folds and len(runs) > 1 else "seed"
    chosen = [run["grid"][run["grid_point"] - 1] for run in runs if "grid" in run]
    for key in grid[0]:
        tried = list(dict.fromkeys(point[key] for point in grid))
        one_each = {"one of": tried, f"chosen by {each}": [point[key] for point in chosen]}
        settings[key] = one_each if len(tried) > 1 else tried[0]
    return settings | {"seeds": list(dict.fromkeys(run["seed"] for run in runs))}


def recipe_of(config: FinetuneConfig) -> str | None:
    """Return the shipped file that has exactly these settings; None: there is none."""
    for name in shipped_names("finetune"):
        try:
            shipped = read_group(FinetuneConfig, config_folder() / "finetune" / f"{name}.yaml")
        except InputError:  # the user's own file beside ours
            continue
        same = all(to_plain(getattr(config, key)) == to_plain(getattr(shipped, key)) for key in RECIPE)
        if same and config.data.max_length == shipped.data.max_length:
            return name
    return None


def _track(config: FinetuneConfig, folder: Path, stem: str, result: Json) -> None:
    """Track table and picture in a run of their own, beside those of the tasks."""
    tracker = build_tracker(config, folder, group=pretraining_run(str(config.model)))
    if not tracker:
        return
    columns = ["task", "score", "mean", "std", "median", "n"]
    rows = [
        [task, metric, *(figures[name] for name in columns[2:])]
        for task, facts in result["tasks"].items()
        for metric, figures in facts["metrics"].items()
    ]
    averages = [facts for facts in result["averages"].values() if facts["value"] is not None]
    means = [["average", facts["title"], facts["value"], None, None, None] for facts in averages]
    track_table([tracker], stem, columns, rows + means, folder / "plots" / f"{stem}.png")
    tracker.experiment.finish()
