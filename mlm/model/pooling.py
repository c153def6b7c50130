"""One vector for a whole text, out of the vectors of its tokens.

Sizes: B batch, S sequence, D hidden.
"""

from __future__ import annotations

from torch import Tensor


def pool(hidden: Tensor, attention_mask: Tensor | None, how: str) -> Tensor:
    """Return (B, D), what stands for each row; a row is one text.

    Args:
        hidden: (B, S, D) the encoder's output.
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
