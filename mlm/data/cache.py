"""The cache of prepared text: its place, its locks, its contents.

    stores/KEY/  tokenizers/KEY/  python-docs-KEY.jsonl  digests.json

- the key of an entry is a hash of everything that decides its content, so no entry is ever out of date
- a process that writes an entry holds its lock; the others wait and then use it
- leftovers of killed processes have names with a leading dot; an unfinished store ends in `PARTIAL`
"""

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
from mlm.files import disk_errors, format_bytes, free_space, remove, shorten

PARTIAL = ".partial"  # suffix of an unfinished store
USED = "used"  # file in a store or vocabulary whose modification time is the last use
DAY_S = 86_400

log = logging.getLogger(__name__)


def cache_folder(cache_dir: str | None) -> Path:
    """Return the cache folder: `cache_dir`, $MLM_CACHE, data/cache in a checkout, or ~/.cache/mlm."""
    if chosen := cache_dir or os.environ.get("MLM_CACHE"):
        return Path(chosen).expanduser()
    checkout = Path(mlm.__file__).parent.parent
    if (checkout / "pyproject.toml").exists():
        return checkout / "data" / "cache"
    return Path.home() / ".cache" / "mlm"


def content_key(*parts: Any) -> str:
    """Return a short hash of plain JSON values."""
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def locked(path: Path, part: str = "") -> Iterator[None]:
    """Let one process at a time make `path`, or a part of it; the others wait and find it."""
    if path.exists():  # it was renamed into place, so it is complete; the cache may be read-only
        yield
        return
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(path.with_name(f".{path.name}{part}.lock")):
        for leftover in [] if part else path.parent.glob(f".{path.name}.*"):  # of a killed process
            if leftover.suffix != ".lock":
                remove(leftover)
        yield


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Turn errors on opening a cache entry into an InputError that names it and the remedy."""
    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, EOFError, StopIteration) as error:
        reason = " ".join(str(error).split())[:200] or "it ends too early"
        remedy = "remove it, and the next run makes it again (`mlm prepare --clean all` empties the cache)"
        raise InputError(f"{folder} is damaged ({reason}); {remedy}") from error


def check_room(path: Path, needed: float) -> None:
    """Raise InputError if the disk of `path` has fewer than `needed` free bytes."""
    free = free_space(path)
    if free < needed:
        need = f"the token store needs about {format_bytes(needed)} more, but {format_bytes(free)} are free"
        remedy = "make room, or name another disk with --data.cache_dir; finished shards are kept"
        raise InputError(f"{path}: {need}; {remedy}")


def mark_used(folder: Path) -> None:
    """Record that a store or vocabulary is used now, unless the cache is read-only."""
    with contextlib.suppress(OSError):
        (folder / USED).touch()


@dataclass(frozen=True)
class CacheEntry:
    """A file or folder of the cache."""

    path: Path
    kind: str  # token store, unfinished store, vocabulary, text or leftover
    size: int  # bytes on disk
    used: float  # time of the last use, in seconds of the epoch
    about: str  # its tokens and sources

    def line(self, now: float) -> str:
        """Return the entry in one line."""
        days = int((now - self.used) / DAY_S)
        age = "today" if days < 1 else f"{days} day{'s' * (days > 1)} ago"
        name = "/".join(self.path.parts[-2:])
        return f"{self.kind:16}  {format_bytes(self.size):>9}  used {age:12}  {name}  {self.about}"


def list_cache(cache: Path) -> list[CacheEntry]:
    """Return the entries of a cache, largest first, without locks and the digests."""
    patterns = ("stores/*", "tokenizers/*", "*.jsonl", ".python-docs*")
    paths = [path for pattern in patterns for path in cache.glob(pattern) if path.suffix != ".lock"]
    return sorted(map(_entry, paths), key=lambda entry: -entry.size)


def clean_cache(cache: Path, days: float) -> list[CacheEntry]:
    """Remove and return the entries not used for so many days; 0 removes all of them.

    An entry that another process is making now stays.
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
            log.warning("%s is being made by another process: not removed", entry.path)
            continue
        removed.append(entry)
    return removed


def _entry(path: Path) -> CacheEntry:
    stats = [file.stat() for file in path.rglob("*") if file.is_file()] or [path.stat()]
    kind = {"stores": "token store", "tokenizers": "vocabulary"}.get(path.parent.name, "text")
    if path.name.startswith("."):
        kind = "leftover"
    elif path.name.endswith(PARTIAL):
        kind = "unfinished store"
    about = ""
    for name in ("manifest.json", "facts.json"):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            facts = json.loads((path / name).read_text("utf-8"))
            about = f"{facts['num_tokens']:,} tokens of " if "num_tokens" in facts else ""
            about += shorten([source["path"] for source in facts["sources"]])
    size, used = sum(stat.st_size for stat in stats), max(stat.st_mtime for stat in stats)
    return CacheEntry(path, kind, size, used, about)
