"""The token store: a corpus as token ids on disk, memory-mapped, readable by any Arrow engine.

- a folder of Arrow IPC stream files ("shards"), uncompressed, one record batch each, one row a document, and
  `manifest.json`; columns `input_ids` (large_list of uint16 or uint32, no special tokens), `text_hash` and
  `num_bytes` (uint64)
- values and offsets are zero-copy numpy views: opening costs the same for any size
- documents are in the order of the sources; a shard holds documents of one source and is cut by characters,
  so it depends on the text alone: a killed run resumes with the missing shards, and several machines write
  a share of the shards each, to the same bytes
- shards are written into a folder ending in `PARTIAL`, which is renamed once it is complete
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from tokenizers import Tokenizer

from mlm.config.errors import InputError
from mlm.data.cache import PARTIAL, check_room, reading
from mlm.data.encoding import Encoded, encode_in_order
from mlm.data.packing import Spans
from mlm.files import disk_errors, format_bytes, remove, replacing
from mlm.tokenizer import SpecialTokens, text_groups

if TYPE_CHECKING:
    import datasets

SHARD_CHARACTERS = 2**25  # of text in a shard: some 16 MB of tokens
BATCH_CHARACTERS = 2**20  # documents are tokenized together up to about this much text
TABLES_SHARE = 0.2  # space that the row tables need, as a share of the store
STORE_VERSION = 2  # changes whenever the same text would give other bytes
COUNTED = 2**22  # tokens counted together: counting copies them to 64-bit integers
RUN_TOKENS = 5  # of documents compared for similarity
NUM_HASHES = 128  # in the signature of a document; the error of a similarity is about 1 / sqrt(NUM_HASHES)
HASH_PARTS = 16  # hashes are sorted in so many parts, one after the other, to save memory

Flags = npt.NDArray[np.bool_]

log = logging.getLogger(__name__)


class TokenStore:
    """A finished store, opened read-only; a token is addressed by its place in the whole corpus."""

    def __init__(self, folder: Path):
        self.folder = folder
        with reading(folder):
            self.manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text("utf-8"))
            self._maps = [_map_file(folder / name) for name in self.manifest["shards"]]
            self._shards = [_open_shard(mapped) for mapped in self._maps]
            self._values = [_view(shard.column("input_ids").values) for shard in self._shards]
        self._bases = np.cumsum([0] + [len(values) for values in self._values])

    @cached_property
    def documents(self) -> Spans:
        """One span a document, (N,)."""
        offsets = [_view(shard.column("input_ids").offsets) for shard in self._shards]
        starts = [part[:-1] + base for part, base in zip(offsets, self._bases[:-1], strict=True)]
        return Spans(np.concatenate(starts), np.concatenate([np.diff(part) for part in offsets]))

    @cached_property
    def text_hashes(self) -> npt.NDArray[np.uint64]:
        """(N,) hash of each document's text."""
        return np.concatenate([_view(shard.column("text_hash")) for shard in self._shards])

    @cached_property
    def num_bytes(self) -> npt.NDArray[np.uint64]:
        """(N,) UTF-8 bytes of each document's text."""
        return np.concatenate([_view(shard.column("num_bytes")) for shard in self._shards])

    @property
    def sources(self) -> list[dict[str, Any]]:
        """Facts about each source, in plain values: path, summary, numbers of documents, tokens and so on."""
        sources: list[dict[str, Any]] = self.manifest["sources"]
        return sources

    def as_dataset(self) -> datasets.Dataset:
        """Return the store as a memory-mapped `datasets.Dataset`: one row a document, column `input_ids`."""
        import datasets  # only now: it takes long to import

        shards = [datasets.Dataset.from_file(str(self.folder / name)) for name in self.manifest["shards"]]
        return datasets.concatenate_datasets(shards).select_columns("input_ids")

    def tokens(self, start: int, length: int) -> npt.NDArray[np.unsignedinteger]:
        """Return a span inside one document, as a view of the file."""
        shard = int(np.searchsorted(self._bases, start, side="right")) - 1
        begin = start - int(self._bases[shard])
        return self._values[shard][begin : begin + length]

    def counts(self, size: int, spans: Spans) -> npt.NDArray[np.int64]:
        """Return how often each id below `size` occurs in spans, which are in order, (size,)."""
        counts = np.zeros(size, np.int64)
        bounds = np.searchsorted(spans.starts, self._bases)
        for shard, values in enumerate(self._values):
            starts = spans.starts[bounds[shard] : bounds[shard + 1]] - self._bases[shard]
            ends = starts + spans.lengths[bounds[shard] : bounds[shard + 1]]
            # Spans that touch are counted together.
            first = np.flatnonzero(np.append(True, starts[1:] != ends[:-1])[: len(starts)])
            last = np.append(first[1:], len(ends))[: len(first)] - 1
            for start, end in zip(starts[first].tolist(), ends[last].tolist(), strict=True):
                for part in range(start, end, COUNTED):
                    counts += np.bincount(values[part : min(part + COUNTED, end)], minlength=size)
            self._maps[shard].madvise(mmap.MADV_DONTNEED)  # else all pages read stay in memory
        return counts

    def __reduce__(self) -> tuple[type[TokenStore], tuple[Path]]:
        return TokenStore, (self.folder,)  # a data loader process opens the files again


