"""Counter-based random numbers: a pure function of integers, no generator state anywhere.

A mask, a row order or a dropout seed is a function of its indices (seed, pass, row, position), so it is the
same on any worker, rank and batch size and after any resume. The mixer is the finaliser of splitmix64
(Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators"), chained over the counters.
"""

import numpy as np
import numpy.typing as npt

Counter = int | npt.NDArray[np.integer]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def random_bits(*counters: Counter) -> npt.NDArray[np.uint64]:
    """Return 64 random bits for each combination of the broadcast counters; order matters."""
    state = np.zeros((1,) * max(np.ndim(counter) for counter in counters), np.uint64)
    with np.errstate(over="ignore"):
        for counter in counters:
            state = state + _GOLDEN + np.asarray(counter).astype(np.uint64) * _SECOND
            state = (state ^ (state >> np.uint64(30))) * _FIRST
            state = (state ^ (state >> np.uint64(27))) * _SECOND
            state = state ^ (state >> np.uint64(31))
    return state


def uniform(*counters: Counter) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each combination of the broadcast counters."""
    return (random_bits(*counters) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permute(index: npt.NDArray[np.int64], size: int, *key: int) -> npt.NDArray[np.int64]:
    """Map positions of a pass to distinct rows: a keyed permutation of `range(size)`, computed pointwise.

    A four-round Feistel network over the smallest even number of bits that holds `size`; images outside are
    mapped again until they fall inside ("cycle walking", Black & Rogaway 2002). It costs the same for any
    position in `index` and any size, and needs no memory; the integers of `key` name the permutation.
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    out = index.astype(np.uint64)
    outside = np.ones(out.shape, bool)
    while outside.any():
        left, right = out[outside] >> bits, out[outside] & mask
        for turn in range(4):
            left, right = right, left ^ (random_bits(*key, turn, right) & mask)
        out[outside] = (left << bits) | right
        outside = out >= np.uint64(size)
    return out.astype(np.int64)
