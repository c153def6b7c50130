"""From sources to rows, each stage cached under a key of everything that decides it.

    sources --read--> documents --encode--> token store --split, pack--> row tables --permute, mask--> batches
    sources.py        (str) encoding.py     store.py      packing.py                sampler.py, collate.py

- vocabulary: key of the source contents and the tokenizer settings
- token store: key of the source contents and the tokenizer's bytes
- row tables: in the store's folder, key of row length, packing, held-out part, deduplication and weights; own
  validation text has a store of its own, whose key is added
"""

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tqdm import tqdm

from mlm.config.data import CorpusConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.config.parse import to_plain
from mlm.cores import available_cores
from mlm.counter import uniform
from mlm.data.cache import content_key, locked, mark_used, reading
from mlm.data.collate import Rows
from mlm.data.formats import short_name
from mlm.data.packing import RowTable, Spans, cut_spans, pack_documents
from mlm.data.sampler import Part, divide_block
from mlm.data.store import (
    STORE_VERSION,
    TokenStore,
    distinct_texts,
    finish_store,
    first_of_equals,
    first_of_similar,
    near_index,
    partial_folder,
    write_shards,
)
from mlm.data.text import Text
from mlm.data.vocabulary import TOKENIZER_VERSION, train_tokenizer
from mlm.files import format_bytes, remove, replacing, shorten
from mlm.tokenizer import SpecialTokens, extra_special_tokens, load_tokenizer, num_ids, tokenizer_digest

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

FEW_DOCUMENTS = 200  # below so many the held-out part is made of blocks instead of whole documents
BLOCK_TOKENS = 2000  # of such a block
UNKNOWN_WARNING_RATE = 0.01  # share of the tokens, or of the text, that causes a warning if unknown
ROWS_VERSION = 5  # changes whenever the same store would give other rows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus."""

    tokenizer: Tokenizer
    store: TokenStore
    train: Rows
    validation: Rows
    unigram_entropy: float
    """Cross-entropy of the validation tokens under the training counts plus one, in nats."""


def prepare_corpus(config: CorpusConfig, tokenizer_config: TokenizerConfig) -> Corpus:
    """Read, tokenize, clean, split and pack a corpus, or reuse the cache."""
    tokenizer, store = prepare_store(config, tokenizer_config)
    assert store is not None, "one machine writes all shards"
    own = config.validation_text
    held_out = _store(Text(own), tokenizer) if own else None
    corpus = _split_and_pack(store, config, tokenizer, held_out)
    for name, rows in (("training", corpus.train), ("validation", corpus.validation)):
        tokens = rows.table.pieces.num_tokens
        log.info("%s: %s tokens in %s rows of %d", name, f"{tokens:,}", f"{len(rows):,}", config.seq_len)
    return corpus


def prepare_evaluation(config: CorpusConfig, tokenizer: Tokenizer) -> Rows:
    """Read and pack the whole of a corpus for evaluation with a given tokenizer."""
    store = _store(Text(config), tokenizer)
    assert store is not None, "one machine writes all shards"
    documents = store.documents.take(_kept(store, config))
    _count_ordinary(store, documents, config, tokenizer)
    table = pack_documents(documents, config.seq_len, config.packing)
    return Rows(store, table, SpecialTokens.from_tokenizer(tokenizer), config.seq_len, config.packing)


