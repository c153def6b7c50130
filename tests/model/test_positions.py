"""Documents in a row, their positions, and the rotation."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.models.modernbert.modeling_modernbert import apply_rotary_pos_emb

from mlm.config.model import ModelConfig
from mlm.model.attention import (
    apply_rotary,
    compute_rotation,
    distance_bias,
    document_bias,
    document_offsets,
    document_positions,
    sinusoids,
)
from mlm.model.encoder import Encoder

MASKS = {
    "one document": [1, 1, 1, 1, 1],
    "packed": [1, 1, 2, 3, 3],
    "packed, then padding": [1, 2, 2, 0, 0],
    "padding in front": [0, 0, 1, 1, 1],
    "padding in between": [1, 1, 0, 1, 1],
    "only padding": [0, 0, 0, 0, 0],
    "as many documents as tokens": [1, 2, 3, 4, 5],
}


@pytest.mark.parametrize("name", MASKS)
def test_positions_count_from_first_token_of_document(name):
    row = MASKS[name]
    by_hand = [index - row.index(document) for index, document in enumerate(row)]
    assert document_positions(torch.tensor([row, row[::-1]]))[0].tolist() == by_hand


@pytest.mark.parametrize("name", MASKS)
def test_offsets_are_where_runs_begin(name):
    rows = [MASKS[name], MASKS["packed"]]
    runs = [
        5 * at + place
        for at, row in enumerate(rows)
        for place in range(5)
        if place == 0 or row[place] != row[place - 1]
    ]
    starts = document_offsets(torch.tensor(rows), 5).starts
    assert starts.dtype == torch.int32
    assert starts.tolist() == runs + [10] * (11 - len(runs))


@pytest.mark.parametrize("name", MASKS)
def test_bias_joins_equal_numbers_only(name):
    row = MASKS[name]
    bias = document_bias(torch.tensor([row]), torch.float32)[0, 0]
    by_hand = [[0.0 if left == right else float("-inf") for right in row] for left in row]
    assert bias.tolist() == by_hand


@pytest.mark.parametrize("window", [None, 1, 2, 5, 6, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_distance_bias_hides_what_is_far_or_ahead(window, causal):
    bias = distance_bias(torch.arange(7), window, causal, torch.bfloat16)
    assert bias.dtype == torch.bfloat16
    for place in range(7):
        for other in range(7):
            hidden = window is not None and abs(place - other) > window // 2
            hidden = hidden or (causal and other > place)
            assert bias[place, other].item() == (float("-inf") if hidden else 0.0)


def test_sinusoids_equal_the_formula():
    table = sinusoids(50, 6)
    for row in (0, 1, 49):
        for pair in range(3):
            angle = row / 10000 ** (2 * pair / 6)
            found = table[row, 2 * pair : 2 * pair + 2].tolist()
            assert found == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-5)


def test_local_layers_have_a_theta_of_their_own():
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 16}
    thetas = {"rotary_theta": 777.0, "local_rotary_theta": 55.0}
    encoder = Encoder(ModelConfig(vocab_size=9, global_attn_every_n_layers=2, **sizes, **thetas))
    assert encoder.is_local == [False, True]
    given = []
    for layer in encoder.layers:
        layer.register_forward_pre_hook(lambda _, inputs: given.append(inputs[2]))
    encoder(torch.arange(6)[None])
    for found, theta in zip(given, (777.0, 55.0), strict=True):
        for part, expected in zip(found, rotation(torch.arange(6)[None], theta), strict=True):
            assert torch.equal(part, expected)


def test_boolean_mask_is_one_document():
    mask = torch.tensor([[True, True, False]])
    assert document_positions(mask).tolist() == [[0, 1, 0]]
    assert document_bias(mask, torch.float32).isinf().sum() == 4


def rotation(positions, theta=10000.0, dtype=torch.float32):
    return compute_rotation(positions, theta, 8, dtype)


@pytest.mark.parametrize("shape", [(1, 5), (3, 5)])
def test_rotation_is_an_operation_that_a_compiler_can_plan_with(shape):
    torch.library.opcheck(compute_rotation, (torch.randint(9, shape), 10000.0, 8, torch.bfloat16))


@pytest.mark.parametrize("theta", [10000.0, 160000.0])
def test_rotation_equals_transformers(theta):
    query, key = torch.randn(2, 2, 3, 6, 8)  # each (B, H, S, K)
    positions = torch.tensor([[0, 1, 2, 3, 4, 5], [0, 1, 0, 1, 2, 0]])
    angles = positions[..., None] / theta ** (torch.arange(0, 8, 2) / 8)
    angles = torch.cat((angles, angles), dim=-1)
    expected = apply_rotary_pos_emb(query, key, angles.cos(), angles.sin())
    found = rotation(positions, theta)
    for states, theirs in zip((query, key), expected, strict=True):
        torch.testing.assert_close(apply_rotary(states, found), theirs)


def test_rotated_products_depend_on_distance_alone():
    query, key = torch.randn(2, 1, 1, 1, 8)
    cos, sin = rotation(torch.arange(20)[None])

    def product(at: int, of: int) -> float:
        turned = (apply_rotary(x, (cos[:, :, i], sin[:, :, i])) for x, i in ((query, at), (key, of)))
        left, right = turned
        return (left * right).sum().item()

    assert product(5, 2) == pytest.approx(product(18, 15), abs=1e-5)
    assert product(5, 2) != pytest.approx(product(5, 3), abs=1e-3)


def test_angles_are_exact_before_the_cast():
    exact = rotation(torch.tensor([[4097]]))
    cast = rotation(torch.tensor([[4097]]), dtype=torch.bfloat16)
    for full, half in zip(exact, cast, strict=True):
        assert half.dtype == torch.bfloat16
        assert torch.equal(full.bfloat16(), half)
