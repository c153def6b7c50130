"""Masked language models: plain text in, a pretrained encoder out.

| package | what it holds | layer |
|---|---|--:|
| `config` | every knob, as typed dataclasses; reading YAML and the command line | 0 |
| `plan` | sizes and costs from the configuration alone | 1 |
| `counter` | random numbers as functions of integers | 1 |
| `tokenizer`, `masking`, `model`, `optim` | vocabulary, prediction targets, encoder, updates | 2 |
| `data`, `hub` | from text to batches; models on disk | 3 |
| `evaluation` | scores and predictions | 4 |
| `training` | the runs, in Lightning | 5 |

Reading order: `training/pretraining.py`, `model/encoder.py`, `masking.py`, `data/store.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = ["Predictor", "load_pretrained"]

_PLACES = {"load_pretrained": "mlm.hub", "Predictor": "mlm.evaluation.predictor"}


def __getattr__(name: str) -> Any:
    """Import the public names on first use, because torch takes seconds to import."""
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
