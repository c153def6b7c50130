"""A new run that starts where another one stands: `--branch`.

What it takes over are weights and optimizer state, and the place in the data if both runs read the same rows
in the same order; otherwise it begins with its first row. Steps, tokens, time and schedule begin at 0.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlm.config.errors import InputError
from mlm.config.experiment import PretrainConfig
from mlm.startup.runs import find_branch
from mlm.training.checkpoint import Checkpoint, find_checkpoint, open_checkpoint

MUST_AGREE = ("model.", "tokenizer", "optimizer.")
"""Beginnings of what two runs must have in common; the rest of their identities says which rows they read."""

log = logging.getLogger(__name__)


def branch_checkpoint(config: PretrainConfig) -> Checkpoint:
    """Return the checkpoint that `config.branch` names, or the newest one of the run that it names.

    Raises:
        InputError: there is none.
    """
    path, _ = find_branch(Path(config.runs_dir), str(config.branch))
    if path.is_file():
        return open_checkpoint(path)
    found = find_checkpoint(path / "checkpoints")
    if found is None:
        raise InputError(f"branch={config.branch}: {path / 'checkpoints'} has no checkpoint")
    return found


def settle_branch(config: PretrainConfig) -> PretrainConfig:
    """Name the checkpoint in the configuration, and give the model the table of positions that is in it.

    Raises:
        InputError: rows would be longer than that table.
    """
    checkpoint = branch_checkpoint(config)
    identity, settled = checkpoint.content["identity"], replace(config, branch=str(checkpoint.path))
    if _has_free_length(identity) or config.init:
        return settled
    rows, wanted = identity["model.max_position_embeddings"], config.model.max_position_embeddings
    if config.data.seq_len > rows or wanted not in (None, rows):
        raise InputError(
            f"cannot branch: {checkpoint.path} has a table of {rows} positions, and data.seq_len="
            f"{config.data.seq_len}, model.max_position_embeddings={wanted or 'null'} need another one; "
            "only models with model.position_embedding=rotary can change it"
        )
    return replace(settled, model=replace(config.model, max_position_embeddings=rows))


def start_branch(module: Any, checkpoint: Checkpoint) -> None:
    """Give a new run weights, optimizer state and place in the data.

    Args:
        module: the `PretrainModule` of the new run.
        checkpoint: where it starts.

    Raises:
        InputError: it is of another model, tokenizer or optimizer; names what differs.
    """
    content, mine = checkpoint.content, module.identity
    theirs = content["identity"]
    differing = [name for name, value in mine.items() if theirs.get(name) != value]
    for name in differing:
        is_length = name == "model.max_position_embeddings" and _has_free_length(theirs)
        if name.startswith(MUST_AGREE) and not is_length:
            raise InputError(
                f"cannot branch: {name} is {mine[name]}, but {checkpoint.path} was trained with "
                f"{theirs.get(name)}"
            )
    module.start = checkpoint.path
    if all(name.startswith(MUST_AGREE) for name in differing):  # the same text in the same rows and order
        module.progress.rows = content["progress"]["rows"]
    where = f"go on with row {module.progress.rows:,}" if module.progress.rows else "begin anew"
    log.info("branching off %s, with its weights and optimizer state; the rows %s", checkpoint.path, where)


def _has_free_length(identity: dict[str, Any]) -> bool:
    """Tell whether no weight of a model depends on its longest row."""
    return identity["model.position_embedding"] in ("rotary", "none")
