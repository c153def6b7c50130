"""Checkpoints: written atomically, found by content, opened without running code."""

from __future__ import annotations

import logging
import os
import re
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from mlm.config.errors import InputError
from mlm.launch import is_first_process

NEEDED = {
    "state_dict": dict,
    "optimizer_states": list,
    "loops": dict,
    "global_step": int,
    "progress": dict,
    "identity": dict,
    "pytorch-lightning_version": str,
}
"""What a checkpoint of ours holds, and of what kind."""

log = logging.getLogger(__name__)


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
    """Writes to a temporary file in the same folder, syncs and renames: a reader never sees half a file.

    Where the file system refuses, as a full one does, that is told and noted in `failure`, and training goes
    on. It is no exception, because the other ranks wait for this one and know nothing of it.
    """

    failure: OSError | None = None
    """Why the newest checkpoint could not be written, if it could not."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        self.failure = None
        try:
            self._write(checkpoint, Path(path))
        except (OSError, RuntimeError) as error:
            # torch's zip writer fails a second time, and otherwise, when it closes what it could not write.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            self.failure = cause
            log.warning("cannot save %s: %s; the checkpoints before it are kept", path, cause.strerror)

    def _write(self, checkpoint: dict[str, Any], target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            umask = os.umask(0)
            os.umask(umask)
            os.chmod(name, 0o666 & ~umask)  # mkstemp makes files that only the owner can read
            os.replace(name, target)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint file."""

    path: Path
    content: dict[str, Any]
    """Plain values and tensors, memory-mapped."""

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.content["global_step"])


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a file without running code that might be in it.

    Raises:
        InputError: it is no whole checkpoint of ours; says why.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not look at the checksums of what it maps
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_content(content)
        return Checkpoint(path, content)
    except (PermissionError, FileNotFoundError):
        raise  # it may be whole: somebody has to look
    except (
        OSError,
        RuntimeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        reason = " ".join(str(error).split())[:120]
    raise InputError(f"{path} is no whole checkpoint of ours: {reason}")


def _check_content(content: Any) -> None:
    """Check that a checkpoint has what a run goes on with, each of its kind.

    Raises:
        ValueError: says what is missing or odd.
    """
    if not isinstance(content, dict):
        raise ValueError("it is no table")
    if missing := [key for key in NEEDED if key not in content]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for key, kind in NEEDED.items():
        value = content[key]
        if type(value) is not kind and not (kind is dict and isinstance(value, dict)):
            raise ValueError(f"its {key} is {str(value)[:40]!r}")
        if not value and kind is not int:
            raise ValueError(f"its {key} is empty")
    if content["global_step"] < 0 or "rows" not in content["progress"]:
        raise ValueError("its global_step or progress is that of no run")
    if not all(isinstance(state, dict) and state for state in content["optimizer_states"]):
        raise ValueError("its optimizer_states are of no optimizer")


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest whole checkpoint of a folder or None.

    What is no whole checkpoint of ours is set aside under another name, with a warning.
    """
    for path in reversed(saved_checkpoints(folder)):
        try:
            found = open_checkpoint(path)
            if found.step == checkpoint_step(path):
                return found
            log.warning("skipping %s: it is of step %d", path, found.step)
        except FileNotFoundError:
            continue  # the run it belongs to goes on and has removed it
        except InputError as error:
            log.warning("skipping it: %s", error)
        if is_first_process():
            path.rename(path.with_name(f"{path.name}.broken"))
    return None
