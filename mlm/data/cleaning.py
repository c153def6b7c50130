"""Duplicate documents of a token store; they stay in it and are left out of the rows made from it.

- exact: by the 64-bit hash of the text; two of a billion different texts share one with a probability of 3 %
- near: by MinHash (Broder 1997) of the runs of `RUN_TOKENS` tokens, so the vocabulary decides whether case
  and spaces count; the `rensa` package finds candidates and compares their signatures
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.config.errors import InputError
from mlm.files import format_bytes

RUN_TOKENS = 5
NUM_HASHES = 128  # in the signature of a document; the error of a similarity is about 1 / sqrt(NUM_HASHES)
HASH_PARTS = 16  # hashes are sorted in so many parts, one after the other, to save memory

Flags = npt.NDArray[np.bool_]

log = logging.getLogger(__name__)


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
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
