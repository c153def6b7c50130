"""An iterable over batches for a Trainer, ours or a stock one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Any


class TrainingLoader:
    """An iterable over training batches that measures how long training waited for them.

    It is not a DataLoader, so a stock Trainer neither replaces its sampler nor expects a resumable state.

    Args:
        batches: returns an iterator from the run's current place on.
        num_batches: batches of an epoch; None: endless.
    """

    waited_s = 0.0
    """Seconds since it was built."""

    def __init__(self, batches: Callable[[], Iterable[Any]], num_batches: int | None = None):
        self._batches, self._num_batches = batches, num_batches

    def __iter__(self) -> Iterator[Any]:
        start = monotonic()
        for batch in self._batches():
            self.waited_s += monotonic() - start
            yield batch
            start = monotonic()

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("an endless loader has no length")
        return self._num_batches
