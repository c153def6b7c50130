"""One vector for a text: what padding holds never matters."""

from __future__ import annotations

import pytest
import torch

from mlm.model.heads import pool

HIDDEN = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def test_mean_is_that_of_the_real_tokens():
    expected = torch.stack((HIDDEN[0].mean(0), HIDDEN[1, :2].mean(0)))
    for mask in (MASK, MASK.bool()):
        torch.testing.assert_close(pool(HIDDEN, mask, "mean"), expected)
    torch.testing.assert_close(pool(HIDDEN, None, "mean"), HIDDEN.mean(1))


@pytest.mark.parametrize("how", ["cls", "cls_tanh"])
def test_first_token(how):
    assert torch.equal(pool(HIDDEN, MASK, how), HIDDEN[:, 0])


@pytest.mark.parametrize("how", ["cls", "mean", "cls_tanh"])
def test_padding_changes_nothing(how):
    broken = HIDDEN.clone()
    broken[1, 2:] = torch.tensor([float("nan"), float("inf"), 1e30])
    assert torch.equal(pool(broken, MASK, how), pool(HIDDEN, MASK, how))


def test_row_of_padding_is_finite():
    assert not pool(HIDDEN, torch.zeros_like(MASK), "mean").any()
