"""Models of the Hugging Face hub, fetched into its own cache: the files that we read, and no others."""

from __future__ import annotations

from pathlib import Path

from mlm.config.errors import InputError
from mlm.startup.checks import is_hub_name

DESCRIPTION = [
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "sentence_bert_config.json",
]
SAFE = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]
"""Fetched only where there is nothing safer; `pretrained.py` opens them without running anything."""
TIMEOUT_SECONDS = 5.0
"""How long the hub may take to answer at all."""


def model_folder(name: str | Path) -> Path:
    """Return a folder as it is, and for OWNER/NAME the folder to which the hub's model was downloaded.

    Raises:
        InputError: the hub has no such model, or cannot be reached and the cache has none.
    """
    if not is_hub_name(str(name)):
        return Path(name)
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
        folder = _snapshot(str(name), [*DESCRIPTION, *SAFE])
        if not any((folder / file).exists() for file in SAFE[:2]):
            folder = _snapshot(str(name), [*DESCRIPTION, *PICKLED])
    except GatedRepoError:
        reason = "its owners want to be asked first: accept their terms on its page, then `hf auth login`"
    except RepositoryNotFoundError:
        reason = "the hub has no model of this name, or it is private"
    except Exception as error:  # the library, and those beneath it, raise whatever went wrong on the way
        reason = f"the hub cannot be reached and nothing is in its cache ({type(error).__name__})"
    else:
        return folder
    raise InputError(f"{name} is no folder here, and {reason}")


def _snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, allow_patterns=patterns, etag_timeout=TIMEOUT_SECONDS))
