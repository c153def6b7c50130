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
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import count
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
from mlm.data.tables import csv_rows, json_rows, parquet_documents, row_documents

READER_VERSION = 1
"""Changes whenever the same files would give other documents."""
HTTP = ("http://", "https://")
HUB_TIMEOUT_S = 10.0
"""How long the hub may take to say which version of a data set is the current one."""
UNSETTLED_NS = 100_000_000
"""A file changed this shortly before may change again under the same time stamp: its digest is not kept."""

log = logging.getLogger(__name__)


def read_documents(
    source: SourceConfig,
    rule: DocumentRule,
    report: ReadReport | None = None,
    progress: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Yield the documents of one source as they are read.

    Args:
        source: where to read; its own `document` is the caller's to apply.
        rule: what a document is in plain text; in all other formats it is a row.
        report: counts what is read.
        progress: called with the number of stored bytes after each block, as `source_size` counts them.

    Raises:
        InputError: nothing is there, nothing is in it, or it cannot be read; the message says where.
    """
    report = report or ReadReport(source.path)
    before = report.documents
    for document in _read(source, rule, report, progress):
        report.add(document)
        yield document
    if report.documents == before:
        rows = f": {report.rows:,} rows, none with text" if report.rows else ""
        raise InputError(f"{source.path}: has no documents{rows}")


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
        yield from _hub_documents(source, report)
    else:
        for name, file in _open_files(source):
            with file:
                report.files += 1
                yield from _file_documents(name, StoredBytes(file, advance), source, rule, report)


def _open_files(source: SourceConfig) -> Iterator[tuple[str, IO[bytes]]]:
    """Yield each file with its name, opened."""
    if not source.is_local:
        yield source.path, _open_url(source.path)
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
    kind = format_of(name if source.is_local else _url_file_name(name))
    column = source.text_column
    try:
        content = decompressed(stored)
        if kind == "parquet":
            yield from parquet_documents(content, stored, name, column, report)
            return
        blocks = text_blocks(content, name, source.encoding)
        if kind == "text":
            yield from cut_text(blocks, rule, report)
        elif kind in ("csv", "tsv"):
            yield from row_documents(csv_rows(blocks, name, kind == "tsv"), name, column, report)
        else:
            rows = json_rows(blocks, name, kind == "json", report)
            yield from row_documents(rows, name, column, report)
    except READ_ERRORS as error:
        raise InputError(f"{name}: cannot be read: {one_line(error)}") from error


def source_files(source: SourceConfig) -> list[Path]:
    """Return the files of a local source, sorted.

    A folder stands for every file of a known format below it; hidden ones and other suffixes are passed over.

    Raises:
        InputError: there is no such path, or no file of a known format.
    """
    try:
        return _source_files(source.path)
    except InputError:
        raise
    except (OSError, ValueError) as error:  # no permission, too long a name, a NUL in it
        raise InputError(f"{source.path}: cannot be read: {one_line(error)}") from error


def _source_files(text: str) -> list[Path]:
    path = Path(text).expanduser()
    if path.is_dir():
        found = _files_below(path)
    elif path.exists() or path.is_symlink():
        return [_checked_file(path)]
    elif glob.has_magic(text):
        found = [Path(match) for match in glob.glob(str(path), recursive=True) if not os.path.isdir(match)]
    else:
        raise InputError(f"{text}: no such file or folder")
    if not found:
        raise InputError(
            f"{text}: has no documents: {'an empty folder' if path.is_dir() else 'no file matches'}"
        )
    known = [file for file in sorted(found) if file.suffix and format_of(file.name)]
    others = ", ".join(sorted({file.suffix or file.name for file in set(found) - set(known)})[:8])
    if not known:
        raise InputError(f"{text}: has no documents: only {others}; known formats are {supported_suffixes()}")
    if others:
        log.info("%s: passed over files of other formats: %s", text, others)
    return [_checked_file(file) for file in known]


def _files_below(folder: Path) -> list[Path]:
    found = []
    for parent, folders, names in os.walk(folder, onerror=_raise):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(parent, name) for name in names if not name.startswith(".")]
    return found


def _raise(error: OSError) -> NoReturn:
    raise error


def _checked_file(path: Path) -> Path:
    """Return the path if it is a regular file of a known format."""
    if path.is_symlink() and not path.exists():
        raise InputError(f"{path}: is a symbolic link to nothing")
    if not path.is_file():
        raise InputError(f"{path}: is neither a file nor a folder")
    if format_of(path.name) is None:
        raise InputError(f"{path}: unknown format {path.suffix}; known are {supported_suffixes()}")
    return path


def source_size(source: SourceConfig) -> int | None:
    """Return the stored bytes of a source; None where that is unknown before reading."""
    if source.is_local:
        return sum(path.stat().st_size for path in source_files(source))
    if "://" in source.path:
        size = _url_facts(source.path).get("size")
        return int(size) if size else None
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
        content = [source.path, sorted((key, str(value)) for key, value in _url_facts(source.path).items())]
    else:
        content = [[format_of(path.name), digests.file_digest(path)] for path in source_files(source)]
    facts = [READER_VERSION, rule, source.text_column, source.encoding, content]
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=20).hexdigest()


def _file_system(url: str) -> tuple[Any, str]:
    """Return the file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if url.startswith(HTTP):
        from aiohttp import ClientTimeout

        # The default ends every download after five minutes.
        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=10, sock_read=60)}
    files, path = url_to_fs(url, **options)
    return files, path


