"""How a run ends on a signal: after the current step, with nothing half done."""

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

from mlm.training.callbacks import StepCallback
from mlm.training.processes import reduce_over_ranks

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class GracefulStop(StepCallback):
    """On SIGTERM, SIGINT or SIGUSR1, ends the run after the current step; the saver then keeps it.

    Replaces Lightning's own handlers, which would save nothing. What was there before comes back in the end.
    """

    signal: int | None = None
    """What the run ends on: with several ranks what all have agreed on, not what one of them has seen."""

    def __init__(self) -> None:
        self._before = {number: signal.getsignal(number) for number in SIGNALS}
        self._noted: int | None = None
        self._alone = True
        self._asked: tuple[Tensor, torch.cuda.Event] | None = None

    def setup(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """Install the handlers, and switch Lightning's off.

        With them the ranks would agree on SIGTERM once more, and wait at every batch for the GPU's answer.
        """
        self._alone = trainer.world_size == 1
        trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
        trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None  # type: ignore[method-assign]
        self._install()

    def _install(self) -> None:
        for number in SIGNALS:
            signal.signal(number, self._note)

    def _give_back(self) -> None:
        for number, handler in self._before.items():
            if handler is not None:  # None: not one of Python's, which nothing can put back
                signal.signal(number, handler)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Only note signals while something is brought to its end."""
        self._install()
        try:
            yield
        finally:
            self._give_back()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._noted is not None and number == signal.SIGINT:  # asked twice: the user does not want to wait
            os._exit(128 + number)
        self._noted = self._noted or number  # a scheduler and a launcher may both pass on the same stop
        if self._alone:
            self.signal = self._noted

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Stop all ranks together as soon as one was signalled."""
        number = self._noted or 0
        if not self._alone:
            told = torch.full((), float(number), device=module.device)
            number = self._largest(told, is_last=trainer.should_stop)
        if number:
            self.signal = number
            trainer.should_stop = True

    def _largest(self, number: Tensor, is_last: bool) -> int:
        """Return the largest number of all ranks: on a GPU that of the step before, which it has already.

        Only in the last step, which is the same for all ranks, it waits for the newest.
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

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Give the handlers back: after an error, of a checkpoint that does not fit too, nothing is saved."""
        self._give_back()

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """Give the handlers back."""
        if stage == "fit":
            self._give_back()
