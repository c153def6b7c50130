"""Losses as sums, because only the whole batch, over passes and ranks, knows what to divide them by."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.config.data import IGNORE_INDEX

CHUNK_ELEMENTS = 2**19
"""Logits per core and chunk: in float32 they fit its cache."""


class ChunkedCrossEntropy(torch.autograd.Function):
    """The summed cross-entropy and its gradient, computed while a chunk of rows is in a CPU's cache.

    The plain way reads or writes all logits in float32 seven times, and keeps three such tables. Backward
    returns the one table kept, so it may run twice only if the logits are not a leaf.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum for (N, V) logits and (N,) labels."""
        gradient = torch.empty_like(logits)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        rows = max(CHUNK_ELEMENTS * torch.get_num_threads() // logits.shape[1], 1)
        chunks = zip(logits.split(rows), labels.split(rows), gradient.split(rows), strict=True)
        for scores, wanted, out in chunks:
            unused = (wanted == IGNORE_INDEX)[:, None]
            target = wanted[:, None].masked_fill(unused, 0)
            scores = scores.float()
            shares = scores.softmax(dim=-1)
            # no second exponential: the largest share is 1 / sum(exp(scores - largest score))
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

    Logits are (B, M, V), labels (B, M) int64 with IGNORE_INDEX where nothing is predicted.
    """
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if logits.device.type == "cpu" and logits.requires_grad:
        loss: Tensor = ChunkedCrossEntropy.apply(logits, labels)
        return loss
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def summed_label_loss(
    logits: Tensor, labels: Tensor, weights: Tensor | None = None, label_smoothing: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return the summed loss of labelled texts and what to divide it by for the mean, float32 scalars.

    Both can be added up over micro-batches and ranks before the one division.

    Args:
        logits: (B, C); (B, 1) for regression.
        labels: (B,) int64 class ids: cross-entropy in nats. (B,) float32: squared error. (B, C) float32 of 0
            and 1, any number of labels: binary cross-entropy in nats, divided by B * C.
        weights: (C,) float32 class weights, and the divisor is the sum of the weights of the labels; for any
            number of labels the weight of a positive example of each, and the divisor stays B * C. None: 1.
        label_smoothing: share of the target spread evenly over all classes; only with class ids.
    """
    logits = logits.float()
    if labels.ndim == 2:
        loss = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights, reduction="sum")
    elif labels.is_floating_point():
        loss = F.mse_loss(logits[:, 0], labels, reduction="sum")
    else:
        loss = F.cross_entropy(logits, labels, weights, reduction="sum", label_smoothing=label_smoothing)
        if weights is not None:
            return loss, weights[labels].sum()
    return loss, loss.new_tensor(labels.numel())
