"""Read the documents of a source: find its files, read each, and detect whether their content changed.

    SourceConfig --source_files--> files --formats.py, tables.py--> documents

- a source is a file, a folder, a glob, a URL, `hub:OWNER/NAME[@CONFIG][:SPLIT]` or a folder of `save_to_disk`
- files are read in sorted order, so that a source gives the same documents in the same order everywhere
- `source_digest` covers the content of the files, not their names or dates: an edit at the same path is
  detected, a copy elsewhere is not a change
"""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from mlm.config.data import HUB_PREFIX, DocumentRule, HubName, SourceConfig
from mlm.config.errors import DiskError, InputError
from mlm.data.data_sets import INFO, data_set_rows, hub_revision, is_saved, open_data_set
from mlm.data.formats import (
    HTTP,
    cut_text,
    decompressed,
    file_system,
    format_of,
    open_file,
    readable,
    supported_suffixes,
    text_blocks,
)
from mlm.data.report import ReadReport
from mlm.data.tables import ARROW_FORMATS, arrow_documents, row_documents, text_rows
from mlm.files import shorten, write_json

READER_VERSION = 4
"""Changes whenever the same files would give other documents."""
UNSETTLED_NS = 100_000_000
"""A file changed less than this ago may change again within the same time stamp: its digest is not kept."""

log = logging.getLogger(__name__)


def read_documents(
    source: SourceConfig,
    rule: DocumentRule,
    report: ReadReport | None = None,
    progress: Callable[[int], None] | None = None,
    bounds: tuple[float, float] = (0, math.inf),
) -> Iterator[str]:
    """Yield the documents of one source as they are read.

    Args:
        source: where to read; `python-docs` is read from its file (`python_docs_file`). The caller applies
            the source's own `document`.
        rule: how plain text is split into documents; in all other formats a row is a document.
        report: counts documents and losses, and holds whether bad rows may be left out.
        progress: called with the number of stored bytes after each block, as `source_size` counts them.
        bounds: documents of fewer or more characters are left out.

    Raises:
        InputError: the source does not exist, has no documents, or cannot be read; names the place.
    """
    report = report or ReadReport(source.path)
    before = report.documents
    shortest, longest = bounds
    for document in _read(source, rule, report, progress):
        if shortest <= len(document) <= longest:
            report.add(document)
            yield document
        else:
            report.wrong_length += 1
    if report.documents == before:
        raise InputError(f"{source.path}: has no documents{report.losses(': ')}")


def _read(
    source: SourceConfig, rule: DocumentRule, report: ReadReport, progress: Callable[[int], None] | None
) -> Iterator[str]:
    def advance(num_bytes: int) -> None:
        report.bytes_read += num_bytes
        if progress:
            progress(num_bytes)

    if source.path.startswith(HUB_PREFIX):
        yield from row_documents(data_set_rows(source.path), source.path, source.text_column, report)
        return
    for name in source_files(source):
        with open_file(name, advance) as stored, readable(name):
            report.files += 1
            yield from _file_documents(name, stored, source, rule, report)


def _file_documents(
    name: str, stored: BufferedReader, source: SourceConfig, rule: DocumentRule, report: ReadReport
) -> Iterator[str]:
    """Yield the documents of one file, of the format that its name says."""
    kind = source.format or str(format_of(name))
    column = source.text_column
    if kind in ARROW_FORMATS:
        yield from arrow_documents(kind, stored, name, column, report)
        return
    blocks = text_blocks(decompressed(stored), name, source.encoding, source.encoding_errors, report)
    if kind == "text":
        yield from cut_text(blocks, rule, report, name)
    else:
        rows = text_rows(blocks, kind, name, report)
        yield from row_documents(rows, name, column, report, open_ended=kind in ("json", "jsonl"))


# ------------------------------------------------------------------------------------------- which files


def source_files(source: SourceConfig) -> list[str]:
    """Return the paths or URLs of the files of a source, sorted.

    A folder means every file of a known format below it. Hidden files and other suffixes are skipped, and of
    a saved data set in splits, all but the split `train`.

    Raises:
        InputError: the path does not exist, or has no file of a known format.
    """
    with readable(source.path, Exception if not source.is_local else (OSError, ValueError)):
        return _local_files(source) if source.is_local else _url_files(source)


def _url_files(source: SourceConfig) -> list[str]:
    found = [source.path]
    if not source.path.startswith(HTTP) and glob.has_magic(source.path):
        files, path = file_system(source.path)
        found = sorted(files.unstrip_protocol(match) for match in files.glob(path))
    if not found:
        raise InputError(f"{source.path}: has no documents: no file matches")
    for url in found:
        _check_format(url, source)
    return found


def _local_files(source: SourceConfig) -> list[str]:
    text, path = source.path, Path(source.path)
    if path.is_dir():
        found = _files_below(path)
    elif path.exists() or path.is_symlink():
        return [_checked_file(path, source)]
    elif glob.has_magic(text):
        found = _matching_files(path)
    else:
        raise InputError(f"{text}: no such file or folder")
    if not found:
        raise InputError(
            f"{text}: has no documents: {'an empty folder' if path.is_dir() else 'no file matches'}"
        )
    known = [file for file in sorted(found) if source.format or (file.suffix and format_of(file.name))]
    others = shorten(sorted({file.suffix or file.name for file in set(found) - set(known)}), 8)
    if not known:
        raise InputError(f"{text}: has no documents: only {others}; known formats are {supported_suffixes()}")
    if others:
        log.info("%s: skipped files of other formats: %s", text, others)
    return [_checked_file(file, source) for file in known]


