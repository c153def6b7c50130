"""How deep each weight of a classifier lies: what fine-tuning leaves alone, and what it moves less.

The embeddings have depth 0, layer n (from 0) has n + 1, and what stands above the layers num_layers + 1.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

from mlm.config.errors import InputError
from mlm.model.heads import SequenceClassifier


def depth_of(name: str, num_layers: int) -> int:
    """Return the depth of a weight, by its name in `SequenceClassifier.named_parameters()`."""
    layer = re.match(r"encoder\.layers\.(\d+)\.", name)
    if layer:
        return int(layer[1]) + 1
    return 0 if name.startswith("encoder.embeddings.") else num_layers + 1


def layer_decay(decay: float, num_layers: int) -> Callable[[str], float]:
    """Return a function of a weight's name: the share of the learning rate that it gets.

    1 above the layers, and `decay` times as much with each layer further down (Clark et al. 2020,
    arXiv:2003.10555, and Bao et al. 2021, arXiv:2106.08254, whose count this is).
    """
    return lambda name: decay ** (num_layers + 1 - depth_of(name, num_layers))


def freeze(model: SequenceClassifier, what: int | Literal["embeddings", "encoder"] | None) -> None:
    """Let training leave a part of the encoder as it is.

    Args:
        model: with all weights to be trained.
        what: the embeddings, with them a number of lowest layers, the whole encoder, or (None) nothing.

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
