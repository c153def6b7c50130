"""The documents of a whole configuration, streamed source by source, and the digest of their content.

The digest covers the content of the files, not their names or dates: an edit at the same path is detected, a
copy elsewhere is not a change.
"""

import hashlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlm.config.data import HUB_PREFIX, PYTHON_DOCS, CorpusConfig, DocumentRule, HubName, SourceConfig
from mlm.config.errors import DiskError, InputError
from mlm.data.cache import cache_folder, content_key, locked
from mlm.data.formats import ReadReport, format_of, readable
from mlm.data.python_docs import file_documents, package_files, python_docs_digest
from mlm.data.sources import file_facts, hub_revision, read_documents, source_files, source_size
from mlm.files import replacing, write_json

READER_VERSION = 4  # changes whenever the same files would give other documents
UNSETTLED_NS = 100_000_000  # a file changed less than this ago may change again within the same time stamp

log = logging.getLogger(__name__)


class DigestCache:
    """Content digests of files by path, size, times and inode: only changed files are read again.

    Kept in a JSON file; a missing or damaged one is an empty cache.
    """

    def __init__(self, path: Path):
        self._path, self.known = path, dict[str, Any]()
        with suppress(OSError, ValueError, TypeError):
            self.known |= json.loads(path.read_text(encoding="utf-8"))
        self._saved = dict(self.known)

    def file_digest(self, name: str) -> str:
        """Return the digest of a file's bytes."""
        with readable(name):
            key, before = os.path.realpath(name), _identity(name)
            known = self.known.get(key)
            if isinstance(known, list) and known[:-1] == before:
                return str(known[-1])
            with open(name, "rb") as file:
                digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=20)).hexdigest()
            settled = time.time_ns() - max(before[1:3]) > UNSETTLED_NS and before == _identity(name)
        if settled:
            self.known[key] = [*before, digest]
        return digest

    def save(self) -> None:
        """Write the cache if it changed; if the disk refuses, the files are read again the next time."""
        if self.known != self._saved:
            with suppress(DiskError):
                write_json(self._path, self.known)
            self._saved = dict(self.known)


def _identity(name: str) -> list[int]:
    """Return size, modification time, change time and inode of a file: a change alters one of them."""
    stat = os.stat(name)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def source_digest(source: SourceConfig, rule: DocumentRule, digests: DigestCache) -> str:
    """Return a digest of everything that decides the documents of a source: content and options.

    A URL counts as unchanged while its server reports the same facts about it.
    """
    content: list[Any]
    if source.path.startswith(HUB_PREFIX):
        content = [source.path, _last_hub_revision(source.path, digests)]
    elif source.is_local:
        files = source_files(source)
        content = [[source.format or format_of(name), digests.file_digest(name)] for name in files]
    else:
        facts = {url: file_facts(url) for url in source_files(source)}
        content = [[url, sorted((key, str(value)) for key, value in of.items())] for url, of in facts.items()]
    digests.save()
    options = [READER_VERSION, rule, source.text_column, source.encoding, source.encoding_errors, content]
    return hashlib.blake2b(json.dumps(options).encode(), digest_size=20).hexdigest()


def _last_hub_revision(path: str, digests: DigestCache) -> str:
    """Return the current commit, or without a network the last one known, which may have been prepared."""
    key = f"{HUB_PREFIX}{HubName.parse(path).repository}"
    try:
        digests.known[key] = hub_revision(path)
    except InputError:
        if key not in digests.known:
            raise
        log.warning("%s: the hub cannot be reached; taken as unchanged since the last time", path)
    return str(digests.known[key])


def python_docs_file(cache: Path, num_proc: int | None = None) -> Path:
    """Return the Python documentation as a file of rows (text, package) in `cache`, written on first use.

    `num_proc` processes read it; None: one a core.
    """
    path = cache / f"python-docs-{python_docs_digest()[:16]}.jsonl"
    with locked(path):
        if not path.exists():
            log.info("%s: reading the documentation of this Python installation into %s", PYTHON_DOCS, path)
            packages = package_files()
            read = zip(packages.values(), file_documents(list(packages), num_proc), strict=True)
            with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
                for package, documents in _bar("reading", read, unit=" files", total=len(packages)):
                    rows = ({"text": document, "package": package} for document in documents)
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


