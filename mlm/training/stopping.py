"""How a run ends on a signal: after the current step, with a checkpoint."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from mlm.training.engine import StepCallback
from mlm.training.processes import reduce_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


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
        """Install the handlers, and switch Lightning's question to all ranks off.

        Lightning asks in each batch whether a rank received SIGTERM and waits for the answer of the GPU.
        """
        self._alone = trainer.world_size == 1
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