def _url_file_name(url: str) -> str:
    return re.split(r"[?#]", url.partition("::")[0])[0].rpartition("/")[2]


def _open_url(url: str) -> IO[bytes]:
    name = _url_file_name(url)
    if format_of(name) is None:
        raise InputError(f"{url}: unknown format {Path(name).suffix}; known are {supported_suffixes()}")
    try:
        files, path = _file_system(url)
        in_order = (
            {"block_size": 0} if url.startswith(HTTP) else {}
        )  # not every server can jump about in a file
        file: IO[bytes] = files.open(path, "rb", **in_order)
    except Exception as error:  # each protocol has its own exceptions, a missing package among them
        raise InputError(f"{url}: cannot be opened: {one_line(error.__cause__ or error)}") from error
    return file


def _url_facts(url: str) -> dict[str, Any]:
    """Return what the server says about a file: size, date, tag."""
    try:
        files, path = _file_system(url)
        return dict(files.info(path))
    except Exception as error:  # as in _open_url
        raise InputError(f"{url}: cannot be reached: {one_line(error.__cause__ or error)}") from error


def _hub_documents(source: SourceConfig, report: ReadReport) -> Iterator[str]:
    name, config, split = _hub_parts(source.path)
    revision = _hub_revision(source.path)
    try:
        import datasets

        rows = datasets.load_dataset(name, config, split=split, streaming=True, revision=revision)
        numbered = zip((f"row {number}" for number in count(1)), rows, strict=False)
        yield from row_documents(numbered, source.path, source.text_column, report)
    except InputError:
        raise
    except Exception as error:  # the library has a different one for each way to fail
        raise InputError(f"{source.path}: cannot be read: {one_line(error)}") from error


def _hub_parts(path: str) -> tuple[str, str | None, str]:
    """Return name, configuration and split of a data set."""
    match = re.fullmatch(r"hub:([^@:]+)(?:@([^:]+))?(?::(.+))?", path)
    if not match:
        raise InputError(f"{path}: is not of the form hub:OWNER/NAME[@CONFIG][:SPLIT]")
    return match[1], match[2], match[3] or "train"


def _hub_revision(path: str) -> str:
    """Return the current commit of a data set.

    It is also the quick test whether the hub can be reached: `load_dataset` would try for half a minute.
    """
    from huggingface_hub import HfApi

    name = _hub_parts(path)[0]
    try:
        return str(HfApi().dataset_info(name, timeout=HUB_TIMEOUT_S).sha)
    except Exception as error:  # as in _hub_documents
        raise InputError(f"{path}: the hub cannot be reached or has no {name}: {one_line(error)}") from error


def _last_hub_revision(path: str, digests: DigestCache) -> str:
    """Return the current commit, or without a network the one seen last, which may have been prepared."""
    key = f"{HUB_PREFIX}{_hub_parts(path)[0]}"
    try:
        revision = _hub_revision(path)
    except InputError:
        known = digests.recall(key)
        if known is None:
            raise
        log.warning("%s: the hub cannot be reached; taken as unchanged since it was last asked", path)
        return str(known)
    digests.remember(key, revision)
    return revision
