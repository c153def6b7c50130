"""The folder of prepared text: where it is, how things in it are made whole or not at all, what it holds.

    stores/KEY/  tokenizers/KEY/  python-docs-KEY.jsonl  digests.json

- everything is named by a key of what decides its content, so nothing in it is ever out of date
- a process that makes something holds its lock; others wait and find it
- what a killed process left behind has a name with a leading dot, and a store in work ends in `PARTIAL`
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

import mlm
from mlm.config.errors import InputError
from mlm.files import disk_errors, format_bytes, free_space, remove

PARTIAL = ".partial"
"""End of the name of a store that is not finished."""
USED = "used"
"""File in a store or vocabulary whose time says when it was used last."""
DAY_S = 86_400

log = logging.getLogger(__name__)


def cache_folder(cache_dir: str | None) -> Path:
    """Return where prepared text is kept: as given, $MLM_CACHE, in the checkout, or in the home folder."""
    if cache_dir:
        return Path(cache_dir).expanduser()
    if os.environ.get("MLM_CACHE"):
        return Path(os.environ["MLM_CACHE"]).expanduser()
    checkout = Path(mlm.__file__).parent.parent
    if (checkout / "pyproject.toml").exists():
        return checkout / "data" / "cache"
    return Path.home() / ".cache" / "mlm"


def content_key(*parts: Any) -> str:
    """Return a short name for plain JSON values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def locked(path: Path, part: str = "") -> Iterator[None]:
    """Let one process at a time make `path`, or one part of it; the others wait and find it."""
    if path.exists():  # it was renamed into place, so it is whole; the cache may be read-only
        yield
        return
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}{part}.lock")):
        for leftover in (
            path.parent.glob(f".{path.name}.*") if not part else ()
        ):  # of a process that was killed
            if leftover.suffix != ".lock":
                remove(leftover)
        yield


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn what goes wrong while something prepared is opened into one line.

    Raises:
        InputError: names what is damaged, and says how it is made anew.
    """
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, EOFError, StopIteration) as error:
        reason = " ".join(str(error).split())[:200] or "it ends too early"
        raise InputError(
            f"{folder} is damaged ({reason}); remove it and it is made anew "
            "(`mlm prepare --clean all` removes all that is prepared)"
        ) from error


def check_room(path: Path, needed: float) -> None:
    """Check that what is about to be written will fit.

    Args:
        path: a place on the disk in question.
        needed: bytes.

    Raises:
        InputError: there is less room.
    """
    free = free_space(path)
    if free < needed:
        raise InputError(
            f"{path}: the token store needs about {format_bytes(needed)} more, but {format_bytes(free)} are "
            "free; make room, or name another disk with --data.cache_dir; finished shards are kept"
        )


def mark_used(folder: Path) -> None:
    """Note that a store or vocabulary is used now; where that cannot be written it is as old as it is."""
    with contextlib.suppress(OSError):
        (folder / USED).touch()


@dataclass(frozen=True)
class CacheEntry:
    """Something in the cache."""

    path: Path
    kind: str
    """What it is: token store, unfinished store, vocabulary, text, leftover."""
    size: int
    """Bytes on disk."""
    used: float
    """When it was used last, in seconds of the epoch."""
    about: str
    """What is in it, in words."""

    def line(self, now: float) -> str:
        """Return the entry in one line."""
        days = int((now - self.used) / DAY_S)
        age = "today" if days < 1 else f"{days} day{'s' * (days > 1)} ago"
        name = "/".join(self.path.parts[-2:])
        return f"{self.kind:16}  {format_bytes(self.size):>9}  used {age:12}  {name}  {self.about}"


def list_cache(cache: Path) -> list[CacheEntry]:
    """Return what the cache holds, largest first; files of a few bytes that manage it are left out."""
    paths = [*cache.glob("stores/*"), *cache.glob("tokenizers/*"), *cache.glob("*.jsonl")]
    paths += cache.glob(".python-docs*")
    entries = [_entry(path) for path in paths if path.suffix != ".lock"]
    return sorted(entries, key=lambda entry: -entry.size)


def clean_cache(cache: Path, days: float) -> list[CacheEntry]:
    """Remove what was not used for so many days, and return what that was; 0 removes everything.

    A store that another process is making at the moment is left alone.
    """
    removed = []
    for entry in list_cache(cache):
        if time.time() - entry.used < days * DAY_S:
            continue
        owner = entry.path.name.removesuffix(PARTIAL)
        locks = [*entry.path.parent.glob(f".{owner}*.lock"), *entry.path.glob(".*.lock")]  # of rows: inside
        try:
            with contextlib.ExitStack() as held:
                for lock in locks:
                    held.enter_context(FileLock(lock, timeout=0))
                shutil.rmtree(entry.path) if entry.path.is_dir() else entry.path.unlink()
                for lock in locks:
                    lock.unlink(missing_ok=True)
        except Timeout:
            log.warning("%s is being made at the moment: left alone", entry.path)
            continue
        removed.append(entry)
    return removed


def _entry(path: Path) -> CacheEntry:
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
    stats = [file.stat() for file in files] or [path.stat()]
    used = max(stat.st_mtime for stat in stats)
    kind, about = "leftover", ""
    if not path.name.startswith("."):
        kind = {"stores": "token store", "tokenizers": "vocabulary"}.get(path.parent.name, "text")
        if path.name.endswith(PARTIAL):
            kind = "unfinished store"
        about = _about(path)
    return CacheEntry(path, kind, sum(stat.st_size for stat in stats), used, about)


def _about(path: Path) -> str:
    for name in ("manifest.json", "facts.json"):
        with contextlib.suppress(OSError, ValueError):
            facts = json.loads((path / name).read_text())
            tokens = f"{facts['num_tokens']:,} tokens of " if "num_tokens" in facts else ""
            return tokens + ", ".join(source["path"] for source in facts["sources"])
    return ""
