"""Changes of a trained model before more training: frozen parts, layer-wise rates, a larger vocabulary."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch

from mlm.config.errors import InputError
from mlm.config.model import VOCAB_MULTIPLE
from mlm.model.heads import MaskedLM, SequenceClassifier


def depth_of(name: str, num_layers: int) -> int:
    """Return the depth of a weight by its name: 0 for embeddings, n + 1 for layer n, num_layers + 1 above."""
    layer = re.match(r"encoder\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) + 1
    return 0 if name.startswith("encoder.embeddings.") else num_layers + 1


def layer_decay(decay: float, num_layers: int) -> Callable[[str], float]:
    """Return a function from a weight's name to its share of the learning rate, which falls with its depth.

    Clark et al. 2020, arXiv:2003.10555, and Bao et al. 2021, arXiv:2106.08254, whose count of layers this is.
    """
    return lambda name: decay ** (num_layers + 1 - depth_of(name, num_layers))


RATES = {"long": (1e-4, 384), "short": (3e-4, 256)}
"""Best learning rate after a long and a short pretraining, and the width that it was measured at."""
MAX_RATE, HEAD_RATE = 3e-4, 1e-3
"""Highest learning rate of an encoder, and that of a head alone."""
SHORT_TOKENS = 100
"""A pretraining on fewer tokens than this for each parameter of the layers is short."""


def default_rate(model: SequenceClassifier, tokens: int | None, frozen: object) -> tuple[float, str]:
    """Return the learning rate that suits fine-tuning an encoder, and why; docs/finetuning.md has the scores.

    It falls with the width to the power 1.5, which meets the published ranges of BERT-base and BERT-large.
    `tokens` of pretraining, 0: random weights, None: a model published by others; `frozen` as in `freeze`.
    """
    if frozen == "encoder":
        return HEAD_RATE, "only the head is trained"
    width = model.config.hidden_size
    size = sum(weight.numel() for weight in model.encoder.layers.parameters())
    is_short = tokens is not None and tokens < SHORT_TOKENS * size
    best, measured_at = RATES["short" if is_short else "long"]
    rate = min(best * (measured_at / width) ** 1.5, MAX_RATE)
    kind = "random weights" if tokens == 0 else f"a {'short' if is_short else 'long'} pretraining"
    return float(f"{rate:.1g}"), f"for width {width} after {kind}"


def freeze(model: SequenceClassifier, what: int | Literal["embeddings", "encoder"] | None) -> None:
    """Exclude a part from training: the embeddings, them and a number of lowest layers, or the encoder.

    Raises:
        InputError: the model has fewer layers.
    """
    num_layers = model.config.num_hidden_layers
    if isinstance(what, int) and what > num_layers:
        raise InputError(f"trainer.freeze={what} is more than the {num_layers} layers of the model")
    if what is None:
        return
    highest = what if isinstance(what, int) else 0
    for name, parameter in model.named_parameters():
        is_frozen = depth_of(name, num_layers) <= highest
        if is_frozen or (what == "encoder" and name.startswith("encoder.")):
            parameter.requires_grad_(False)


TABLES = ("encoder.embeddings.token.weight", "head.output.weight", "head.bias")
"""Weights with a row for each token; a tied model has no separate output matrix."""


@torch.no_grad()
def extend_vocabulary(model: MaskedLM, pieces: Mapping[int, Sequence[int]]) -> MaskedLM:
    """Return a copy in which each new id starts as the mean of its `pieces`, without any of all tokens."""
    old, size = model.encoder.embeddings.token.num_embeddings, max(pieces, default=-1) + 1
    rows = old if size <= old else -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    first, state = min(pieces, default=old), model.state_dict()
    for name in state.keys() & set(TABLES):
        table = state[name].new_zeros(rows, *state[name].shape[1:])
        table[:old] = state[name]
        for id_, parts in pieces.items():
            table[id_] = state[name][list(parts) or slice(first)].mean(dim=0)
        state[name] = table
    with torch.device("meta"):  # sizes only: no memory, no random numbers
        larger = MaskedLM(replace(model.config, vocab_size=rows))
    larger.to_empty(device="cpu")
    larger.load_state_dict(state)
    return larger.train(model.training)
