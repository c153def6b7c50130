"""The folder of a run: made for one process alone, removed again when nothing was trained in it."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from tqdm.contrib.logging import logging_redirect_tqdm

from mlm.config.errors import InputError, in_words
from mlm.config.experiment import PretrainConfig, RunConfig
from mlm.config.parse import dump_config, flatten
from mlm.files import disk_errors, write_text
from mlm.launch import command_for, is_first_process

METRICS = "metrics.csv"
"""Written from the first step on: a folder with one in it is never removed."""

log = logging.getLogger(__name__)


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path]:
    """Make or reopen the folder of a run and lend it; what is logged meanwhile goes above the progress bars.

    A new folder gets its configuration at once. If an error ends the run before training began, what was made
    here is removed.

    Raises:
        InputError: another process has it.
    """
    runs_dir, is_new_place = Path(config.runs_dir), not Path(config.runs_dir).exists()
    if not is_first_process():  # the first one did all this
        yield runs_dir / str(config.name)
        return
    with disk_errors(runs_dir, "place with --runs_dir"):
        runs_dir.mkdir(parents=True, exist_ok=True)
        folder = _make(runs_dir, config)
    try:
        with _locked(folder), logging_redirect_tqdm():
            for left in folder.glob(".config.new.yaml.*"):  # by a process that was killed
                left.unlink()
            if not (folder / "config.yaml").exists():
                keep_config(config, folder)
            yield folder
    except Exception:
        if not config.resume and not any(folder.rglob(METRICS)):
            shutil.rmtree(folder)
            if is_new_place:
                with suppress(OSError):  # somebody else put something there
                    runs_dir.rmdir()
        raise


def _make(runs_dir: Path, config: RunConfig) -> Path:
    """Make the folder; of two runs that chose the same time as their name, the later gets a number."""
    if config.resume:
        (runs_dir / str(config.name)).mkdir(exist_ok=True)
        return runs_dir / str(config.name)
    chosen_by_us = re.search(r"-\d{8}-\d{6}(-\d+)?$", str(config.name))
    first = str(config.name)
    for number in count(2):
        with suppress(FileExistsError):
            (runs_dir / str(config.name)).mkdir()
            return runs_dir / str(config.name)
        if not chosen_by_us:
            break
        config.name = f"{first}-{number}"
    raise InputError(f"the run folder {runs_dir / first} exists; take another --name, or use --resume")


def resume_command(config: RunConfig) -> str:
    """Return what to type to go on with a run."""
    place = "" if config.runs_dir == RunConfig.runs_dir else f" --runs_dir {config.runs_dir}"
    script = "train.py" if isinstance(config, PretrainConfig) else "finetune.py"
    return f"{command_for(script)} --resume --name {config.name}{place}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    lock = FileLock(folder / ".lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise InputError(f"another process is running in {folder}") from None
    with lock:
        yield


def keep_config(config: RunConfig, folder: Path) -> None:
    """Write the configuration into the run folder; an earlier, different one is kept and the change told."""
    path, new = folder / "config.yaml", folder / "config.new.yaml"
    write_text(new, dump_config(replace(config, resume=False)))
    before, after = (_values(file if file.exists() else new) for file in (path, new))
    changes = [
        f"{key}: {in_words(before.get(key))} -> {in_words(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    if changes:
        kept = next(name for number in count(1) if not (name := folder / f"config-{number}.yaml").exists())
        shutil.copy2(path, kept)  # not moved: another process may be about to read it
        log.info("resuming with another configuration than %s: %s", kept, "; ".join(changes))
    new.replace(path)


def _values(config: Path) -> dict[str, Any]:
    return flatten(yaml.safe_load(config.read_text(encoding="utf-8")) or {})
