"""Masked language models: plain text in, a pretrained encoder out.

| package | what it holds | layer |
|---|---|--:|
| `config` | every option, as typed dataclasses; reading YAML and the command line | 0 |
| `plan` | sizes and costs from the configuration alone | 1 |
| `counter` | random numbers as functions of integers | 1 |
| `launch` | the processes of a run, from the environment | 1 |
| `startup` | what is checked before torch is imported: files, run folders, launchers | 2 |
| `tokenizer`, `masking`, `model`, `optim` | vocabulary, prediction targets, encoder, updates | 2 |
| `data`, `hub` | from text to batches; models on disk | 3 |
| `evaluation` | scores and predictions | 4 |
| `training` | the runs, in Lightning | 5 |

Reading order: `training/pretraining.py`, `model/encoder.py`, `masking.py`, `data/store.py`.
"""

from __future__ import annotations

from typing import Any

__all__ = ["load_config", "load_pretrained"]


def __getattr__(name: str) -> Any:
    """Import what is heavy only when it is asked for."""
    if name == "load_config":
        from mlm.startup.command import load_config

        return load_config
    if name == "load_pretrained":
        from mlm.hub import load_pretrained

        return load_pretrained
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
