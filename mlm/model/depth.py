"""The depth of each weight of a classifier: for freezing and layer-wise learning-rate decay.

The embeddings have depth 0, layer n (from 0) has n + 1, and the layers above the encoder have num_layers + 1.
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
    """Return a function from a weight's name to its share of the learning rate.

    1 above the encoder's layers, and `decay` times as much with each layer further down (Clark et al. 2020,
    arXiv:2003.10555, and Bao et al. 2021, arXiv:2106.08254, whose count of layers this is).
    """
    return lambda name: decay ** (num_layers + 1 - depth_of(name, num_layers))


def freeze(model: SequenceClassifier, what: int | Literal["embeddings", "encoder"] | None) -> None:
    """Exclude a part of the encoder from training.

    Args:
        model: with all weights trainable.
        what: the embeddings; a number of lowest layers and the embeddings; the whole encoder; None: nothing.

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
