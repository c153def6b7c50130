"""From sources to rows, each stage cached under a key of everything that decides it.

    sources --read--> documents --encode--> token store --split, pack--> row tables --permute, mask--> batches
    sources.py        (str) encoding.py     store.py      packing.py                sampler.py, collate.py

- vocabulary: key of the source contents and the tokenizer settings
- token store: key of the source contents and the tokenizer's bytes
- row tables: beside the store, key of row length, packing, the held-out part, what is left out, and weights
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from mlm.config.data import CorpusConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.config.parse import to_plain
from mlm.cores import available_cores
from mlm.counter import uniform
from mlm.data.cache import content_key, locked, mark_used, reading
from mlm.data.cleaning import distinct_texts, first_of_equals, first_of_similar, near_index
from mlm.data.collate import Rows
from mlm.data.packing import RowTable, Spans, cut_spans, pack_documents
from mlm.data.report import short_name
from mlm.data.sampler import Part, divide_block
from mlm.data.store import STORE_VERSION, TokenStore, drop_shards, finish_store, write_shards
from mlm.data.text import Text
from mlm.files import format_bytes, replacing
from mlm.tokenizer import (
    TOKENIZER_VERSION,
    SpecialTokens,
    load_tokenizer,
    num_ids,
    tokenizer_digest,
    train_tokenizer,
)

FEW_DOCUMENTS = 200
"""Below this many documents the held-out part is made of blocks instead of whole documents."""
BLOCK_TOKENS = 2000
"""Size of such a block."""
UNKNOWN_WARNING_RATE = 0.01
"""Share of unknown tokens from which the user is warned."""
ROWS_VERSION = 5
"""Changes whenever the same store would give other rows."""

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

    @property
    def sources(self) -> list[dict[str, Any]]:
        """What is known of each source, in plain values: path, documents, tokens, duplicates and so on."""
        return self.store.sources


def prepare_corpus(config: CorpusConfig, tokenizer_config: TokenizerConfig) -> Corpus:
    """Read, tokenize, clean, split and pack a corpus, or reuse what was prepared before.

    Raises:
        InputError: a source cannot be read or holds no text, or the disk is full.
    """
    tokenizer, store = prepare_store(config, tokenizer_config)
    assert store is not None, "one machine writes all shards"
    special = SpecialTokens.from_tokenizer(tokenizer)
    tables = _train_and_validation(store, config, num_ids(tokenizer), special)
    train, validation = (
        Rows(store, table, special, config.seq_len, config.packing)
        for table in (tables.train, tables.validation)
    )
    train = replace(train, parts=tables.parts)
    for name, rows in (("training", train), ("validation", validation)):
        tokens = rows.table.pieces.num_tokens
        log.info("%s: %s tokens in %s rows of %d", name, f"{tokens:,}", f"{len(rows):,}", config.seq_len)
    return Corpus(tokenizer, special, store, train, validation, tables.unigram_entropy)


def prepare_evaluation(config: CorpusConfig, tokenizer: Tokenizer) -> Rows:
    """Read and pack the whole of a corpus for evaluation with a given tokenizer."""
    store = _store(Text(config), tokenizer)
    assert store is not None, "one machine writes all shards"
    documents, special = store.documents.take(_kept(store, config)), SpecialTokens.from_tokenizer(tokenizer)
    _require_ordinary(store.counts(num_ids(tokenizer), documents), special, config)
    table = pack_documents(documents, config.seq_len, config.packing)
    return Rows(store, table, special, config.seq_len, config.packing)


def prepare_store(
    config: CorpusConfig, tokenizer_config: TokenizerConfig, machine: tuple[int, int] = (1, 1)
) -> tuple[Tokenizer, TokenStore | None]:
    """Prepare the vocabulary, and the token store or this machine's share of it.

    Args:
        config: the text.
        tokenizer_config: the vocabulary.
        machine: (i, n) for machine i of n; all of them train the same vocabulary.

    Returns:
        The tokenizer, and the store; None while other machines have shards to write.
    """
    text = Text(config)
    tokenizer = prepare_tokenizer(text, tokenizer_config)
    return tokenizer, _store(text, tokenizer, machine)


def prepare_tokenizer(text: Text, config: TokenizerConfig) -> Tokenizer:
    """Load or train the vocabulary; a trained one is kept in the cache."""
    if config.path:
        if replace(config, path=None, add_tokens=None) != TokenizerConfig():
            log.warning("all other tokenizer.* keys are ignored: the vocabulary is %s", config.path)
        return load_tokenizer(config.path, config.add_tokens)
    distinct = text.config.deduplicate != "none"
    weights = [source.weight for source in text.sources]
    trained = replace(config, add_tokens=None)
    key = content_key(text.digest, weights, distinct, to_plain(trained), TOKENIZER_VERSION)
    folder = text.cache / "tokenizers" / key
    with locked(folder):
        if not folder.exists():
            _check_packages(text.config)
            log.info("training a %s vocabulary of %s entries", config.type, f"{config.vocab_size:,}")
            documents: Iterable[str] = text.sample(config.max_bytes)
            documents = distinct_texts(documents) if distinct else documents
            tokenizer = train_tokenizer(documents, config, name=text.name)
            text.check_unchanged()
            with replacing(folder) as temporary:
                temporary.mkdir()
                (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
                facts = {**to_plain(config), "sources": [{"path": source.path} for source in text.sources]}
                (temporary / "facts.json").write_text(json.dumps(facts, indent=1))
        else:
            log.info("vocabulary: reusing %s", folder)
    mark_used(folder)
    with reading(folder):
        tokenizer = load_tokenizer(folder)
    return load_tokenizer(folder, config.add_tokens) if config.add_tokens else tokenizer


def _store(text: Text, tokenizer: Tokenizer, machine: tuple[int, int] = (1, 1)) -> TokenStore | None:
    """Open or build the token store, or write a machine's share of its shards."""
    digest = tokenizer_digest(tokenizer)
    folder = text.cache / "stores" / content_key(text.digest, digest, STORE_VERSION)
    with locked(folder, "-{}-of-{}".format(*machine)):
        if folder.exists():
            log.info("token store: reusing %s", folder)
        else:
            _check_packages(text.config)
            log.info("token store: tokenizing into %s", folder)
            sources = text.by_source("tokenizing")
            cores = text.config.num_proc or available_cores()
            shards = write_shards(folder, sources, tokenizer, cores, machine, lambda: text.share_read)
            try:
                text.check_unchanged()
            except InputError:
                drop_shards(folder)
                raise
            shards += [0] * (len(text.sources) - len(shards))
            facts = {"tokenizer": digest, "text": text.digest}
            with locked(folder):
                if (
                    not folder.exists()
                    and finish_store(folder, shards, _facts_of_sources(text), facts) is None
                ):
                    return None
    mark_used(folder)
    store = TokenStore(folder)
    _name_sources(store, text)
    _tell(store, text.config)
    return store