def prepare_store(
    config: CorpusConfig, tokenizer_config: TokenizerConfig, machine: tuple[int, int] = (1, 1)
) -> tuple[Tokenizer, TokenStore | None]:
    """Prepare the vocabulary, and the token store or the share of machine i of n, `machine`.

    The store is None while other machines have shards to write.
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
    trained = to_plain(replace(config, add_tokens=None))
    key = content_key(text.digest, weights, distinct, trained, TOKENIZER_VERSION)
    folder = text.cache / "tokenizers" / key
    with locked(folder):
        if folder.exists():
            log.info("vocabulary: reusing %s", folder)
        else:
            if text.config.deduplicate == "near":  # its package may be missing: seen before hours of reading
                near_index()
            log.info("training a %s vocabulary of %s entries", config.type, f"{config.vocab_size:,}")
            tokenizer = train_on_text(text, config)
            text.check_unchanged()
            facts = {**to_plain(config), "sources": [{"path": source.path} for source in text.sources]}
            with replacing(folder) as temporary:
                temporary.mkdir()
                (temporary / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
                (temporary / "facts.json").write_text(json.dumps(facts, indent=1), "utf-8")
    mark_used(folder)
    with reading(folder):
        tokenizer = load_tokenizer(folder)
    return load_tokenizer(folder, config.add_tokens) if config.add_tokens else tokenizer


def train_on_text(text: Text, config: TokenizerConfig) -> Tokenizer:
    """Train a vocabulary on a sample of the text, each document once if the corpus is deduplicated."""
    documents: Iterable[str] = text.sample(config.max_bytes)
    if text.config.deduplicate != "none":
        documents = distinct_texts(documents)
    return train_tokenizer(documents, config, name=text.name)


def _store(text: Text, tokenizer: Tokenizer, machine: tuple[int, int] = (1, 1)) -> TokenStore | None:
    """Open or build the token store, or write a machine's share of its shards."""
    # Stores from before extra special tokens were recognised have pieces of them.
    marks = ["marks"] if extra_special_tokens(tokenizer) else []
    digest = tokenizer_digest(tokenizer)
    folder = text.cache / "stores" / content_key(text.digest, digest, STORE_VERSION, *marks)
    with locked(folder, "-{}-of-{}".format(*machine)):
        if folder.exists():
            log.info("token store: reusing %s", folder)
        else:
            if text.config.deduplicate == "near":
                near_index()
            log.info("token store: tokenizing into %s", folder)
            sources = text.by_source("tokenizing")
            cores = text.config.num_proc or available_cores()
            shards = write_shards(folder, sources, tokenizer, cores, machine, lambda: text.share_read)
            try:
                text.check_unchanged()
            except InputError:
                remove(partial_folder(folder))
                raise
            pairs = zip(text.config.sources, text.reports, strict=True)
            read = [{"path": source.path, "summary": report.summary()} for source, report in pairs]
            with locked(folder):
                if not folder.exists():
                    finish_store(folder, shards, read, {"tokenizer": digest, "text": text.digest})
                if not folder.exists():
                    return None
    mark_used(folder)
    store = TokenStore(folder)
    # The store may have been made from copies of the files elsewhere: name the files of this run.
    for known, source, file in zip(store.sources, text.config.sources, text.sources, strict=True):
        known["path"] = source.path
        known["summary"] = f"{short_name(file.path)}: {known['summary'].partition(': ')[2]}"
    _log_facts(store, text.config)
    return store


def _log_facts(store: TokenStore, config: CorpusConfig) -> None:
    for source in store.sources:
        log.info("%s", source["summary"])
        rate = source["num_unknown"] / max(source["num_tokens"], 1)
        share = source.get("num_unknown_bytes", 0) / max(source["num_bytes"], 1)
        if max(rate, share) > UNKNOWN_WARNING_RATE:
            text = "%s: %.1f %% of the text and %.1f %% of the tokens are unknown; type bpe leaves none"
            log.warning(text, source["path"], 100 * share, 100 * rate)
    facts = store.manifest
    tokens, unknown = facts["num_tokens"], facts["num_unknown"]
    log.info("token store: %s tokens, %s of text", f"{tokens:,}", format_bytes(facts["num_bytes"]))
    if unknown:
        share = 100 * facts.get("num_unknown_bytes", 0) / facts["num_bytes"]
        text = "unknown tokens: %s (%.2f %%), %.2f %% of the text"
        log.info(text, f"{unknown:,}", 100 * unknown / tokens, share)
    if facts["num_without_tokens"]:
        log.info("documents without tokens, left out: %s", f"{facts['num_without_tokens']:,}")
    if facts["num_duplicates"]:
        number, documents = facts["num_duplicates"], facts["num_documents"]
        share = f"{number:,} of {documents:,} documents ({number / documents:.1%})"
        kept = config.deduplicate == "none"
        advice = "data.deduplicate=exact leaves them out" if kept else "they are left out of the rows"
        log.info("duplicates: %s repeat an earlier one; %s", share, advice)


