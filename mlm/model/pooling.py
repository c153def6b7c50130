"""One vector for a whole text, out of the vectors of its tokens.

Sizes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_tokens(input_ids: Tensor, how: str) -> Tensor | None:
    """Return (B, 1) int64, where in each row (B, S) the one token is that `pool` looks at; None: all."""
    return None if how == "mean" else torch.zeros_like(input_ids[:, :1])


def pool(hidden: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """Return (B, D), what stands for each row; a row is one text.

    Args:
        hidden: (B, S, D) the encoder's output; (B, 1, D) does for one that looks at the first token.
        attention_mask: (B, S) integer or bool, 0 = padding; None: no padding.
        how: a value of `ModelConfig.pooling`; the layers that follow belong to the head.
    """
    if how != "mean":
        return hidden[:, 0]
    if attention_mask is None:
        return hidden.mean(dim=1)
    real = (attention_mask != 0)[..., None]  # (B, S, 1)
    # where, not a product: what padding holds does not matter, not even if it is infinite
    return hidden.where(real, 0.0).sum(dim=1) / real.sum(dim=1).clamp(min=1)
