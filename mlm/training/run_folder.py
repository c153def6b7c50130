"""The folder of a run: made for one process alone, its configuration, and its checkpoints.

Checkpoints are written atomically and found by content.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import FileLock, Timeout
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from tqdm.contrib.logging import logging_redirect_tqdm

from mlm.config.commands import PretrainConfig, RunConfig
from mlm.config.errors import DiskError, InputError, in_words
from mlm.config.parse import dump_config, flatten
from mlm.files import disk_errors, replacing, write_text
from mlm.hub.checkpoint import Checkpoint, DamagedError, open_checkpoint
from mlm.launch import command_for, is_first_process

METRICS, SUMMARY = "metrics.csv", "summary.json"
"""Written from the first step on, and at the end: a folder with the first in it is never removed."""

log = logging.getLogger(__name__)


@contextmanager
def run_folder(config: RunConfig) -> Iterator[Path]:
    """Create or reopen the folder of a run (context manager); log lines go above the bars.

    A new folder gets its configuration at once, and is removed if an error ends the run before training.
    """
    runs_dir, is_new_place = Path(config.runs_dir), not Path(config.runs_dir).exists()
    if not is_first_process():  # the first one did all this
        yield runs_dir / str(config.name)
        return
    with disk_errors(runs_dir, "place with --runs_dir"):
        runs_dir.mkdir(parents=True, exist_ok=True)
        folder = _make(runs_dir, config)
    try:
        with FileLock(folder / ".lock", blocking=False), logging_redirect_tqdm():
            for left in folder.glob(".config.new.yaml.*"):  # by a process that was killed
                left.unlink()
            if not (folder / "config.yaml").exists():
                keep_config(config, folder)
            yield folder
    except Timeout:
        raise InputError(f"another process is running in {folder}") from None
    except Exception:
        if not config.resume and not any(folder.rglob(METRICS)):
            shutil.rmtree(folder)
            if is_new_place:
                with suppress(OSError):  # somebody else put something there
                    runs_dir.rmdir()
        raise


def _make(runs_dir: Path, config: RunConfig) -> Path:
    """Make the folder; of two runs whose name is the same time, the later gets a number."""
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
    """Return the command that continues a run."""
    place = "" if config.runs_dir == RunConfig.runs_dir else f" --runs_dir {shlex.quote(config.runs_dir)}"
    script = "train.py" if isinstance(config, PretrainConfig) else "finetune.py"
    return f"{command_for(script)} --resume --name {shlex.quote(str(config.name))}{place}"


def keep_config(config: RunConfig, folder: Path, is_new: bool = False) -> None:
    """Write the configuration into the run folder; keep an earlier, different one, and log the changes.

    A run that `is_new` has no earlier one to keep: only its null values were replaced.
    """
    path, new = folder / "config.yaml", folder / "config.new.yaml"
    write_text(new, dump_config(replace(config, resume=False)))
    texts = [file.read_text(encoding="utf-8") for file in (path if path.exists() else new, new)]
    before, after = (flatten(yaml.safe_load(text) or {}) for text in texts)
    changes = [
        f"{key}: {in_words(before.get(key))} -> {in_words(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]
    if changes and not is_new:
        kept = next(name for number in count(1) if not (name := folder / f"config-{number}.yaml").exists())
        shutil.copy2(path, kept)  # not moved: another process may be about to read it
        log.info("resuming with another configuration than %s: %s", kept, "; ".join(changes))
    new.replace(path)


def git_commit(package: Path) -> str | None:
    """Return the commit of a package, with -dirty where files were changed; None outside a checkout."""
    tracked = ["ls-files", "--error-unmatch", "__init__.py"]  # not merely installed below somebody's checkout
    describe = ["describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
    run = partial(subprocess.run, capture_output=True, text=True, check=True, timeout=10)
    try:
        *_, done = [run(["git", "-C", str(package), *arguments]) for arguments in (tracked, describe)]
    except (OSError, subprocess.SubprocessError):
        return None
    return str(done.stdout).strip()


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of an optimizer step belongs."""
    return folder / f"step-{step:08d}.ckpt"


def checkpoint_step(path: Path) -> int:
    """Return the optimizer step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def saved_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that have our names, oldest first; a user's copies are not ours."""
    return sorted(
        path for path in folder.glob("step-*.ckpt") if re.fullmatch(r"step-\d{8,}\.ckpt", path.name)
    )


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes checkpoints atomically; after a failed write training continues, as other ranks wait."""

    failure: OSError | None = None
    """Why the newest checkpoint could not be written; None if it was."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        self.failure, target = None, Path(path)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target) as temporary, temporary.open("wb") as file:
                torch.save(checkpoint, file)
        except (OSError, RuntimeError, DiskError) as error:
            # torch's zip writer fails a second time, and differently, when it closes the unfinished file.
            causes = (error, error.__cause__, error.__context__)
            failure = next((cause for cause in causes if isinstance(cause, OSError)), None)
            if failure is None:
                raise
            self.failure = failure
            log.warning("cannot save %s: %s; earlier checkpoints are kept", path, failure.strerror)


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a folder, None if there never was one.

    Damaged files are renamed, with a warning. InputError: one cannot be read, or all are damaged.
    """
    for path in reversed(saved_checkpoints(folder)):
        try:
            found = open_checkpoint(path)
            if found.step == checkpoint_step(path):
                return found
            log.warning("skipping %s: it is of step %d", path, found.step)
        except FileNotFoundError:
            continue  # its run is still training and has removed it
        except DamagedError as error:
            log.warning("skipping it: %s", error)
        if is_first_process():
            path.rename(path.with_name(f"{path.name}.broken"))
    if damaged := sorted(folder.glob("step-*.ckpt.broken")):
        raise InputError(
            f"all checkpoints of {folder.parent} are damaged ({damaged[-1].name} is the newest): restore one "
            "from a backup, or start a new run"
        )
    return None
