"""Known facts of Transformer encoders, each held against our layers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from mlm.config.model import ModelConfig
from mlm.model import Encoder, MaskedLM
from mlm.model.attention import SelfAttention, distance_bias, document_bias, sinusoids
from mlm.model.encoder import EncoderLayer, FeedForward, build_norm, init_weights

POST = ModelConfig(
    hidden_size=32,
    num_attention_heads=4,
    intermediate_size=64,
    norm_position="post",
    norm_bias=True,
    position_embedding="none",
    activation="relu",
    attention_bias=True,
    mlp_bias=True,
)
PRE = replace(POST, norm_position="pre", first_attention_norm=True)


def size(*modules: nn.Module) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())


def shaken(module: nn.Module) -> nn.Module:
    """Give every parameter, norms and biases too, a random value."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return module.eval()


def encoder(config: ModelConfig) -> Encoder:
    return shaken(
        MaskedLM(replace(config, vocab_size=20, num_hidden_layers=2, max_position_embeddings=16))
    ).encoder


def test_post_norm_layer_has_8544_parameters():
    layer = EncoderLayer(POST)
    weights = layer.attention.query_key_value.weight.numel() + layer.attention.output.weight.numel()
    assert size(layer.feed_forward) == 4192
    assert weights == 4096
    assert size(layer.attention) - weights == 128
    assert size(layer.attention_norm, layer.feed_forward_norm) == 128
    assert size(layer) == 8544


def test_six_post_norm_layers_and_a_final_norm_have_18915328_parameters():
    shape = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048, "num_hidden_layers": 6}
    with torch.device("meta"):
        model = Encoder(replace(POST, vocab_size=20, final_norm=True, **shape))
    assert size(model.layers, model.final_norm) == 18_915_328


def test_pre_norm_layer_has_872_parameters():
    config = replace(PRE, hidden_size=8, num_attention_heads=2, intermediate_size=32)
    layer = EncoderLayer(config)
    matrices = (
        layer.attention.query_key_value,
        layer.attention.output,
        layer.feed_forward.up,
        layer.feed_forward.down,
    )
    assert [size(matrix) for matrix in matrices] == [216, 72, 288, 264]
    assert size(layer.attention_norm, layer.feed_forward_norm) == 32
    assert size(layer) == 872
    assert size(Encoder(replace(config, vocab_size=20, num_hidden_layers=3)).layers) == 2616


def test_layer_norm_of_two_rows():
    norm = build_norm(POST, 4)
    rows = norm(torch.tensor([[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]))
    torch.testing.assert_close(
        rows, torch.tensor([[-1.3416, -0.4472, 0.4472, 1.3416]] * 2), atol=5e-5, rtol=0
    )


def test_rms_norm_of_two_rows():
    norm = build_norm(replace(POST, norm="rmsnorm", norm_bias=False), 2)
    rows = norm(torch.tensor([[3.0, 4.0], [-6.0, 8.0]]))
    torch.testing.assert_close(rows * 12.5**0.5, torch.tensor([[3.0, 4.0], [-3.0, 4.0]]), atol=1e-4, rtol=0)
    assert [name for name, _ in norm.named_parameters()] == ["weight"]


def test_sinusoids_of_three_positions():
    expected = [[0, 1, 0, 1], [0.841, 0.540, 0.010, 1.000], [0.909, -0.416, 0.020, 1.000]]
    torch.testing.assert_close(sinusoids(3, 4), torch.tensor(expected), atol=5e-4, rtol=0)


@pytest.mark.parametrize("activation", ["relu", "gelu", "geglu", "swiglu"])
def test_pre_norm_layer_without_output_projections_returns_its_input(activation):
    layer = shaken(EncoderLayer(replace(PRE, activation=activation)))
    for projection in (layer.attention.output, layer.feed_forward.down):
        nn.init.zeros_(projection.weight)
        nn.init.zeros_(projection.bias)
    hidden = torch.randn(2, 5, 32)
    assert torch.equal(layer(hidden), hidden)


@pytest.mark.parametrize("config", [POST, PRE], ids=["post", "pre"])
def test_without_positions_permuted_tokens_give_permuted_outputs(config):
    ids, order = torch.randint(20, (2, 9)), torch.randperm(9)
    model = encoder(config)
    torch.testing.assert_close(model(ids[:, order]), model(ids)[:, order], atol=1e-5, rtol=1e-5)
    for kind in ("rotary", "learned", "sinusoidal"):
        model = encoder(replace(config, position_embedding=kind))
        assert (model(ids[:, order]) - model(ids)[:, order]).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["none", "rotary", "learned", "sinusoidal"])
