"""Losses: of masked tokens summed, as only the whole batch knows how many there are; of examples the mean."""

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


def mean_loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, smoothing: float = 0.0
) -> Tensor:
    """Return the mean cross-entropy in nats, or for numbers the mean squared error, as a float32 scalar.

    Args:
        logits: (B, C); for numbers (B, 1).
        labels: (B,) ids of classes int64, or numbers float32, or (B, C) float32 with 1 for each label that a
            text has; then it is the mean binary cross-entropy.
        weights: (C,) what an example of each class counts, the mean being weighted by it; with any number of
            labels what having one counts against not having it. None: all count the same.
        smoothing: share of the target that goes to all classes alike.
    """
    if labels.ndim == 2:
        return F.binary_cross_entropy_with_logits(logits.float(), labels, pos_weight=weights)
    if labels.is_floating_point():
        return F.mse_loss(logits[:, 0].float(), labels)
    return F.cross_entropy(logits.float(), labels, weights, label_smoothing=smoothing)
