"""Models of the Hugging Face hub, downloaded into its cache: only the files that we read."""

from __future__ import annotations

import functools
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
"""Downloaded only if there is nothing safer; `weights.py` opens them without running anything."""
TIMEOUT_SECONDS = 5.0
"""How long to wait for the hub's first answer."""


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model, as `resolve_model` does."""
    return resolve_model(name)[0]


def resolve_model(name: str | Path) -> tuple[Path, str | None]:
    """Return the folder of a model, and the commit of the hub's repository that it holds.

    OWNER/NAME or OWNER/NAME@REVISION is downloaded, once in a process: later calls give the same commit.

    Args:
        name: a folder, or a name as `is_hub_name` knows it; REVISION is a branch, a tag or a commit.

    Returns:
        The folder and the commit, None for a local folder.

    Raises:
        InputError: the hub has no such model, or cannot be reached and its cache does not have it.
    """
    if not is_hub_name(str(name)):
        return Path(name), None
    folder = _download(str(name))
    return folder, folder.name  # the documented layout of the hub's cache: snapshots/COMMIT


@functools.cache
def _download(name: str) -> Path:
    from huggingface_hub import errors

    model, _, revision = name.partition("@")
    try:
        folder = _snapshot(model, revision or None, SAFE)
        if not any((folder / file).exists() for file in SAFE[:2]):
            folder = _snapshot(model, folder.name, PICKLED)
        return folder
    except errors.GatedRepoError:
        reason = "its owners restrict access: accept their terms on its page, then `hf auth login`"
    except errors.RepositoryNotFoundError:
        reason = "the hub has no model of this name, or it is private"
    except errors.RevisionNotFoundError:
        reason = f"the hub's model has no branch, tag or commit {revision}"
    except Exception as error:  # the library and its dependencies raise many kinds
        reason = f"the hub cannot be reached and nothing is in its cache ({type(error).__name__})"
    raise InputError(f"{name} is not a folder here, and {reason}")


def _snapshot(model: str, revision: str | None, weights: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    patterns = [*DESCRIPTION, *weights]
    folder = snapshot_download(
        model, revision=revision, allow_patterns=patterns, etag_timeout=TIMEOUT_SECONDS
    )
    return Path(folder)
