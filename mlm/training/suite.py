"""Fine-tuning several times: tasks, seeds and grids, resumed where they stopped, and one table of all.

    finetune_all --tasks, seeds--> run_suite --each--> run_unit --grid--> run_grid --each point--> finetune

- every task and seed is a run in a folder of its own, `<task>/seed-<n>`; one with a summary is finished
- on several GPUs each run is a process with a GPU to itself
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.glue import DIAGNOSTIC, FROM_MNLI, GLUE_TASKS, MNLI, Point
from mlm.config.suite import OWN_DATA, at_point, is_suite, points, units
from mlm.data.glue import check_parts, submitted_parts, warn_of_sizes
from mlm.data.glue_sizes import odd_size
from mlm.evaluation.submission import answer, answer_table, write_submission
from mlm.startup.suite import DATA_FILE, data_digests, read_digests
from mlm.training.devices import run_on_devices, visible_devices
from mlm.training.epochs import Diverged
from mlm.training.finetuning import finetune, forget
from mlm.training.reporting import resolve_tracking, run_title
from mlm.training.run_folder import keep_config, run_folder
from mlm.training.suite_report import track, write_report
from mlm.training.summary import write_summary

Json = dict[str, Any]
SUMMARY = "summary.json"

log = logging.getLogger(__name__)


def finetune_all(config: FinetuneConfig) -> int:
    """Fine-tune an encoder on all tasks and seeds of a configuration: the `finetune` command.

    Returns:
        The exit status: 0, or 128 + the signal that stopped it.

    Raises:
        InputError: something the user has to change.
    """
    config = replace(config, logging=resolve_tracking(config.logging))
    try:
        return run_suite(config) if is_suite(config) else run_unit(units(config)[0])
    finally:
        forget()


def run_unit(unit: FinetuneConfig) -> int:
    """Run one task with one seed, at every point of its grid if it has one; return the exit status."""
    grid = points(unit)
    return run_grid(unit, grid) if len(grid) > 1 else finetune(at_point(unit, grid[0]))


def run_grid(unit: FinetuneConfig, grid: Sequence[Point]) -> int:
    """Try every point of a grid and keep the best one, the first of equals, as the run's result.

    Of the others the models are removed as soon as they are beaten.
    """
    folder = Path(unit.runs_dir, str(unit.name))
    with run_folder(replace(unit, resume=folder.exists())):
        keep_digests(unit, folder)
        best: tuple[float, int] | None = None
        tried: list[Json] = []
        for number, point in enumerate(grid, 1):
            config = replace(at_point(unit, point), runs_dir=str(folder), name=f"point-{number}")
            status = finish_run(config, selects=True)
            if status:
                return status
            summary = read_summary(config)
            score = next(iter((summary.get("selection_metrics") or summary["metrics"]).values()), None)
            tried.append({**point, "score": score, "failed": summary["failed"]})
            beaten = number
            if score is not None and (best is None or score > best[0]):
                beaten, best = (best[1] if best else 0), (score, number)
            shutil.rmtree(folder / f"point-{beaten}" / "model", ignore_errors=True)
        keep_point(unit, tried, best[1] if best else 1)
    return 0


def keep_digests(config: FinetuneConfig, folder: Path) -> None:
    """Write down what the runs read, before the first of them; a suite that grew reads more."""
    write_summary(folder / DATA_FILE, data_digests(config) | read_digests(folder))


def keep_point(unit: FinetuneConfig, tried: list[Json], number: int) -> None:
    """Make what one point of a grid left the result of the run."""
    folder = Path(unit.runs_dir, str(unit.name))
    point = folder / f"point-{number}"
    summary: Json = json.loads((point / SUMMARY).read_text(encoding="utf-8"))
    for name in ("model", "metrics.csv", "plots"):
        if (point / name).exists():
            shutil.rmtree(folder / name, ignore_errors=True)  # of an earlier try, whose summary was damaged
            shutil.move(point / name, folder / name)
    if summary["metrics"]:
        on_holdout = "selection_metrics" in summary
        where = "a part held out of train" if on_holdout else "the very examples reported: optimistic"
        chosen = f"best of {len(tried)} settings by {next(iter(summary['metrics']))} on {where}"
        summary |= {"model_dir": str(folder / "model"), "selection": chosen}
    summary |= {"grid": tried, "grid_point": number}
    write_summary(folder / SUMMARY, summary)
    if run_title(folder) == unit.name:
        shown = ", ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items()) or "no score"
        print(f"\n{unit.name}: task {summary['task']}, {shown}; {summary['selection']}\n")
        for one in tried:
            settings = ", ".join(f"{key} {value:g}" for key, value in one.items() if "." in key)
            print(f"  {settings}: {'-' if one['score'] is None else format(one['score'], '.4f')}")
        print(f"\nmodel           {summary['model_dir']}")


def finish_run(config: FinetuneConfig, selects: bool = False, whole_unit: bool = False) -> int:
    """Do a run that is not finished yet; one whose loss is lost is written down as failed.

    Args:
        config: the run.
        selects: as in `finetune`.
        whole_unit: with the grid that it may have.

    Returns:
        The exit status.
    """
    folder = Path(config.runs_dir, str(config.name))
    if is_finished(folder):
        log.info("%s is finished already", folder)
        return 0
    clear(config)
    try:
        return run_unit(config) if whole_unit else finetune(config, selects)
    except Diverged as error:
        log.warning("%s failed: %s", folder, error)
        write_failure(config, str(error))
        return 0


def clear(config: FinetuneConfig) -> None:
    """Remove what a run left that did not end; a grid goes on with the points that are left."""
    if len(points(config)) == 1:
        shutil.rmtree(Path(config.runs_dir, str(config.name)), ignore_errors=True)


def write_failure(config: FinetuneConfig, reason: str) -> None:
    """Write down a run that came to nothing, so that the table shows it."""
    folder = Path(config.runs_dir, str(config.name))
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "task": config.task[0] if config.task else OWN_DATA,
        "seed": config.seed,
        "metrics": {},
        "num_train_examples": 0,
        "num_validation_examples": 0,
        "elapsed_s": 0.0,
        "train_examples_per_second": 0.0,
        "model_dir": None,
        "failed": reason,
        "selection": "",
    }
    write_summary(folder / SUMMARY, summary)


def is_finished(folder: Path) -> bool:
    """Tell whether a run has written down what came of it; with a damaged summary it is to be done again."""
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return False
    except ValueError:
        summary = None
    whole = isinstance(summary, dict) and summary.keys() >= {"metrics", "failed", "model_dir"}
    if not whole:
        log.warning("%s is damaged: the run is done again", folder / SUMMARY)
    return whole


def read_summary(config: FinetuneConfig) -> Json:
    """Return what a finished run wrote down."""
    path = Path(config.runs_dir, str(config.name), SUMMARY)
    summary: Json = json.loads(path.read_text(encoding="utf-8"))
    return summary


def run_suite(config: FinetuneConfig) -> int:
    """Run all that is not finished, then write table, picture and submission; see `finetune_all`."""
    for task in config.task:
        check_parts(task, config.glue_dir, with_test=config.submit)
    top = Path(config.runs_dir, str(config.name))
    for task in config.task:
        warn_of_sizes(task, config.glue_dir, with_test=config.submit)
    with run_folder(replace(config, resume=top.exists())) as folder:
        keep_config(config, folder)
        keep_digests(config, folder)
        runs = units(config)
        first = [unit for unit in runs if unit.task == [MNLI]] if config.start_from_mnli else []
        status = run_units(first)
        rest = [
            from_mnli(unit, runs) if config.start_from_mnli else unit for unit in runs if unit not in first
        ]
        status = status or run_units(rest)
        if status:
            log.warning(
                "stopped; the finished runs are kept: start the same command again with --name %s", top.name
            )
            return status
        if DIAGNOSTIC in config.task:
            answer_diagnostic(config, [unit for unit in runs if unit.task == [MNLI]])
        report(config, folder, runs)
    return 0


def run_units(runs: Sequence[FinetuneConfig]) -> int:
    """Do all the runs that are not finished, on all devices there are; return the exit status."""
    if not runs:
        return 0
    devices = visible_devices(runs[0])
    if len(devices) > 1:
        waiting = [run for run in runs if not is_finished(Path(run.runs_dir, str(run.name)))]
        for run in waiting:
            clear(run)
        return run_on_devices(waiting, devices, write_failure)
    return next((status for run in runs if (status := finish_run(run, whole_unit=True))), 0)


def from_mnli(unit: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> FinetuneConfig:
    """Return a run that starts from MNLI's model, of the same seed if there is one, where it gains from that.

    Raises:
        InputError: no run of MNLI succeeded.
    """
    if unit.task[0] not in FROM_MNLI:
        return unit
    models = {run.seed: read_summary(run)["model_dir"] for run in runs if run.task == [MNLI]}
    there = {seed: model for seed, model in models.items() if model}
    if not there:
        raise InputError("start_from_mnli=true: no run of mnli came to a model")
    model = there.get(unit.seed) or next(iter(there.values()))
    return replace(unit, model=model, model_config=None, tokenizer=None)


def answer_diagnostic(config: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> None:
    """Write what each model of MNLI says of the diagnostic set, whose labels are secret."""
    for run in runs:
        mnli, folder = read_summary(run), Path(run.runs_dir).parent / DIAGNOSTIC / str(run.name)
        if is_finished(folder) or not mnli["model_dir"]:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        answers = answers_of(config, DIAGNOSTIC, mnli["model_dir"])
        for name, predictions in answers.items():
            (folder / f"{name}.tsv").write_text(answer_table(predictions), encoding="utf-8")
        kept = (
            "seed",
            "num_train_examples",
            "elapsed_s",
            "train_examples_per_second",
            "model_dir",
            "selection",
        )
        facts = {"task": DIAGNOSTIC, "metrics": {}, "failed": None, **{name: mnli[name] for name in kept}}
        number = len(next(iter(answers.values())))
        write_summary(folder / SUMMARY, facts | {"num_validation_examples": number})


def answers_of(config: FinetuneConfig, task: str, model: str) -> dict[str, list[str]]:
    """Return the answers of a model to all that is submitted of a task, by the official name of the file."""
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
    units = {task: by_task[task][0] for task in (*GLUE_TASKS, own) if task in by_task}
    summaries = {task: [read_summary(run) for run in by_task[task]] for task in units}
    submission = submit(config, folder, summaries) if config.submit else None
    track(config, folder, write_report(config, folder, units, summaries, submission))
    if submission:
        print(f"submission      {submission['file']}")
        if submission["refused"]:
            log.warning("the server will refuse it: %s", ", ".join(submission["refused"]))


def submit(config: FinetuneConfig, folder: Path, summaries: dict[str, list[Json]]) -> Json:
    """Write the zip file for the server; of each task the model whose first score on dev is the highest."""
    models = {}
    for task, runs in summaries.items():
        scored = [run for run in runs if run["metrics"]]
        if not scored:
            raise InputError(f"submit=true: no run of {task} came to a model")
        models[task] = max(scored, key=lambda run: next(iter(run["metrics"].values())))["model_dir"]
    models[DIAGNOSTIC] = models[MNLI]
    answers: dict[str, list[str]] = {}
    for task, model in models.items():
        answers |= answers_of(config, task, model)
    write_submission(folder / "submission.zip", answers)
    parts = {name: (task, part) for task in models for part, name in submitted_parts(task).items()}
    odd = {name: odd_size(*parts[name], len(given)) for name, given in answers.items()}
    refused = [f"{name} answers {what}" for name, what in odd.items() if what]
    return {"file": str(folder / "submission.zip"), "models": models, "refused": refused}
