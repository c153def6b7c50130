"""What a training on a CPU asks of the C library's allocator; only glibc is asked, see mallopt(3).

By itself it gives large blocks back to the system and gets them anew, page by page, by chance 3,000 to 35,000
pages in a step of the default model. So what a step frees is kept for the next one. What outlasts a step (the
optimizer's moments) would lie among it and cut it into pieces that do not fit again, at width 384 a twentieth
of all memory; so while a checkpoint is loaded and in the first step, which create it, each large block gets
pages of its own. The validation in between leaves nothing behind, and takes twice as long if nothing is kept.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Any

import lightning.pytorch as pl

from mlm.training.engine import StepCallback

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
"""Numbers of mallopt's parameters: free bytes that are kept at the end, bytes by which the memory grows, size
from which a block gets pages of its own, how many blocks may."""
LARGE_BLOCK = 2**19
"""Bytes; the moments of a matrix of 384 x 384 and more."""
MANY_BLOCKS = 2**16
"""glibc's own bound of MMAP_MAX."""
MALLOC_CHOICES = (
    "GLIBC_TUNABLES",
    *(f"MALLOC_{name}_" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")),
)
"""Variables of the environment by which a user decides the same."""


class KeepFreedMemory(StepCallback):
    """Separates what lasts from what each step needs, then keeps what each step frees."""

    def __init__(self) -> None:
        self.has_begun, self.has_stepped = False, False

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Begin before a checkpoint's moments are loaded."""
        map_large_blocks()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Keep freed memory in the validation before the first step; this callback comes before it."""
        super().on_train_start(trainer, module)
        keep_freed_memory()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Separate what the first optimizer step creates."""
        if not self.has_begun:
            map_large_blocks()
            self.has_begun = True

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Keep freed memory from the end of the first optimizer step on."""
        if not self.has_stepped:
            keep_freed_memory()
            self.has_stepped = True


def map_large_blocks() -> None:
    """Let each block of LARGE_BLOCK bytes and more have pages of its own, given back when it is freed."""
    give_back_freed_memory()
    _set({MMAP_THRESHOLD: LARGE_BLOCK, MMAP_MAX: MANY_BLOCKS})


def keep_freed_memory() -> None:
    """Let what is freed from now on be kept, blocks of any size together."""
    give_back_freed_memory()
    _set({MMAP_MAX: 0, TRIM_THRESHOLD: 2**31 - 1, TOP_PAD: 2**26})


def give_back_freed_memory() -> None:
    """Let all pages that hold nothing be given back, also those between others."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def _set(options: dict[int, int]) -> None:
    """Set parameters of mallopt, unless the environment has the user's choice."""
    if platform.libc_ver()[0] == "glibc" and os.environ.keys().isdisjoint(MALLOC_CHOICES):
        for option, value in options.items():
            ctypes.CDLL(None).mallopt(option, value)
