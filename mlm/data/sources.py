"""Sources to documents: which files a source names, what they hold, and whether that has changed.

    SourceConfig --source_files--> files --formats.py, tables.py--> documents

- a source is a file, a folder, a glob, `python-docs`, `hub:OWNER/NAME[@CONFIG][:SPLIT]` or a URL
- files are read in sorted order, so that a source gives the same documents in the same order everywhere
- `source_digest` covers the content of the files, never their names or dates: an edit at the same path is
  seen, a copy elsewhere is not a change
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

from mlm.config.data import HUB_PREFIX, PYTHON_DOCS, DocumentRule, SourceConfig
from mlm.config.errors import InputError
from mlm.data.formats import (
    BLOCK_BYTES,
    READ_ERRORS,
    ReadReport,
    StoredBytes,
    cut_text,
    decompressed,
    format_of,
    one_line,
    supported_suffixes,
    text_blocks,
)
from mlm.data.remote import (
    hub_documents,
    hub_repository,
    hub_revision,
    open_url,
    url_facts,
    url_file_name,
    url_files,
)
from mlm.data.tables import arrow_documents, csv_rows, json_rows, parquet_documents, row_documents

READER_VERSION = 4
"""Changes whenever the same files would give other documents."""
SAVED_SPLITS, SAVED_STATE, SAVED_INFO = "dataset_dict.json", "state.json", "dataset_info.json"
"""What `datasets` writes beside the text: the splits in a folder, the files of one, and what they are."""
UNSETTLED_NS = 100_000_000
"""A file changed this shortly before may change again under the same time stamp: its digest is not kept."""

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
        source: where to read; its own `document` is the caller's to apply.
        rule: what a document is in plain text; in all other formats it is a row.
        report: counts what is read, and knows whether bad rows may be left out.
        progress: called with the number of stored bytes after each block, as `source_size` counts them.
        bounds: documents of fewer or more characters are left out.

    Raises:
        InputError: nothing is there, nothing is in it, or it cannot be read; the message says where.
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

    if source.path == PYTHON_DOCS:
        from mlm.data.python_docs import read_python_docs

        yield from read_python_docs()
    elif source.path.startswith(HUB_PREFIX):
        yield from hub_documents(source, report)
    else:
        for name, file in _open_files(source):
            with file:
                report.files += 1
                yield from _file_documents(name, StoredBytes(file, advance), source, rule, report)


def _open_files(source: SourceConfig) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield each file with its name, opened."""
    if not source.is_local:
        for url in url_files(source.path):
            _check_format(url, url_file_name(url), source)
            yield url, open_url(url)
        return
    for path in source_files(source):
        try:
            file = path.open("rb")
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
        yield str(path), file


def _file_documents(
    name: str, stored_bytes: StoredBytes, source: SourceConfig, rule: DocumentRule, report: ReadReport
) -> Iterator[str]:
    """Yield the documents of one file, of the format that its name says."""
    stored: Any = io.BufferedReader(stored_bytes, BLOCK_BYTES)
    kind = source.format or format_of(name if source.is_local else url_file_name(name))
    column = source.text_column
    try:
        content = decompressed(stored)
        if kind == "parquet":
            yield from parquet_documents(content, stored, name, column, report)
            return
        if kind == "arrow":
            yield from arrow_documents(content, name, column, report)
            return
        blocks = text_blocks(content, name, source.encoding, source.encoding_errors, report)
        if kind == "text":
            yield from cut_text(blocks, rule, report, name)
        elif kind in ("csv", "tsv"):
            yield from row_documents(csv_rows(blocks, name, kind == "tsv", report), name, column, report)
        else:
            rows = json_rows(blocks, name, kind == "json", report)
            yield from row_documents(rows, name, column, report, open_ended=True)
    except READ_ERRORS as error:
        raise InputError(f"{name}: cannot be read: {one_line(error)}") from error


def source_files(source: SourceConfig) -> list[Path]:
    """Return the files of a local source, sorted.

    A folder stands for every file of a known format below it; hidden ones and other suffixes are passed over,
    and of a data set in splits that `datasets` saved, all but the split `train`.

    Raises:
        InputError: there is no such path, or no file of a known format.
    """
    try:
        return _source_files(source)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # no permission, too long a name, a NUL in it
        raise InputError(f"{source.path}: cannot be read: {one_line(error)}") from error


def _source_files(source: SourceConfig) -> list[Path]:
    text = source.path
    path = Path(text).expanduser()
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
    others = ", ".join(sorted({file.suffix or file.name for file in set(found) - set(known)})[:8])
    if not known:
        raise InputError(f"{text}: has no documents: only {others}; known formats are {supported_suffixes()}")
    if others:
        log.info("%s: passed over files of other formats: %s", text, others)
    return [_checked_file(file, source) for file in known]


