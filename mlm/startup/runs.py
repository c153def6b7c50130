"""Run folders on the disk: names of new runs, runs to resume or to branch off, models to start from."""

from __future__ import annotations

import difflib
import json
import os
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from mlm.config.errors import InputError, WrongType, require
from mlm.config.experiment import PretrainConfig, RunConfig
from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.keys import Given, Keys, read_file
from mlm.config.parse import CommandLine, build_config
from mlm.config.values import from_text
from mlm.launch import command_for, is_first_process, launched
from mlm.startup.checks import is_model

RUN_NAME = "MLM_RUN_NAME"
"""Environment variable that hands the name of the run to the other ranks."""


def choose_name(config: RunConfig, stem: str) -> None:
    """Set the name of the run, once for all ranks: as given, as handed over, or `stem` and UTC time.

    Raises:
        InputError: a launcher started several processes without a name, so each would make its own.
    """
    # The recipe `adapt` continues another model; without one it would train from scratch at a low rate.
    starts = bool(config.resume or config.init or config.branch) if type(config) is PretrainConfig else True
    require(stem != "adapt" or starts, "init", "null", "leaves --config adapt without a model to adapt")
    if config.name is None and RUN_NAME in os.environ:
        config.name = replace(config, name=os.environ[RUN_NAME]).name
    if config.name is not None or config.resume:
        return
    launch = launched()
    number = launch.world_size if launch else int(os.environ.get("WORLD_SIZE", 1))
    rule = f"cannot be agreed on by several processes; give --name or ${RUN_NAME}"
    require(is_first_process() and number == 1, "name", "null", rule)
    first = f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = (first if number == 1 else f"{first}-{number}" for number in count(1))
    name = next(name for name in names if not Path(config.runs_dir, name).exists())
    config.name = replace(config, name=name).name


def with_stored_keys(cls: type[RunConfig], line: CommandLine) -> CommandLine:
    """Add the stored keys of the run that a command line resumes or branches off, below what it gives.

    Raises:
        InputError: there is no such run, or its configuration cannot be read.
    """
    keys, given = Keys.of(cls), line.given | line.flags
    wanted = build_config(
        RunConfig, {key: given[key] for key in ("name", "runs_dir", "resume") if key in given}
    )
    if not wanted.resume:
        return line._replace(given=_branched_keys(given, keys, Path(wanted.runs_dir)) | line.given)
    runs_dir, name = Path(wanted.runs_dir), wanted.name or os.environ.get(RUN_NAME)
    if wanted.resume == "auto":
        if name is None:
            raise WrongType("resume: auto needs a --name: which run to start or to continue", "resume")
        if not (runs_dir / name).exists():
            return line._replace(flags=line.flags | {"resume": Given("false")})
    folder = run_to_resume(cls, runs_dir, name)
    stored = read_file(folder / "config.yaml", keys) if (folder / "config.yaml").exists() else {}
    if not stored and wanted.resume != "auto":
        hint = "is not a run folder, because it has no config.yaml, or an empty one"
        raise InputError(f"--resume: {folder} {hint}")
    settled = {"name": Given(folder.name), "runs_dir": Given(wanted.runs_dir), "resume": Given("true")}
    return line._replace(given=stored | line.given, flags=line.flags | settled)


def _branched_keys(given: dict[str, Given], keys: Keys, runs_dir: Path) -> dict[str, Given]:
    """Return the keys of the run that a new one branches off, as it was configured; nothing without `branch`.

    Length and schedule are taken over as a whole or, where the user gives any of it, not at all. The
    vocabulary is the one of the run, whatever text the new one reads.
    """
    branch = from_text(given["branch"].value, str | None) if "branch" in given else None
    if branch is None:
        return {}
    _, folder = find_branch(runs_dir, str(branch))
    if not (folder / "config.yaml").exists():
        return {}
    stored = read_file(folder / "config.yaml", keys)
    bounds = {"trainer.max_steps", "trainer.max_tokens", "trainer.max_time"}
    schedule = {key for key in stored if key.startswith("schedule.")}
    left = {"name", "runs_dir", "resume", "branch"}
    for group in (bounds, schedule):
        left |= group if group & given.keys() else set()
    vocabulary = {}
    if from_text(stored["init"].value, str | None) is None:
        left |= {key for key in stored if key.startswith("tokenizer.")}
        vocabulary = {"tokenizer.path": Given(str(folder / "tokenizer"))}
    return {key: value for key, value in stored.items() if key not in left} | vocabulary


