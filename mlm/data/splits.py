"""Divide labelled examples: hold out a part by hash or by order, or cut them into folds.

Examples with the same key, a hash of the text or of its group, always stay together.

N examples, C classes, U different keys.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.counter import uniform

Mask = npt.NDArray[np.bool_]
Keys = npt.NDArray[np.uint64]


def last_rows(number: int, fraction: float) -> Mask:
    """Return a mask of the last `fraction` of a number of rows: at least one, and never all."""
    held_out = min(max(round(fraction * number), 1), number - 1)
    return np.arange(number) >= number - held_out


def by_hash(keys: Keys, labels: npt.NDArray[Any], fraction: float, grouped: bool = False) -> Mask:
    """Return a mask of the examples to hold out, (N,); all False where there are too few.

    An example is held out when the hash of its key falls under `fraction`: rows added later move none. Every
    class keeps an example to train on: a class without one is taken back, with its whole groups if `grouped`.
    """
    share = uniform(keys.view(np.int64))
    held_out = share < fraction
    for members in _members(labels):
        if held_out[members].all():
            held_out &= ~(np.isin(share, share[members]) if grouped else members)
    for members in _members(labels) if labels.dtype.kind != "f" else ():  # every class is scored if it can be
        lowest = np.unique(share[members])
        if len(lowest) > 1 and not held_out[members].any():
            more = held_out | (share == lowest[0])
            held_out = held_out if any(more[others].all() for others in _members(labels)) else more
    if not held_out.any():  # the first key in the order of hashes without which no class is empty
        units = (share == value for value in np.unique(share))
        fits = (unit for unit in units if all((members & ~unit).any() for members in _members(labels)))
        held_out = next(fits, held_out)
    return held_out


def fold_of(keys: Keys, labels: npt.NDArray[Any], folds: int) -> npt.NDArray[np.int64]:
    """Return the fold of each example, (N,) from 0: of equal size and with equal shares of each class.

    The keys are dealt out, those with most examples first, then by hash: each goes to the fold that has least
    of its classes, of equal ones to the smallest. The order of the rows plays no part.
    """
    units, owner, sizes = np.unique(keys, return_inverse=True, return_counts=True)
    counts = np.stack([np.bincount(owner, members, len(units)) for members in _members(labels)], 1)  # (U, C)
    if labels.ndim == 2:  # texts without any label are a class of their own
        counts = np.column_stack([counts, np.bincount(owner, ~labels.any(1), len(units))])
    shares = counts / np.maximum(counts.sum(0), 1)
    filled, rows, chosen = np.zeros((folds, counts.shape[1])), np.zeros(folds), np.zeros(len(units), np.int64)
    for unit in np.lexsort((units, -sizes)):
        fold = np.lexsort((rows, filled @ shares[unit]))[0]
        chosen[unit] = fold
        filled[fold] += counts[unit]
        rows[fold] += sizes[unit]
    return chosen[owner]


def _members(labels: npt.NDArray[Any]) -> Iterator[Mask]:
    """Yield a mask of the examples of each class, (N,); numbers are one class."""
    if labels.ndim == 2:
        yield from (column for column in labels.T if column.any())
    elif labels.dtype.kind == "f":
        yield np.ones(len(labels), bool)
    else:
        yield from (labels == label for label in np.unique(labels))
