"""What a model costs, from its configuration alone: parameters and arithmetic.

D hidden size, F feed-forward width, L layers, S tokens a row, V vocabulary.
"""

from __future__ import annotations

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig


def count_parameters(config: ModelConfig, num_labels: int | None = None) -> dict[str, int]:
    """Return the number of parameters by part; the tied output matrix is counted once, as an embedding.

    Args:
        config: the model.
        num_labels: outputs of the classifier that is its head; None: its head is that for masked tokens.

    Raises:
        InputError: a size of the tables is still null.
    """
    D, F, L, V = config.hidden_size, config.intermediate_size, config.num_hidden_layers, _vocab_size(config)
    inputs = 2 if config.gated else 1  # matrices from D to F
    tables = V + config.type_vocab_size + _table_positions(config)
    norm = D * (1 + config.norm_bias)
    norms = 1 + 2 * L  # the embeddings', and two a layer
    if config.norm_position == "pre":
        norms += config.first_attention_norm  # the final one, less the first attention's where it is left out
    output = norm + V  # the matrix is the token table
    if num_labels is not None:
        output = (D + 1) * num_labels + norm * (config.norm_position == "pre")
    return {
        "embeddings": tables * D,
        "attention": L * 4 * (D * D + config.attention_bias * D),
        "feed_forward": L * ((inputs + 1) * D * F + config.mlp_bias * (inputs * F + D)),
        "norms": norms * norm,
        "head": D * D + config.head_bias * D + output,
    }


def total_parameters(config: ModelConfig, num_labels: int | None = None) -> int:
    """Return the number of parameters of the whole model; arguments as in `count_parameters`."""
    return sum(count_parameters(config, num_labels).values())


def flops_per_token(config: ModelConfig, seq_len: int, masked_fraction: float) -> float:
    """Return the floating-point operations of training on one token, forward and backward.

    A matrix of n elements costs 6 n (a multiplication and an addition, three times), attention to S tokens
    12 S D a layer; the head is computed for masked tokens only. What is not a matrix product is left out.

    Args:
        config: the model.
        seq_len: S.
        masked_fraction: predicted tokens per token, in [0, 1].
    """
    D, F, L = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    matrices = 4 * D * D + (3 if config.gated else 2) * D * F
    head = D * D + D * _vocab_size(config)
    return 6.0 * L * matrices + 12.0 * L * seq_len * D + masked_fraction * 6.0 * head


def _vocab_size(config: ModelConfig) -> int:
    if config.vocab_size is None:
        raise InputError("model.vocab_size is null; set it, or give the tokenizer it is taken from")
    return config.vocab_size


def _table_positions(config: ModelConfig) -> int:
    if config.position_embedding != "learned":
        return 0
    if config.max_position_embeddings is None:
        raise InputError("model.max_position_embeddings is null; set it to the longest row in tokens")
    return config.max_position_embeddings
