"""`mlm prepare` and `mlm tokenizer`: preparation ahead of training, the cache, and vocabularies."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from mlm.config.commands import PrepareConfig, TokenizerInspectConfig, TokenizerTrainConfig
from mlm.config.data import CorpusConfig, SourceConfig
from mlm.data.cache import cache_folder, clean_cache, list_cache
from mlm.data.corpus import Corpus, prepare_corpus, prepare_store, train_on_text
from mlm.data.encoding import DocumentEncoder
from mlm.data.sampler import BLOCK_ROWS
from mlm.data.store import TokenStore
from mlm.data.text import Text
from mlm.files import format_bytes, write_text
from mlm.tokenizer import SpecialTokens, encode_documents, load_tokenizer, tokenizer_digest

INSPECTED_TOKENS = 16  # the longest ones are shown

log = logging.getLogger(__name__)


def prepare(config: PrepareConfig) -> None:
    """Prepare a corpus, list the cache, or clean it."""
    if config.list or config.clean is not None:
        cache = cache_folder(config.data.cache_dir)
        days = config.clean if isinstance(config.clean, int) else 0
        entries = list_cache(cache) if config.list else clean_cache(cache, days)
        total = format_bytes(sum(entry.size for entry in entries))
        print(f"{cache}: {'' if config.list else 'removed '}{total}")
        for entry in entries:
            print(entry.line(time.time()))
        return
    if config.shard is None:
        corpus = prepare_corpus(config.data, config.tokenizer)
        print("\n".join(["", *_store_table(corpus.store, config.data), *_rows_table(corpus)]))
        return
    _, store = prepare_store(config.data, config.tokenizer, config.machine)
    if store is None:
        print(f"shard {config.shard} is done; the machine that ends last finishes the token store")
    else:
        print("\n".join(["", *_store_table(store, config.data)]))


def _store_table(store: TokenStore, config: CorpusConfig) -> Iterator[str]:
    names = [source["path"] for source in store.sources]
    width = max(len(name) for name in [*names, "all sources"])
    yield f"{'source':{width}}  {'documents':>12}  {'tokens':>15}  unknown  duplicates  weight"
    weights = [f"{source.weight:g}" if source.weight else "-" for source in config.sources]
    lines: list[tuple[str, dict[str, Any], str]] = list(zip(names, store.sources, weights, strict=True))
    if len(lines) > 1:
        lines.append(("all sources", store.manifest, ""))
    for name, counts, weight in lines:
        unknown = counts["num_unknown"] / max(counts["num_tokens"], 1)
        duplicates = counts["num_duplicates"] / max(counts["num_documents"], 1)
        numbers = f"{counts['num_documents']:>12,}  {counts['num_tokens']:>15,}"
        yield f"{name:{width}}  {numbers}  {unknown:7.2%}  {duplicates:10.2%}  {weight:>6}"
    yield ""
    size = sum(file.stat().st_size for file in store.folder.rglob("*") if file.is_file())
    yield f"token store     {store.folder}  ({format_bytes(size)})"


def _rows_table(corpus: Corpus) -> Iterator[str]:
    for name, rows in (("training", corpus.train), ("validation", corpus.validation)):
        filled = rows.num_tokens(np.arange(len(rows))) / (len(rows) * rows.seq_len)
        yield f"{name:16}{len(rows):,} rows of {rows.seq_len}, {filled:.1%} of them text"
    parts = corpus.train.parts
    if parts:
        passes = [part.per_block / part.num_rows for part in parts]
        for part, times in zip(parts, passes, strict=True):
            share = f"{part.per_block / BLOCK_ROWS:.1%} of the rows, its {part.num_rows:,}"
            yield f"{'mix':16}{part.name}: {share} come {times / min(passes):.1f} times in the longest pass"
    yield f"vocabulary      {corpus.tokenizer.get_vocab_size():,} entries"


def train(config: TokenizerTrainConfig) -> None:
    """Train a vocabulary and write it."""
    text = Text(config.data)
    tokenizer = train_on_text(text, config.tokenizer)
    for report in text.reports:
        log.info("%s", report.summary())
    file = Path(config.output) / "tokenizer.json"
    write_text(file, tokenizer.to_str(pretty=True))
    print(f"{file}: {tokenizer.get_vocab_size():,} entries, digest {tokenizer_digest(tokenizer)}")


def inspect(config: TokenizerInspectConfig) -> None:
    """Print facts about a vocabulary, the tokens of some texts, and its fertility on some sources."""
    tokenizer = load_tokenizer(config.path)
    special = SpecialTokens.from_tokenizer(tokenizer)
    print(f"vocabulary      {config.path}, digest {tokenizer_digest(tokenizer)}")
    print(f"kind            {type(tokenizer.model).__name__}, {tokenizer.get_vocab_size():,} entries")
    names = [f"{tokenizer.id_to_token(number)} {number}" for number in special.ids]
    print(f"special tokens  {'  '.join(names)}")
    longest = sorted(tokenizer.get_vocab(), key=lambda token: (-len(token), token))[:INSPECTED_TOKENS]
    print(f"longest         {' '.join(longest)}")
    for sentence, ids in zip(config.text, encode_documents(tokenizer, config.text), strict=True):
        pieces = " ".join(str(tokenizer.id_to_token(number)) for number in ids)
        print(f"\n{sentence}\n{len(ids)} tokens: {pieces}")
    if config.sources:
        print(f"\n{'unknown':>8}  {'tokens/word':>11}  {'bytes/token':>11}  source")
    for source in config.sources:
        print(_fertility(tokenizer, source, special.unk, config.max_bytes))


def _fertility(tokenizer: Tokenizer, source: SourceConfig, unknown: int, max_bytes: int) -> str:
    """Return unknown tokens, tokens a word and bytes a token at the beginning of a source, in one line."""
    text = Text(CorpusConfig(sources=[replace(source, weight=None)]))
    encode = DocumentEncoder(tokenizer)
    words = num_bytes = num_tokens = num_unknown = 0
    for document in chain.from_iterable(text.by_source("measuring")):
        encoded = encode([document])
        words += len(document.split())
        num_bytes += int(encoded.num_bytes[0])
        num_tokens += len(encoded.ids)
        num_unknown += int((encoded.ids == unknown).sum())
        if num_bytes >= max_bytes:
            break
    rates = f"{num_tokens / max(words, 1):11.2f}  {num_bytes / max(num_tokens, 1):11.2f}"
    return f"{num_unknown / max(num_tokens, 1):8.2%}  {rates}  {source.path}"