def write_shards(
    folder: Path,
    sources: Iterable[Iterable[str]],
    tokenizer: Tokenizer,
    processes: int = 1,
    machine: tuple[int, int] = (1, 1),
    share_read: Callable[[], float | None] = lambda: 1.0,
) -> list[int]:
    """Write the missing shards of a store, whose final place is `folder`; return how many each source has.

    Memory holds a shard of tokens and a few batches of text. Machine i of n, (i, n) counted from 1, writes
    every n-th shard. `share_read` returns the share of all text read so far, from which the space for the
    rest is estimated. `processes` is the number of cores that tokenize; it changes no byte. If the disk has
    no room, finished shards are kept.
    """
    partial = partial_folder(folder)
    with disk_errors(partial):
        partial.mkdir(parents=True, exist_ok=True)
    done = {path.name for path in partial.glob("shard-*")}
    if done:
        log.info("token store: resuming after %d finished shards", len(done))
    number, of = machine
    unknown = SpecialTokens.from_tokenizer(tokenizer).unk
    shards: list[int] = []
    batches = (
        (shard, texts)
        for shard, documents in groupby(_number_shards(sources, shards), key=itemgetter(0))
        if shard % of == number - 1 and _shard_name(shard) not in done
        for texts in text_groups(map(itemgetter(1), documents), BATCH_CHARACTERS)
    )
    try:
        with closing(encode_in_order(batches, tokenizer, processes)) as encoded:
            for shard, parts in groupby(encoded, key=itemgetter(0)):
                columns = _shard_columns([part for _, part in parts], unknown)
                # The shards to come are assumed to be as large as this one.
                following = (shard + 1) / (share_read() or 1.0) - (shard + 1)
                check_room(partial, columns.nbytes * (1 + max(following, 0) / of) * (1 + TABLES_SHARE))
                with (
                    replacing(partial / _shard_name(shard)) as temporary,
                    temporary.open("wb") as file,
                    pa.ipc.new_stream(file, columns.schema) as writer,
                ):
                    writer.write_batch(columns)
    except BaseException:
        if not any(partial.glob("shard-*")):
            remove(partial)
        raise
    return shards


def finish_store(
    folder: Path, shards: list[int], sources: list[dict[str, Any]], facts: dict[str, Any]
) -> TokenStore | None:
    """Write the manifest and give the store its name; None as long as shards of other machines are missing.

    `shards` is the result of `write_shards`; the counts are added to the facts about each of the `sources`;
    `facts` are further entries of the manifest.
    """
    partial = partial_folder(folder)
    names = [_shard_name(shard) for shard in range(sum(shards))]
    if not all((partial / name).exists() for name in names):
        return None
    with reading(partial):
        opened = [_open_shard(_map_file(partial / name)) for name in names]
    if not any(len(shard) for shard in opened):
        remove(partial)
        paths = ", ".join(source["path"] for source in sources)
        raise InputError(f"{paths}: the text gives no tokens: the vocabulary can write nothing of it")
    first = first_of_equals(np.concatenate([_view(shard.column("text_hash")) for shard in opened]))
    counted, begin, row = [], 0, 0
    for source, number in zip(sources, shards, strict=True):
        counts = _source_counts(opened[begin : begin + number])
        duplicates = int((~first[row : row + counts["num_documents"]]).sum())
        counted.append({**source, **counts, "num_duplicates": duplicates})
        begin, row = begin + number, row + counts["num_documents"]
    totals = {name: sum(source[name] for source in counted) for name in counted[0] if name.startswith("num_")}
    for leftover in partial.glob(".*"):  # of a process that was killed while it wrote
        remove(leftover)
    manifest = {"version": STORE_VERSION, **totals, **facts, "sources": counted, "shards": names}
    with replacing(partial / "manifest.json") as temporary:
        temporary.write_text(json.dumps(manifest, indent=1), "utf-8")
    partial.rename(folder)
    return TokenStore(folder)


def partial_folder(folder: Path) -> Path:
    """Return the folder of the shards of an unfinished store."""
    return folder.with_name(folder.name + PARTIAL)


def _shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.arrow"


def _number_shards(sources: Iterable[Iterable[str]], shards: list[int]) -> Iterator[tuple[int, str]]:
    """Yield each document with the number of its shard, and count the shards of each source."""
    shard = -1
    for documents in sources:
        before, room = shard, 0
        for text in documents:
            if room <= 0:
                shard, room = shard + 1, SHARD_CHARACTERS
            room -= len(text)
            yield shard, text
        shards.append(shard - before)


