"""A larger vocabulary for a trained model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mlm.config.model import VOCAB_MULTIPLE
from mlm.model.heads import MaskedLM

TABLES = ("encoder.embeddings.token.weight", "head.output.weight", "head.bias")
"""Weights with a row for each token; a tied model has no separate output matrix."""


@torch.no_grad()
def extend_vocabulary(model: MaskedLM, pieces: Mapping[int, Sequence[int]]) -> MaskedLM:
    """Return a copy in which each new token starts as the mean of the tokens that it replaces.

    Args:
        model: not changed.
        pieces: the new ids, each with the ids of its pieces; an empty list means all tokens.
    """
    old, size = model.encoder.embeddings.token.num_embeddings, max(pieces, default=-1) + 1
    rows = old if size <= old else -(-size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
    first, state = min(pieces, default=old), model.state_dict()
    for name in TABLES:
        if name not in state:
            continue
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
