"""Which rows make up a batch: a pure function of (seed, rows consumed).

Row number i of the run is row `permute(i mod R)` of pass `i div R`; a global batch is the next G of them.
Every row comes once a pass, a batch may span two passes, and each rank takes its own slice: 1, 2 or 8 devices
train on the same sequence of global batches, and a resumed run continues with the next row.

A weighted mix has several parts. Every `BLOCK_ROWS` rows of the run have a fixed number of rows of each part,
in an order drawn for that block; each part goes through its own rows, pass after pass, so a small one is
repeated and no row of a large one is skipped. The next row of a part follows from the number of the block and
the place in it, so all of the above holds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlm.counter import permute

Ints = npt.NDArray[np.int64]

BLOCK_ROWS = 2**12  # rows of a run in which every part of a mix has its exact share
MIX_KEY = 1  # distinguishes the order of a block from the order of rows


class Part(NamedTuple):
    """The rows of one source in a weighted mix; the rows of the next part follow in the table."""

    num_rows: int
    per_block: int  # rows of this part in every BLOCK_ROWS rows of the run
    name: str = ""  # of the source


def divide_block(shares: list[float]) -> list[int]:
    """Return the rows of each part in a block: in proportion to the shares, at least one each."""
    exact = np.array(shares) / sum(shares) * BLOCK_ROWS
    counts = np.maximum(exact.astype(np.int64), 1)
    while counts.sum() != BLOCK_ROWS:  # the largest error is corrected first
        step = 1 if counts.sum() < BLOCK_ROWS else -1
        error = np.where(counts + step > 0, step * (exact - counts), -np.inf)
        counts[error.argmax()] += step
    return [int(count) for count in counts]


@lru_cache(maxsize=4)
def _mixed_block(per_block: tuple[int, ...], seed: int, block: int) -> tuple[Ints, Ints]:
    """Return for each place of a block its part, and the number of earlier places of that part."""
    order = permute(np.arange(BLOCK_ROWS), BLOCK_ROWS, seed, MIX_KEY, block)
    owner = np.repeat(np.arange(len(per_block)), per_block)[order]
    by_part = np.argsort(owner, kind="stable")
    rank = np.empty_like(owner)
    rank[by_part] = np.concatenate([np.arange(count) for count in per_block])
    return owner, rank


class RowBatch(NamedTuple):
    """The rows of one micro-batch."""

    passes: Ints  # (B,) number of earlier passes over the data
    rows: Ints  # (B,) row numbers in the row table
    mask_rate: float | None = None  # share of the ordinary tokens to predict; None: the rate of the masking


@dataclass(frozen=True)
class TrainingSampler:
    """Yields the micro-batches of one rank, without end."""

    num_rows: int  # R, rows of the table
    seed: int
    global_batch_size: int  # G, rows of one optimizer step over all ranks
    micro_batch_size: int  # rows of one pass on one rank; divides G / world_size
    rank: int = 0
    world_size: int = 1
    rows_consumed: int = 0  # rows the run has trained on already; the whole resume state
    parts: tuple[Part, ...] = ()  # of a weighted mix, in the order of the table; empty: all rows are equal
    mask_rate: Callable[[int], float] | None = None
    """The mask rate of an optimizer step, counted from the first one of this sampler; called in the training
    process when rows are drawn, and sent with them to the loader processes."""

    def __iter__(self) -> Iterator[RowBatch]:
        share = self.global_batch_size // self.world_size
        first = self.rows_consumed + self.rank * share
        for step in count():
            rate = self.mask_rate(step) if self.mask_rate else None
            for start in range(first, first + share, self.micro_batch_size):
                yield self.rows(np.arange(start, start + self.micro_batch_size))._replace(mask_rate=rate)
            first += self.global_batch_size

    def rows(self, index: Ints) -> RowBatch:
        """Return pass and row of the rows `index` (B,) of the run; in a mix, the pass of the row's part."""
        if not self.parts:
            return RowBatch(*_permuted(index, self.num_rows, self.seed))
        per_block = tuple(part.per_block for part in self.parts)
        block, place = np.divmod(index, BLOCK_ROWS)
        owner, nth = np.empty_like(place), np.empty_like(place)
        for number in np.unique(block):
            inside = block == number
            owners, ranks = _mixed_block(per_block, self.seed, int(number))
            owner[inside], nth[inside] = owners[place[inside]], ranks[place[inside]]
        nth += block * np.array(per_block)[owner]
        passes, rows, first = np.empty_like(nth), np.empty_like(nth), 0
        for number, part in enumerate(self.parts):
            mine = owner == number
            passes[mine], places = _permuted(nth[mine], part.num_rows, self.seed, number)
            rows[mine] = first + places
            first += part.num_rows
        return RowBatch(passes, rows)


def _permuted(index: Ints, num_rows: int, *key: int) -> tuple[Ints, Ints]:
    """Return the pass, and the row in the order of that pass, of places in an endless sequence."""
    passes, place = np.divmod(index, num_rows)
    rows = np.empty_like(place)
    for number in np.unique(passes):
        inside = passes == number
        rows[inside] = permute(place[inside], num_rows, *key, int(number))
    return passes, rows


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