def _shard_columns(parts: list[Encoded], unknown: int) -> pa.RecordBatch:
    """Return the documents of a shard that have tokens; the metadata counts the others and unknown tokens."""
    ids, lengths, hashes, sizes, lost = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    filled = lengths > 0
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[filled])])
    columns = {
        "input_ids": pa.LargeListArray.from_arrays(offsets, ids),
        "text_hash": pa.array(hashes[filled]),
        "num_bytes": pa.array(sizes[filled]),
    }
    counts = {"num_without_tokens": (~filled).sum(), "num_unknown": (ids == unknown).sum()}
    counts["num_unknown_bytes"] = lost.sum()
    metadata = {name: str(int(count)) for name, count in counts.items()}
    return pa.RecordBatch.from_pydict(columns).replace_schema_metadata(metadata)


def _map_file(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _open_shard(mapped: mmap.mmap) -> pa.RecordBatch:
    return pa.ipc.open_stream(pa.py_buffer(mapped)).read_next_batch()


def _view(column: pa.Array) -> npt.NDArray[Any]:
    """Return the numbers of a column without a copy; its own `to_numpy` imports pandas, 35 MB and 0.4 s."""
    return np.from_dlpack(column)


def _source_counts(shards: list[pa.RecordBatch]) -> dict[str, int]:
    counts = {
        "num_documents": sum(len(shard) for shard in shards),
        "num_tokens": sum(len(shard.column("input_ids").values) for shard in shards),
        "num_bytes": sum(int(_view(shard.column("num_bytes")).sum()) for shard in shards),
    }
    for name in ("num_unknown", "num_unknown_bytes", "num_without_tokens"):
        # Shards of an earlier version do not count the bytes.
        counts[name] = sum(int(shard.schema.metadata.get(name.encode(), 0)) for shard in shards)
    return counts


# ------------------------------------------------------------------------------------ duplicate documents
#
# They stay in the store and are left out of the rows made from it. Exact: by the 64-bit hash of the text; two
# of a billion different texts share one with a probability of 3 %. Near: by MinHash (Broder 1997) of the runs
# of RUN_TOKENS tokens, so the vocabulary decides whether case and spaces count; the rensa package finds
# candidates and compares their signatures.


def first_of_equals(text_hashes: npt.NDArray[np.uint64]) -> Flags:
    """Return (N,) true for the first document of each hash (N,), in 16 bytes a document, hashes included."""
    first = np.zeros(len(text_hashes), np.bool_)
    parts = text_hashes.view(np.uint8)[::8] % np.uint8(HASH_PARTS)  # one of the bytes of each hash
    for part in range(HASH_PARTS):
        places = np.flatnonzero(parts == part)
        _, found = np.unique(text_hashes[places], return_index=True)
        first[places[found]] = True
    return first


def near_index() -> Any:
    """Return the class that finds near-duplicates, or raise InputError if its package is not installed."""
    try:
        from rensa import RMinHashDeduplicator
    except ImportError:
        rule = "needs the package rensa: pip install 'mlm[dedup]'; exact works without"
        raise InputError(f"data.deduplicate=near {rule}") from None
    return RMinHashDeduplicator


def first_of_similar(documents: Iterable[npt.NDArray[np.integer]], kept: Flags, similarity: float) -> Flags:
    """Return (N,) true for the documents of `kept` (N,) that are not similar to an earlier one that stays.

    From the estimated Jaccard `similarity` of their runs two documents, arrays of tokens, count as similar.
    """
    make_index, before = near_index(), _memory()
    # With b parts of a signature looked up, half of the pairs of similarity (1/b)^(b/NUM_HASHES) become
    # candidates, which are compared: enough parts to miss few similar documents.
    fitting = (bands for bands in (16, 32, 64) if bands ** (-bands / NUM_HASHES) < 0.9 * similarity)
    bands = next(fitting, NUM_HASHES)
    index = make_index(similarity, NUM_HASHES, use_lsh=True, num_bands=bands, seed=42)
    runs = ((str(place), _runs(tokens)) for place, tokens in enumerate(documents) if kept[place])
    different = index.add_pairs(runs)
    stays = kept.copy()
    stays[kept] = different
    memory = format_bytes(max(_memory() - before, 0))
    log.info("near-duplicates: an index of %s documents took %s of memory", f"{len(different):,}", memory)
    return stays


def _runs(tokens: npt.NDArray[np.integer]) -> list[bytes]:
    """Return every run of tokens in a document, as bytes; a shorter document is one run."""
    raw, width = tokens.tobytes(), tokens.itemsize
    last = max(len(raw) - RUN_TOKENS * width, 0)
    return [raw[start : start + RUN_TOKENS * width] for start in range(0, last + 1, width)]


def distinct_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yield each text once, keeping 8 bytes of each in memory."""
    seen: set[bytes] = set()
    for text in texts:
        key = hashlib.blake2b(text.encode(), digest_size=8).digest()
        if key not in seen:
            seen.add(key)
            yield text


def _memory() -> int:
    """Return the resident memory of this process in bytes; 0 where /proc is missing."""
    try:
        return int(Path("/proc/self/statm").read_text("utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
