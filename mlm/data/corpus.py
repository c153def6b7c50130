"""From sources to rows, each stage cached under a key of everything that decides it.

    sources --read--> documents --encode--> token store --split, pack--> row tables --permute, mask--> batches
    sources.py        (str)    tokenizer    store.py      packing.py                  sampler.py, collate.py

- vocabulary: key of the source contents and the tokenizer settings
- token store: key of the source contents and the tokenizer's bytes
- row tables: beside the store, key of row length, packing and the held-out part
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from filelock import FileLock
from tokenizers import Tokenizer
from tqdm import tqdm

import mlm
from mlm.config.data import PYTHON_DOCS, CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.config.parse import to_plain
from mlm.counter import uniform
from mlm.data.collate import Rows
from mlm.data.formats import ReadReport
from mlm.data.packing import RowTable, Spans, cut_spans, pack_documents
from mlm.data.python_docs import python_docs_digest, read_package_docs
from mlm.data.sources import DigestCache, read_documents, source_digest, source_size
from mlm.data.store import STORE_VERSION, TokenStore, build_store
from mlm.tokenizer import (
    TOKENIZER_VERSION,
    SpecialTokens,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)

FEW_DOCUMENTS = 200
"""Below this many documents the held-out part is made of blocks instead of whole documents."""
BLOCK_TOKENS = 2000
"""Size of such a block."""
UNKNOWN_WARNING_RATE = 0.01
"""Share of unknown tokens from which the user is warned."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: what training needs of the text."""

    tokenizer: Tokenizer
    special: SpecialTokens
    store: TokenStore
    train: Rows
    validation: Rows
    unigram_entropy: float
    """Cross-entropy of the validation tokens under the training counts plus one, in nats."""


def cache_folder(config: CorpusConfig) -> Path:
    """Return where stores are kept: the option, $MLM_CACHE, the checkout, or the home folder."""
    if config.cache_dir:
        return Path(config.cache_dir).expanduser()
    if os.environ.get("MLM_CACHE"):
        return Path(os.environ["MLM_CACHE"]).expanduser()
    checkout = Path(mlm.__file__).parent.parent
    if (checkout / "pyproject.toml").exists():
        return checkout / "data" / "cache"
    return Path.home() / ".cache" / "mlm"


def prepare_corpus(config: CorpusConfig, tokenizer_config: TokenizerConfig) -> Corpus:
    """Read, tokenize, split and pack a corpus, or reuse what was prepared before.

    Raises:
        InputError: a source cannot be read or holds no text.
    """
    text = _Text(config)
    tokenizer = _tokenizer(text, tokenizer_config)
    store = _store(text, tokenizer)
    train, validation = _split_and_pack(store, config)
    special = SpecialTokens.from_tokenizer(tokenizer)
    counts = [store.counts(table.pieces, tokenizer.get_vocab_size()) for table in (train, validation)]
    for part in counts:
        _require_ordinary(part, special, config)
    train_rows, validation_rows = (
        Rows(store, table, special, config.seq_len, config.packing) for table in (train, validation)
    )
    for name, rows in (("training", train_rows), ("validation", validation_rows)):
        tokens = rows.table.pieces.num_tokens
        log.info("%s: %s tokens in %s rows of %d", name, f"{tokens:,}", f"{len(rows):,}", config.seq_len)
    return Corpus(tokenizer, special, store, train_rows, validation_rows, _unigram_entropy(*counts))


def prepare_evaluation(config: CorpusConfig, tokenizer: Tokenizer) -> Rows:
    """Read and pack the whole of a corpus for evaluation with a given tokenizer."""
    store, special = _store(_Text(config), tokenizer), SpecialTokens.from_tokenizer(tokenizer)
    _require_ordinary(store.counts(store.documents, tokenizer.get_vocab_size()), special, config)
    table = pack_documents(store.documents, config.seq_len, config.packing)
    return Rows(store, table, special, config.seq_len, config.packing)


