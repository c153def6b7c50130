"""Counts, arithmetic and memory: the published sizes, the built model, torch's own counter, and by hand."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mlm.__main__ import main
from mlm.config.commands import PlanConfig, PretrainConfig
from mlm.config.errors import InputError
from mlm.config.files import config_folder, shipped_names
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.training import OptimizerConfig, TrainerConfig
from mlm.model import MaskedLM, SequenceClassifier
from mlm.model.attention import distance_bias
from mlm.optim import build_optimizer
from mlm.plan import (
    count_parameters,
    flops_per_token,
    planned_steps,
    tokens_seen,
    total_parameters,
    training_memory,
)
from mlm.startup.command import parse_config

PUBLISHED = {  # vocabulary, encoder (BERT's with its pooler), masked language model
    "bert-tiny": (30522, 4_385_920, 4_416_698),
    "bert-mini": (30522, 11_170_560, 11_201_594),
    "bert-small": (30522, 28_763_648, 28_795_194),
    "bert-medium": (30522, 41_373_184, 41_404_730),
    "bert-base": (30522, 109_482_240, 109_514_298),
    "bert-large": (30522, 335_141_888, 335_174_458),
    "roberta-base": (50265, 124_055_040 + 590_592, 124_697_433),
    "modernbert-base": (50368, 149_014_272, 149_655_232),
    "modernbert-large": (50368, 394_781_696, 395_881_664),
    "ettin-17m": (50368, 16_797_440, 16_913_600),
    "ettin-32m": (50368, 31_883_136, 32_081_344),
    "ettin-68m": (50368, 68_144_640, 68_457_664),
}
TINY = ModelConfig(
    vocab_size=50,
    hidden_size=8,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=12,
    max_position_embeddings=16,
)
SWITCHES = {
    "norm": ("layernorm", "rmsnorm"),
    "norm_position": ("pre", "post"),
    "embedding_norm": (True, False),
    "first_attention_norm": (False, True),
    "final_norm": (None, True, False),
    "position_embedding": ("rotary", "learned", "sinusoidal", "none"),
    "position_offset": (0, 2),
    "activation": ("relu", "gelu", "geglu", "swiglu"),
    "type_vocab_size": (0, 2),
    "embedding_size": (None, 4),
    "head_transform": (True, False),
    "tie_word_embeddings": (True, False),
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), (False, True)),
}


def shipped(name: str) -> ModelConfig:
    return parse_config(PretrainConfig, ["--model", name], prog="test").model


def built(config: ModelConfig) -> MaskedLM:
    with torch.device("meta"):  # sizes without memory
        return MaskedLM(config)


def test_every_shipped_model_has_a_published_size():
    assert set(shipped_names("model")) == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_models_have_the_published_sizes(name):
    vocab_size, encoder, masked_lm = PUBLISHED[name]
    config = replace(shipped(name), vocab_size=vocab_size)
    pooler = config.hidden_size * (config.hidden_size + 1) if config.pooling == "cls_tanh" else 0
    assert total_parameters(config) == masked_lm
    assert total_parameters(config) - count_parameters(config)["head"] + pooler == encoder
    assert sum(weight.numel() for weight in built(config).parameters()) == masked_lm


def test_other_published_sizes():
    cased = replace(shipped("bert-base"), vocab_size=28996)
    assert total_parameters(cased) == 108_340_804
    ettin_1b = {"hidden_size": 1792, "num_hidden_layers": 28, "num_attention_heads": 28}
    ettin_1b |= {"intermediate_size": 3840, "vocab_size": 50368}
    assert total_parameters(replace(shipped("ettin-17m"), **ettin_1b)) == 1_031_314_112
    neobert = ModelConfig(
        vocab_size=30522,
        hidden_size=768,
        num_hidden_layers=28,
        num_attention_heads=12,
        intermediate_size=2048,
        norm="rmsnorm",
        embedding_norm=False,
        first_attention_norm=True,
        activation="swiglu",
        head_transform=False,
        tie_word_embeddings=False,
    )
    assert total_parameters(neobert) == 245_136_954
    assert total_parameters(neobert) - count_parameters(neobert)["head"] == 221_665_536


def drawn_configs(count: int) -> list[ModelConfig]:
    draw, configs = random.Random(0), []
    while len(configs) < count:
        values = {name: draw.choice(choices) for name, choices in SWITCHES.items()}
        try:
            configs.append(replace(TINY, **values))
        except InputError:  # a combination that does not exist
            continue
    return configs


@pytest.mark.parametrize("config", drawn_configs(60), ids=range(60))
def test_counts_equal_built_model(config):
    parts = dict.fromkeys(("embeddings", "attention", "feed_forward", "norms", "head"), 0)
    for name, weight in built(config).named_parameters():
        part = "head" if name.startswith("head") else next(p for p in ("norm", *parts) if p in name)
        parts["norms" if part == "norm" else part] += weight.numel()
    assert count_parameters(config) == parts


@pytest.mark.parametrize("config", drawn_configs(10), ids=range(10))
@pytest.mark.parametrize("labels", [("score",), ("a", "b", "c")])
def test_counts_of_a_classifier_equal_built_model(config, labels):
    with torch.device("meta"):
        model = SequenceClassifier(config, ClassifierConfig(labels))
    counts = count_parameters(config, len(labels))
    head = [*model.pooler.parameters(), *model.classifier.parameters()]
    assert counts["head"] == sum(weight.numel() for weight in head)
    assert total_parameters(config, len(labels)) == sum(weight.numel() for weight in model.parameters())


def test_layers_of_known_sizes():
    layer = replace(shipped("bert-tiny"), hidden_size=32, num_attention_heads=4, intermediate_size=64)
    parts = count_parameters(replace(layer, num_hidden_layers=1, vocab_size=10))
    assert parts["feed_forward"] == 4192
    assert parts["attention"] == 4096 + 128
    assert parts["norms"] == 3 * 64
    six = replace(shipped("bert-small"), num_hidden_layers=6, vocab_size=10, final_norm=True)
    parts = count_parameters(replace(six, embedding_norm=False))
    assert parts["attention"] + parts["feed_forward"] + parts["norms"] == 18_915_328


def test_flops_equal_hand_calculation():
    config = replace(shipped("bert-mini"), vocab_size=8192)
    layer, head = 6 * (4 * 256**2 + 2 * 256 * 1024) + 12 * 128 * 256, 6 * (256**2 + 256 * 8192)
    keys_and_values = 6 * 2 * 256**2
    by_hand = 3 * layer + keys_and_values + 0.15 * (layer - keys_and_values + head)
    assert flops_per_token(config, seq_len=128, masked_fraction=0.15) == pytest.approx(by_hand)
    whole = 4 * layer + 0.15 * head
    assert flops_per_token(config, 128, 0.15, whole_layers=True) == pytest.approx(whole)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation": "relu"},
        {"embedding_size": 4},
        {"head_transform": False},
        {"tie_word_embeddings": False, "head_transform": False, "embedding_size": 4},
        {"global_attn_every_n_layers": 2, "local_attention": 6},
        {"attention": "causal"},
        {"attention": "causal", "global_attn_every_n_layers": 3, "local_attention": 5},
        {"global_attn_every_n_layers": 3, "local_attention": 64},
    ],
)
def test_flops_equal_counted_products(changes):
    config, B, S, M = replace(TINY, **changes), 2, 16, 4
    model = MaskedLM(config)
    ids, positions = torch.randint(50, (B, S)), torch.randint(S, (B, M))
    with FlopCounterMode(display=False) as counter:
        model(ids, masked_positions=positions).sum().backward()
    wasted = 0.0  # products with what a token does not see, which the plain matrix product computes too
    for layer in range(config.num_hidden_layers):
        window = config.local_attention if config.is_local(layer) else None
        bias = distance_bias(torch.arange(S), window, config.attention == "causal", torch.float32)
        pairs = bias.isfinite().sum().item()
        assert tokens_seen(config, layer, S) == pytest.approx(pairs / S)
        attending = M / S if layer == config.num_hidden_layers - 1 else 1
        wasted += attending * 12 * config.hidden_size * (S * S - pairs) * B
    found = flops_per_token(config, S, M / S) * B * S + wasted
    assert found == pytest.approx(counter.get_total_flops(), rel=1e-12)


def test_local_attention_costs_less_on_long_rows_only():
    local = replace(TINY, global_attn_every_n_layers=3, local_attention=128)
    assert flops_per_token(local, 64, 0.15) == flops_per_token(TINY, 64, 0.15)
    assert flops_per_token(local, 8192, 0.15) < 0.5 * flops_per_token(TINY, 8192, 0.15)


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize(
    "changes", [{}, {"embedding_size": 4, "tie_word_embeddings": False}, {"position_embedding": "sinusoidal"}]
)
def test_memory_equals_that_of_a_step(name, changes):
    model = MaskedLM(replace(TINY, **changes))
    optimizer = build_optimizer(model, OptimizerConfig(name=name))
    model(torch.randint(50, (2, 16))).sum().backward()
    optimizer.step()
    parameters = list(model.parameters())
    numbers = [state for kept in optimizer.state.values() for state in kept.values() if state.ndim]
    gradients = [weight.grad for weight in parameters if weight.grad is not None]
    found = {"weights": parameters, "gradients": gradients, "optimizer": numbers}
    assert training_memory(model.config, OptimizerConfig(name=name)) == {
        part: sum(tensor.nbytes for tensor in tensors) for part, tensors in found.items()
    }


def test_steps_of_the_budget():
    def steps(**bounds):
        return planned_steps(TrainerConfig(**bounds), tokens_per_step=4096)

    assert steps(max_steps=600) == 600
    assert steps(max_steps=600, max_tokens=1_000_000) == 245
    assert steps(max_steps=None, max_tokens=4097) == 2
    assert steps(max_steps=None, max_time="5m") is None


def test_null_sizes_are_named():
    with pytest.raises(InputError, match="vocab_size is null"):
        total_parameters(ModelConfig())
    with pytest.raises(InputError, match="max_position_embeddings is null"):
        total_parameters(ModelConfig(vocab_size=8, position_embedding="learned"))


def plan_of(capsys, *words: str) -> dict[str, str]:
    assert main(["plan", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    return dict(line.strip().split("  ", 1) for line in lines)


def test_plan_prints_what_the_functions_say(capsys):
    words = ["--config", "bert-mini", "--model.vocab_size", "30522", "--trainer.max_tokens", "1e6"]
    found = {name: text.strip() for name, text in plan_of(capsys, *words).items()}
    assert found["parameters"] == "11,201,594"
    assert found["embeddings"] == "7,945,216"
    assert found["FLOPs a token"].startswith("23.8 M, ")
    assert found["optimizer"] == "89.6 MB"
    assert found["memory a device"] == "179.2 MB, activations not counted"
    assert found["tokens a step"].startswith("4,096")
    assert found["steps"] == "245"
    assert found["tokens"] == "1,003,520"


@pytest.mark.parametrize(
    ("words", "optimizer", "memory"),
    [
        (["--trainer.devices", "8"], "11.2 MB", "22.4 MB, 1/8 of all, "),
        (["--trainer.devices", "4", "--trainer.num_nodes", "4"], "5.6 MB", "11.2 MB, 1/16 of all, "),
        (["--trainer.devices", "1"], "89.6 MB", "179.2 MB, "),
        ([], "89.6 MB", "179.2 MB, undivided; fsdp2 divides it among the devices, "),
    ],
)
def test_fsdp2_divides_the_memory_among_the_devices(capsys, words, optimizer, memory):
    model = ["--config", "bert-mini", "--model.vocab_size", "30522", "--optimizer.name", "adamw"]
    found = plan_of(capsys, *model, "--trainer.strategy", "fsdp2", *words)
    assert found["memory a device"].strip() == f"{memory}activations not counted"
    assert found["optimizer"].strip() == optimizer
    undivided = plan_of(capsys, *model, "--trainer.strategy", "ddp", *words)
    assert undivided["memory a device"].strip() == "179.2 MB, activations not counted"


def test_plan_needs_neither_text_nor_end(capsys, tmp_path, tokenizer):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    words = ["--trainer.max_steps", "null", "--trainer.max_time", "5m", "--data.sources", "nowhere.txt"]
    found = plan_of(capsys, *words, "--tokenizer.path", str(tmp_path))
    assert found["vocabulary"].strip() == "128 rows"
    assert found["time"].strip() == "5m at most"
    assert "steps" not in found


@pytest.mark.parametrize("path", sorted(config_folder().glob("pretrain/*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_run_can_be_planned(capsys, path):
    assert "parameters" in plan_of(capsys, "--config", str(path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--init", "some/model"], "init=some/model is not read by this command"),
        (["--data.seq_len", "1024", "--model", "bert-tiny"], "data.seq_len=1024 is longer than"),
        (["--model.vocab_size", "100"], "model.vocab_size=100 is smaller than the tokenizer"),
        (["--tokenizer.path", "pyproject.toml"], "pyproject.toml is not a tokenizer.json"),
    ],
)
def test_mistakes_are_one_line(capsys, monkeypatch, words, message):
    monkeypatch.chdir(config_folder().parent)
    with pytest.raises(SystemExit) as stop:
        main(["plan", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("mlm plan: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_plan_needs_no_torch():
    code = (
        "import sys; from mlm.__main__ import main; main(['plan']);"
        "print(sorted({'torch', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_plan_takes_what_pretrain_takes():
    given = ["--config", "bert-mini", "--seed", "3", "--logging.wandb", "disabled"]
    planned, run = (parse_config(kind, given, prog="test") for kind in (PlanConfig, PretrainConfig))
    assert (planned.model, planned.optimizer) == (run.model, run.optimizer)
