"""From labelled texts to batches: tokenized once, batched by length, padded to the longest of a batch.

- the tokenizer's own template adds the special tokens, so a stock class sees the same ids; text that spells a
  special token never becomes one
- of a pair that is too long the longer text is cut first
- which examples make up a batch is a pure function of (seed, epoch)

B examples a batch, S tokens of the longest, N examples, C classes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from mlm.config.errors import InputError
from mlm.counter import permute
from mlm.data.labelled import Examples
from mlm.files import shorten
from mlm.tokenizer import SpecialTokens, plain_tokenizer

if TYPE_CHECKING:  # tokenizing needs no torch, which takes seconds to import
    from torch import Tensor

Ints = npt.NDArray[np.int64]

GROUP_EXAMPLES = 4096  # texts tokenized together
MAX_GROUP_BATCHES = 8
"""Batches whose examples are sorted together: more waste less padding, fewer mix better. Pearson's
correlation on STS-B, mean of two seeds: 0.816 with 44, 0.825 with 8, 0.827 at random."""
MAX_BATCH_TOKENS = 2**15  # of a batch for prediction


class LabelledBatch(TypedDict):
    """A batch for training or scoring."""

    rows: Tensor  # (B,) int64, the number of each example
    input_ids: Tensor  # (B, S) int64
    attention_mask: Tensor  # (B, S) int64, 0 at padding, else 1
    token_type_ids: Tensor  # (B, S) int64, 1 in the second text of a pair
    labels: Tensor | None
    """(B,) ids of classes int64, or numbers float32, or (B, C) float32 of 0 and 1; None: not known."""
    num_tokens: int  # that are not padding, counted here so that no device has to be asked


@dataclass(frozen=True)
class EncodedExamples:
    """Tokenized examples; maps row numbers to a batch."""

    ids: npt.NDArray[np.int32]  # the tokens of all examples on end
    types: npt.NDArray[np.int8]  # the token type of each
    offsets: Ints  # (N + 1,) where the examples begin
    labels: npt.NDArray[Any] | None
    pad: int  # id of the padding token
    num_truncated: int = 0  # examples that were too long
    further: tuple[EncodedExamples, Ints] | None = None
    """Of long texts the windows after the first, which is the text's row, and the row (W,) of each window."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Ints:
        """(N,) tokens of each example."""
        return np.diff(self.offsets)

    def digest(self) -> str:
        """Return a hash of tokens and labels."""
        hashed = hashlib.blake2b(digest_size=16)
        for array in (self.ids, self.types, self.offsets, self.labels):
            hashed.update(b"" if array is None else array.tobytes())
        return hashed.hexdigest()

    def label_tensor(self, rows: Ints | slice = slice(None)) -> Tensor:
        """Return the labels of some rows, or of all, as a batch holds them."""
        import torch

        assert self.labels is not None, "asked for labels that are not known"
        chosen = self.labels[rows]
        return torch.from_numpy(chosen.astype(np.float32) if chosen.dtype.kind in "fb" else chosen)

    def arrays(self, rows: Ints) -> dict[str, Ints]:
        """Return input_ids, attention_mask and token_type_ids of some rows, each (B, S) int64."""
        lengths = self.lengths[rows]
        width = int(lengths.max(initial=1))  # a rank may have no row of a small batch
        mask = np.arange(width) < lengths[:, None]
        places = (self.offsets[rows][:, None] + np.arange(width))[mask]
        ids, types = np.full(mask.shape, self.pad, np.int64), np.zeros(mask.shape, np.int64)
        ids[mask], types[mask] = self.ids[places], self.types[places]
        return {"input_ids": ids, "attention_mask": mask.astype(np.int64), "token_type_ids": types}

    def __getitem__(self, rows: Ints) -> LabelledBatch:
        import torch

        arrays = {name: torch.from_numpy(array) for name, array in self.arrays(rows).items()}
        return LabelledBatch(
            rows=torch.from_numpy(rows),
            input_ids=arrays["input_ids"],
            attention_mask=arrays["attention_mask"],
            token_type_ids=arrays["token_type_ids"],
            labels=None if self.labels is None else self.label_tensor(rows),
            num_tokens=int(arrays["attention_mask"].sum()),
        )


def encode_examples(
    tokenizer: Tokenizer, examples: Examples, max_length: int | None, windows: bool = False
) -> EncodedExamples:
    """Tokenize texts, special tokens included, to at most `max_length` tokens each.

    The tokenizer's own padding and truncation neither count nor change; it must put [CLS] first. With
    `windows` a long text is not truncated but read in windows: each has `max_length` tokens with its special
    ones, and begins with the last quarter of the tokens of the window before, so that together they hold
    every token. The last one may be shorter. Pairs have no windows.
    """
    special, plain = SpecialTokens.from_tokenizer(tokenizer), plain_tokenizer(tokenizer)
    assert not windows or examples.pairs is None, "pairs are refused before"
    overlap = (max_length - plain.num_special_tokens_to_add(False)) // 4 if windows and max_length else 0
    first, more, owners, num_truncated = _Flat(), _Flat(), [np.zeros(0, np.int64)], 0
    for row, (encoding, is_long) in enumerate(_encodings(plain, examples, max_length, overlap)):
        if not row and encoding.ids[:1] != [special.cls]:
            raise InputError("the tokenizer does not begin a text with [CLS]; its post_processor must add it")
        first.add(encoding)
        if is_long and windows:
            further = encoding.overflowing
            more.add(*further)
            owners.append(np.full(len(further), row))
        num_truncated += is_long and not windows
    encoded = first.joined(special.pad, examples.labels, num_truncated)
    rest = more.joined(special.pad)
    return replace(encoded, further=(rest, np.concatenate(owners))) if len(rest) else encoded


