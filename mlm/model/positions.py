"""Which document a token belongs to, where in it the token stands, and how attention learns that place.

- a row may hold several documents: tokens with the same number in the attention mask belong together
- positions restart at the first token of each document, so a packed document is computed as if it stood alone
- rotary: queries and keys turn by angles proportional to their position, so that their product depends on the
  distance alone; element i is paired with element i + K/2, the order of ModernBERT's published weights

Su et al. 2021 (arXiv:2104.09864), sec. 3.2.

Sizes: B batch, S sequence, H heads, K head width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mlm.config.model import ModelConfig

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of every position's angles, each (1 or B, 1, S, K/2)."""


def document_bias(attention_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (B, 1, S, S), added to the attention scores: 0 within a document, minus infinity across.

    Padding (number 0) attends to padding, so that no token is left without anything to attend to.

    Args:
        attention_mask: (B, S) integer or bool, the document number of each token.
        dtype: the type of the scores.
    """
    apart = attention_mask[:, None, :, None] != attention_mask[:, None, None, :]
    return torch.zeros_like(apart, dtype=dtype).masked_fill_(apart, float("-inf"))


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


class RotaryEmbedding(nn.Module):
    """Angles by which queries and keys turn; no parameters."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.hidden_size // config.num_attention_heads
        self.theta = config.rotary_theta

    def forward(self, positions: Tensor, dtype: torch.dtype) -> Rotation:
        """Return cosines and sines, computed in float32 and cast to `dtype`.

        Args:
            positions: (1 or B, S) int64.
            dtype: the type of the queries and keys.
        """
        pairs = torch.arange(0, self.head_width, 2, device=positions.device, dtype=torch.float32)
        frequencies = 1.0 / self.theta ** (pairs / self.head_width)
        angles = positions[:, None, :, None].float() * frequencies
        return angles.cos().to(dtype), angles.sin().to(dtype)


def apply_rotary(states: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (element i, element i + K/2) of `states` (B, H, S, K) by its position's angle."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