def python_docs_file(cache: Path, num_proc: int | None = None) -> Path:
    """Return the Python documentation as a file of rows (text, package); it is written when it is not there.

    Args:
        cache: folder that keeps it.
        num_proc: processes that read; None: one a core.
    """
    path = cache / f"python-docs-{python_docs_digest()[:16]}.jsonl"
    with _locked(path):
        if not path.exists():
            log.info("%s: reading the documentation of this Python installation into %s", PYTHON_DOCS, path)
            with (
                _bar("reading", unit=" files") as bar,
                _replacing(path) as temporary,
                temporary.open("w", encoding="utf-8") as file,
            ):
                for package, document in read_package_docs(_absolute(bar), num_proc):
                    row = {"text": document, "package": package}
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    return path


class _Text:
    """The documents of a configuration and the digest of their contents."""

    def __init__(self, config: CorpusConfig):
        self.config = config
        self.cache = cache_folder(config)
        self.reports: dict[str, ReadReport] = {}
        digests = DigestCache(self.cache / "digests.json")
        self.sources = [self._materialise(source) for source in config.sources]
        self.digest = _key(
            [source_digest(source, source.document or config.document, digests) for source in self.sources],
            config.max_documents,
        )

    def _materialise(self, source: SourceConfig) -> SourceConfig:
        """Write the Python documentation to a file once: it is read twice, and worth a look."""
        if source.path != PYTHON_DOCS:
            return source
        return replace(source, path=str(python_docs_file(self.cache, self.config.num_proc)))

    def documents(self, task: str) -> Iterator[str]:
        """Yield the documents under a progress bar in bytes."""
        sizes = [source_size(source) for source in self.sources]
        total = sum(size for size in sizes if size is not None) if None not in sizes else None
        limit = self.config.max_documents
        with _bar(task, unit="B", unit_scale=True, total=total) as bar:
            yield from islice(self._read(bar.update), limit)
            if total and bar.n < total and limit is None:
                bar.update(total - bar.n)

    def _read(self, progress: Callable[[int], None]) -> Iterator[str]:
        for source in self.sources:
            report = ReadReport(source.path)
            yield from read_documents(source, source.document or self.config.document, report, progress)
            self.reports[source.path] = report