def _check_packages(config: CorpusConfig) -> None:
    """Miss a package before hours are spent on reading; what is prepared already may need none."""
    if config.deduplicate == "near":
        near_index()


def _facts_of_sources(text: Text) -> list[dict[str, Any]]:
    pairs = zip(text.config.sources, text.reports, strict=True)
    return [{"path": source.path, "summary": report.summary()} for source, report in pairs]


def _name_sources(store: TokenStore, text: Text) -> None:
    """Give the sources of a store their names of today: it may be made of copies that lay elsewhere."""
    for known, source, read in zip(store.sources, text.config.sources, text.sources, strict=True):
        known["path"] = source.path
        known["summary"] = f"{short_name(read.path)}: {known['summary'].partition(': ')[2]}"


def _tell(store: TokenStore, config: CorpusConfig) -> None:
    """Say what is in a store: what was read, what it became, and what looks wrong with it."""
    kept = config.deduplicate == "none"
    advice = "data.deduplicate=exact leaves them out" if kept else "they are left out of the rows"
    for source in store.sources:
        log.info("%s", source["summary"])
        rate = source["num_unknown"] / max(source["num_tokens"], 1)
        if rate > UNKNOWN_WARNING_RATE:
            text = "%s: %.1f %% of the tokens are unknown; a vocabulary of type bpe leaves none"
            log.warning(text, source["path"], 100 * rate)
    facts = store.manifest
    size = format_bytes(facts["num_bytes"])
    log.info("token store: %s tokens, %s of text", f"{facts['num_tokens']:,}", size)
    if facts["num_unknown"]:
        rate = facts["num_unknown"] / facts["num_tokens"]
        log.info("unknown tokens: %s (%.2f %%)", f"{facts['num_unknown']:,}", 100 * rate)
    if facts["num_without_tokens"]:
        log.info("documents without tokens, left out: %s", f"{facts['num_without_tokens']:,}")
    if facts["num_duplicates"]:
        number, documents = facts["num_duplicates"], facts["num_documents"]
        share = f"{number:,} of {documents:,} documents ({number / documents:.1%})"
        log.info("duplicates: %s repeat an earlier one; %s", share, advice)


def _kept(store: TokenStore, config: CorpusConfig) -> npt.NDArray[np.bool_]:
    """Return which documents are used, (N,); what takes long to find is kept beside the store."""
    if config.deduplicate == "none":
        return np.ones(store.manifest["num_documents"], np.bool_)
    if config.deduplicate == "exact":
        return first_of_equals(store.text_hashes)
    path = store.folder / f"kept-near-{config.near_similarity}.npy"
    with locked(path):
        if not path.exists():
            spans = zip(store.documents.starts.tolist(), store.documents.lengths.tolist(), strict=True)
            documents = (store.tokens(*span) for span in spans)
            kept = first_of_similar(documents, first_of_equals(store.text_hashes), config.near_similarity)
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, kept)
    with reading(path):
        return np.load(path)


