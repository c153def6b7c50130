"""Losses: of masked tokens summed, as only the whole batch knows how many there are; of examples the mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.config.data import IGNORE_INDEX

CHUNK_ELEMENTS = 2**19
"""Logits that a core works on at a time: in float32 they fit its cache."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy and its gradient, some rows at a time.

    The plain way goes through the memory of all logits in float32 seven times, which a CPU waits for, and
    keeps three such tables. This one computes the gradient while the rows are in the cache, and keeps it in
    the type of the logits. It hands out the table it keeps, so backward may run twice only where the logits
    are no leaf.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum for (N, V) logits and (N,) labels."""
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        rows = max(CHUNK_ELEMENTS * torch.get_num_threads() // logits.shape[1], 1)
        for scores, wanted, out in zip(
            logits.split(rows), labels.split(rows), gradient.split(rows), strict=True
        ):
            unused = (wanted == IGNORE_INDEX)[:, None]
            target = wanted[:, None].masked_fill(unused, 0)
            scores = scores.float()
            shares = scores.softmax(dim=-1)
            # one exponential is enough: the largest share is 1 / sum(exp(scores - the largest score))
            log_sum = scores.amax(1, keepdim=True) - shares.amax(1, keepdim=True).log()
            total += (log_sum - scores.gather(1, target)).masked_fill(unused, 0.0).sum()
            out.copy_(shares.scatter_add_(1, target, shares.new_full(target.shape, -1.0)))
            out.index_fill_(0, unused[:, 0].nonzero().flatten(), 0.0)
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        return gradient if grad_output == 1 else gradient * grad_output, None


def summed_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the summed negative log-likelihood in nats, a scalar in float32; 0 when nothing is predicted.

    Args:
        logits: (B, M, V) float.
        labels: (B, M) int64, IGNORE_INDEX where nothing is predicted.
    """
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if logits.device.type == "cpu" and logits.requires_grad:
        loss: Tensor = ChunkedCrossEntropy.apply(logits, labels)
        return loss
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


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
