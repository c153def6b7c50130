"""Depths of weights, the learning rates that follow from them, and what is frozen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneOptimizerConfig
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.model.adapt import default_rate, depth_of, freeze, layer_decay
from mlm.model.heads import SequenceClassifier
from mlm.optim import build_optimizer, set_learning_rate

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 24}


@pytest.fixture
def model():
    config = ModelConfig(**SIZES, type_vocab_size=2, norm_bias=True).resolve(50, 32)
    return SequenceClassifier(config, ClassifierConfig(("a", "b")))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_weight_gets_the_rate_of_its_depth(model, name):
    """Embeddings decay^4, the layers decay^3, decay^2, decay^1, all above them 1."""
    settings = FinetuneOptimizerConfig(name=name, lr=1e-3, muon_lr=2e-3, layer_decay=0.5, weight_decay=0.1)
    optimizer = build_optimizer(model, settings, layer_decay(0.5, 3))
    set_learning_rate(optimizer, 0.1)
    found = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    muon = {id(p) for group in optimizer.param_groups if "momentum" in group for p in group["params"]}
    assert bool(muon) == (name == "muon")
    parts = {"encoder.embeddings.": 4, "encoder.layers.0.": 3, "encoder.layers.1.": 2, "encoder.layers.2.": 1}
    parts |= {"encoder.final_norm.": 0, "pooler.": 0, "classifier.": 0}
    assert len(found) == len(list(model.parameters()))
    for key, parameter in model.named_parameters():
        (exponent,) = (power for start, power in parts.items() if key.startswith(start))
        rate = 2e-3 if id(parameter) in muon else 1e-3
        assert found[id(parameter)] == pytest.approx(0.1 * rate * 0.5**exponent), key


def test_without_decay_there_are_the_groups_there_always_were(model):
    plain = build_optimizer(model, FinetuneOptimizerConfig(lr=1e-3))
    same = build_optimizer(model, FinetuneOptimizerConfig(lr=1e-3), layer_decay(1.0, 3))
    sizes = [[len(group["params"]) for group in one.param_groups] for one in (plain, same)]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 2


@pytest.mark.parametrize(
    ("what", "frozen"),
    [
        (None, []),
        ("embeddings", ["encoder.embeddings."]),
        (2, ["encoder.embeddings.", "encoder.layers.0.", "encoder.layers.1."]),
        (3, ["encoder.embeddings.", "encoder.layers."]),
        ("encoder", ["encoder."]),
    ],
)
def test_what_is_frozen(model, what, frozen):
    freeze(model, what)
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad != name.startswith(tuple(frozen)), name


def test_more_layers_than_there_are_are_refused(model):
    with pytest.raises(InputError, match=r"trainer.freeze=4 is more than the 3 layers of the model"):
        freeze(model, 4)


def test_every_weight_has_a_depth(model):
    depths = {depth_of(name, 3) for name, _ in model.named_parameters()}
    assert depths == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("width", "tokens", "frozen", "rate", "reason"),
    [
        (384, None, None, 1e-4, "for width 384 after a long pretraining"),
        (768, None, None, 4e-5, "for width 768 after a long pretraining"),
        (1024, None, 2, 2e-5, "for width 1024 after a long pretraining"),
        (128, None, None, 3e-4, "for width 128 after a long pretraining"),
        (256, 10**6, "embeddings", 3e-4, "for width 256 after a short pretraining"),
        (512, 10**6, None, 1e-4, "for width 512 after a short pretraining"),
        (512, 10**9, None, 6e-5, "for width 512 after a long pretraining"),
        (512, 0, None, 1e-4, "for width 512 after random weights"),
        (512, None, "encoder", 1e-3, "only the head is trained"),
    ],
)
def test_learning_rate_by_width_and_pretraining(width, tokens, frozen, rate, reason):
    shape = ModelConfig(vocab_size=64, hidden_size=width, num_hidden_layers=1, num_attention_heads=2)
    with torch.device("meta"):
        model = SequenceClassifier(replace(shape, intermediate_size=width), ClassifierConfig(("a", "b")))
    assert default_rate(model, tokens, frozen) == (rate, reason)