def _tokenizer(text: _Text, config: TokenizerConfig) -> Tokenizer:
    """Load or train the vocabulary; a trained one is kept in the cache."""
    if config.path:
        if replace(config, path=None, add_tokens=None) != TokenizerConfig():
            log.warning(
                "tokenizer.type, vocab_size and lowercase are ignored: the vocabulary is %s", config.path
            )
        return load_tokenizer(config.path, config.add_tokens)
    trained = replace(config, add_tokens=None)
    folder = text.cache / "tokenizers" / _key(text.digest, to_plain(trained), TOKENIZER_VERSION)
    with _locked(folder):
        if not folder.exists():
            log.info("training a %s vocabulary of %s entries", config.type, f"{config.vocab_size:,}")
            tokenizer = train_tokenizer(text.documents("vocabulary"), config)
            with _replacing(folder) as temporary:
                temporary.mkdir()
                (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        else:
            log.info("vocabulary: reusing %s", folder)
    return load_tokenizer(folder, config.add_tokens)


def _store(text: _Text, tokenizer: Tokenizer) -> TokenStore:
    """Open or build the token store."""
    digest = tokenizer_digest(tokenizer)
    folder = text.cache / "stores" / _key(text.digest, digest, STORE_VERSION)
    with _locked(folder):
        if folder.exists():
            log.info("token store: reusing %s", folder)
            return TokenStore(folder)
        facts = {"tokenizer": digest, "text": text.digest, "sources": [to_plain(s) for s in text.sources]}
        store = build_store(folder, text.documents("tokenizing"), tokenizer, facts)
    for report in text.reports.values():
        log.info("%s", report.summary())
    counts = store.manifest
    rate = counts["num_unknown"] / max(counts["num_tokens"], 1)
    log.info("token store: %s tokens in %s", f"{counts['num_tokens']:,}", folder)
    if rate > UNKNOWN_WARNING_RATE:
        log.warning(
            "%.1f %% of the tokens are unknown to the vocabulary; train it on this text or use type bpe",
            100 * rate,
        )
    return store


def split_documents(store: TokenStore, fraction: float, max_validation_tokens: int) -> tuple[Spans, Spans]:
    """Divide a corpus into what is trained on and what is held out.

    A document is held out when the hash of its content falls under `fraction`: duplicates stay on one side,
    and text added later moves none. With few documents, blocks of them are divided instead. Neither part is
    ever empty; a corpus of a single unit is on both sides, with a warning.

    Returns:
        The spans for training and for validation.
    """
    units, hashes = store.documents, store.text_hashes
    block: npt.NDArray[np.int64] = np.zeros(len(hashes), np.int64)
    if len(hashes) < FEW_DOCUMENTS:
        counts = -(-units.lengths // BLOCK_TOKENS)
        block = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        units, hashes = cut_spans(units, BLOCK_TOKENS), np.repeat(hashes, counts)
    share = uniform(hashes.view(np.int64), block)
    held_out = share < fraction
    if not held_out.any():
        held_out = share == share.min()
    if held_out.all():
        held_out = share != share.max()
    if not held_out.any():
        log.warning("the corpus is a single piece of text: it is trained on and validated on")
        return units, units
    validation = units.take(held_out)
    fits = np.cumsum(validation.lengths) <= max_validation_tokens
    fits[0] = True
    return units.take(~held_out), validation.take(fits)


def _split_and_pack(store: TokenStore, config: CorpusConfig) -> tuple[RowTable, RowTable]:
    key = _key(config.seq_len, config.packing, config.validation_fraction, config.max_validation_tokens)
    folder = store.folder / f"rows-{key}"
    with _locked(folder):
        if not folder.exists():
            parts = split_documents(store, config.validation_fraction, config.max_validation_tokens)
            with _replacing(folder) as temporary:
                temporary.mkdir()
                for name, spans in zip(("train", "validation"), parts, strict=True):
                    _save_table(temporary / name, pack_documents(spans, config.seq_len, config.packing))
    return _load_table(folder / "train"), _load_table(folder / "validation")


def _save_table(folder: Path, table: RowTable) -> None:
    folder.mkdir()
    np.save(folder / "offsets.npy", table.offsets)
    np.save(folder / "starts.npy", table.pieces.starts)
    np.save(folder / "lengths.npy", table.pieces.lengths)


def _load_table(folder: Path) -> RowTable:
    offsets, starts, lengths = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "starts", "lengths")
    )
    return RowTable(offsets, Spans(starts, lengths))


def _unigram_entropy(train: npt.NDArray[np.int64], validation: npt.NDArray[np.int64]) -> float:
    """Return -sum_v q(v) ln p(v): q are the validation shares, p those of the training counts plus one."""
    log_share = np.log((train + 1) / (train.sum() + len(train)))
    return float(-(validation * log_share).sum() / validation.sum())


def _require_ordinary(counts: npt.NDArray[np.int64], special: SpecialTokens, config: CorpusConfig) -> None:
    """Refuse text of which nothing can be predicted: every loss on it would be 0."""
    if counts.sum() == counts[list(special.ids)].sum():
        names = ", ".join(source.path for source in config.sources)
        raise InputError(
            f"{names}: the vocabulary knows no token of the text; train it on this text or use type bpe"
        )


def _key(*parts: Any) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=12).hexdigest()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time make `path`; the others wait and find it."""
    if path.exists():  # it is renamed into place, so it is whole; the cache may be read-only
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    with FileLock(lock):
        for leftover in set(path.parent.glob(f".{path.name}.*")) - {lock}:  # of a process that was killed
            _remove(leftover)
        yield


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path that takes the final name on success and vanishes on failure."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.rename(path)
    except BaseException:
        _remove(temporary)
        raise


def _bar(task: str, **options: Any) -> tqdm:
    often = 0.3 if sys.stderr.isatty() else 10.0  # a log file need not hold every move
    return tqdm(desc=task, leave=False, mininterval=often, dynamic_ncols=True, **options)


def _absolute(bar: tqdm) -> Callable[[int, int], None]:
    def update(done: int, total: int) -> None:
        bar.total = total
        bar.update(done - bar.n)

    return update
