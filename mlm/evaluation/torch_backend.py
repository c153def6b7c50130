"""The torch side of inference: models that take numpy batches and return numpy arrays, in any mode.

Sizes: N examples, B a batch, M masked positions, C classes (1 for a number), D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.data.examples import EncodedExamples
from mlm.evaluation.predictor import Batch, Floats, Head, TextPooling, run_batches
from mlm.hub.pretrained import load_classifier, load_encoder, load_masked_lm
from mlm.model import Encoder, MaskedLM, SequenceClassifier, pool

Model = SequenceClassifier | MaskedLM | Encoder
LOADERS: dict[Head, Any] = {
    "classifier": load_classifier,
    "encoder": load_encoder,
    "masked_lm": partial(load_masked_lm, needs_head=True),
}


def pick_device(device: str = "auto", rank: int = 0) -> torch.device:
    """Return a device by its name; auto: a CUDA GPU (by rank where there are several), else MPS, else CPU."""
    if device != "auto":
        return torch.device(device)
    if torch.cuda.is_available():
        return torch.device("cuda", rank % torch.cuda.device_count())
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")


def load_head(folder: Path, head: Head, device: str) -> Model:
    """Load a model folder; InputError: it is damaged or has no such head."""
    return LOADERS[head](folder).to(pick_device(device))


@torch.no_grad()
def compute_logits(model: Model, batch: Batch) -> npt.NDArray[np.float32]:
    """Return (B, C) of a classifier, or (B, M, V) of a masked LM at `masked_positions`."""
    return model(**_inputs(model, batch)).float().cpu().numpy()


@torch.no_grad()
def compute_vectors(
    model: Model, batch: Batch, pooling: TextPooling, normalize: bool
) -> npt.NDArray[np.float32]:
    """Return the pooled hidden state of each text, (B, D)."""
    inputs, encoder = _inputs(model, batch), getattr(model, "encoder", model)
    pooled = pool(encoder(**inputs), inputs["attention_mask"], pooling).float()
    return (F.normalize(pooled, dim=-1) if normalize else pooled).cpu().numpy()


def _inputs(model: Model, batch: Batch) -> dict[str, Tensor]:
    device = next(model.parameters()).device
    return {name: torch.from_numpy(values).to(device) for name, values in arguments(model, batch).items()}


def arguments(model: Model, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of the forward pass in a batch; token types only if the model has them."""
    names = ["input_ids", "attention_mask", "masked_positions"]
    names += ["token_type_ids"] if model.config.type_vocab_size > 1 else []
    return {name: batch[name] for name in names if name in batch}


def predict_logits(model: SequenceClassifier, examples: EncodedExamples, batch_size: int) -> Floats:
    """Return the logits of all examples in their order, (N, C), in the current mode of the model."""
    width = model.classifier.out_features
    return run_batches(examples, batch_size, partial(compute_logits, model), width).astype(np.float64)
