"""Encoder layers against torch's, and facts known of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mlm.config.model import ModelConfig
from mlm.model.encoder import EncoderLayer, FeedForward, init_weights

BIASED = ModelConfig(
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=64,
    norm_position="post",
    norm_bias=True,
    activation="gelu",
    attention_bias=True,
    mlp_bias=True,
)


def size(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


def shaken(module: nn.Module) -> nn.Module:
    """Give every parameter, norms and biases too, a random value."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return module


@pytest.mark.parametrize(
    ("activation", "function"), [("geglu", nn.functional.gelu), ("swiglu", nn.functional.silu)]
)
def test_gate_is_the_first_half(activation, function):
    gated, plain = FeedForward(replace(BIASED, activation=activation)), FeedForward(BIASED)
    gate, up = gated.gate_up.weight.chunk(2)
    gate_bias, up_bias = gated.gate_up.bias.chunk(2)
    hidden = torch.randn(2, 32)
    inner = function(hidden @ gate.T + gate_bias) * (hidden @ up.T + up_bias)
    torch.testing.assert_close(gated(hidden), inner @ gated.down.weight.T + gated.down.bias)
    assert size(gated) == size(plain) + 32 * 64 + 64


def test_hidden_dropout_drops_sublayer_outputs():
    layer = EncoderLayer(replace(BIASED, norm_position="pre", hidden_dropout=0.5))
    hidden = torch.randn(1, 3, 32)
    assert not torch.equal(layer(hidden), layer(hidden))
    assert torch.equal(layer.eval()(hidden), layer(hidden))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_initial_values(norm):
    config = replace(BIASED, hidden_size=128, intermediate_size=256, norm=norm, norm_bias=norm == "layernorm")
    layer = shaken(EncoderLayer(config))
    init_weights(layer, 0.02)
    for name, weight in layer.named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert weight.abs().max() <= 0.04, name
            assert weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.03), name  # of a normal cut at 2