def _matching_files(pattern: Path) -> list[Path]:
    """Return the files that a glob matches; if it matches folders only, the files below them."""
    matches = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
    folders = [match for match in matches if match.is_dir()]
    if folders == matches:
        return list(dict.fromkeys(file for folder in folders for file in _files_below(folder)))
    if folders and "**" not in pattern.parts:
        log.warning(
            "%s: matches files and folders; the folders are not read: %s", pattern, shorten(folders, 3)
        )
    return [match for match in matches if not match.is_dir()]


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, also through links; a folder that several paths lead to comes once."""
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if is_saved(set(names)):
            found += [Path(file["filename"]) for file in open_data_set(parent).cache_files]
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(parent, name) for name in names if not name.startswith(".") and name != INFO]
    return found


def _raise(error: OSError) -> NoReturn:
    raise error


def _checked_file(path: Path, source: SourceConfig) -> str:
    """Return the path if it is a regular file of a known format."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: is a symbolic link to nothing")
    if not path.is_file():
        raise InputError(f"{path}: is neither a file nor a folder")
    _check_format(str(path), source)
    return str(path)


def _check_format(name: str, source: SourceConfig) -> None:
    if not source.format and format_of(name) is None:
        raise InputError(
            f"{name}: unknown format {Path(name).suffix}; known are {supported_suffixes()}; "
            "or set the format of this source, format: text (jsonl, ...)"
        )


# ------------------------------------------------------------------------------------- size and content


def source_size(source: SourceConfig) -> int | None:
    """Return the stored bytes of a source; None if that is unknown before reading."""
    if source.path.startswith(HUB_PREFIX):
        return None
    sizes = [int(_facts(name).get("size") or 0) for name in source_files(source)]
    return sum(sizes) if source.is_local or all(sizes) else None


def _facts(name: str) -> dict[str, Any]:
    """Return size, date and tag of a file or URL, as its file system reports them."""
    with readable(name, Exception):  # each protocol has its own exceptions
        files, path = file_system(name)
        return dict(files.info(path))


class DigestCache:
    """Content digests of files by path, size, times and inode: only changed files are read again.

    Args:
        path: the JSON file that keeps them; a missing or damaged one is an empty cache.
    """

    def __init__(self, path: Path):
        self._path, self._changed = path, False
        self._known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}

    def file_digest(self, name: str) -> str:
        """Return the digest of a file's bytes."""
        with readable(name):
            key, before = os.path.realpath(name), _identity(name)
            known = self._known.get(key)
            if isinstance(known, list) and known[:-1] == before:
                return str(known[-1])
            with open(name, "rb") as file:
                digest = hashlib.file_digest(file, _blake2b).hexdigest()
            settled = time.time_ns() - max(before[1:3]) > UNSETTLED_NS and before == _identity(name)
        if settled:
            self.remember(key, [*before, digest])
        return digest

    def remember(self, key: str, value: Any) -> None:
        """Keep a value of plain JSON types; `save` writes it."""
        self._changed |= self._known.get(key) != value
        self._known[key] = value

    def save(self) -> None:
        """Write the cache if it changed; if the disk refuses, the files are read again the next time."""
        if self._changed:
            with suppress(OSError, DiskError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_json(self._path, self._known)
            self._changed = False

    def recall(self, key: str) -> Any:
        """Return the value of a key; None if there is none."""
        return self._known.get(key)


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=20)


def _identity(name: str) -> list[int]:
    """Return size, modification time, change time and inode of a file: a change alters one of them."""
    stat = os.stat(name)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def file_states(source: SourceConfig) -> dict[str, list[int]]:
    """Return size, times and inode of each file of a local source, to detect changes; else nothing."""
    if not source.is_local:
        return {}
    with readable(source.path):
        return {name: _identity(name) for name in source_files(source)}


def source_digest(source: SourceConfig, rule: DocumentRule, digests: DigestCache) -> str:
    """Return a digest of everything that decides the documents of a source: content and options.

    Args:
        source: any source; a URL counts as unchanged while its server reports the same facts about it.
        rule: how plain text is split into documents.
        digests: saves reading unchanged files.
    """
    content: Any
    if source.path.startswith(HUB_PREFIX):
        content = [source.path, _last_hub_revision(source.path, digests)]
    elif source.is_local:
        content = [
            [source.format or format_of(name), digests.file_digest(name)] for name in source_files(source)
        ]
    else:
        content = [
            [url, sorted((key, str(value)) for key, value in _facts(url).items())]
            for url in source_files(source)
        ]
    digests.save()
    facts = [READER_VERSION, rule, source.text_column, source.encoding, source.encoding_errors, content]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=20).hexdigest()


def _last_hub_revision(path: str, digests: DigestCache) -> str:
    """Return the current commit, or without a network the last one known, which may have been prepared."""
    key = f"{HUB_PREFIX}{HubName.parse(path).repository}"
    try:
        revision = hub_revision(path)
    except InputError:
        known = digests.recall(key)
        if known is None:
            raise
        log.warning("%s: the hub cannot be reached; taken as unchanged since the last time", path)
        return str(known)
    digests.remember(key, revision)
    return revision