def split_documents(
    store: TokenStore,
    fraction: float,
    max_validation_tokens: int,
    kept: npt.NDArray[np.bool_] | None = None,
) -> tuple[Spans, Spans]:
    """Divide a corpus into what is trained on and what is held out.

    A document is held out when the hash of its content falls under `fraction`: duplicates stay on one side,
    and text added later moves none. With few documents, blocks of them are divided instead. Neither part is
    ever empty; a corpus of a single unit is on both sides, with a warning.

    Args:
        store: the corpus.
        fraction: share of the documents that is held out.
        max_validation_tokens: bound of what is validated on, drawn from all that is held out.
        kept: (N,) the documents to divide; None: all.

    Returns:
        The spans for training and for validation.
    """
    units, hashes = store.documents, store.text_hashes
    if kept is not None:
        units, hashes = units.take(kept), hashes[kept]
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
    order = np.argsort(share[held_out], kind="stable")
    fits = np.zeros(len(order), np.bool_)
    fits[order] = np.cumsum(validation.lengths[order]) <= max_validation_tokens
    fits[order[0]] = True
    return units.take(~held_out), validation.take(fits)


@dataclass(frozen=True)
class _Tables:
    """What is made of a store for one configuration."""

    train: RowTable
    validation: RowTable
    parts: tuple[Part, ...]
    """Of the training rows; empty without weights."""
    unigram_entropy: float


def _train_and_validation(
    store: TokenStore, config: CorpusConfig, vocab_size: int, special: SpecialTokens
) -> _Tables:
    """Clean, split and pack a store, or open what was made of it before."""
    weights = [source.weight for source in config.sources]
    key = content_key(
        [config.seq_len, config.packing, config.validation_fraction, config.max_validation_tokens],
        [config.deduplicate, config.near_similarity, weights, ROWS_VERSION],
    )
    folder = store.folder / f"rows-{key}"
    with locked(folder):
        if not folder.exists():
            kept = None if config.deduplicate == "none" else _kept(store, config)
            train, validation = split_documents(
                store, config.validation_fraction, config.max_validation_tokens, kept
            )
            counts = [store.counts(vocab_size, spans) for spans in (train, validation)]
            for part in counts:
                _require_ordinary(part, special, config)
            table, parts = _pack_mix(store, train, config)
            facts = {"parts": parts, "unigram_entropy": _unigram_entropy(*counts)}
            with replacing(folder) as temporary:
                temporary.mkdir()
                _save_table(temporary / "train", table)
                rows = pack_documents(validation, config.seq_len, config.packing)
                _save_table(temporary / "validation", rows)
                (temporary / "facts.json").write_text(json.dumps(facts))
    with reading(folder):
        facts = json.loads((folder / "facts.json").read_text())
        names = [source.path for source in config.sources]
        named = tuple(Part(rows, per_block, names[source]) for rows, per_block, source in facts["parts"])
        train_table, validation_table = (_load_table(folder / name) for name in ("train", "validation"))
        return _Tables(train_table, validation_table, named, facts["unigram_entropy"])


def _pack_mix(
    store: TokenStore, train: Spans, config: CorpusConfig
) -> tuple[RowTable, list[tuple[int, int, int]]]:
    """Pack what is trained on; with weights, the sources one by one.

    Returns:
        The table, and with weights for each source that has rows: their number, rows a block, its place.
    """
    weights = [source.weight for source in config.sources]
    if None in weights:
        return pack_documents(train, config.seq_len, config.packing), []
    bounds = np.cumsum([0] + [source["num_tokens"] for source in store.sources])
    tables, shares, places = [], [], []
    for place, (source, weight) in enumerate(zip(store.sources, weights, strict=True)):
        begin, end = bounds[place : place + 2]
        spans = train.take((train.starts >= begin) & (train.starts < end))
        if not spans.num_tokens:
            log.warning("%s: nothing is left to train on; its weight goes to the others", source["path"])
            continue
        tables.append(pack_documents(spans, config.seq_len, config.packing))
        assert weight is not None
        places.append(place)
        shares.append(weight / spans.num_tokens * len(tables[-1]))  # of tokens -> of rows
    return RowTable.joined(tables), list(zip(map(len, tables), divide_block(shares), places, strict=True))


def _save_table(folder: Path, table: RowTable) -> None:
    folder.mkdir()
    np.save(folder / "offsets.npy", table.offsets)
    np.save(folder / "starts.npy", table.pieces.starts)
    np.save(folder / "lengths.npy", table.pieces.lengths)


def _load_table(folder: Path) -> RowTable:
    offsets, starts, lengths = (
        np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("offsets", "starts", "lengths")
    )
    if not offsets[-1] == len(starts) == len(lengths):
        raise ValueError(f"{folder.name}: the files are of different rows")
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
            f"{names}: the vocabulary knows no token of the text; all words are new to it or longer than it "
            "takes: train one of type bpe, which can write every text"
        )
