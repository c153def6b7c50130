"""Which rows make up a batch: a pure function of (seed, rows consumed).

Row number i of the run is row `permute(i mod R)` of pass `i div R`; a global batch is the next G of them.
Every row comes once a pass, a batch may span two passes, and each rank takes its own slice: 1, 2 or 8 devices
train on the same sequence of global batches, and a resumed run goes on with the next row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlm.counter import permute

Ints = npt.NDArray[np.int64]


class RowBatch(NamedTuple):
    """The rows of one micro-batch."""

    passes: Ints
    """(B,) how often the data was gone through before."""
    rows: Ints
    """(B,) row numbers in the row table."""


@dataclass(frozen=True)
class TrainingSampler:
    """Yields the micro-batches of one rank, without end.

    Args:
        num_rows: R, rows of the table.
        seed: names the order.
        global_batch_size: G, rows of one optimizer step over all ranks.
        micro_batch_size: rows of one pass on one rank; divides G / world_size.
        rank: this process.
        world_size: number of processes.
        rows_consumed: rows the run trained on before; the whole resume state.
    """

    num_rows: int
    seed: int
    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world_size: int = 1
    rows_consumed: int = 0

    def __iter__(self) -> Iterator[RowBatch]:
        share = self.global_batch_size // self.world_size
        first = self.rows_consumed + self.rank * share
        while True:
            for start in range(first, first + share, self.micro_batch_size):
                yield self.rows(np.arange(start, start + self.micro_batch_size))
            first += self.global_batch_size

    def rows(self, index: Ints) -> RowBatch:
        """Return pass and row of the run's rows number `index` (B,)."""
        passes, place = np.divmod(index, self.num_rows)
        rows = np.empty_like(place)
        for number in np.unique(passes):
            inside = passes == number
            rows[inside] = permute(place[inside], self.num_rows, self.seed, int(number))
        return RowBatch(passes, rows)


@dataclass(frozen=True)
class ValidationSampler:
    """Yields every row once, in order; rank r takes every world_size-th batch, none is padded or repeated."""

    num_rows: int
    batch_size: int
    rank: int = 0
    world_size: int = 1

    def __iter__(self) -> Iterator[RowBatch]:
        for start in range(self.rank * self.batch_size, self.num_rows, self.batch_size * self.world_size):
            rows = np.arange(start, min(start + self.batch_size, self.num_rows))
            yield RowBatch(np.zeros_like(rows), rows)

    def __len__(self) -> int:
        batches = -(-self.num_rows // self.batch_size)
        return len(range(self.rank, batches, self.world_size))
