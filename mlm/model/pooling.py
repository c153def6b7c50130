"""From the vectors of the tokens to one vector per text.

Sizes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pooled_tokens(input_ids: Tensor, how: str) -> Tensor | None:
    """Return (B, 1) int64, the position in each row (B, S) of the token that `pool` uses; None: all."""
    return None if how == "mean" else torch.zeros_like(input_ids[:, :1])


def pool(hidden: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """Return (B, D), one vector for each row; a row is one text.

    Args:
        hidden: (B, S, D) the encoder's output; if pooling uses the first token only, (B, 1, D) suffices.
        attention_mask: (B, S) integer or bool, 0 = padding; None: no padding.
        how: a value of `ModelConfig.pooling`; the layers that follow belong to the head.
    """
    if how != "mean":
        return hidden[:, 0]
    if attention_mask is None:
        return hidden.mean(dim=1)
    real = (attention_mask != 0)[..., None]  # (B, S, 1)
    # where, not a product: padding may be infinite
    return hidden.where(real, 0.0).sum(dim=1) / real.sum(dim=1).clamp(min=1)
