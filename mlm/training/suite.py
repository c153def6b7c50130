"""Fine-tune several times: tasks, seeds and grids, and one table of all runs.

    finetune_all --tasks, seeds--> run_suite --each--> run_part --grid--> run_grid --each point--> run_part

- every task and seed is a run in its own folder, `<task>/seed-<n>`; a run with a summary is finished
- a suite continues when it is started again: an unfinished run resumes at its newest checkpoint
- on several GPUs each run is a process with its own GPU
"""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.config.errors import InputError, require
from mlm.config.finetune import DIAGNOSTIC, FROM_MNLI, GLUE_TASKS, MNLI, FinetuneConfig, Point
from mlm.config.parse import read_group
from mlm.data.glue import TASKS, check_parts, size_of, submitted_parts
from mlm.evaluation.glue import answer, answer_table, write_submission
from mlm.files import remove, write_json, write_text
from mlm.launch import launched
from mlm.startup.command import log_to_stderr
from mlm.startup.suite import (
    DATA_FILE,
    OWN_DATA,
    at_point,
    data_digests,
    is_suite,
    points,
    read_digests,
    units,
)
from mlm.training.callbacks import Diverged
from mlm.training.datamodule import forget
from mlm.training.devices import run_on_devices, visible_devices
from mlm.training.finetuning import finetune
from mlm.training.run_folder import keep_config, run_folder, saved_checkpoints
from mlm.training.suite_report import write_report
from mlm.training.tracking import resolve_tracking

Json = dict[str, Any]
SUMMARY = "summary.json"
NO_SCORES: Json = {
    "metrics": {},
    "num_train_examples": 0,
    "num_validation_examples": 0,
    "elapsed_s": 0.0,
    "train_examples_per_second": 0.0,
    "model_dir": None,
    "failed": None,
    "selection": "",
}
"""Summary of a run without a model, but for task and seed."""

log = logging.getLogger(__name__)


def finetune_all(config: FinetuneConfig) -> int:
    """Fine-tune an encoder on all tasks and seeds of a configuration: the `finetune` command.

    Returns:
        The exit status: 0, or 128 + the signal that stopped it.

    Raises:
        InputError: something the user has to change.
    """
    if is_suite(config):
        launch, devices = launched(), config.trainer.devices
        alone = (launch is None or launch.world_size == 1) and devices in ("auto", 1)
        hint = (
            "does not fit several tasks or seeds, of which each runs on one device; leave it out, or run one"
        )
        require(alone, "trainer.devices", launch.world_size if launch else devices, hint)
    config = replace(config, logging=resolve_tracking(config.logging))
    try:
        if is_suite(config):
            return run_suite(config)
        unit = units(config)[0]
        grid = points(unit)
        return run_grid(unit, grid) if len(grid) > 1 else finetune(at_point(unit, grid[0]))
    finally:
        forget()


def run_suite(config: FinetuneConfig) -> int:
    """Do all unfinished runs, then write table, picture and submission; see `finetune_all`."""
    for task in config.task:
        check_parts(task, config.glue_dir, with_test=config.submit)
    with run_folder(replace(config, resume=folder_of(config).exists())) as folder:
        keep_config(config, folder)
        keep_digests(config, folder)
        runs = units(config)
        first = [run for run in runs if run.task == [MNLI]] if config.start_from_mnli else []
        status = run_units(config, first)
        if not status:
            rest = [run for run in runs if run not in first]
            status = run_units(config, [from_mnli(run, first) for run in rest] if first else rest)
        if status:
            name = shlex.quote(str(config.name))
            log.warning("stopped; to continue, start the same command again with --name %s", name)
            return status
        if DIAGNOSTIC in config.task:
            answer_diagnostic(config, [run for run in runs if run.task == [MNLI]])
        report(config, folder, runs)
    return 0


