"""New tokens: what they begin with, and that nothing else changes."""

from __future__ import annotations

import pytest
import torch

from mlm.config.model import ModelConfig
from mlm.model.adapt import extend_vocabulary
from mlm.model.heads import MaskedLM, rule_out_unused_ids

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
IDS = torch.arange(12)[None]


@pytest.mark.parametrize("vocab_size", [60, 128])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", ["rotary", "sinusoidal"])
def test_new_rows_are_means_and_the_others_stay(vocab_size, tied, positions):
    config = ModelConfig(vocab_size=vocab_size, max_position_embeddings=16, **SIZES)
    config.tie_word_embeddings, config.position_embedding = tied, positions
    torch.manual_seed(0)
    model = MaskedLM(config)
    with torch.no_grad():
        model.head.bias.normal_()
    rule_out_unused_ids(model, 60)
    larger = extend_vocabulary(model, {60: [7, 8, 8], 61: [9], 62: []})
    assert larger.config.vocab_size == (64 if vocab_size == 60 else 128)
    assert larger.encoder.config == larger.config
    assert not larger.encoder.embeddings.token.weight.is_meta
    state, after = model.state_dict(), larger.state_dict()
    assert state.keys() == after.keys()
    for name in state:
        assert torch.equal(state[name][:60], after[name][:60])
    tables = [name for name in state if name in ("encoder.embeddings.token.weight", "head.output.weight")]
    assert len(tables) == 2 - tied
    for name in [*tables, "head.bias"]:
        torch.testing.assert_close(after[name][60], (state[name][7] + 2 * state[name][8]) / 3)
        assert torch.equal(after[name][61], state[name][9])
        torch.testing.assert_close(after[name][62], state[name][:60].mean(0))
    rule_out_unused_ids(larger, 63)
    with torch.no_grad():
        torch.testing.assert_close(larger.eval()(IDS)[..., :60], model.eval()(IDS)[..., :60])
        assert larger(IDS)[..., 63:].max() < -1e3
    larger(IDS).sum().backward()
    assert larger.encoder.embeddings.token.weight.grad.shape[0] == larger.config.vocab_size