def run_to_resume(cls: type[RunConfig], runs_dir: Path, name: str | None) -> Path:
    """Return the run folder to continue: the one named, else the newest of this command without a summary.

    Raises:
        InputError: none was named and none is unfinished, or the named one does not exist.
    """
    if name is not None:
        if not (runs_dir / name).is_dir():
            fix = _similar(runs_dir, name) or "a new run needs no --resume"
            raise InputError(f"--resume: there is not a run folder {runs_dir / name}; {fix}")
        return runs_dir / name
    configs = [
        path
        for path in runs_dir.glob("*/config.yaml")
        if not (path.parent / "summary.json").exists() and _has_group(path, cls.own_group)
    ]
    if not configs:
        raise InputError(f"--resume: {runs_dir} holds no unfinished run; name one with --name")
    return max(configs, key=lambda path: path.stat().st_mtime_ns).parent


def _has_group(config: Path, group: str) -> bool:
    """Return whether a configuration file has a group of keys; a damaged file has none."""
    try:
        values = yaml.safe_load(config.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    return isinstance(values, dict) and group in values


def find_branch(runs_dir: Path, branch: str) -> tuple[Path, Path]:
    """Return what `branch` names, a run folder or a checkpoint file, and the run folder it belongs to.

    Raises:
        InputError: it is neither; says where it was looked for.
    """
    places = (Path(branch).expanduser(), runs_dir / branch)
    for path in places:
        if (path / "checkpoints").is_dir():
            return path, path
        if path.is_file():
            return path, path.absolute().parent.parent
    fix = _similar(runs_dir, branch) or f"looked for {' and '.join(map(str, places))}"
    raise InputError(f"branch={branch} is neither a run nor a checkpoint: {fix}", "branch")


def _similar(runs_dir: Path, name: str) -> str:
    """Return a question with the names of runs like this one; empty: there are none."""
    close = difflib.get_close_matches(name, [path.name for path in runs_dir.glob("*/")], 3)
    return f"did you mean {' or '.join(close)}?" if close else ""


def choose_model(config: FinetuneConfig) -> None:
    """Set the model to start from, or for random weights its shape and tokenizer, where none is named.

    Raises:
        InputError: there is no finished pretraining run to take it from.
    """
    runs = config.runs_dir
    if config.model != SCRATCH:
        config.model = config.model or newest_pretrained_model(runs)
        return
    config.model_config = config.model_config or newest_pretrained_model(runs, "model_config")
    if config.tokenizer is None:
        shape = config.model_config
        config.tokenizer = shape if is_model(shape) else newest_pretrained_model(runs, "tokenizer")


def newest_pretrained_model(runs_dir: str, key: str = "model") -> str:
    """Return the model folder of the pretraining run that finished last.

    Args:
        runs_dir: the folder of the run folders.
        key: the option that nobody gave.

    Raises:
        InputError: there is none; says what makes one.
    """
    finished = [path for path in Path(runs_dir).glob("*/summary.json") if _is_finished_pretraining(path)]
    if not finished:
        raise InputError(
            f"{key}=null: {runs_dir} holds no finished pretraining run; run "
            f"{command_for('train.py')} first, or name a model folder with --{key}",
            key,
        )
    return str(max(finished, key=lambda path: path.stat().st_mtime_ns).parent / "model")


def _is_finished_pretraining(summary: Path) -> bool:
    """Tell the run of an encoder, with a model to start from, from one that fine-tuned it."""
    try:
        facts: Any = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    has_model = (summary.parent / "model" / "config.json").is_file()
    return has_model and isinstance(facts, dict) and "task" not in facts
