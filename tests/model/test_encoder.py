"""The encoder: what a token's vector may depend on, and what not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.model import Encoder, MaskedLM

MODERN = ModelConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=64,
)
CLASSIC = replace(
    MODERN,
    norm_position="post",
    position_embedding="learned",
    activation="gelu",
    type_vocab_size=2,
    norm_bias=True,
    attention_bias=True,
    mlp_bias=True,
    head_bias=True,
)
MIXED = replace(MODERN, position_embedding="learned", first_attention_norm=True)
CONFIGS = {"modern": MODERN, "classic": CLASSIC, "mixed": MIXED}


def encoder(config: ModelConfig) -> Encoder:
    torch.manual_seed(0)
    return MaskedLM(replace(config, initializer_range=0.3)).eval().encoder


@pytest.fixture(params=CONFIGS)
def model(request) -> Encoder:
    return encoder(CONFIGS[request.param])


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.allclose(left, right, atol=1e-5, rtol=0)


def test_packed_row_equals_documents_one_by_one(model):
    ids, cuts = torch.randint(40, (1, 20)), [0, 3, 4, 13, 18]
    mask = torch.zeros(1, 20, dtype=torch.long)
    for number, (start, end) in enumerate(pairwise(cuts), start=1):
        mask[:, start:end] = number
    packed = model(ids, mask)
    for start, end in pairwise(cuts):
        assert close(packed[:, start:end], model(ids[:, start:end]))


def test_padding_and_other_rows_change_nothing(model):
    short, long = torch.randint(40, (1, 7)), torch.randint(40, (1, 60))
    alone = model(short)
    padded, mask = torch.zeros(1, 64, dtype=torch.long), torch.zeros(1, 64, dtype=torch.long)
    padded[:, :7], mask[:, :7] = short, 1
    assert close(model(padded, mask)[:, :7], alone)
    batch, both = torch.cat((padded[:, :60], long)), torch.cat((mask[:, :60], torch.ones_like(long)))
    assert close(model(batch, both)[:1, :7], alone)
    assert close(model(batch, both.bool())[1:], model(long))


def test_bfloat16_is_close_to_float32(model):
    ids, mask = torch.randint(40, (2, 12)), torch.tensor([[1] * 12, [1] * 5 + [2] * 4 + [0] * 3])
    with torch.autocast("cpu", torch.bfloat16):
        half = model(ids, mask)
    assert (half - model(ids, mask)).abs().max() < 0.2
    assert half.isfinite().all()


def test_row_of_padding_is_finite_with_finite_gradients(model):
    output = model.train()(torch.randint(40, (2, 6)), torch.tensor([[0] * 6, [1] * 6]))
    output.square().sum().backward()
    assert output.isfinite().all()
    assert all(weight.grad.isfinite().all() for weight in model.parameters() if weight.grad is not None)


def test_without_positions_permuting_tokens_permutes_outputs():
    for config in (CLASSIC, MIXED):
        model, order = encoder(config), torch.randperm(9)
        ids = torch.randint(40, (2, 9))
        assert not close(model(ids[:, order]), model(ids)[:, order])
        nn.init.zeros_(model.embeddings.position.weight)
        assert close(model(ids[:, order]), model(ids)[:, order])


def test_rotary_ignores_a_common_shift():
    model, ids = encoder(MODERN), torch.randint(40, (1, 6))
    shifted = torch.cat((torch.zeros(1, 4, dtype=torch.long), ids), dim=1)
    mask = torch.tensor([[0] * 4 + [1] * 6])
    assert close(model(shifted, mask)[:, 4:], model(ids))
    assert not close(model(ids.flip(1)).flip(1), model(ids))


def test_every_token_sees_both_sides(model):
    ids = torch.randint(1, 40, (1, 8))
    before = model(ids)
    for changed in (0, 7):
        other = ids.clone()
        other[0, changed] = 0
        assert ((model(other) - before).abs().amax(-1) > 1e-4).all()


def test_token_types_shift_the_classic_encoder():
    model, ids = encoder(CLASSIC), torch.randint(40, (2, 6))
    types = torch.tensor([[0, 0, 0, 1, 1, 1]]).expand(2, 6)
    assert close(model(ids), model(ids, token_type_ids=torch.zeros_like(ids)))
    assert not close(model(ids), model(ids, token_type_ids=types))


def test_norms_stand_where_the_layout_says():
    modern, classic, mixed = (encoder(config) for config in (MODERN, CLASSIC, MIXED))
    assert isinstance(modern.layers[0].attention_norm, nn.Identity)
    assert all(isinstance(m.layers[1].attention_norm, nn.LayerNorm) for m in (modern, classic, mixed))
    assert all(isinstance(m.layers[0].attention_norm, nn.LayerNorm) for m in (classic, mixed))
    assert isinstance(modern.final_norm, nn.LayerNorm)
    assert isinstance(classic.final_norm, nn.Identity)


def test_too_long_row_is_refused(model):
    with pytest.raises(InputError, match="65 tokens exceeds the model's max_position_embeddings=64"):
        model(torch.zeros(1, 65, dtype=torch.long))
