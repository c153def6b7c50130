"""The documents of a whole configuration, streamed source by source, and the digest of their content."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any

from tqdm import tqdm

from mlm.config.data import PYTHON_DOCS, CorpusConfig, SourceConfig
from mlm.config.errors import InputError
from mlm.data.cache import cache_folder, content_key, locked
from mlm.data.python_docs import file_documents, package_files, python_docs_digest
from mlm.data.report import ReadReport
from mlm.data.sources import DigestCache, file_states, read_documents, source_digest, source_size
from mlm.files import replacing

log = logging.getLogger(__name__)


def python_docs_file(cache: Path, num_proc: int | None = None) -> Path:
    """Return the Python documentation as a file of rows (text, package), written on first use.

    Args:
        cache: folder that keeps it.
        num_proc: processes that read; None: one a core.
    """
    path = cache / f"python-docs-{python_docs_digest()[:16]}.jsonl"
    with locked(path):
        if not path.exists():
            log.info("%s: reading the documentation of this Python installation into %s", PYTHON_DOCS, path)
            packages = package_files()
            files = file_documents(list(packages), num_proc)
            with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
                for package, documents in _bar(
                    "reading", zip(packages.values(), files, strict=True), unit=" files", total=len(packages)
                ):
                    rows = ({"text": document, "package": package} for document in documents)
                    file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return path


class Text:
    """The documents of a configuration and the digest of their contents."""

    def __init__(self, config: CorpusConfig):
        self.config = config
        self.cache = cache_folder(config.cache_dir)
        self.reports: list[ReadReport] = []
        """Counts of each source, of the last pass."""
        self.share_read: float | None = 0.0
        """Share of the stored bytes read so far; None if their number is unknown."""
        digests = DigestCache(self.cache / "digests.json")
        self.sources = [self._materialise(source) for source in config.sources]
        self._states = self._file_states()
        self.digest = content_key(
            [source_digest(source, source.document or config.document, digests) for source in self.sources],
            [config.max_documents, config.min_length, config.max_length, config.skip_bad_rows],
        )

    def _materialise(self, source: SourceConfig) -> SourceConfig:
        """Write the Python documentation to a file once: it is read twice, and users look into it."""
        if source.path != PYTHON_DOCS:
            return source
        return replace(source, path=str(python_docs_file(self.cache, self.config.num_proc)))

    @property
    def name(self) -> str:
        """The paths of the sources, for errors."""
        return ", ".join(source.path for source in self.config.sources)

    def check_unchanged(self) -> None:
        """Check that the files did not change since the digest was computed, before results are stored.

        Raises:
            InputError: names the first file that changed, appeared or vanished.
        """
        before, now = self._states, self._file_states()
        for path in before | now:
            if before.get(path) != now.get(path):
                raise InputError(f"{path}: changed while it was read; nothing of it is kept; run again")

    def _file_states(self) -> dict[str, list[int]]:
        return {name: state for source in self.sources for name, state in file_states(source).items()}

    def by_source(self, task: str) -> Iterator[Iterator[str]]:
        """Yield the documents of each source in turn, with one progress bar in bytes."""
        total = sum(size or 0 for size in self.sizes) if all(self.sizes) else None
        with self._reading(task, total) as advance:
            for source in self.sources:
                yield self._read(source, advance)
            self.share_read = 1.0

    def sample(self, max_bytes: int) -> Iterator[str]:
        """Yield documents of all sources interleaved, in proportion to their weights or sizes.

        Args:
            max_bytes: how much the caller will take at most; for the progress bar.
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
        config = self.config
        left = None
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
