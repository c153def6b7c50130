"""Files written completely or not at all, and sizes and lists formatted for people.

Every file that matters is written to a temporary name in the same folder, synced, and renamed: readers never
see half a file, and a killed process leaves only a name with a leading dot.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlm.config.errors import DiskError

CACHE_PLACE = "disk with --data.cache_dir"
"""Suggested in place of a full disk where the file belongs to the cache; other files pass their own place."""
DISK_ERRORS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG),
)


@contextlib.contextmanager
def replacing(path: Path, place: str = CACHE_PLACE) -> Iterator[Path]:
    """Yield a temporary path that is renamed to `path` on success and removed on failure.

    The temporary path may become a file or a folder. If `path` is a link, its target is replaced.

    Raises:
        DiskError: the disk refuses the file; see `disk_errors`.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with disk_errors(path, place):
            yield temporary
            _sync(temporary)
            temporary.rename(path)
    except BaseException:
        remove(temporary)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    with replacing(path, "place") as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON, atomically; non-finite numbers of the top level become null."""
    if isinstance(value, dict):
        value = {
            name: None if isinstance(entry, float) and not math.isfinite(entry) else entry
            for name, entry in value.items()
        }
    write_text(path, json.dumps(value, indent=1) + "\n")


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    """Flush a file, or all files of a folder, to the disk before it gets its final name."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


@contextlib.contextmanager
def disk_errors(path: Path, place: str = CACHE_PLACE) -> Iterator[None]:
    """Turn a full disk, a quota or missing permissions while writing `path` into one line.

    Raises:
        DiskError: names the path, the cause and the free space.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in DISK_ERRORS:
            raise
        raise DiskError(
            f"{path}: cannot be written: {error.strerror or error} ({format_bytes(free_space(path))} free "
            f"there); nothing half-written is kept; make room, or name another {place}"
        ) from error


def free_space(path: Path) -> int:
    """Return the free bytes on the disk of a path, which need not exist yet."""
    existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def format_bytes(num_bytes: float) -> str:
    """Return a size with a decimal unit, such as `1.2 GB`."""
    power = min((len(str(int(num_bytes))) - 1) // 3, 4)
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{num_bytes / 1000**power:.{1 if power else 0}f} {unit}"


def shorten(items: Sequence[object], most: int = 20) -> str:
    """Return the first items joined by commas, with `, ...` where there are more."""
    return ", ".join(map(str, items[:most])) + (", ..." if len(items) > most else "")
