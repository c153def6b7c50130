"""Files written completely or not at all, and sizes and lists formatted for people.

Every file that matters is written to a temporary name in the same folder, synced, and renamed: readers never
see half a file, and a killed process leaves only a name with a leading dot.
"""

import contextlib
import ctypes
import errno
import glob
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

    The temporary path may become a file or a folder; a folder replaces an existing one whole. If `path` is a
    link, its target is replaced. After a killed process, `recover` restores `path` and removes leftovers.

    Raises:
        DiskError: the disk refuses the file; see `disk_errors`.
    """
    path = Path(os.path.realpath(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with disk_errors(path, place):
            yield temporary
            for file in [temporary, *temporary.rglob("*")]:
                if file.is_file():
                    with file.open("rb") as opened:
                        os.fsync(opened.fileno())
            _move(temporary, path)
    except BaseException:
        remove(temporary)
        raise


def _move(source: Path, path: Path) -> None:
    """Rename `source` to `path`; if both are folders, swap them in one step and remove the old one.

    Where the system cannot swap names, the old folder is `SOURCE.old` for a moment, and `path` is missing.
    """
    if not (source.is_dir() and path.is_dir()):
        source.rename(path)
        return
    if not _swap(source, path):
        old = source.with_name(f"{source.name}.old")
        path.rename(old)
        source.rename(path)
        old.rename(source)  # so that a name in .old is always a complete folder
    remove(source)


def _swap(first: Path, second: Path) -> bool:
    """Swap two names in one step, by Linux's renameat2; return False where there is no such call."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None)
    if renameat2 is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return renameat2(here, os.fsencode(first), here, os.fsencode(second), exchange) == 0


def recover(path: Path) -> None:
    """Undo what processes killed inside `replacing(path)` left: restore `path` if missing, remove the rest.

    Only where no other process writes `path` at the same time.
    """
    path = Path(os.path.realpath(path))
    for left in sorted(path.parent.glob(f".{glob.escape(path.name)}.[0-9]*")):
        if left.suffix == ".old" and not path.exists():
            left.rename(path)
        else:
            remove(left)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically; its folder is created if needed."""
    with disk_errors(path, "place"):
        path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, "place") as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON, atomically; non-finite numbers of the top level become null."""
    if isinstance(value, dict):
        bad = {key for key, entry in value.items() if isinstance(entry, float) and not math.isfinite(entry)}
        value = {**value, **dict.fromkeys(bad)}
    write_text(path, json.dumps(value, indent=1) + "\n")


def remove(path: Path) -> None:
    """Remove a file or a folder if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
        why = f"{error.strerror or error} ({format_bytes(free_space(path))} free there)"
        remedy = f"nothing half-written is kept; make room, or name another {place}"
        raise DiskError(f"{path}: cannot be written: {why}; {remedy}") from error


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
