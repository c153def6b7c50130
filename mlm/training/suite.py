"""Fine-tune several times: tasks, seeds, folds and grids, and one table of all runs.

    finetune_all --tasks, seeds--> _run_suite --> _run_part --grid--> _run_grid --each point--> _run_part

- every task and seed, or fold, is a run in its own folder, `<task>/seed-<n>` or `<task>/fold-<n>`
- a run with a summary is finished
- a suite continues when it is started again: an unfinished run resumes at its newest checkpoint
- on several GPUs each run is a process with its own GPU
"""

from __future__ import annotations

import json
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from mlm.config.errors import InputError, require
from mlm.config.finetune import DIAGNOSTIC, FROM_MNLI, MNLI, FinetuneConfig, Point
from mlm.config.parse import dump_config, read_group
from mlm.data.glue import TASKS, check_parts, size_of
from mlm.evaluation.glue import answer_table
from mlm.files import remove, write_json, write_text
from mlm.launch import launched
from mlm.startup.command import log_to_stderr
from mlm.startup.suite import (
    DATA_FILE,
    OWN_DATA,
    at_point,
    check_data,
    data_digests,
    is_suite,
    points,
    read_digests,
    units,
)
from mlm.training.callbacks import Diverged
from mlm.training.datamodule import forget
from mlm.training.finetuning import finetune
from mlm.training.processes import resolve_accelerator
from mlm.training.results import HELD_OUT
from mlm.training.run_folder import SUMMARY, keep_config, run_folder, saved_checkpoints
from mlm.training.suite_report import answers_of, report
from mlm.training.tracking import resolve_tracking

Json = dict[str, Any]
POLL_S = 0.2
"""Seconds between two readings of the processes on several devices."""
NO_SCORES: Json = {"metrics": {}, "model_dir": None, "failed": None, "selection": ""}
NO_SCORES |= {"num_train_examples": 0, "num_validation_examples": 0}
NO_SCORES |= {"elapsed_s": 0.0, "train_examples_per_second": 0.0}
"""Summary of a run without a model, but for task and seed."""

log = logging.getLogger(__name__)


def finetune_all(config: FinetuneConfig) -> int:
    """Fine-tune an encoder on all tasks, seeds and folds; return 0, or 128 + the signal that ended it."""
    several, launch, devices = is_suite(config), launched(), config.trainer.devices
    alone = (launch is None or launch.world_size == 1) and devices in ("auto", 1)
    hint = "does not fit several tasks, seeds or folds: each runs on one device; leave it out, or run one"
    require(alone or not several, "trainer.devices", launch.world_size if launch else devices, hint)
    config = replace(config, logging=resolve_tracking(config.logging))
    try:
        if several:
            return _run_suite(config)
        unit = units(config)[0]
        grid = points(unit)
        return _run_grid(unit, grid) if len(grid) > 1 else finetune(at_point(unit, grid[0]))
    finally:
        forget()


def _run_suite(config: FinetuneConfig) -> int:
    """Do all unfinished runs, then write table, picture and submission; see `finetune_all`."""
    for task in config.task:
        check_parts(task, config.glue_dir, with_test=config.submit)
    with run_folder(replace(config, resume=_folder_of(config).exists())) as folder:
        keep_config(config, folder)
        write_json(folder / DATA_FILE, data_digests(config) | read_digests(folder))  # it may have grown
        runs = units(config)
        first = [run for run in runs if run.task == [MNLI]] if config.start_from_mnli else []
        status = _run_units(config, first)
        if not status:
            rest = [run for run in runs if run not in first]
            status = _run_units(config, [_from_mnli(run, first) for run in rest] if first else rest)
        if status:
            name = shlex.quote(str(config.name))
            log.warning("stopped; to continue, start the same command again with --name %s", name)
            return status
        if DIAGNOSTIC in config.task:
            _answer_diagnostic(config, [run for run in runs if run.task == [MNLI]])
        summaries = [_read_summary(run) for run in runs]
        report(config, folder, list(zip(runs, summaries, strict=True)))
        if not any(summary["metrics"] for summary in summaries):
            raise InputError(f"{folder}: every run failed: {summaries[0]['failed']}")
    return 0