def run_units(config: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> int:
    """Do the unfinished runs, on all devices of this machine; return the exit status."""
    titled = [(run, folder_of(run).relative_to(config.runs_dir).as_posix()) for run in runs]
    devices = visible_devices(config)
    if len(devices) > 1:
        return run_on_devices([one for one in titled if not is_finished(folder_of(one[0]))], devices)
    return next((status for run, title in titled if (status := run_part(run, title))), 0)


def run_part(config: FinetuneConfig, title: str, selects: bool = False) -> int:
    """Do a run of a suite, or a point of a grid, unless it is finished; a diverged one is recorded as failed.

    Args:
        config: the run, with the grid that it may have.
        title: its name in log and tracker.
        selects: as in `finetune`.

    Returns:
        The exit status.
    """
    folder, grid = folder_of(config), points(config)
    if is_finished(folder):
        log.info("%s is finished already", folder)
        return 0
    try:
        if len(grid) > 1:
            return run_grid(config, grid, title)
        return finetune(start_or_resume(at_point(config, grid[0])), selects=selects, title=title)
    except Diverged as error:
        log.warning("%s failed: %s", folder, error)
        write_failure(config, str(error))
        return 0


def start_or_resume(config: FinetuneConfig) -> FinetuneConfig:
    """Return an unfinished run as it continues: from its newest checkpoint, else from the start."""
    folder = folder_of(config)
    resume = bool(saved_checkpoints(folder / "checkpoints"))
    if not resume:
        remove(folder)
    return replace(config, resume=resume)


def run_grid(unit: FinetuneConfig, grid: Sequence[Point], title: str | None = None) -> int:
    """Try every point of a grid and keep the best one, the first of equals, as the result of the run.

    The models of the others are removed as soon as a better one is found.

    Args:
        unit: the run.
        grid: its points.
        title: as in `finetune`.

    Returns:
        The exit status.
    """
    folder = folder_of(unit)
    with run_folder(replace(unit, resume=folder.exists())):
        keep_digests(unit, folder)
        best: tuple[float, int] | None = None
        tried: list[Json] = []
        for number, point in enumerate(grid, 1):
            name = f"point-{number}"
            config = replace(at_point(unit, point), runs_dir=str(folder), name=name)
            if status := run_part(config, f"{title or unit.name}/{name}", selects=True):
                return status
            summary = read_summary(config)
            score = next(iter((summary.get("selection_metrics") or summary["metrics"]).values()), None)
            tried.append({**point, "score": score, "failed": summary["failed"]})
            beaten = number
            if score is not None and (best is None or score > best[0]):
                beaten, best = (best[1] if best else 0), (score, number)
            remove(folder / f"point-{beaten}" / "model")
        summary = keep_point(folder, tried, best[1] if best else 1)
    if title is None:
        print(grid_message(str(unit.name), summary))
    return 0


def keep_point(folder: Path, tried: list[Json], number: int) -> Json:
    """Make one point of a grid the result of the run, and return its summary."""
    point = folder / f"point-{number}"
    summary = read_json(point / SUMMARY)
    for name in ("model", "metrics.csv", "plots"):
        if (point / name).exists():
            remove(folder / name)  # of an earlier try, whose summary was damaged
            shutil.move(point / name, folder / name)
    if summary["metrics"]:
        on_holdout = "selection_metrics" in summary
        where = "a part held out of train" if on_holdout else "the very examples reported: optimistic"
        chosen = f"best of {len(tried)} settings by {next(iter(summary['metrics']))} on {where}"
        summary |= {"model_dir": str(folder / "model"), "selection": chosen}
    summary |= {"grid": tried, "grid_point": number}
    write_json(folder / SUMMARY, summary)
    return summary


def grid_message(name: str, summary: Json) -> str:
    """Return the score of every point and the place of the model, for a grid outside of a suite."""
    shown = ", ".join(f"{metric} {value:.4f}" for metric, value in summary["metrics"].items()) or "no score"
    lines = [f"\n{name}: task {summary['task']}, {shown}; {summary['selection']}\n"]
    for one in summary["grid"]:
        settings = ", ".join(f"{key} {value:g}" for key, value in one.items() if "." in key)
        lines.append(f"  {settings}: {'-' if one['score'] is None else format(one['score'], '.4f')}")
    return "\n".join([*lines, f"\nmodel           {summary['model_dir']}"])


def keep_digests(config: FinetuneConfig, folder: Path) -> None:
    """Record the data of the runs, before the first of them; a suite that grew reads more."""
    write_json(folder / DATA_FILE, data_digests(config) | read_digests(folder))


def write_failure(config: FinetuneConfig, reason: str) -> None:
    """Record that a run failed, so that the table shows it."""
    folder = folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    known = {"task": config.task[0] if config.task else OWN_DATA, "seed": config.seed}
    write_json(folder / SUMMARY, known | NO_SCORES | {"failed": reason})


def is_finished(folder: Path) -> bool:
    """Return whether a run has written its summary; with a damaged one it must be repeated."""
    try:
        summary = read_json(folder / SUMMARY)
    except FileNotFoundError:
        return False
    except ValueError:
        summary = {}
    whole = isinstance(summary, dict) and summary.keys() >= {"metrics", "failed", "model_dir"}
    if not whole:
        log.warning("%s is damaged: the run is repeated", folder / SUMMARY)
    return whole


def folder_of(config: FinetuneConfig) -> Path:
    """Return the folder of a run."""
    return Path(config.runs_dir, str(config.name))


def read_json(path: Path) -> Json:
    """Return the values of a JSON file."""
    values: Json = json.loads(path.read_text(encoding="utf-8"))
    return values


def read_summary(config: FinetuneConfig) -> Json:
    """Return the summary of a finished run."""
    summary = read_json(folder_of(config) / SUMMARY)
    if config.task and summary["metrics"] and "dev_sizes" not in summary:  # written by an earlier version
        _, part, *_ = TASKS[config.task[0]].parts
        size = size_of(config.task[0], part, summary["num_validation_examples"])
        summary["dev_sizes"] = [size._asdict()]
    return summary


def from_mnli(unit: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> FinetuneConfig:
    """Return a run that starts from MNLI's model, of the same seed if there is one, where it gains from that.

    Raises:
        InputError: all runs of MNLI failed.
    """
    if unit.task[0] not in FROM_MNLI:
        return unit
    models = {run.seed: read_summary(run)["model_dir"] for run in runs}
    there = {seed: model for seed, model in models.items() if model}
    if not there:
        raise InputError("start_from_mnli=true: every MNLI run failed, so there is no model to start from")
    model = there.get(unit.seed) or next(iter(there.values()))
    return replace(unit, model=model, model_config=None, tokenizer=None)


def answer_diagnostic(config: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> None:
    """Write the answers of each model of MNLI to the diagnostic set, whose labels are secret."""
    for run in runs:
        mnli, folder = read_summary(run), Path(run.runs_dir).parent / DIAGNOSTIC / str(run.name)
        if is_finished(folder) or not mnli["model_dir"]:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        ((name, answers),) = answers_of(config, DIAGNOSTIC, mnli["model_dir"]).items()
        write_text(folder / f"{name}.tsv", answer_table(answers))
        facts = {name: mnli[name] for name in ("seed", *NO_SCORES)}
        facts |= {"metrics": {}, "failed": None, "num_validation_examples": len(answers)}
        write_json(folder / SUMMARY, {"task": DIAGNOSTIC, **facts})


def answers_of(config: FinetuneConfig, task: str, model: str) -> dict[str, list[str]]:
    """Return the answers of a model to all submitted parts of a task, by the official name of the file."""
    longest, batch = config.data.max_length, 2 * config.trainer.batch_size
    return {
        name: answer(model, task, part, config.glue_dir, longest, batch)
        for part, name in submitted_parts(task).items()
    }


def report(config: FinetuneConfig, folder: Path, runs: Sequence[FinetuneConfig]) -> None:
    """Write the submission and the report of a suite, and print the table."""
    own = Path(config.data.train).name if config.data.train else OWN_DATA
    by_task: dict[str, list[FinetuneConfig]] = {}
    for run in runs:
        by_task.setdefault(run.task[0] if run.task else own, []).append(run)
    names = [task for task in (*GLUE_TASKS, own) if task in by_task]
    summaries = {task: [read_summary(run) for run in by_task[task]] for task in names}
    submission = submit(config, folder, summaries) if config.submit else None
    first = {task: by_task[task][0] for task in names}
    write_report(config, folder, first, summaries, submission)
    if submission:
        print(f"submission      {submission['file']}")
        if submission["refused"]:
            log.warning("the server will refuse it: %s", ", ".join(submission["refused"]))


def submit(config: FinetuneConfig, folder: Path, summaries: dict[str, list[Json]]) -> Json:
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
        sizes = {
            name: size_of(task, part, len(answers[name])) for part, name in submitted_parts(task).items()
        }
        refused += [f"{name} answers {size}" for name, size in sizes.items() if not size.is_official]
    write_submission(folder / "submission.zip", answers)
    return {"file": str(folder / "submission.zip"), "models": models, "refused": refused}


def main(settings: str, title: str) -> int:
    """Do one run of a suite in this process, which `devices.py` started; return the exit status.

    Args:
        settings: file of its configuration.
        title: as in `run_part`.
    """
    log_to_stderr()
    config = read_group(FinetuneConfig, Path(settings))
    try:
        return run_part(config, title)
    except InputError as error:
        log.error("%s", error)
        write_failure(config, str(error))
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
