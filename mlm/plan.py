"""The cost of a model and its training, from the configuration alone: parameters, FLOPs, memory, budget.

D hidden size, E width of the embedding tables, F feed-forward width, L layers, S tokens a row, V vocabulary.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from mlm.config.commands import PretrainConfig
from mlm.config.data import TokenizerConfig, prediction_slots
from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.config.training import BaseTrainerConfig, OptimizerConfig
from mlm.files import format_bytes

FLOAT_BYTES = 4
"""Weights, gradients and optimizer state are kept in float32, in mixed precision too."""


def count_parameters(config: ModelConfig, num_labels: int | None = None) -> dict[str, int]:
    """Return the number of parameters by part; a tied output matrix is counted once, as an embedding.

    `num_labels` is the number of outputs of a classifier head; None: the head predicts masked tokens. An
    InputError says that a size of the tables is still null.
    """
    D, F, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    E, W, V = config.embedding_width, config.output_width, _vocab_size(config)

    def norm(width: int) -> int:
        return width * (1 + config.norm_bias)

    inputs = 2 if config.gated else 1  # matrices from D to F
    projection = E * D + D if config.embedding_size else 0
    norms = L + sum(map(config.has_attention_norm, range(L))) + config.has_final_norm  # of width D
    if num_labels is None:
        transform = (D + config.head_bias) * W + norm(W) if config.head_transform else 0
        head = transform + (0 if config.tie_word_embeddings else V * W) + V
    else:
        transform = (D + config.head_bias) * D + (norm(D) if config.pooling in ("cls", "mean") else 0)
        head = transform + (D + 1) * num_labels
    return {
        "embeddings": (V + config.type_vocab_size + config.position_rows) * E + projection,
        "attention": L * 4 * (D * D + config.attention_bias * D),
        "feed_forward": L * ((inputs + 1) * D * F + config.mlp_bias * (inputs * F + D)),
        "norms": norms * norm(D) + config.embedding_norm * norm(E),
        "head": head,
    }


def total_parameters(config: ModelConfig, num_labels: int | None = None) -> int:
    """Return the sum of `count_parameters`."""
    return sum(count_parameters(config, num_labels).values())


def flops_per_token(
    config: ModelConfig, seq_len: int, masked_fraction: float, whole_layers: bool = False
) -> float:
    """Return the floating-point operations of training on one token, forward and backward.

    A matrix of n elements costs 6 n (a multiplication and an addition, three times), attention 12 D for each
    token attended to; anything but matrix products is left out. The head is computed for masked tokens only,
    and so is the last layer, except for its keys and values.

    `masked_fraction` is the number of predicted tokens per token, in [0, 1]; `whole_layers` counts the last
    layer at every token, as papers do.
    """
    D, L, W = config.hidden_size, config.num_hidden_layers, config.output_width
    *seen, seen_by_last = (tokens_seen(config, layer, seq_len) for layer in range(L))
    head = W * _vocab_size(config) + (D * W if config.head_transform else 0)
    projection = config.embedding_width * D if config.embedding_size else 0
    layer = _layer_matrices(config) // L
    last = 1.0 if whole_layers else masked_fraction
    matrices = projection + (L - 1) * layer + 2 * D * D + last * (layer - 2 * D * D) + masked_fraction * head
    return 6.0 * matrices + 12.0 * D * (sum(seen) + last * seen_by_last)


def tokens_seen(config: ModelConfig, layer: int, seq_len: int) -> float:
    """Return how many tokens a token attends to in a layer, itself included: the mean over a full row."""
    reach = min(config.local_attention // 2 if config.is_local(layer) else seq_len, seq_len - 1)
    one_side = reach - reach * (reach + 1) / 2 / seq_len  # less those beyond the end of the row
    return 1 + one_side * (1 if config.attention == "causal" else 2)


def training_memory(config: ModelConfig, optimizer: OptimizerConfig, shares: int = 1) -> dict[str, int]:
    """Return the bytes that training keeps on each device, by part, without activations.

    AdamW keeps two numbers for each parameter, Muon one for each element of a hidden matrix; fsdp2 divides
    the bytes into `shares`, one a device.
    """
    total, D, E = total_parameters(config), config.hidden_size, config.embedding_width
    frozen = config.position_rows * E if config.position_embedding == "sinusoidal" else 0
    trained, by_muon = total - frozen, 0
    if optimizer.name == "muon":  # all matrices except embedding tables
        by_muon = _layer_matrices(config) + (E * D if config.embedding_size else 0)
        by_muon += D * config.output_width if config.head_transform else 0
    numbers = {"weights": total, "gradients": trained, "optimizer": 2 * trained - by_muon}
    return {part: -(-number // shares) * FLOAT_BYTES for part, number in numbers.items()}


def planned_steps(trainer: BaseTrainerConfig, tokens_per_step: float) -> int | None:
    """Return the optimizer steps that the budget allows; None: only time bounds it."""
    by_tokens = None if trainer.max_tokens is None else math.ceil(trainer.max_tokens / tokens_per_step)
    return min((steps for steps in (trainer.max_steps, by_tokens) if steps is not None), default=None)


def print_plan(config: PretrainConfig) -> None:
    """Print the cost of a run; InputError: the model does not fit the rows or the vocabulary."""
    seq_len, trainer = config.data.seq_len, config.trainer
    model = config.model.resolve(_tokenizer_size(config.tokenizer), seq_len)
    slots = prediction_slots(seq_len, config.masking.highest_mask_rate)
    flops = flops_per_token(model, seq_len, slots / seq_len)
    tokens_per_step = trainer.global_batch_size * seq_len
    steps = planned_steps(trainer, tokens_per_step)
    shares: int | None = 1
    if trainer.strategy == "fsdp2":  # unknown before the start with devices=auto
        nodes = 1 if trainer.num_nodes == "auto" else trainer.num_nodes
        shares = None if trainer.devices == "auto" else trainer.devices * nodes
    memory = training_memory(model, config.optimizer, shares or 1)
    divided = "" if shares == 1 else f"1/{shares} of all, "
    if shares is None:
        divided = "undivided; fsdp2 divides it among the devices, "
    lines = [
        ("parameters", f"{total_parameters(model):,}"),
        *((f"  {part}", f"{count:,}") for part, count in count_parameters(model).items()),
        ("vocabulary", f"{model.vocab_size:,} rows"),
        ("FLOPs a token", f"{_short(flops)}, forward and backward, {slots} of {seq_len} tokens predicted"),
        ("memory a device", f"{format_bytes(sum(memory.values()))}, {divided}activations not counted"),
        *((f"  {part}", format_bytes(count)) for part, count in memory.items()),
        ("tokens a step", f"{tokens_per_step:,}, if all {trainer.global_batch_size} rows are full"),
    ]
    if steps is not None:
        total = steps * tokens_per_step
        lines += [
            ("steps", f"{steps:,}"),
            ("tokens", f"{total:,}"),
            ("FLOPs", f"{_short(flops * total)}, {flops * total / 3600e12:,.2f} hours at 1 TFLOP/s"),
        ]
    if trainer.max_time is not None:
        lines.append(("time", f"{trainer.max_time} at most"))
    for name, text in lines:
        print(f"{name:<17}{text}")


def _tokenizer_size(config: TokenizerConfig) -> int:
    """Return the entries of the vocabulary to reuse or to train."""
    if config.path is None:
        return config.vocab_size
    path = Path(config.path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if (path / "vocab.txt").is_file() and not file.exists():
        return len((path / "vocab.txt").read_text(encoding="utf-8").splitlines())
    try:
        written = json.loads(file.read_text(encoding="utf-8"))
        added: list[int] = [token["id"] + 1 for token in written["added_tokens"]]
        return max([len(written["model"]["vocab"]), *added])
    except (ValueError, KeyError, TypeError):
        raise InputError(f"tokenizer.path={config.path}: {file} is not a tokenizer.json") from None


def _short(number: float) -> str:
    """Return a number in three digits and a unit of thousands, such as `4.42 M`."""
    units = ["", "k", "M", "G", "T", "P", "E"]
    while number >= 999.5 and len(units) > 1:
        number, units = number / 1000, units[1:]
    return f"{number:.3g} {units[0]}"


def _layer_matrices(config: ModelConfig) -> int:
    """Elements of the matrices in all layers."""
    D, F = config.hidden_size, config.intermediate_size
    return config.num_hidden_layers * (4 * D * D + (3 if config.gated else 2) * D * F)


def _vocab_size(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise InputError("model.vocab_size is null; set it, or give the tokenizer it is taken from")
    return config.vocab_size
