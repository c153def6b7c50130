"""Checkpoints: written atomically, found by content, opened without running code."""

from __future__ import annotations

import logging
import os
import re
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from mlm.config.errors import DiskError, InputError
from mlm.files import replacing
from mlm.launch import is_first_process

NEEDED = {
    "state_dict": dict,
    "optimizer_states": list,
    "global_step": int,
    "progress": dict,
    "identity": dict,
    "pytorch-lightning_version": str,
}
"""Contents of a checkpoint and their types."""

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
    """Writes checkpoints atomically; a failed write is recorded in `failure` and training continues.

    It is not an exception, because the other ranks wait for this one and do not know about it.
    """

    failure: OSError | None = None
    """Why the newest checkpoint could not be written; None if it was."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        self.failure = None
        target = Path(path)
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


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint file."""

    path: Path
    content: dict[str, Any]
    """Plain values and tensors, memory-mapped."""

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.content["global_step"])


class DamagedError(InputError):
    """A file that was read and is not a complete checkpoint."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint without running code that might be in the file.

    Raises:
        DamagedError: it is not a complete checkpoint.
        InputError: it cannot be read; it may be complete.
        FileNotFoundError: there is no such file.
    """
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not check the checksums of files it maps
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_content(content)
        return Checkpoint(path, content)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path} cannot be read: {reason}; resume again when it can be") from None
    except (
        RuntimeError,
        EOFError,
        LookupError,
        TypeError,
        ValueError,
        UnpicklingError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        reason = " ".join(str(error).split())[:120]
    raise DamagedError(f"{path} is not a complete checkpoint: {reason}")


def _check_content(content: Any) -> None:
    """Check that a checkpoint has what a run goes on with, each of its kind.

    Raises:
        ValueError: says what is missing or odd.
    """
    if not isinstance(content, dict):
        raise ValueError("it is not a table")
    if missing := [key for key in NEEDED if key not in content]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for key, kind in NEEDED.items():
        value = content[key]
        if type(value) is not kind and not (kind is dict and isinstance(value, dict)):
            raise ValueError(f"its {key} is {str(value)[:40]!r}")
        if not value and kind is not int:
            raise ValueError(f"its {key} is empty")
    if content["global_step"] < 0 or "rows" not in content["progress"]:
        raise ValueError("its global_step or progress is not that of a run")
    if not all(isinstance(state, dict) and state for state in content["optimizer_states"]):
        raise ValueError("its optimizer_states are not those of an optimizer")


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a folder, None if there never was one.

    Damaged files are set aside under another name, with a warning.

    Raises:
        InputError: a checkpoint cannot be read, or there were checkpoints and all are damaged.
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
