"""The losses against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mlm.config.data import IGNORE_INDEX
from mlm.model import loss
from mlm.model.loss import summed_cross_entropy, summed_label_loss

LABELS = torch.tensor([[3, IGNORE_INDEX, 0], [10, 7, IGNORE_INDEX]])


def plain(logits: torch.Tensor) -> torch.Tensor:
    flat = logits.flatten(0, 1).float()
    return F.cross_entropy(flat, LABELS.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")


def random_logits(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    logits = 3 * torch.randn(2, 3, 11, generator=torch.Generator().manual_seed(0))
    return logits.to(dtype).requires_grad_()


@pytest.mark.parametrize("chunk", [1, 22, 1000])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_loss_and_gradient_equal_torch(monkeypatch, chunk, scale):
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk)
    logits = random_logits()
    found, expected = summed_cross_entropy(logits, LABELS), plain(logits)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad(value * scale, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)
    assert not gradients[0][LABELS == IGNORE_INDEX].any()


def test_half_precision_rounds_like_torch():
    logits = random_logits(torch.bfloat16)
    found, expected = summed_cross_entropy(logits, LABELS), plain(logits)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    gradients = [torch.autograd.grad(value, logits)[0] for value in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=8e-3)


def test_without_gradients_and_without_predictions():
    logits = random_logits()
    with torch.no_grad():
        assert not summed_cross_entropy(logits, LABELS).requires_grad
    nothing = summed_cross_entropy(logits, torch.full((2, 3), IGNORE_INDEX))
    nothing.backward()
    assert nothing == 0
    assert not logits.grad.any()


def test_a_logit_that_is_no_number_shows():
    logits = random_logits().detach()
    logits[0, 0, 5] = float("nan")
    assert summed_cross_entropy(logits.requires_grad_(), LABELS).isnan()


def test_an_impossible_token_that_is_not_asked_for_changes_nothing():
    logits = random_logits().detach()
    logits[0, 1, 0] = float("-inf")  # an unused slot
    logits.requires_grad_()
    found = summed_cross_entropy(logits, LABELS)
    found.backward()
    assert found.isfinite()
    assert logits.grad.isfinite().all()


CLASSES = torch.tensor([2, 0, 1, 2, 2, 0, 1])
LABELLED = {
    "classes": (CLASSES, {"label_smoothing": 0.0}),
    "smoothed": (CLASSES, {"label_smoothing": 0.1}),
    "regression": (torch.linspace(-1, 2, 7), {}),
    "multilabel": (F.one_hot(CLASSES, 3).float() + F.one_hot(CLASSES.roll(1), 3) > 0, {}),
}


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 3.0, 1.25])], ids=["plain", "weighted"])
@pytest.mark.parametrize("kind", LABELLED)
def test_label_loss_equals_torch_and_adds_up_over_parts(kind, weights):
    labels, smoothing = LABELLED[kind]
    labels = labels.float() if labels.dtype == torch.bool else labels
    if kind == "regression":
        weights = None
    logits = torch.randn(7, 1 if kind == "regression" else 3, generator=torch.Generator().manual_seed(1))
    logits = logits.requires_grad_()
    if kind == "multilabel":
        expected = F.binary_cross_entropy_with_logits(logits, labels, pos_weight=weights)
    elif kind == "regression":
        expected = F.mse_loss(logits[:, 0], labels)
    else:
        expected = F.cross_entropy(logits, labels, weights, **smoothing)
    whole = torch.div(*summed_label_loss(logits, labels, weights, **smoothing))
    bounds = [slice(0, 1), slice(1, 5), slice(5, 7)]
    parts = [summed_label_loss(logits[part], labels[part], weights, **smoothing) for part in bounds]
    accumulated = sum(loss for loss, _ in parts) / sum(weight for _, weight in parts)
    for found in (whole, accumulated):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        gradients = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, expected)]
        torch.testing.assert_close(*gradients, atol=1e-6, rtol=0)


def test_label_loss_of_half_precision_logits_and_of_no_examples_is_float32():
    empty = torch.empty(0, 3, dtype=torch.bfloat16, requires_grad=True)
    loss, weight = summed_label_loss(empty, torch.empty(0, dtype=torch.long), torch.ones(3))
    assert loss.dtype == weight.dtype == torch.float32
    assert (loss.item(), weight.item()) == (0, 0)
    loss.backward()
