"""Documents within a row, positions within a document, and how attention takes both into account.

- a row may hold several documents: tokens with the same number in the attention mask belong together
- positions restart at the first token of each document, so a packed document is computed as if it were alone
- the scores of tokens that a token may not see get minus infinity added: of other documents, in local layers
  of distant tokens, in causal ones of later tokens
- rotary: queries and keys are rotated by angles proportional to their position, so that their product depends
  on the distance alone; element i is paired with element i + K/2, as in ModernBERT's published weights
  (Su et al. 2021, arXiv:2104.09864, sec. 3.2)
- sinusoidal: a fixed table added to the embeddings (Vaswani et al. 2017, arXiv:1706.03762, sec. 3.5)

Sizes: B batch, S sequence, H heads, K head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position's angles, each (1 or B, 1, S, K/2)."""


class DocumentOffsets(NamedTuple):
    """Starts of the documents in a batch whose rows are joined to one: a compact form of `document_bias`."""

    starts: Tensor
    """(N + 1,) int32, ascending; unused slots and the last one hold B * S."""


def document_bias(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, S, S), added to the attention scores: 0 within a document, minus infinity across.

    Padding (number 0) attends to padding, so that every token attends to something.

    Args:
        attention_mask: (B, S) integer or bool, the document number of each token.
        dtype: the type of the scores.
    """
    apart = attention_mask[:, None, :, None] != attention_mask[:, None, None, :]
    return torch.zeros_like(apart, dtype=dtype).masked_fill_(apart, float("-inf"))


def document_offsets(attention_mask: Tensor, most: int) -> DocumentOffsets:
    """Return where each run of equal numbers begins, without asking the device how many there are.

    Args:
        attention_mask: (B, S) integer, the document number of each token; a document is one run.
        most: the most runs in a row, padding included; with more the result is wrong.
    """
    B, S = attention_mask.shape
    begins = torch.ones_like(attention_mask, dtype=torch.bool)
    begins[:, 1:] = attention_mask[:, 1:] != attention_mask[:, :-1]
    run = begins.flatten().cumsum(0) - 1
    places = torch.arange(B * S, dtype=torch.int32, device=run.device)
    starts = places.new_full((B * most + 1,), B * S)
    return DocumentOffsets(starts.scatter_reduce(0, run.clamp(max=B * most), places, "amin"))


def distance_bias(index: Tensor, window: int | None, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return (S, S), added to the attention scores: 0 where a token may look, minus infinity elsewhere.

    Args:
        index: (S,) int64, positions in a row.
        window: a token sees up to half of it on each side; None: any distance.
        causal: a token sees no later token.
        dtype: the type of the scores.
    """
    ahead = index - index[:, None]
    far = ahead.abs() > (len(index) if window is None else window // 2)
    return torch.zeros_like(ahead, dtype=dtype).masked_fill_(far | (causal & (ahead > 0)), float("-inf"))


def document_positions(attention_mask: Tensor) -> Tensor:
    """Return (B, S), the distance of each token from the first token of its document.

    Args:
        attention_mask: (B, S) integer or bool, document numbers from 0 to S.
    """
    B, S = attention_mask.shape
    document = attention_mask.long()
    index = torch.arange(S, device=document.device).expand(B, S)
    first = index.new_zeros(B, S + 1).scatter_reduce(1, document, index, "amin", include_self=False)
    return index - first.gather(1, document)


def sinusoids(rows: int, width: int) -> Tensor:
    """Return (rows, width) float32: column 2i is sin(row / 10000^(2i/width)), column 2i + 1 its cosine."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2) / width)
    angles = torch.arange(rows)[:, None] * frequencies
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


class SinusoidalEmbedding(nn.Embedding):
    """A frozen table of positions, looked up like a learned one."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__(rows, width)
        self.weight.requires_grad_(False)


@torch.library.custom_op("mlm::compute_rotation", mutates_args=())
def compute_rotation(
    positions: Tensor, theta: float, width: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the positions' angles, computed in float32 and cast to `dtype`.

    A custom operation without gradient, opaque to the compiler, which would otherwise recompute the angles in
    every layer for each head.

    Args:
        positions: (1 or B, S) int64.
        theta: the base of the frequencies.
        width: K, of a head.
        dtype: the type of the queries and keys.

    Returns:
        Two of (1 or B, 1, S, K/2).
    """
    pairs = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / theta ** (pairs / width)
    angles = positions[:, None, :, None].float() * frequencies
    return angles.cos().to(dtype), angles.sin().to(dtype)


@compute_rotation.register_fake
def _(positions: Tensor, theta: float, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    shape = (positions.shape[0], 1, positions.shape[1], width // 2)
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


def select_rotation(rotation: Rotation | None, places: Tensor) -> Rotation | None:
    """Return the rotation of the tokens at `places` (B, 1, M, 1) of the row."""
    return rotation and (rotation[0].take_along_dim(places, dim=2), rotation[1].take_along_dim(places, dim=2))


def apply_rotary(states: Tensor, rotation: Rotation | None) -> Tensor:
    """Rotate each pair (element i, element i + K/2) of `states` (..., B, H, S, K) by its position's angle."""
    if rotation is None:
        return states
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