def _matching_files(pattern: Path) -> list[Path]:
    """Return the files that a glob matches; those below the folders that it matches if it matches no file."""
    matches = [Path(match) for match in sorted(glob.glob(str(pattern), recursive=True))]
    folders = [match for match in matches if match.is_dir()]
    if folders == matches:
        return list(dict.fromkeys(file for folder in folders for file in _files_below(folder)))
    if folders and "**" not in pattern.parts:
        names = ", ".join(map(str, folders[:3])) + (", ..." if len(folders) > 3 else "")
        log.warning("%s: matches files and folders; the folders are not read: %s", pattern, names)
    return [match for match in matches if not match.is_dir()]


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, also behind links; a folder that several paths lead to comes once."""
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        real = os.path.realpath(parent)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if SAVED_SPLITS in names:
            folders[:], names = [_saved_split(Path(parent))], []
        elif SAVED_INFO in names:
            names = _saved_files(Path(parent), names)
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return found


def _saved_files(folder: Path, names: list[str]) -> list[str]:
    """Return the files of a data set that `datasets` saved, or of its cache."""
    if SAVED_STATE in names:
        state = json.loads((folder / SAVED_STATE).read_text(encoding="utf-8"))
        return [str(file["filename"]) for file in state["_data_files"]]
    return [name for name in names if name != SAVED_INFO]


def _saved_split(folder: Path) -> str:
    """Return which split of a saved data set is read."""
    splits = json.loads((folder / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
    if "train" not in splits and len(splits) > 1:
        raise InputError(f"{folder}: holds the splits {', '.join(splits)}; name one: {folder / splits[0]}")
    split = str("train" if "train" in splits else splits[0])
    log.info("%s: reading the split %s of %s", folder, split, ", ".join(splits))
    return split


def _raise(error: OSError) -> NoReturn:
    raise error


def _checked_file(path: Path, source: SourceConfig) -> Path:
    """Return the path if it is a regular file of a known format."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: is a symbolic link to nothing")
    if not path.is_file():
        raise InputError(f"{path}: is neither a file nor a folder")
    _check_format(str(path), path.name, source)
    return path


def _check_format(place: str, name: str, source: SourceConfig) -> None:
    if not source.format and format_of(name) is None:
        raise InputError(
            f"{place}: unknown format {Path(name).suffix}; known are {supported_suffixes()}; "
            "or say it with format: text (jsonl, ...) at this source"
        )


def source_size(source: SourceConfig) -> int | None:
    """Return the stored bytes of a source; None where that is unknown before reading."""
    if source.is_local:
        return sum(path.stat().st_size for path in source_files(source))
    if "://" in source.path:
        sizes = [int(url_facts(url).get("size") or 0) for url in url_files(source.path)]
        return sum(sizes) if all(sizes) else None
    return None


class DigestCache:
    """Content digests of files, kept by path, size, times and inode: only changed files are read again.

    Args:
        path: the JSON file that keeps them; a missing or damaged one is an empty cache.
    """

    def __init__(self, path: Path):
        self._path = path
        self._known: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            known = json.loads(path.read_text(encoding="utf-8"))
            self._known = known if isinstance(known, dict) else {}

    def file_digest(self, path: Path) -> str:
        """Return the digest of a file's bytes."""
        try:
            key, before = str(path.resolve()), _identity(path)
            known = self._known.get(key)
            if isinstance(known, list) and known[:-1] == before:
                return str(known[-1])
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, _blake2b).hexdigest()
            settled = time.time_ns() - max(before[1:3]) > UNSETTLED_NS and before == _identity(path)
        except OSError as error:
            raise InputError(f"{path}: cannot be read: {one_line(error)}") from error
        if settled:
            self.remember(key, [*before, digest])
        return digest

    def remember(self, key: str, value: Any) -> None:
        """Keep a value of plain JSON types, on disk too."""
        if self._known.get(key) == value:
            return
        self._known[key] = value
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with suppress(OSError):  # without a cache the files are read again, that is all
            self._path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(self._known), encoding="utf-8")
            temporary.replace(self._path)

    def recall(self, key: str) -> Any:
        """Return what is kept under a key; None if nothing is."""
        return self._known.get(key)


def _blake2b() -> Any:
    return hashlib.blake2b(digest_size=20)


def _identity(path: Path) -> list[int]:
    """Return what changes when a file does: size, modification and change time, inode."""
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def file_states(source: SourceConfig) -> dict[Path, list[int]]:
    """Return what changes when a file of a local source does; nothing for any other source."""
    if not source.is_local:
        return {}
    try:
        return {path: _identity(path) for path in source_files(source)}
    except OSError as error:
        raise InputError(f"{source.path}: cannot be read: {one_line(error)}") from error


def source_digest(source: SourceConfig, rule: DocumentRule, digests: DigestCache) -> str:
    """Return a digest of everything that decides the documents of a source: content and options.

    Args:
        source: any source; a URL counts as unchanged while its server reports the same facts about it.
        rule: what a document is.
        digests: saves reading unchanged files.
    """
    content: Any
    if source.path == PYTHON_DOCS:
        from mlm.data.python_docs import python_docs_digest

        content = python_docs_digest()
    elif source.path.startswith(HUB_PREFIX):
        content = [source.path, _last_hub_revision(source.path, digests)]
    elif not source.is_local:
        facts_of = ((url, url_facts(url)) for url in url_files(source.path))
        content = [
            [url, sorted((key, str(value)) for key, value in known.items())] for url, known in facts_of
        ]
    else:
        content = [
            [source.format or format_of(path.name), digests.file_digest(path)]
            for path in source_files(source)
        ]
    facts = [READER_VERSION, rule, source.text_column, source.encoding, source.encoding_errors, content]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=20).hexdigest()


def _last_hub_revision(path: str, digests: DigestCache) -> str:
    """Return the current commit, or without a network the one seen last, which may have been prepared."""
    key = hub_repository(path)
    try:
        revision = hub_revision(path)
    except InputError:
        known = digests.recall(key)
        if known is None:
            raise
        log.warning("%s: the hub cannot be reached; taken as unchanged since it was last asked", path)
        return str(known)
    digests.remember(key, revision)
    return revision