class _Flat:
    """Tokenized texts on end."""

    def __init__(self) -> None:
        self._ids, self._types, self._offsets = [np.zeros(0, np.int32)], [np.zeros(0, np.int8)], [0]

    def add(self, *encodings: Encoding) -> None:
        """Append texts."""
        for one in encodings:
            self._ids.append(np.array(one.ids, np.int32))
            self._types.append(np.array(one.type_ids, np.int8))
            self._offsets.append(self._offsets[-1] + len(one.ids))

    def joined(
        self, pad: int, labels: npt.NDArray[Any] | None = None, num_truncated: int = 0
    ) -> EncodedExamples:
        """Return all of them."""
        flat = np.concatenate(self._ids), np.concatenate(self._types), np.array(self._offsets)
        return EncodedExamples(*flat, labels, pad, num_truncated)


def _encodings(
    tokenizer: Tokenizer, examples: Examples, max_length: int | None, overlap: int
) -> Iterator[tuple[Encoding, bool]]:
    pairs = examples.pairs
    inputs: list[Any] = examples.texts if pairs is None else list(zip(examples.texts, pairs, strict=True))
    for start in range(0, len(inputs), GROUP_EXAMPLES):
        group = inputs[start : start + GROUP_EXAMPLES]
        tokenizer.no_truncation()
        encodings = tokenizer.encode_batch_fast(group)
        long = [max_length is not None and len(encoding.ids) > max_length for encoding in encodings]
        if max_length is not None and any(long):
            tokenizer.enable_truncation(max_length, stride=overlap, strategy="longest_first")
            places = np.flatnonzero(long)
            cut = tokenizer.encode_batch_fast([group[place] for place in places])
            for place, encoding in zip(places, cut, strict=True):
                encodings[place] = encoding
        yield from zip(encodings, long, strict=True)


def batches_by_length(lengths: Ints, batch_size: int, seed: int, epoch: int) -> list[Ints]:
    """Return the rows of each batch of an epoch: similar lengths together, in random order.

    The rows (N,) are permuted, cut into groups of a few batches, sorted by length within each group and cut
    into batches, and these are permuted. Every row comes once; only the last batch of the last group is
    smaller.
    """
    num_rows = len(lengths)
    rows = permute(np.arange(num_rows), num_rows, seed, epoch)
    group = min(max(num_rows // (4 * batch_size), 1), MAX_GROUP_BATCHES) * batch_size
    batches = []
    for start in range(0, num_rows, group):
        chosen = rows[start : start + group]
        chosen = chosen[np.argsort(lengths[chosen], kind="stable")]
        batches += [chosen[first : first + batch_size] for first in range(0, len(chosen), batch_size)]
    order = permute(np.arange(len(batches)), len(batches), seed, epoch, 1)
    return [batches[number] for number in order]


def batches_in_order(lengths: Ints, batch_size: int) -> list[Ints]:
    """Return batches for prediction: every row once, the longest first, where a lack of memory shows.

    Where texts are long there are fewer in a batch: at most MAX_BATCH_TOKENS tokens, padding included.
    """
    rows, batches = np.argsort(-lengths, kind="stable"), []
    while len(rows):
        fitting = min(batch_size, max(MAX_BATCH_TOKENS // max(int(lengths[rows[0]]), 1), 1))
        batches.append(rows[:fitting])
        rows = rows[fitting:]
    return batches


def class_weights(
    wanted: Literal["balanced"] | Sequence[str] | None, labels: tuple[str, ...], values: npt.NDArray[Any]
) -> npt.NDArray[np.float64] | None:
    """Return the loss weight of each class, (C,); None: all the same.

    Balanced weights are N / (C * examples of the class), so that every class has the same total; for
    multilabel, of each label the texts with and without it have the same total. Else `wanted` holds
    `label=weight` for some of the labels; the others weigh 1.
    """
    if wanted is None:
        return None
    if wanted == "balanced":
        counts = np.maximum(np.array(list(label_counts(labels, values).values())), 1)
        return (len(values) - counts) / counts if values.ndim == 2 else len(values) / (len(labels) * counts)
    weights = {name: float(weight) for name, _, weight in (entry.rpartition("=") for entry in wanted)}
    if unknown := [name for name in weights if name not in labels]:
        known = shorten(labels)
        raise InputError(f"head.class_weights: {unknown[0]} is not among the labels of training: {known}")
    return np.array([weights.get(label, 1.0) for label in labels])


def label_counts(labels: tuple[str, ...], values: npt.NDArray[Any]) -> dict[str, int]:
    """Return the number of examples of each class, by name; `values` are (N,) ids or (N, C) bool."""
    counts = values.sum(0) if values.ndim == 2 else np.bincount(values, minlength=len(labels))
    return dict(zip(labels, counts.tolist(), strict=True))
