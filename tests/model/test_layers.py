"""Encoder layers against torch's, and facts known of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mlm.config.model import ModelConfig
from mlm.model.layers import EncoderLayer, FeedForward, GatedFeedForward, build_norm, init_weights
from mlm.model.positions import document_bias

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


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_layer_equals_torch(norm_position):
    ours = shaken(EncoderLayer(replace(BIASED, norm_position=norm_position))).double().eval()
    theirs = (
        nn.TransformerEncoderLayer(
            32, 4, 64, activation="gelu", batch_first=True, norm_first=norm_position == "pre"
        )
        .double()
        .eval()
    )
    names = {
        "self_attn.in_proj_": "attention.query_key_value.",
        "self_attn.out_proj.": "attention.output.",
        "linear1.": "feed_forward.up.",
        "linear2.": "feed_forward.down.",
        "norm1.": "attention_norm.",
        "norm2.": "feed_forward_norm.",
    }
    state = ours.state_dict()
    theirs.load_state_dict(
        {old + kind: state[new + kind] for old, new in names.items() for kind in ("weight", "bias")}
    )
    hidden, mask = torch.randn(2, 7, 32).double(), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with torch.no_grad():
        expected = theirs(hidden, src_key_padding_mask=mask == 0)
        found = ours(hidden, document_bias(mask, torch.float64))
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=1e-9, rtol=0)


def test_post_norm_layer_has_known_size():
    layer = EncoderLayer(BIASED)
    assert size(layer) == 8544
    assert size(layer.feed_forward) == 4192
    assert size(layer.attention) == 4096 + 128
    assert size(layer.attention_norm) + size(layer.feed_forward_norm) == 128


def test_pre_norm_layers_have_known_size():
    config = replace(BIASED, hidden_size=8, num_attention_heads=2, intermediate_size=32, norm_position="pre")
    layer = EncoderLayer(config)
    parts = [
        layer.attention.query_key_value,
        layer.attention.output,
        layer.feed_forward.up,
        layer.feed_forward.down,
    ]
    assert [size(part) for part in parts] == [216, 72, 288, 264]
    assert size(layer) == 872
    assert size(nn.ModuleList(EncoderLayer(config) for _ in range(3))) == 2616


def test_layer_norm_gives_known_values():
    norm = build_norm(replace(BIASED, hidden_size=4, num_attention_heads=2))
    rows = norm(torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]))
    assert torch.allclose(rows, torch.tensor([-1.3416, -0.4472, 0.4472, 1.3416]), atol=1e-4)
    assert build_norm(replace(BIASED, norm_bias=False)).bias is None


def test_pre_norm_layer_without_outputs_is_identity():
    layer = shaken(EncoderLayer(replace(BIASED, norm_position="pre")))
    for projection in (layer.attention.output, layer.feed_forward.down):
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)
    hidden = torch.randn(2, 5, 32)
    assert torch.equal(layer(hidden), hidden)


def test_post_norm_output_has_mean_0_and_std_1():
    layers = nn.Sequential(*(EncoderLayer(BIASED) for _ in range(4)))
    init_weights(layers, 0.02)
    output = layers(torch.randn(3, 9, 32))
    assert output.mean(-1).abs().max() < 1e-5
    assert (output.std(-1, correction=0) - 1).abs().max() < 1e-2


def test_gate_is_the_first_half():
    gated, plain = (
        kind(replace(BIASED, activation=act))
        for kind, act in ((GatedFeedForward, "geglu"), (FeedForward, "gelu"))
    )
    gate, up = gated.gate_up.weight.chunk(2)
    gate_bias, up_bias = gated.gate_up.bias.chunk(2)
    hidden = torch.randn(2, 32)
    inner = nn.functional.gelu(hidden @ gate.T + gate_bias) * (hidden @ up.T + up_bias)
    torch.testing.assert_close(gated(hidden), inner @ gated.down.weight.T + gated.down.bias)
    assert size(gated) == size(plain) + 32 * 64 + 64


def test_hidden_dropout_drops_sublayer_outputs():
    layer = EncoderLayer(replace(BIASED, norm_position="pre", hidden_dropout=0.5))
    hidden = torch.randn(1, 3, 32)
    assert not torch.equal(layer(hidden), layer(hidden))
    assert torch.equal(layer.eval()(hidden), layer(hidden))


def test_initial_values():
    layer = shaken(EncoderLayer(replace(BIASED, hidden_size=128, intermediate_size=256)))
    init_weights(layer, 0.02)
    for name, weight in layer.named_parameters():
        if name.endswith("bias"):
            assert not weight.any(), name
        elif "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert weight.abs().max() <= 0.04, name
            assert weight.std().item() == pytest.approx(0.02 * 0.8796, rel=0.03), name  # of a normal cut at 2
