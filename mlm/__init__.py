"""Masked language models: plain text in, a pretrained encoder out.

| package | contents | layer |
|---|---|--:|
| `config` | every option, as typed dataclasses; reading YAML and the command line | 0 |
| `files`, `cores`, `counter`, `launch` | files, cores, random numbers, processes of a run | 1 |
| `plan`, `startup` | costs; checks before torch is imported: command line, files, run folders | 2 |
| `tokenizer`, `masking`, `model`, `optim` | vocabulary, prediction targets, encoder, updates | 2 |
| `data`, `hub` | from text to batches; models on disk | 3 |
| `evaluation` | scores and predictions | 4 |
| `training` | the runs, in Lightning | 5 |

Reading order: `training/pretraining.py`, `training/engine.py`, `model/encoder.py`, `masking.py`,
`data/store.py`.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_PUBLIC = {
    "load_config": "mlm.startup.command",
    "load_pretrained": "mlm.hub",
    "Predictor": "mlm.evaluation.predictor",
    "PretrainModule": "mlm.training.pretraining",
    "PretrainDataModule": "mlm.training.datamodule",
    "FinetuneModule": "mlm.training.finetuning",
    "FinetuneDataModule": "mlm.training.datamodule",
}
"""Public names and their modules, imported when first used."""

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
