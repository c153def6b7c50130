"""The encoder: what a token's vector may depend on, and what not."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.model import Encoder, MaskedLM, attention

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
LOCAL = {"global_attn_every_n_layers": 2, "local_attention": 4}
LOCAL_CONFIGS = {
    "local": replace(MODERN, **LOCAL, local_rotary_theta=50.0),
    "local, fixed positions": replace(CLASSIC, **LOCAL, position_embedding="sinusoidal"),
    "local, no positions": replace(MIXED, **LOCAL, position_embedding="none"),
}
CAUSAL_CONFIGS = {
    "causal": replace(MODERN, attention="causal"),
    "causal, local, learned positions": replace(MIXED, **LOCAL, attention="causal", position_offset=2),
}
CONFIGS = {
    "modern": MODERN,
    "classic": CLASSIC,
    "mixed": MIXED,
    "fixed positions": replace(CLASSIC, position_embedding="sinusoidal"),
    "no positions": replace(CLASSIC, position_embedding="none", activation="relu"),
    "offset": replace(CLASSIC, position_offset=2, final_norm=True, type_vocab_size=0),
    "rmsnorm": replace(MODERN, norm="rmsnorm", activation="swiglu", embedding_norm=False),
    "narrow tables": replace(CLASSIC, embedding_size=8),
}


def encoder(config: ModelConfig) -> Encoder:
    torch.manual_seed(0)
    return MaskedLM(replace(config, initializer_range=0.3)).eval().encoder


ALL = {**CONFIGS, **LOCAL_CONFIGS, **CAUSAL_CONFIGS}


@pytest.fixture(params=ALL)
def model(request) -> Encoder:
    return encoder(ALL[request.param])


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


@pytest.mark.parametrize("mode", ["plain", "documents", "recomputed", "kernel"])
def test_selected_tokens_equal_selection_of_all(model, mode, monkeypatch):
    ids, selected = torch.randint(40, (3, 20)), torch.tensor([[0, 7, 19], [3, 3, 4], [18, 2, 11]])
    mask = None if mode == "plain" else torch.tensor([[1] * 20, [1] * 5 + [2] * 15, [1] * 9 + [2] * 10 + [0]])
    if mode == "kernel":
        monkeypatch.setattr(attention, "attend_by_matmul", None)
        monkeypatch.setattr(attention, "LONGEST_BY_MATMUL", 19)
    model.train().gradient_checkpointing = mode == "recomputed"
    wanted = model(ids, mask)[torch.arange(3)[:, None], selected]
    found = model(ids, mask, selected=selected)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    target = torch.randn_like(wanted)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [
        torch.autograd.grad((out * target).sum(), weights, allow_unused=True) for out in (found, wanted)
    ]
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-5)


def test_last_layer_computes_selected_tokens_only(model):
    sizes = []
    for part in (part for layer in model.layers for part in (layer.attention, layer.feed_forward)):
        part.register_forward_hook(lambda _, __, output: sizes.append(output.shape[1]))
    model(torch.randint(40, (2, 9)), selected=torch.tensor([[1, 2], [8, 0]]))
    assert sizes == [9, 9, 2, 2]


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


@pytest.mark.parametrize("name", CONFIGS)
def test_every_token_sees_both_sides(name):
    model, ids = encoder(CONFIGS[name]), torch.randint(1, 40, (1, 8))
    before = model(ids)
    for changed in (0, 7):
        other = ids.clone()
        other[0, changed] = 0
        assert ((model(other) - before).abs().amax(-1) > 1e-4).all()


@pytest.mark.parametrize("name", [*LOCAL_CONFIGS, "causal, local, learned positions"])
def test_local_layers_see_the_window_only(name):
    config = ALL[name]
    ids = torch.randint(1, 40, (1, 12))
    changed = ids.clone()
    changed[0, 5] = 0
    # One layer is global; alone, or followed by a local one, it shows what each of the two lets through.
    one, two = (encoder(replace(config, num_hidden_layers=n)) for n in (1, 2))
    assert ((one(changed) - one(ids)).abs().amax(-1)[0, 5:] > 1e-4).all()
    two.is_local = [True, True]
    seen = (two(changed) - two(ids)).abs().amax(-1)[0] > 1e-6
    assert seen.nonzero().flatten().tolist() == list(range(5 if config.attention == "causal" else 1, 10))


def test_local_layers_turn_by_their_own_theta():
    config = replace(MODERN, **LOCAL, local_rotary_theta=50.0)
    ids = torch.randint(40, (1, 9))
    assert not close(encoder(config)(ids), encoder(replace(config, local_rotary_theta=10000.0))(ids))
    every = replace(config, global_attn_every_n_layers=1)  # there are no local layers: the window is not used
    assert close(encoder(every)(ids), encoder(replace(every, local_rotary_theta=1.0, local_attention=1))(ids))


def test_wide_window_is_full_attention():
    ids = torch.randint(40, (2, 9))
    wide = replace(MODERN, global_attn_every_n_layers=2, local_attention=16)
    assert close(encoder(wide)(ids), encoder(MODERN)(ids))
    assert not close(encoder(replace(wide, local_attention=14))(ids), encoder(MODERN)(ids))


def test_first_position_takes_the_row_of_the_offset():
    model, plain = encoder(replace(CLASSIC, position_offset=2)), encoder(CLASSIC)
    assert model.embeddings.position.weight.shape == (66, 16)
    state = model.state_dict()
    state["embeddings.position.weight"] = state["embeddings.position.weight"][2:]
    plain.load_state_dict(state)
    ids, mask = torch.randint(40, (1, 64)), torch.tensor([[1] * 30 + [2] * 34])
    assert close(model(ids, mask), plain(ids, mask))


def test_fixed_positions_are_not_trained():
    model = encoder(CONFIGS["fixed positions"])
    model(torch.randint(40, (1, 9))).square().sum().backward()
    assert model.embeddings.position.weight.grad is None
    assert model.embeddings.token.weight.grad is not None


def test_narrow_tables_are_projected():
    embeddings = encoder(CONFIGS["narrow tables"]).embeddings
    ids, positions = torch.randint(40, (2, 5)), torch.arange(5)[None]
    tables = (embeddings.token(ids), embeddings.position(positions), embeddings.token_type.weight[0])
    expected = embeddings.norm(sum(tables)) @ embeddings.projection.weight.T + embeddings.projection.bias
    torch.testing.assert_close(embeddings(ids, positions), expected)
    assert embeddings(ids, positions).shape == (2, 5, 16)


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
    final = encoder(replace(CLASSIC, final_norm=True))
    assert isinstance(final.final_norm, nn.LayerNorm)
    bare = encoder(replace(MODERN, embedding_norm=False, final_norm=False))
    assert isinstance(bare.embeddings.norm, nn.Identity)
    assert isinstance(bare.final_norm, nn.Identity)
    rms = encoder(replace(MODERN, norm="rmsnorm"))
    assert {type(module) for name, module in rms.named_modules() if name.endswith("norm")} == {
        nn.RMSNorm,
        nn.Identity,
    }


@pytest.mark.parametrize("name", ["modern", "classic"])
def test_gradient_checkpointing_changes_nothing(name):
    """Loss and gradients are the same to the bit, dropout included."""
    dropout = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}
    model, ids = encoder(replace(CONFIGS[name], **dropout)).train(), torch.randint(40, (2, 9))
    found = []
    for model.gradient_checkpointing in (False, True):
        torch.manual_seed(5)
        model.zero_grad()
        loss = model(ids, torch.ones_like(ids)).pow(2).sum()
        loss.backward()
        found.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
    for kept, computed_again in zip(*found, strict=True):
        assert torch.equal(kept, computed_again)


def test_too_long_row_is_refused(model):
    with pytest.raises(InputError, match="65 tokens exceeds the model's max_position_embeddings=64"):
        model(torch.zeros(1, 65, dtype=torch.long))
