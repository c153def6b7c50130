"""Weights & Biases: an early import, and how far a tracked run got, read from the files kept of it.

A tracker that was killed may have lost what it was given last, so that only its files know. They are logs in
LevelDB's format: blocks of 32 KiB, in them pieces of records, each with checksum, length and kind.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from mlm.config.training import LoggingConfig
from mlm.launch import is_first_process

BLOCK = 2**15
TAIL = 2**20
"""Bytes at the end of a file that are searched."""
HEADER = struct.Struct("<IHB")
WHOLE, FIRST, LAST = 1, 2, 4
"""Kinds of pieces; what is between first and last is 3."""
STEP = re.compile(rb"\x08[\x80-\xff]*[\x00-\x7f]\x12.*trainer/global_step\x82\x01.(\d+)", re.DOTALL)
"""A protocol buffer: the number of the record, field 2 (what was logged), in it the key and its value."""


def import_tracker(config: LoggingConfig) -> None:
    """Import what a tracked run needs, if this process tracks; to be called before torch is imported.

    Its classes look for their documentation in every module there is: that takes a second less while these
    are few.
    """
    if is_first_process() and "disabled" not in (config.wandb, os.environ.get("WANDB_MODE")):
        with suppress(ImportError):  # an inner module of theirs, which wandb.init imports anyway
            import wandb.sdk.launch.inputs.internal  # noqa: F401


def tracked_step(folder: Path) -> int:
    """Return the newest step that the tracked run of a run folder holds, -1 if none."""
    for path in sorted(folder.glob("wandb/*run-*/run-*.wandb"), reverse=True):
        steps = [int(found[1]) for record in _last_records(path) if (found := STEP.match(record))]
        if steps:
            return max(steps)
    return -1


def _last_records(path: Path) -> Iterator[bytes]:
    """Yield the whole records near the end of a file."""
    first_block = max(path.stat().st_size - TAIL, 0) // BLOCK
    with path.open("rb") as file:
        file.seek(first_block * BLOCK)
        data = file.read()
    place, record = (
        (0 if first_block else HEADER.size),
        b"",
    )  # the first block begins with a header of its own
    while place + HEADER.size <= len(data):
        left = BLOCK - place % BLOCK
        if left < HEADER.size:
            place += left
            continue
        _, length, kind = HEADER.unpack_from(data, place)
        place += HEADER.size + length
        piece = data[place - length : place]
        record = piece if kind in (WHOLE, FIRST) else record + piece
        if kind in (WHOLE, LAST) and len(piece) == length:
            yield record