def _run_units(config: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> int:
    """Do the unfinished runs, on all devices of this machine; return the exit status."""
    titled = [(run, _folder_of(run).relative_to(config.runs_dir).as_posix()) for run in runs]
    named, devices = os.environ.get("CUDA_VISIBLE_DEVICES"), []
    if resolve_accelerator(config.trainer) == "gpu":
        devices = named.split(",") if named else list(map(str, range(torch.cuda.device_count())))
    if len(devices) > 1:
        return run_on_devices([one for one in titled if not _is_finished(_folder_of(one[0]))], devices)
    for run, title in titled:
        check_data(config, _folder_of(config))  # somebody may change a file while the suite runs
        if status := _run_part(run, title):
            return status
    return 0


def run_on_devices(runs: Sequence[tuple[FinetuneConfig, str]], devices: Sequence[str]) -> int:
    """Do independent runs in parallel, one per device at a time; return 0 or the first other exit status.

    The output of a run goes to a file beside its folder. A run that fails records that in its summary, and
    the others continue; after any other exit status no further run is started.
    """
    waiting, status = list(runs), 0
    running: dict[str, tuple[FinetuneConfig, subprocess.Popen[bytes]]] = {}
    # By default SIGTERM would end this process alone, and the others would continue.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while running or (waiting and not status):
            for device in devices:
                if device in running and running[device][1].poll() is not None:
                    status = status or _report(*running.pop(device))
                if device not in running and waiting and not status:
                    run, title = waiting.pop(0)
                    running[device] = run, _start(run, title, device)
            time.sleep(POLL_S)
    finally:
        for _, process in running.values():  # none, unless a signal or an error ends the loop
            process.terminate()
        for _, process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return status


def _start(run: FinetuneConfig, title: str, device: str) -> subprocess.Popen[bytes]:
    folder = _folder_of(run)
    settings, output = f"{folder}.yaml", f"{folder}.log"
    write_text(Path(settings), dump_config(run))
    log.info("%s on device %s; output: %s", title, device, output)
    command = [sys.executable, "-m", "mlm.training.suite", settings, title]
    with Path(output).open("wb") as file:
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": device}
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)


def _report(run: FinetuneConfig, process: subprocess.Popen[bytes]) -> int:
    """Log how a process ended, and return its exit status, 128 + n after signal n."""
    folder, status = _folder_of(run), process.returncode
    if status:
        log.error("%s ended with status %d; its output is %s.log", folder, status, folder)
        return 128 - status if status < 0 else status
    if failed := _read_json(folder / SUMMARY)["failed"]:
        log.warning("%s failed: %s", folder, failed)
    return 0


def _run_part(config: FinetuneConfig, title: str, selects: bool = False) -> int:
    """Do a run of a suite with its grid, or a point of a grid, unless it is finished; return the exit status.

    A diverged run is recorded as failed. `title` and `selects` as in `finetune`.
    """
    folder, grid = _folder_of(config), points(config)
    if _is_finished(folder):
        log.info("%s is finished already", folder)
        return 0
    try:
        if len(grid) > 1:
            return _run_grid(config, grid, title)
        return finetune(start_or_resume(at_point(config, grid[0])), selects=selects, title=title)
    except Diverged as error:
        log.warning("%s failed: %s", folder, error)
        _write_failure(config, str(error))
        return 0


def start_or_resume(config: FinetuneConfig) -> FinetuneConfig:
    """Return an unfinished run as it continues: from its newest checkpoint, else from the start."""
    folder = _folder_of(config)
    resume = bool(saved_checkpoints(folder / "checkpoints"))
    if not resume:
        remove(folder)
    return replace(config, resume=resume)


def _run_grid(unit: FinetuneConfig, grid: Sequence[Point], title: str | None = None) -> int:
    """Try every point of a grid and keep the best one, the first of equals, as the result of the run.

    The models of the others are removed as soon as a better one is found. Returns the exit status.
    """
    folder = _folder_of(unit)
    with run_folder(replace(unit, resume=folder.exists())):
        write_json(folder / DATA_FILE, data_digests(unit) | read_digests(folder))
        best: tuple[float, int] | None = None
        tried: list[Json] = []
        for number, point in enumerate(grid, 1):
            name = f"point-{number}"
            config = replace(at_point(unit, point), runs_dir=str(folder), name=name)
            if status := _run_part(config, f"{title or unit.name}/{name}", selects=True):
                return status
            summary = _read_summary(config)
            score = next(iter((summary.get("selection_metrics") or summary["metrics"]).values()), None)
            tried.append({**point, "score": score, "failed": summary["failed"]})
            beaten = number
            if score is not None and (best is None or score > best[0]):
                beaten, best = (best[1] if best else 0), (score, number)
            remove(folder / f"point-{beaten}" / "model")
        summary = _keep_point(folder, tried, best[1] if best else 1)
    if title is None:  # no part of a suite
        shown = ", ".join(f"{metric} {value:.4f}" for metric, value in summary["metrics"].items())
        print(f"\n{unit.name}: task {summary['task']}, {shown or 'no score'}; {summary['selection']}\n")
        for one in tried:
            settings = ", ".join(f"{key} {value:g}" for key, value in one.items() if "." in key)
            print(f"  {settings}: {'-' if one['score'] is None else format(one['score'], '.4f')}")
        print(f"\nmodel           {summary['model_dir']}")
    return 0


