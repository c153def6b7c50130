"""Token stores made of a list of texts, for tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer

from mlm.data.store import TokenStore, finish_store, write_shards


def build_store(folder: Path, documents: Iterable[str], tokenizer: Tokenizer) -> TokenStore:
    """Tokenize the documents of one source into a new store, in this process."""
    shards = write_shards(folder, [documents], tokenizer)
    store = finish_store(folder, shards, [{"path": "documents"}], {})
    assert store is not None
    return store
