"""Counts and arithmetic: the built model, the published sizes, and a hand calculation."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.model import MaskedLM, SequenceClassifier
from mlm.plan import count_parameters, flops_per_token, total_parameters


def bert(layers: int, width: int, vocab_size: int = 30522) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=4 * width,
        max_position_embeddings=512,
        norm_position="post",
        norm_bias=True,
        position_embedding="learned",
        activation="gelu",
        attention_bias=True,
        mlp_bias=True,
        type_vocab_size=2,
        head_bias=True,
    )


def modernbert(layers: int, width: int, feed_forward: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=50368,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        intermediate_size=feed_forward,
    )


PUBLISHED = {
    "bert-tiny": (bert(2, 128), 4_416_698),
    "bert-mini": (bert(4, 256), 11_201_594),
    "bert-small": (bert(4, 512), 28_795_194),
    "bert-medium": (bert(8, 512), 41_404_730),
    "bert-base-uncased": (bert(12, 768), 109_514_298),
    "bert-base-cased": (bert(12, 768, 28996), 108_340_804),
    "bert-large-uncased": (bert(24, 1024), 335_174_458),
    "modernbert-base": (modernbert(22, 768, 1152), 149_655_232),
    "modernbert-large": (modernbert(28, 1024, 2624), 395_881_664),
    "ettin-17m": (modernbert(7, 256, 384), 16_913_600),
    "ettin-32m": (modernbert(10, 384, 576), 32_081_344),
    "ettin-68m": (modernbert(19, 512, 768), 68_457_664),
    "ettin-1b": (modernbert(28, 1792, 3840), 1_031_314_112),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_total_equals_published_size(name):
    config, published = PUBLISHED[name]
    assert total_parameters(config) == published


SWITCHES = {
    "norm_position": ("pre", "post"),
    "position_embedding": ("rotary", "learned"),
    "activation": ("gelu", "geglu"),
    "type_vocab_size": (0, 2),
    "first_attention_norm": (False, True),
}
BIASES = ("norm_bias", "attention_bias", "mlp_bias", "head_bias")
TINY = ModelConfig(
    vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12
)


@pytest.mark.parametrize("values", product(*SWITCHES.values()))
def test_counts_equal_built_model(values):
    config = replace(TINY, max_position_embeddings=16, **dict(zip(SWITCHES, values, strict=True)))
    for bias in (None, *BIASES):
        config = config if bias is None else replace(config, **{bias: True})
        assert total_parameters(config) == sum(weight.numel() for weight in MaskedLM(config).parameters())


@pytest.mark.parametrize("config", [bert(2, 128, 100), replace(modernbert(2, 128, 96), vocab_size=100)])
@pytest.mark.parametrize("labels", [("score",), ("a", "b", "c")])
def test_counts_of_a_classifier_equal_built_model(config, labels):
    with torch.device("meta"):
        model = SequenceClassifier(config, ClassifierConfig(labels))
    counts = count_parameters(config, len(labels))
    head = [*model.pooler.parameters(), *model.classifier.parameters()]
    assert counts["head"] == sum(weight.numel() for weight in head)
    assert total_parameters(config, len(labels)) == sum(weight.numel() for weight in model.parameters())


def test_parts_equal_built_parts():
    model = MaskedLM(replace(TINY, norm_bias=True))
    parts = count_parameters(model.config)
    groups = {"norms": 0, "embeddings": 0, "attention": 0, "feed_forward": 0, "head": 0}
    for name, weight in model.named_parameters():
        part = "head" if name.startswith("head") else next(p for p in ("norm", *groups) if p in name)
        groups["norms" if part == "norm" else part] += weight.numel()
    assert parts == groups


def test_layers_of_reference_sizes():
    layer = replace(bert(1, 64), hidden_size=32, num_attention_heads=4, intermediate_size=64)
    parts = count_parameters(layer)
    assert parts["feed_forward"] == 4192
    assert parts["attention"] == 4096 + 128
    assert parts["norms"] == 3 * 64
    parts = count_parameters(replace(bert(6, 512), norm_position="pre", first_attention_norm=True))
    embedding_norm = 2 * 512
    assert parts["attention"] + parts["feed_forward"] + parts["norms"] - embedding_norm == 18_915_328


def test_flops_equal_hand_calculation():
    config = bert(4, 256, 8192)
    by_hand = 6 * 4 * (4 * 256**2 + 2 * 256 * 1024) + 12 * 4 * 128 * 256 + 0.15 * 6 * (256**2 + 256 * 8192)
    assert flops_per_token(config, seq_len=128, masked_fraction=0.15) == pytest.approx(by_hand)


def test_flops_equal_counted_products():
    config, B, S, M = replace(TINY, activation="geglu"), 2, 16, 4
    model = MaskedLM(config)
    ids, positions = torch.randint(50, (B, S)), torch.randint(S, (B, M))
    with FlopCounterMode(display=False) as counter:
        model(ids, masked_positions=positions).sum().backward()
    assert flops_per_token(config, S, M / S) * B * S == counter.get_total_flops()


def test_null_sizes_are_named():
    with pytest.raises(InputError, match="vocab_size is null"):
        total_parameters(ModelConfig())
    with pytest.raises(InputError, match="max_position_embeddings is null"):
        total_parameters(ModelConfig(vocab_size=8, position_embedding="learned"))
