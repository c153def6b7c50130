"""Models of the Hugging Face hub, downloaded into its cache: only the files that we read."""

from __future__ import annotations

import functools
from pathlib import Path

from mlm.config.errors import InputError
from mlm.startup.checks import is_checkpoint, is_hub_name

FILES = [
    *("config.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
    *("sentence_bert_config.json", "modules.json", "1_Pooling/config.json"),
]
SAFE = ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"]
PICKLED = ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"]
"""Downloaded only if there is nothing safer; `read_tensors` opens them without running anything."""
TIMEOUT_SECONDS = 5.0
"""How long to wait for the hub's first answer."""


def model_folder(name: str | Path) -> Path:
    """Return the folder of a model, as `resolve_model` does."""
    return resolve_model(name)[0]


def pinned_name(name: str | Path) -> str | None:
    """Return OWNER/NAME@COMMIT of a model of the hub, for the records of a run; None: a local folder."""
    commit = resolve_model(name)[1]
    return commit and f"{str(name).partition('@')[0]}@{commit}"


def resolve_model(name: str | Path) -> tuple[Path, str | None]:
    """Return the folder of a model, and the commit of the hub's repository that it holds; None: a local one.

    The model of a checkpoint is written to a folder that lasts as long as the process.
    OWNER/NAME or OWNER/NAME@REVISION (a branch, a tag or a commit) is downloaded, once in a process: later
    calls give the same commit. InputError: neither the hub nor its cache has it.
    """
    if is_checkpoint(str(name)):
        from mlm.hub.checkpoint import checkpoint_folder  # reads models, which are in folders again

        return checkpoint_folder(Path(name)), None
    if not is_hub_name(str(name)):
        return Path(name), None
    folder = _download(str(name))
    return folder, folder.name  # the documented layout of the hub's cache: snapshots/COMMIT


@functools.cache
def _download(name: str) -> Path:
    from huggingface_hub import errors, snapshot_download

    model, _, revision = name.partition("@")
    fetch = functools.partial(snapshot_download, model, etag_timeout=TIMEOUT_SECONDS)
    try:
        folder = Path(fetch(revision=revision or None, allow_patterns=FILES + SAFE))
        if not any((folder / file).exists() for file in SAFE[:2]):
            fetch(revision=folder.name, allow_patterns=FILES + PICKLED)
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
