"""Checkpoints: written atomically, found by content, opened without running code."""

from __future__ import annotations

import logging
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

log = logging.getLogger(__name__)


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return where the checkpoint of an optimizer step belongs."""
    return folder / f"step-{step:08d}.ckpt"


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes to a temporary file in the same folder, syncs and renames: a reader never sees half a file."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`."""
        target = Path(path)
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


def find_checkpoint(folder: Path) -> Path | None:
    """Return the newest whole checkpoint of a folder, None without one; broken files are skipped with a warning."""
    for path in sorted(folder.glob("step-*.ckpt"), reverse=True):
        try:
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            reason = str(error).splitlines()[0][:120]
            log.warning("skipping %s, which is no whole checkpoint of ours (%s)", path, reason)
        else:
            return path
    return None
