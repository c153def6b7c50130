"""The tokens to predict and their replacements (Devlin et al. 2019, arXiv:1810.04805, sec. 3.1).

- a pure function of (seed, pass, row, position): the same masks on any worker, rank and batch size
- a row has ceil(rate * (S - 2)) slots for predictions, as CLS and SEP have none, so shapes are static; unused
  slots carry the label -100
- token: exactly the drawn number of tokens; whole_word and span: the same number, in whole units that fit
- special tokens are never predicted and never drawn as a replacement
- the rate may change over a run: it is a function of the optimizer step alone

B rows, S tokens a row, M slots for predictions.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from mlm.config.data import IGNORE_INDEX, MaskingConfig, prediction_slots
from mlm.counter import random_bits, uniform

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

# The purpose of a random number, so that no two draws share their bits.
_COUNT, _ORDER, _SPLIT, _REPLACEMENT = range(4)

SPAN_STOP_RATE, MAX_SPAN = 0.2, 10
"""Chance that a span ends after each token; longest span (Joshi et al. 2020, arXiv:1907.10529, sec. 3.1)."""


def mask_rate_at(config: MaskingConfig, step: int, first: int, total: int | None) -> float:
    """Return the share of the ordinary tokens to predict in the batch after `step` optimizer steps.

    It changes from step `first` on, over the `total` steps of the run; None while they are unknown.
    """
    if config.final_mask_rate is None or total is None or step <= first:
        return config.mask_rate
    share = min((step - first) / max(total - 1 - first, 1), 1.0)
    return config.mask_rate + share * (config.final_mask_rate - config.mask_rate)


class MaskedTokens(NamedTuple):
    """A batch with its predictions."""

    input_ids: Ints  # (B, S) input of the model
    masked_positions: Ints  # (B, M) places to predict, ascending; 0 in unused slots
    labels: Ints  # (B, M) the ids to predict there; IGNORE_INDEX in unused slots


@dataclass(frozen=True)
class Masking:
    """Hides tokens of a batch by one strategy."""

    config: MaskingConfig
    rate: float  # share of the ordinary tokens to predict, in (0, 1]; the largest if it changes
    mask_id: int  # shown in place of a hidden token
    is_special: Bools  # (V,) the ids that are never predicted nor drawn
    starts_word: Bools | None = None  # (V,) the ids that begin a word; needed by whole_word only

    def __call__(
        self, input_ids: Ints, seed: int, passes: Ints, rows: Ints, rate: float | None = None
    ) -> MaskedTokens:
        """Hide tokens of `input_ids`, (B, S) with CLS and SEP at least; padding is a special id.

        `passes` and `rows`, (B,), are the number of earlier passes over the data and the row numbers in the
        row table; `rate` is at most `self.rate`, and None means that.
        """
        rate = self.rate if rate is None else rate
        key = (seed, passes[:, None], rows[:, None])
        maskable = ~self.is_special[input_ids]
        count = maskable.sum(1, keepdims=True)
        # floor(x + u) is x on average; a row with a maskable token has at least one masked.
        budget = np.floor(rate * count + uniform(*key, _COUNT)).astype(np.int64)
        shape = len(input_ids), prediction_slots(input_ids.shape[1], self.rate)
        budget = np.clip(budget, np.minimum(count, 1), shape[1])
        places = np.arange(input_ids.shape[1])[None, :]
        order = uniform(*key, _ORDER, places)
        selectors = {"token": _select_tokens, "whole_word": _select_words, "span": _select_spans}
        selected = selectors[self.config.strategy](self, input_ids, maskable, budget[:, 0], order)
        shown = np.where(selected, self._replace(input_ids, key, places), input_ids)
        positions, labels = np.zeros(shape, np.int64), np.full(shape, IGNORE_INDEX, np.int64)
        row, place = np.nonzero(selected)
        slot = (np.cumsum(selected, axis=1) - 1)[row, place]
        positions[row, slot], labels[row, slot] = place, input_ids[row, place]
        return MaskedTokens(shown, positions, labels)

    def _replace(self, input_ids: Ints, key: tuple[int, Ints, Ints], places: Ints) -> Ints:
        """Return the replacement of each place if it is selected: [MASK], a random token, or itself."""
        split = uniform(*key, _SPLIT, places)
        ordinary = np.flatnonzero(~self.is_special)
        drawn = ordinary[random_bits(*key, _REPLACEMENT, places) % np.uint64(len(ordinary))]
        hidden, changed = self.config.mask_token_fraction, self.config.random_token_fraction
        return np.where(split < hidden, self.mask_id, np.where(split < hidden + changed, drawn, input_ids))


def _select_tokens(masking: Masking, ids: Ints, maskable: Bools, budget: Ints, order: Floats) -> Bools:
    """Take the first `budget` maskable tokens in random order."""
    ranked = np.argsort(np.where(maskable, order, np.inf), axis=1, kind="stable")
    selected = np.zeros(maskable.shape, bool)
    np.put_along_axis(selected, ranked, np.arange(ids.shape[1])[None, :] < budget[:, None], axis=1)
    return selected


def _select_words(masking: Masking, ids: Ints, maskable: Bools, budget: Ints, order: Floats) -> Bools:
    """Take whole words in random order as long as they fit; special tokens end a word."""
    assert masking.starts_word is not None, "whole_word masking needs starts_word"
    before = np.pad(maskable, ((0, 0), (1, 0)))[:, :-1]
    begins = maskable & (masking.starts_word[ids] | ~before)
    selected = np.zeros(maskable.shape, bool)
    for row in range(len(ids)):
        first = np.flatnonzero(begins[row])
        if not len(first):
            continue
        # A word ends before the next word or special token.
        stops = np.flatnonzero(begins[row] | ~maskable[row])
        after = np.append(stops, ids.shape[1])[np.searchsorted(stops, first, side="right")]
        words = sorted(zip(order[row, first], first, after, strict=True))
        left = int(budget[row])
        for _, start, end in words:
            if end - start <= left:
                selected[row, start:end] = True
                left -= int(end - start)
        if left == budget[row]:  # every word is too long: hide one that the slots can hold, or cut one
            slots = prediction_slots(ids.shape[1], masking.rate)
            cut = words[0][1], words[0][1] + left
            start, end = next(((a, b) for _, a, b in words if b - a <= slots), cut)
            selected[row, start:end] = True
    return selected


def _select_spans(masking: Masking, ids: Ints, maskable: Bools, budget: Ints, order: Floats) -> Bools:
    """Take runs of geometric length at random places; the last one is cut to fit."""
    fraction = (order * 2**26) % 1.0  # low bits of the order draw, independent of its rank
    length = 1 + np.floor(np.log1p(-fraction) / math.log1p(-SPAN_STOP_RATE)).astype(np.int64)
    length = np.minimum(length, MAX_SPAN)
    selected = np.zeros(maskable.shape, bool)
    for row in range(len(ids)):
        left = int(budget[row])
        for start in np.argsort(order[row], kind="stable"):
            end = start
            stop = min(start + min(int(length[row, start]), left), ids.shape[1])
            while end < stop and maskable[row, end] and not selected[row, end]:
                end += 1
            selected[row, start:end] = True
            left -= int(end - start)
            if not left:
                break
    return selected