def _kept(store: TokenStore, config: CorpusConfig) -> Bools:
    """Return which documents are used, (N,); near-duplicates take long to find, so the answer is saved."""
    if config.deduplicate == "none":
        return np.ones(store.manifest["num_documents"], np.bool_)
    first = first_of_equals(store.text_hashes)
    if config.deduplicate == "exact":
        return first
    path = store.folder / f"kept-near-{config.near_similarity}.npy"
    with locked(path):
        if not path.exists():
            spans = zip(store.documents.starts.tolist(), store.documents.lengths.tolist(), strict=True)
            # A progress bar on a terminal only.
            spans = tqdm(spans, "near-duplicates", len(first), leave=False, disable=None)
            kept = first_of_similar((store.tokens(*span) for span in spans), first, config.near_similarity)
            with replacing(path) as temporary, temporary.open("wb") as file:
                np.save(file, kept)
    with reading(path):
        return np.load(path)


def split_documents(
    store: TokenStore, fraction: float, max_validation_tokens: int, kept: Bools | None = None
) -> tuple[Spans, Spans]:
    """Divide the `kept` (N,) documents of a corpus into the spans for training and for validation.

    A document is held out when the hash of its content is below `fraction`: duplicates are in one part, and
    text added later moves no document. The validation tokens are drawn from the whole held-out part. With few
    documents, blocks of them are divided instead. No part is ever empty; a corpus of a single unit is in both
    parts, with a warning.
    """
    units, hashes = store.documents, store.text_hashes
    if kept is not None:
        units, hashes = units.take(kept), hashes[kept]
    block: Ints = np.zeros(len(hashes), np.int64)
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
        log.warning("the corpus is a single piece of text: it is used for training and for validation")
        return units, units
    validation = units.take(held_out)
    fits = _drawn(validation, share[held_out], max_validation_tokens)
    return units.take(~held_out), validation.take(fits)


def _split_and_pack(
    store: TokenStore, config: CorpusConfig, tokenizer: Tokenizer, own: TokenStore | None = None
) -> Corpus:
    """Clean, split and pack a store, or open its row tables from the cache; `own` is validation text."""
    special = SpecialTokens.from_tokenizer(tokenizer)
    weights = [source.weight for source in config.sources]
    key = content_key(
        [config.seq_len, config.packing, config.validation_fraction, config.max_validation_tokens],
        [config.deduplicate, config.near_similarity, weights, ROWS_VERSION],
        *([own.folder.name] if own else []),
    )
    folder = store.folder / f"rows-{key}"
    with locked(folder):
        if not folder.exists():
            log.info("packing rows of %d tokens", config.seq_len)
            overlap: list[int] = []
            kept = None if config.deduplicate == "none" else _kept(store, config)
            fraction, bound = config.validation_fraction, config.max_validation_tokens
            if own is None:
                train, validation = split_documents(store, fraction, bound, kept)
            else:
                train = store.documents if kept is None else store.documents.take(kept)
                validation, overlap = _own_validation(own, store, config)
            counts = [
                _count_ordinary(of, spans, config, tokenizer)
                for of, spans in ((store, train), (own or store, validation))
            ]
            extra = extra_special_tokens(tokenizer)
            if never := [token for token, id_ in extra.items() if not counts[0][id_]]:
                log.warning("special tokens that the text lacks are never trained: %s", shorten(never, 8))
            table, mix = _pack_mix(store, train, config)
            validation_table = pack_documents(validation, config.seq_len, config.packing)
            with replacing(folder) as temporary:
                temporary.mkdir()
                _save_table(temporary / "train", table)
                _save_table(temporary / "validation", validation_table)
                # -sum_v q(v) ln p(v): q are the validation shares, p those of the training counts plus one
                log_share = np.log((counts[0] + 1) / (counts[0].sum() + len(counts[0])))
                entropy = float(-(counts[1] * log_share).sum() / counts[1].sum())
                facts = {"parts": mix, "unigram_entropy": entropy, "overlap": overlap}
                (temporary / "facts.json").write_text(json.dumps(facts), "utf-8")
    with reading(folder):
        facts = json.loads((folder / "facts.json").read_text("utf-8"))
        names = [source.path for source in config.sources]
        parts = tuple(Part(rows, per_block, names[source]) for rows, per_block, source in facts["parts"])
        shape, held_out = (special, config.seq_len, config.packing), own or store
        counted = np.cumsum([0] + [source["num_tokens"] for source in held_out.sources[:-1]]).tolist()
        bounds = tuple(counted if config.validated_sources else ())
        train_rows = Rows(store, _load_table(folder / "train"), *shape, parts)
        validation_rows = Rows(held_out, _load_table(folder / "validation"), *shape, bounds=bounds)
        entropy = facts["unigram_entropy"]
        if own:
            shared, number = facts["overlap"]
            level = logging.WARNING if shared else logging.INFO
            text = "%s of %s validation documents are in the training text"
            log.log(level, text, f"{shared:,}", f"{number:,}")
    return Corpus(tokenizer, store, train_rows, validation_rows, entropy)