def _keep_point(folder: Path, tried: list[Json], number: int) -> Json:
    """Make one point of a grid the result of the run, and return its summary."""
    point = folder / f"point-{number}"
    summary = _read_json(point / SUMMARY)
    for name in ("model", "metrics.csv", "plots", HELD_OUT):
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


def _write_failure(config: FinetuneConfig, reason: str) -> None:
    """Record that a run failed, so that the table shows it."""
    folder = _folder_of(config)
    folder.mkdir(parents=True, exist_ok=True)
    known = {"task": config.task[0] if config.task else OWN_DATA, "seed": config.seed}
    known |= {"fold": config.data.fold} if config.data.fold else {}
    write_json(folder / SUMMARY, known | NO_SCORES | {"failed": reason})


def _is_finished(folder: Path) -> bool:
    """Return whether a run has written its summary; with a damaged one it must be repeated."""
    try:
        summary = _read_json(folder / SUMMARY)
    except FileNotFoundError:
        return False
    except (ValueError, TypeError):
        summary = {}
    if not (whole := summary.keys() >= {"metrics", "failed", "model_dir"}):
        log.warning("%s is damaged: the run is repeated", folder / SUMMARY)
    return whole


def _folder_of(config: FinetuneConfig) -> Path:
    return Path(config.runs_dir, str(config.name))


def _read_json(path: Path) -> Json:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _read_summary(config: FinetuneConfig) -> Json:
    """Return the summary of a finished run."""
    summary = _read_json(_folder_of(config) / SUMMARY)
    if config.task and summary["metrics"] and "dev_sizes" not in summary:  # written by an earlier version
        _, part, *_ = TASKS[config.task[0]].parts
        size = size_of(config.task[0], part, summary["num_validation_examples"])
        summary["dev_sizes"] = [size._asdict()]
    return summary


def _from_mnli(unit: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> FinetuneConfig:
    """Return a run that starts from MNLI's model, if possible of the same seed, where it gains from that."""
    if unit.task[0] not in FROM_MNLI:
        return unit
    found = [(run.seed, _read_summary(run)["model_dir"]) for run in runs]
    there = {seed: model for seed, model in found if model}
    if not there:
        raise InputError("start_from_mnli=true: every MNLI run failed, so there is no model to start from")
    model = there.get(unit.seed) or next(iter(there.values()))
    return replace(unit, model=model, model_config=None, tokenizer=None)


def _answer_diagnostic(config: FinetuneConfig, runs: Sequence[FinetuneConfig]) -> None:
    """Write the answers of each model of MNLI to the diagnostic set, whose labels are secret."""
    for run in runs:
        mnli, folder = _read_summary(run), Path(run.runs_dir).parent / DIAGNOSTIC / str(run.name)
        if _is_finished(folder) or not mnli["model_dir"]:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        ((name, answers),) = answers_of(config, DIAGNOSTIC, mnli["model_dir"]).items()
        write_text(folder / f"{name}.tsv", answer_table(answers))
        facts = {name: mnli[name] for name in ("seed", *NO_SCORES)}
        facts |= {"metrics": {}, "failed": None, "num_validation_examples": len(answers)}
        write_json(folder / SUMMARY, {"task": DIAGNOSTIC, **facts})


def main(settings: str, title: str) -> int:
    """Do the run of a configuration file in this process, started by `run_on_devices`; return the status."""
    log_to_stderr()
    config = read_group(FinetuneConfig, Path(settings))
    try:
        return _run_part(config, title)
    except InputError as error:
        log.error("%s", error)
        _write_failure(config, str(error))
        return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
