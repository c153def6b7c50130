"""From row numbers to a batch: cut the pieces out of the store, add the special tokens, mask.

B rows, S tokens a row, M slots for predictions.
"""

from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import Dataset

from mlm.config.data import IGNORE_INDEX, MaskingConfig
from mlm.data.packing import PackingMode, RowTable
from mlm.data.sampler import Part, RowBatch
from mlm.data.store import TokenStore
from mlm.masking import Masking
from mlm.tokenizer import SpecialTokens, num_ids, starts_word

Ints = npt.NDArray[np.int64]


class MaskedBatch(TypedDict):
    """A batch for the model; its tokens are counted here, which needs no synchronisation with a device."""

    input_ids: Tensor  # (B, S) int64, masked
    attention_mask: Tensor  # (B, S) int64, 0 at padding, else the number of the document inside its row
    masked_positions: Tensor  # (B, M) int64 places to predict
    labels: Tensor  # (B, M) int64 ids to predict, IGNORE_INDEX in unused slots
    num_tokens: int  # that are not padding
    num_ordinary: int  # that may be predicted: all but the special ones
    num_masked: int  # to predict
    num_hidden: int  # to predict, shown as [MASK]
    num_random: int  # to predict, shown as another ordinary token
    sources: NotRequired[Tensor]  # (B, M) int64 source of the tokens to predict, where rows tell them apart


@dataclass(frozen=True)
class Rows:
    """The rows of one part of a corpus, unmasked."""

    store: TokenStore
    table: RowTable
    special: SpecialTokens
    seq_len: int
    packing: PackingMode
    parts: tuple[Part, ...] = ()  # of a weighted mix; empty: all rows are equal
    bounds: tuple[int, ...] = ()  # place in the store where each source begins; empty: not told apart

    def __len__(self) -> int:
        return len(self.table)

    def num_tokens(self, rows: Ints) -> int:
        """Return the number of tokens in `rows`, (B,), without padding."""
        first, last = self.table.offsets[rows], self.table.offsets[rows + 1]
        counts = last - first
        pieces = int(counts.sum())
        number = np.repeat(first - (np.cumsum(counts) - counts), counts) + np.arange(pieces)
        return self._with_special(int(self.table.pieces.lengths[number].sum()), pieces, len(rows))

    def _with_special(self, ordinary: int, pieces: int, rows: int) -> int:
        return ordinary + (pieces + rows if self.packing == "concat" else 2 * pieces)

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the documents that begin in these rows."""
        begin_here = np.isin(self.store.documents.starts, self.table.pieces.starts)
        return int(self.store.num_bytes[begin_here].sum())

    @property
    def tokens_per_row(self) -> float:
        """Mean number of tokens in a row over the run, without padding."""
        parts = self.parts or (Part(len(self), 1),)
        first, total = 0, 0.0
        for num_rows, per_block, _ in parts:
            begin, end = (int(self.table.offsets[row]) for row in (first, first + num_rows))
            ordinary = int(self.table.pieces.lengths[begin:end].sum())
            total += per_block * self._with_special(ordinary, end - begin, num_rows) / num_rows
            first += num_rows
        return total / sum(part.per_block for part in parts)

    def render(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return the ids and the document numbers (0 = padding) of `rows`, (B,), each (B, S)."""
        shape = len(rows), self.seq_len
        ids, documents = np.full(shape, self.special.pad, np.int64), np.zeros(shape, np.int64)
        run_on = self.packing == "concat"
        starts, lengths = self.table.pieces.starts, self.table.pieces.lengths
        for out, row in enumerate(rows.tolist()):
            at, first = 0, int(self.table.offsets[row])
            for piece in range(first, int(self.table.offsets[row + 1])):
                begin = at
                if piece == first or not run_on:
                    ids[out, at] = self.special.cls
                    at += 1
                length = int(lengths[piece])
                ids[out, at : at + length] = self.store.tokens(int(starts[piece]), length)
                at += length + 1
                ids[out, at - 1] = self.special.sep
                documents[out, begin:at] = 1 if run_on else piece - first + 1
        return ids, documents

    def sources(self, rows: Ints, places: Ints) -> Ints:
        """Return the number of the source of the tokens at `places` (B, M) of `rows` (B,), each (B, M)."""
        run_on, found = self.packing == "concat", np.empty_like(places)
        starts, lengths = self.table.pieces.starts, self.table.pieces.lengths
        for out, row in enumerate(rows.tolist()):
            first, last = self.table.offsets[row : row + 2]
            ends = run_on + np.cumsum(lengths[first:last] + (1 if run_on else 2))  # with the special tokens
            piece = np.searchsorted(ends, places[out], side="right")
            found[out] = np.searchsorted(self.bounds, starts[first:last][piece], side="right") - 1
        return found


@dataclass(frozen=True)
class MaskedRows(Dataset[MaskedBatch]):
    """Maps a batch of row numbers to a masked batch; the masks depend on `seed` and pass."""

    rows: Rows
    masking: Masking
    seed: int

    def __getitem__(self, batch: RowBatch) -> MaskedBatch:
        ids, documents = self.rows.render(batch.rows)
        masked = self.masking(ids, self.seed, batch.passes, batch.rows, batch.mask_rate)
        used = masked.labels != IGNORE_INDEX
        shown = np.take_along_axis(masked.input_ids, masked.masked_positions, axis=1)
        hidden = used & (shown == self.masking.mask_id)
        found = MaskedBatch(
            input_ids=torch.from_numpy(masked.input_ids),
            attention_mask=torch.from_numpy(documents),
            masked_positions=torch.from_numpy(masked.masked_positions),
            labels=torch.from_numpy(masked.labels),
            num_tokens=int((documents > 0).sum()),
            num_ordinary=int((~self.masking.is_special[ids]).sum()),
            num_masked=int(used.sum()),
            num_hidden=int(hidden.sum()),
            num_random=int((used & ~hidden & (shown != masked.labels)).sum()),
        )
        if self.rows.bounds:
            found["sources"] = torch.from_numpy(self.rows.sources(batch.rows, masked.masked_positions))
        return found


def build_masking(config: MaskingConfig, rate: float, tokenizer: Tokenizer) -> Masking:
    """Return the masking of a tokenizer's ids at one rate; whole_word needs to know where words begin."""
    special = SpecialTokens.from_tokenizer(tokenizer)
    added = tokenizer.get_added_tokens_decoder().items()
    is_special = np.ones(num_ids(tokenizer), bool)  # unused ids too
    is_special[list(tokenizer.get_vocab(with_added_tokens=True).values())] = False
    is_special[[*special.ids, *(number for number, token in added if token.special)]] = True
    words = starts_word(tokenizer) if config.strategy == "whole_word" else None
    return Masking(config, rate, special.mask, is_special, words)