def _own_validation(own: TokenStore, store: TokenStore, config: CorpusConfig) -> tuple[Spans, list[int]]:
    """Return the documents to validate on; how many of them the training text has too, and their number.

    Beyond `max_validation_tokens` they are drawn by the hash of their content, as a held-out part is.
    """
    kept = _kept(own, config)
    documents, hashes = own.documents.take(kept), own.text_hashes[kept]
    fits = _drawn(documents, uniform(hashes.view(np.int64)), config.max_validation_tokens)
    if not fits.all():
        used, bound = f"{int(fits.sum()):,} of {len(fits):,}", config.max_validation_tokens
        log.info("validating on %s documents: data.max_validation_tokens=%s", used, bound)
    shared = np.isin(hashes[fits], store.text_hashes)
    return documents.take(fits), [int(shared.sum()), len(shared)]


def _drawn(units: Spans, share: npt.NDArray[np.float64], max_tokens: int) -> Bools:
    """Return (N,) true for the units with the lowest `share` (N,) that have `max_tokens`, at least one."""
    order = np.argsort(share, kind="stable")
    fits = np.zeros(len(order), np.bool_)
    fits[order] = np.cumsum(units.lengths[order]) <= max_tokens
    fits[order[0]] = True
    return fits


def _pack_mix(
    store: TokenStore, train: Spans, config: CorpusConfig
) -> tuple[RowTable, list[tuple[int, int, int]]]:
    """Pack the training part; with weights by source, and return (rows, rows a block, index) of each."""
    weights = [source.weight for source in config.sources]
    if None in weights:
        return pack_documents(train, config.seq_len, config.packing), []
    bounds = np.cumsum([0] + [source["num_tokens"] for source in store.sources])
    tables, shares, places = [], [], []
    for place, (source, weight) in enumerate(zip(store.sources, weights, strict=True)):
        begin, end = bounds[place : place + 2]
        spans = train.take((train.starts >= begin) & (train.starts < end))
        if not spans.num_tokens:
            log.warning("%s: no text is left to train on; its weight goes to the others", source["path"])
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
    names = ("offsets", "starts", "lengths")
    offsets, starts, lengths = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in names)
    if not offsets[-1] == len(starts) == len(lengths):
        raise ValueError(f"{folder.name}: the files are of different rows")
    return RowTable(offsets, Spans(starts, lengths))


def _count_ordinary(store: TokenStore, spans: Spans, config: CorpusConfig, tokenizer: Tokenizer) -> Ints:
    """Return how often each id occurs; refuse text without a token to predict: every loss would be 0."""
    counts = store.counts(num_ids(tokenizer), spans)
    if counts.sum() == counts[list(SpecialTokens.from_tokenizer(tokenizer).ids)].sum():
        names = ", ".join(source.path for source in config.sources)
        why = "every word has a new character or is too long: train one of type bpe, which can write any text"
        raise InputError(f"{names}: the vocabulary knows no token of the text; {why}")
    return counts
