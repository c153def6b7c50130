"""The token store: a corpus as token ids on disk, memory-mapped, readable by any Arrow engine.

- a folder of Arrow IPC stream files, uncompressed, one record batch each (a "shard"), one row a document, and
  `manifest.json`; `datasets.Dataset.from_file` opens a shard as it is
- columns: `input_ids` (large_list of uint16 or uint32, no special tokens), `text_hash`, `num_bytes` (uint64)
- values and offsets are zero-copy numpy views: opening costs the same for any size
- written to a temporary folder and renamed: a folder with its final name is always whole
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer

from mlm.config.errors import InputError
from mlm.data.packing import Spans
from mlm.tokenizer import SpecialTokens, encode_documents

MAX_SHARD_TOKENS = 2**26
"""A shard is closed once it holds this many tokens: 128 MiB of uint16."""
STORE_VERSION = 1
"""Changes whenever the same text would give other bytes."""

log = logging.getLogger(__name__)


class TokenStore:
    """A finished store, opened read-only; tokens are addressed by their place in the whole corpus.

    Args:
        folder: what `build_store` wrote.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
        columns = [_open_shard(folder / name) for name in self.manifest["shards"]]
        self._values = [values for values, _, _, _ in columns]
        self._bases = np.cumsum([0] + [len(values) for values in self._values])
        starts = [
            offsets[:-1] + base for (_, offsets, _, _), base in zip(columns, self._bases[:-1], strict=True)
        ]
        self.documents = Spans(
            np.concatenate(starts), np.concatenate([np.diff(offsets) for _, offsets, _, _ in columns])
        )
        """One span a document, (N,)."""
        self.text_hashes: npt.NDArray[np.uint64] = np.concatenate([hashes for _, _, hashes, _ in columns])
        """(N,) hash of each document's text."""
        self.num_bytes: npt.NDArray[np.uint64] = np.concatenate([sizes for _, _, _, sizes in columns])
        """(N,) UTF-8 bytes of each document's text."""

    def tokens(self, start: int, length: int) -> npt.NDArray[np.unsignedinteger]:
        """Return a span inside one document, as a view of the file."""
        shard = int(np.searchsorted(self._bases, start, side="right")) - 1
        begin = start - int(self._bases[shard])
        return self._values[shard][begin : begin + length]

    def counts(self, spans: Spans, size: int) -> npt.NDArray[np.int64]:
        """Return how often each id below `size` occurs in some spans."""
        counts = np.zeros(size, np.int64)
        order = np.argsort(spans.starts, kind="stable")
        starts, ends = spans.starts[order], (spans.starts + spans.lengths)[order]
        # Neighbours are counted together, up to the end of a shard.
        first = np.ones(len(starts), bool)
        first[1:] = (starts[1:] != ends[:-1]) | np.isin(starts[1:], self._bases)
        for start, end in zip(starts[first], ends[np.roll(first, -1)], strict=True):
            for part in range(int(start), int(end), 2**22):  # bincount copies to int64: keep the copy small
                counts += np.bincount(self.tokens(part, min(2**22, int(end) - part)), minlength=size)
        return counts

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)  # a data loader process opens the files anew


def _open_shard(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    batch = pa.ipc.open_stream(pa.memory_map(str(path))).read_next_batch()
    ids = batch.column("input_ids")
    return (
        ids.values.to_numpy(zero_copy_only=True),
        ids.offsets.to_numpy(zero_copy_only=True),
        batch.column("text_hash").to_numpy(),
        batch.column("num_bytes").to_numpy(),
    )


@dataclass
class _Shard:
    """The documents of the shard being filled."""

    ids: list[npt.NDArray[Any]] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def write(self, path: Path) -> None:
        offsets = np.zeros(len(self.ids) + 1, np.int64)
        np.cumsum([len(ids) for ids in self.ids], out=offsets[1:])
        columns = {
            "input_ids": pa.LargeListArray.from_arrays(offsets, np.concatenate(self.ids)),
            "text_hash": pa.array(self.hashes, pa.uint64()),
            "num_bytes": pa.array(self.sizes, pa.uint64()),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        with path.open("wb") as file:
            with pa.ipc.new_stream(file, batch.schema) as writer:
                writer.write_batch(batch)
            file.flush()
            os.fsync(file.fileno())


def build_store(
    folder: Path,
    documents: Iterable[str],
    tokenizer: Tokenizer,
    facts: dict[str, Any] | None = None,
    progress: Callable[[int], None] | None = None,
) -> TokenStore:
    """Tokenize documents into a new store.

    Args:
        folder: final place of the store; must not exist.
        documents: the texts, streamed; at most one shard of tokens is held in memory.
        tokenizer: encodes them; literal special tokens in the text become ordinary pieces.
        facts: kept in the manifest.
        progress: called with the number of documents after each batch.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        temporary.mkdir(parents=True)
        manifest = _write_shards(temporary, documents, tokenizer, progress)
        if not manifest["shards"]:
            raise InputError(f"has no documents: none of {manifest['num_without_tokens']} has a token")
        manifest |= facts or {}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=1))
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return TokenStore(folder)


def _write_shards(
    folder: Path, documents: Iterable[str], tokenizer: Tokenizer, progress: Callable[[int], None] | None
) -> dict[str, Any]:
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32
    unknown = SpecialTokens.from_tokenizer(tokenizer).unk
    totals = {"num_documents": 0, "num_tokens": 0, "num_unknown": 0, "num_without_tokens": 0}
    shards: list[str] = []
    shard, held = _Shard(), 0

    def close() -> None:
        name = f"shard-{len(shards):05d}.arrow"
        shard.write(folder / name)
        shards.append(name)

    for texts in _batches(documents):
        for text, encoded in zip(texts, encode_documents(tokenizer, texts), strict=True):
            ids = np.array(encoded, dtype)
            if not len(ids):
                totals["num_without_tokens"] += 1
                continue
            if held and held + len(ids) > MAX_SHARD_TOKENS:
                close()
                shard, held = _Shard(), 0
            raw = text.encode()
            shard.ids.append(ids)
            shard.hashes.append(int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little"))
            shard.sizes.append(len(raw))
            held += len(ids)
            totals["num_documents"] += 1
            totals["num_tokens"] += len(ids)
            totals["num_unknown"] += int((ids == unknown).sum())
        if progress:
            progress(len(texts))
    if held:
        close()
    return {"version": STORE_VERSION, **totals, "shards": shards}


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts into batches that are worth the threads of the tokenizer but bounded in memory."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= 2**20 or len(batch) >= 4096:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
