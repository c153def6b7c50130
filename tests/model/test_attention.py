"""Attention against torch's own, and its two ways against each other."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from mlm.config.model import ModelConfig
from mlm.model import MaskedLM, attention
from mlm.model.attention import (
    SelfAttention,
    attend_by_kernel,
    attend_by_matmul,
    compute_rotation,
    distance_bias,
    document_bias,
    document_offsets,
)

MASK = torch.tensor([[1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]])


def states(*shape: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(3, *shape, requires_grad=True) for _ in range(3))


NEAR = distance_bias(torch.arange(6), 3, True, torch.float32)
BIASES = {
    "none": None,
    "documents": document_bias(MASK, torch.float32),
    "near and before": NEAR,
    "both": document_bias(MASK, torch.float32) + NEAR,
}


@pytest.mark.parametrize("name", BIASES)
def test_both_ways_equal(name):
    bias, inputs = BIASES[name], states(2, 6, 4)
    outputs, gradients = [], []
    for attend in (attend_by_matmul, attend_by_kernel):
        output = attend(*inputs, bias, 0.0)
        outputs.append(output)
        gradients.append(torch.autograd.grad(output.square().sum(), inputs))
    torch.testing.assert_close(*outputs, atol=1e-5, rtol=0)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)
    assert outputs[0].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", BIASES)
def test_kernel_equals_matmul_on_gpu(name):
    bias = None if BIASES[name] is None else BIASES[name].cuda()
    inputs = [state.detach().cuda() for state in states(2, 6, 8)]
    by_matmul, by_kernel = (attend(*inputs, bias, 0.0) for attend in (attend_by_matmul, attend_by_kernel))
    torch.testing.assert_close(by_matmul, by_kernel, atol=1e-5, rtol=0)


@pytest.mark.parametrize("attend", [attend_by_matmul, attend_by_kernel])
def test_dropout_drops_weights_and_keeps_their_mean(attend):
    torch.manual_seed(0)
    query, key = torch.zeros(2, 1, 1, 400, 4)
    value = torch.ones(1, 1, 400, 4)
    sums = attend(query, key, value, None, 0.25)  # each weight is 1/400 or dropped
    assert sums.mean().item() == pytest.approx(1.0, abs=0.01)
    assert sums.std().item() == pytest.approx((0.25 / 0.75 / 400) ** 0.5, rel=0.1)
    assert attend(query, key, value, None, 0.0).std().item() < 1e-6


def test_attention_equals_torch():
    config = ModelConfig(hidden_size=12, num_attention_heads=3, attention_bias=True, attention_dropout=0.3)
    ours, theirs = SelfAttention(config).eval(), nn.MultiheadAttention(12, 3, batch_first=True).eval()
    ours.query_key_value.weight.data.copy_(theirs.in_proj_weight)
    nn.init.normal_(theirs.in_proj_bias)
    ours.query_key_value.bias.data.copy_(theirs.in_proj_bias)
    ours.output.load_state_dict(theirs.out_proj.state_dict())
    hidden, padding = torch.randn(2, 6, 12), torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    expected, _ = theirs(hidden, hidden, hidden, key_padding_mask=padding == 0)
    found = ours(hidden, document_bias(padding, torch.float32))
    torch.testing.assert_close(found[padding == 1], expected[padding == 1], atol=1e-6, rtol=1e-5)


def test_dropout_is_off_in_evaluation():
    attention = SelfAttention(ModelConfig(hidden_size=8, num_attention_heads=2, attention_dropout=0.5))
    hidden = torch.randn(1, 5, 8)
    assert not torch.equal(attention(hidden), attention(hidden))
    attention.eval()
    assert torch.equal(attention(hidden), attention(hidden))


def matrix_blocks(model):
    modules = model.named_modules()
    return {f"{name}.weight": module.blocks for name, module in modules if hasattr(module, "blocks")}


def test_weights_made_of_several_matrices_are_named_and_stay_so():
    config = ModelConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
    expected = {
        "encoder.layers.0.attention.query_key_value.weight": (6, 1),
        "encoder.layers.0.attention.output.weight": (1, 2),
        "encoder.layers.0.feed_forward.gate_up.weight": (2, 1),
    }
    model = MaskedLM(config)
    assert matrix_blocks(model) == matrix_blocks(copy.deepcopy(model)) == expected
    model.load_state_dict(MaskedLM(config).state_dict(), assign=True)
    assert matrix_blocks(model) == expected
    parameters = dict(model.named_parameters())
    sizes = {
        name: (parameters[name].size(0) // a, parameters[name].size(1) // b)
        for name, (a, b) in expected.items()
    }
    assert set(sizes.values()) == {(4, 8), (8, 4), (config.intermediate_size, 8)}
    classic = MaskedLM(ModelConfig(vocab_size=8, hidden_size=8, num_attention_heads=2, activation="gelu"))
    assert set(matrix_blocks(classic).values()) == {(6, 1), (1, 2)}


def test_long_rows_on_a_cpu_take_the_kernel_and_give_the_same(monkeypatch):
    config = ModelConfig(hidden_size=16, num_attention_heads=2)
    layer = SelfAttention(config).eval()
    hidden = torch.randn(1, 40, 16, generator=torch.Generator().manual_seed(0))
    short = layer(hidden)
    monkeypatch.setattr(attention, "LONGEST_BY_MATMUL", 39)
    monkeypatch.setattr(attention, "attend_by_matmul", None)
    torch.testing.assert_close(layer(hidden), short, atol=1e-6, rtol=1e-5)


def attend_to_spans(query, key, value, starts, _, longest, __):
    """Do what torch's kernel for documents does, which no CPU has."""
    spans = zip(starts.tolist(), starts[1:].tolist(), strict=False)
    parts = [[states[a:b].transpose(0, 1) for states in (query, key, value)] for a, b in spans if a < b]
    assert all(part[0].shape[1] <= longest for part in parts)
    attended = [nn.functional.scaled_dot_product_attention(*part).transpose(0, 1) for part in parts]
    return torch.cat(attended)


def test_by_document_equals_bias(monkeypatch):
    monkeypatch.setattr(attention, "varlen_attn", attend_to_spans)
    config = ModelConfig(hidden_size=16, num_attention_heads=2)
    layer, hidden = SelfAttention(config), torch.randn(*MASK.shape, 16)
    rotation = compute_rotation(torch.arange(6)[None], 10000.0, 8, torch.float32)
    found = layer(hidden, document_offsets(MASK, 4), rotation)
    plain = layer(hidden, document_bias(MASK, torch.float32), rotation)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-5)
    selected = torch.tensor([[5, 0]] * len(MASK))
    found = layer(hidden, document_offsets(MASK, 4), rotation, selected)
    torch.testing.assert_close(found, plain[:, [5, 0]], atol=1e-6, rtol=1e-5)


@pytest.mark.gpu
def test_by_document_equals_bias_on_gpu():
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = MaskedLM(ModelConfig(**sizes)).cuda()
    mask = torch.arange(40).expand(3, 40).cuda() // 7 + 1
    mask[:, 30:] = 0
    ids = torch.randint(64, mask.shape, device="cuda")
    outputs, gradients = [], []
    for most in (None, 8):
        model.encoder.documents_per_row = most
        with torch.autocast("cuda", torch.bfloat16):
            outputs.append(model(ids, mask)[mask > 0].float())
        gradients.append(torch.autograd.grad(outputs[-1].square().sum(), model.head.dense.weight)[0])
    torch.testing.assert_close(*outputs, atol=0.02, rtol=0.02)
    torch.testing.assert_close(*gradients, atol=0.1, rtol=0.05)