class Text:
    """The documents of a configuration and the digest of their contents."""

    def __init__(self, config: CorpusConfig):
        self.config = config
        self.cache = cache_folder(config.cache_dir)
        self.reports: list[ReadReport] = []  # counts of each source, of the last pass
        self.share_read: float | None = 0.0  # of the stored bytes; None if their number is unknown
        digests = DigestCache(self.cache / "digests.json")
        # The Python documentation is written to a file once: it is read twice, and users look into it.
        self.sources = list(config.sources)
        for number, source in enumerate(self.sources):
            if source.path == PYTHON_DOCS:
                path = python_docs_file(self.cache, config.num_proc)
                self.sources[number] = replace(source, path=str(path))
        self._states = self._file_states()
        self.digest = content_key(
            [source_digest(source, source.document or config.document, digests) for source in self.sources],
            [config.max_documents, config.min_length, config.max_length, config.skip_bad_rows],
        )

    @property
    def name(self) -> str:
        """The paths of the sources, for errors."""
        return ", ".join(source.path for source in self.config.sources)

    def check_unchanged(self) -> None:
        """Raise InputError if a file changed, appeared or vanished since the digest was computed."""
        before, now = self._states, self._file_states()
        for path in before | now:
            if before.get(path) != now.get(path):
                raise InputError(f"{path}: changed while it was read; nothing of it is kept; run again")

    def _file_states(self) -> dict[str, list[int]]:
        states: dict[str, list[int]] = {}
        for source in self.sources:
            if source.is_local:
                with readable(source.path):
                    states |= {name: _identity(name) for name in source_files(source)}
        return states

    def by_source(self, task: str) -> Iterator[Iterator[str]]:
        """Yield the documents of each source in turn, with one progress bar in bytes."""
        total = sum(size or 0 for size in self.sizes) if all(self.sizes) else None
        with self._reading(task, total) as advance:
            for source in self.sources:
                yield self._read(source, advance)
            self.share_read = 1.0

    def sample(self, max_bytes: int) -> Iterator[str]:
        """Yield documents of all sources interleaved, in proportion to their weights or sizes.

        The caller takes about `max_bytes` at most, which the progress bar shows.
        """
        if len(self.sources) == 1 or self.config.max_documents is not None:
            yield from chain.from_iterable(self.by_source("vocabulary"))
            return
        total = min(max_bytes, sum(size or max_bytes for size in self.sizes))
        with self._reading("vocabulary", total) as advance:
            readers = [self._read(source, lambda num_bytes: None) for source in self.sources]
            turns = [(0.0, number) for number in range(len(readers))]  # a heap: the least read source is next
            while turns:
                taken, number = heappop(turns)
                document = next(readers[number], None)
                if document is not None:
                    advance(len(document))
                    share = self.sources[number].weight or self.sizes[number] or 1
                    heappush(turns, (taken + len(document) / share, number))
                    yield document

    @cached_property
    def sizes(self) -> list[int | None]:
        """The stored bytes of each source; None if unknown."""
        return [source_size(source) for source in self.sources]

    @contextmanager
    def _reading(self, task: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Start a pass: new reports, and a progress bar; yield the function that advances it."""
        self.reports = []
        with _bar(task, unit="B", unit_scale=True, total=total) as bar:

            def advance(num_bytes: int) -> None:
                bar.update(num_bytes)
                self.share_read = min(bar.n / total, 1.0) if total else None

            yield advance

    def _read(self, source: SourceConfig, advance: Callable[[int], None]) -> Iterator[str]:
        config, left = self.config, None
        if config.max_documents is not None:
            left = config.max_documents - sum(report.documents for report in self.reports)
        report = ReadReport(source.path, skip_bad_rows=config.skip_bad_rows)
        self.reports.append(report)
        bounds = config.min_length or 0, config.max_length or inf
        rule = source.document or config.document
        yield from islice(read_documents(source, rule, report, advance, bounds), left)


def _bar(task: str, items: Iterable[Any] | None = None, **options: Any) -> tqdm:
    often = 0.3 if sys.stderr.isatty() else 10.0  # a log file needs few lines
    return tqdm(items, desc=task, leave=False, mininterval=often, dynamic_ncols=True, **options)