@pytest.mark.parametrize("packed", [False, True])
def test_causal_attention_hides_the_last_token_from_all_before(kind, packed):
    model = encoder(replace(PRE, position_embedding=kind, attention="causal"))
    ids = torch.randint(1, 20, (2, 9))
    mask = torch.tensor([[1] * 4 + [2] * 5]).expand(2, 9) if packed else None
    changed = ids.clone()
    changed[:, -1] = 0
    before, after = model(ids, mask), model(changed, mask)
    torch.testing.assert_close(before[:, :-1], after[:, :-1], atol=1e-6, rtol=0)
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3
    both_sides = encoder(replace(PRE, position_embedding=kind))
    assert (both_sides(ids)[:, :-1] - both_sides(changed)[:, :-1]).abs().max() > 1e-3


def test_post_norm_outputs_have_mean_0_and_deviation_1():
    layers = nn.Sequential(*(EncoderLayer(POST) for _ in range(6)), build_norm(POST))
    init_weights(layers, 0.02)
    output = layers(torch.randn(3, 9, 32))
    assert output.mean(-1).abs().max() < 5e-5
    assert (output.std(-1, correction=0) - 1).abs().max() < 5e-3


def gradient_norm(layers: list, residual: bool) -> float:
    """Norm of the gradient at the input of a stack of maps, for the sum of the outputs."""
    start = torch.randn(1, 64, requires_grad=True)
    hidden = start
    for layer in layers:
        hidden = hidden + layer(hidden) if residual else layer(hidden)
    (gradient,) = torch.autograd.grad(hidden.sum(), start)
    return gradient.norm().item()


def test_gradients_vanish_without_residuals_only():
    torch.manual_seed(0)
    config = replace(POST, hidden_size=64, intermediate_size=64)
    parts = [FeedForward(config) for _ in range(20)]  # as torch initialises them
    layers = [lambda hidden, up=part.up: torch.tanh(up(hidden)) for part in parts]
    assert 1e-5 < gradient_norm(layers, residual=False) < 1e-3
    assert 10 < gradient_norm(layers, residual=True) < 200
    ours = [EncoderLayer(replace(PRE, hidden_size=64, intermediate_size=64)) for _ in range(20)]
    with_residuals = gradient_norm(
        [lambda hidden, layer=layer: layer(hidden[None])[0] for layer in ours], False
    )
    assert 5 < with_residuals < 200


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_layer_equals_torch(norm_position, activation):
    torch.manual_seed(0)
    ours = EncoderLayer(replace(POST, norm_position=norm_position, activation=activation)).eval()
    theirs = nn.TransformerEncoderLayer(
        32, 4, 64, activation=activation, batch_first=True, norm_first=norm_position == "pre"
    ).eval()
    names = {
        "attention.query_key_value.": "self_attn.in_proj_",
        "attention.output.": "self_attn.out_proj.",
        "feed_forward.up.": "linear1.",
        "feed_forward.down.": "linear2.",
        "attention_norm.": "norm1.",
        "feed_forward_norm.": "norm2.",
    }
    state = theirs.state_dict()
    ours.load_state_dict(
        {our + kind: state[their + kind] for our, their in names.items() for kind in ("weight", "bias")}
    )
    hidden, mask = torch.randn(2, 7, 32), torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    causal = distance_bias(torch.arange(7), None, True, torch.float32)
    with torch.no_grad():  # which is when torch takes its own fast path
        expected, found = theirs(hidden), ours(hidden)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        expected, found = theirs(hidden, src_mask=causal), ours(hidden, causal)
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
        expected = theirs(hidden, src_key_padding_mask=mask == 0)
        found = ours(hidden, document_bias(mask, torch.float32))
        torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=1e-6, rtol=0)
    theirs, ours = theirs.double(), shaken(ours).double()
    theirs.load_state_dict(
        {
            their + kind: ours.state_dict()[our + kind]
            for our, their in names.items()
            for kind in ("weight", "bias")
        }
    )
    torch.testing.assert_close(ours(hidden.double()), theirs(hidden.double()), atol=1e-9, rtol=0)


def test_local_attention_equals_attention_to_the_window():
    """Each token alone, with nothing but its window: no mask is involved in what is expected."""
    attention, hidden, window = shaken(SelfAttention(POST)), torch.randn(1, 12, 32), 6
    bias = distance_bias(torch.arange(12), window, False, torch.float32)
    found = attention(hidden, bias)
    for place in range(12):
        first = max(0, place - window // 2)
        alone = attention(hidden[:, first : place + window // 2 + 1])
        torch.testing.assert_close(found[:, place], alone[:, place - first], atol=1e-5, rtol=1e-5)
