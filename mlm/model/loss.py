"""The masked-LM loss, summed: whoever knows how many tokens are masked in the whole batch divides by it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from mlm.config.data import IGNORE_INDEX


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed negative log-likelihood in nats, a scalar in float32; 0 when nothing is predicted.

    Args:
        logits: (B, M, V) float.
        labels: (B, M) int64, IGNORE_INDEX where nothing is predicted.
    """
    return F.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
