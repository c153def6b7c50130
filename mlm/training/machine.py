"""Callbacks about the machine: signals that stop a run, memory that it frees, cores that others use."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from mlm.cores import busy_seconds, cores_to_run_on
from mlm.launch import is_first_process
from mlm.training.engine import StepCallback
from mlm.training.processes import reduce_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
CHECK_EVERY_S = 10.0
"""Seconds between two readings of who uses the cores."""
LEAST_OTHERS = 0.3
"""Cores that other programs must use before it is reported."""
WAIT_POLICY = "OMP_WAIT_POLICY"
"""Whether threads that wait for others keep their cores busy meanwhile; read when torch is loaded."""
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD, MMAP_MAX = -1, -2, -3, -4
"""Parameters of mallopt(3): free bytes kept at the end, bytes by which the memory grows, size from which a
block gets pages of its own, how many blocks may."""
LARGE_BLOCK = 2**19
"""Bytes; the moments of a matrix of 384 x 384 and more."""
MANY_BLOCKS = 2**16
"""glibc's own bound of MMAP_MAX."""
MALLOC_CHOICES = (
    "GLIBC_TUNABLES",
    *(f"MALLOC_{name}_" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD", "TOP_PAD")),
)
"""Variables of the environment by which a user decides the same."""

log = logging.getLogger(__name__)


class GracefulStop(StepCallback):
    """On SIGTERM, SIGINT or SIGUSR1, ends the run after the current step; the saver then writes it.

    Lightning installs a handler of its own just before training, which would save nothing and end ranks at
    different steps. The signals are blocked from then until ours are back. A second Ctrl-C exits at once.
    """

    signal: int | None = None
    """The signal the run ends on; with several ranks the one that all agreed on."""

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._received: int | None = None
        self._alone = True
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """Install the handlers, and switch off Lightning's question to all ranks."""
        self._alone = trainer.world_size == 1
        # Lightning would ask all ranks for SIGTERM in each batch, and wait for the GPU's answer.
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._install()

    def on_fit_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Block the signals while Lightning installs its handler."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Replace Lightning's handler by ours."""
        super().on_train_start(trainer, module)
        self._install()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    def _install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def restore(self) -> None:
        """Give the handlers back, after Lightning has put back those it found."""
        for number, handler in self._before.items():
            if handler is not None:  # None: not installed from Python, so it cannot be restored
                signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Only record signals while the model is saved."""
        self._install()
        try:
            yield
        finally:
            self.restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is not None and number == signal.SIGINT:
            os._exit(128 + number)
        self._received = self._received or number  # a scheduler and a launcher may both pass on one stop
        if self._alone:
            self.signal = self._received

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Stop all ranks together as soon as one received a signal."""
        number = self._received or 0
        if not self._alone:
            received = torch.full((), float(number), device=module.device)
            number = self._largest(received, is_last=trainer.should_stop)
        if number:
            self.signal = number
            trainer.should_stop = True

    def _largest(self, number: Tensor, is_last: bool) -> int:
        """Return the largest number of all ranks; on a GPU that of the step before, which is there already.

        Only the last step, which is the same for all ranks, waits for the newest.
        """
        number = reduce_over_ranks(number, torch.distributed.ReduceOp.MAX)
        if is_last or not number.is_cuda:
            return int(number)
        before, event = self._asked, torch.cuda.Event()
        self._asked = number.to("cpu", non_blocking=True), event
        event.record()
        if before is None:
            return 0
        before[1].synchronize()
        return int(before[0])


class KeepFreedMemory(StepCallback):
    """Keeps in glibc's allocator what each step of training on a CPU frees.

    By itself the allocator returns large blocks and gets them again, by chance 3,000 to 35,000 pages a step
    of the default model. What outlasts a step (the optimizer's moments) would fragment the kept memory, at
    width 384 a twentieth of it. So while a checkpoint is loaded and in the first step, which create it, large
    blocks get pages of their own. The validation in between is twice as slow if nothing is kept.
    """

    has_stepped = False

    def setup(self, trainer: pl.Trainer, pl_module: Any, stage: str) -> None:
        """Begin before a checkpoint's moments are loaded."""
        map_large_blocks()

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Keep freed memory in the validation before the first step; this callback comes before it."""
        super().on_train_start(trainer, module)
        keep_freed_memory()

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Separate the memory that the first optimizer step creates."""
        if batch_idx == 0:
            map_large_blocks()

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


class BusyCores(StepCallback):
    """Warns once that other programs use the cores on which torch's threads wait for each other."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Start watching, where threads wait and the user has not decided how."""
        super().on_train_start(trainer, module)
        threads = torch.get_num_threads()
        self._threads = threads * trainer.num_devices
        waits = module.device.type == "cpu" and threads > 1 and WAIT_POLICY not in os.environ
        self._is_done = not (waits and is_first_process())
        self._before: tuple[float, float, float] | None = None  # clock, this process, all programs

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Compare all use of the cores with ours, every CHECK_EVERY_S seconds until the warning.

        The first step is left out: processes of ours may compile the model in it.
        """
        if self._is_done or (self._before and time.monotonic() - self._before[0] < CHECK_EVERY_S):
            return
        if (busy := busy_seconds()) is None:
            return
        now, before = (time.monotonic(), time.process_time(), busy), self._before
        self._before = now
        if before is None:
            return
        wall, own, everyone = (after - earlier for after, earlier in zip(now, before, strict=True))
        others, cores = (everyone - own * trainer.num_devices) / wall, cores_to_run_on()
        if others >= LEAST_OTHERS and others + self._threads > cores:
            log.warning(
                f"other programs use {others:.1f} of the {cores} cores, on which our threads wait for each "
                f"other: as long as they run, the same command with {WAIT_POLICY}=passive before it is faster"
            )
            self._is_done = True
