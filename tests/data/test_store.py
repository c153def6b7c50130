import pickle

import datasets
import numpy as np
import pytest

from mlm.data import store as store_module
from mlm.data.store import TokenStore, build_store
from mlm.tokenizer import encode_documents


@pytest.fixture
def store(tmp_path, documents, tokenizer):
    return build_store(tmp_path / "store", documents, tokenizer)


def test_every_document_comes_back(store, documents, tokenizer):
    expected = encode_documents(tokenizer, documents)
    spans = zip(store.documents.starts.tolist(), store.documents.lengths.tolist(), strict=True)
    assert [store.tokens(*span).tolist() for span in spans] == expected
    assert store.num_bytes.tolist() == [len(document.encode()) for document in documents]
    counts = np.bincount(np.concatenate(expected), minlength=120)
    assert store.counts(store.documents, 120).tolist() == counts.tolist()
    assert store.manifest["num_tokens"] == counts.sum()


def test_shards_change_nothing(store, tmp_path, documents, tokenizer, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_SHARD_TOKENS", 500)
    sharded = build_store(tmp_path / "sharded", documents, tokenizer)
    assert len(sharded.manifest["shards"]) > 5
    assert np.array_equal(sharded.documents.starts, store.documents.starts)
    for start, length in zip(store.documents.starts.tolist(), store.documents.lengths.tolist(), strict=True):
        assert np.array_equal(sharded.tokens(start, length), store.tokens(start, length))
    assert sharded.counts(sharded.documents, 120).tolist() == store.counts(store.documents, 120).tolist()
    some = store.documents.take(np.arange(300) % 7 < 3)
    assert sharded.counts(some, 120).tolist() == store.counts(some, 120).tolist()
    pieces = [store.tokens(*span) for span in zip(some.starts.tolist(), some.lengths.tolist(), strict=True)]
    assert store.counts(some, 120).tolist() == np.bincount(np.concatenate(pieces), minlength=120).tolist()


def test_datasets_opens_a_shard(store, documents, tokenizer):
    table = datasets.Dataset.from_file(str(store.folder / store.manifest["shards"][0]))
    assert table["input_ids"][7] == encode_documents(tokenizer, documents[7:8])[0]


def test_same_text_same_bytes(store, tmp_path, documents, tokenizer):
    again = build_store(tmp_path / "again", iter(documents), tokenizer)
    for name in store.manifest["shards"]:
        assert (again.folder / name).read_bytes() == (store.folder / name).read_bytes()


def test_equal_texts_have_equal_hashes(tmp_path, tokenizer):
    found = build_store(tmp_path / "s", ["the boat", "a lamp", "the boat"], tokenizer)
    hashes = found.text_hashes.tolist()
    assert hashes[0] == hashes[2] != hashes[1]


def test_documents_without_tokens_are_counted_and_left_out(tmp_path, tokenizer):
    found = build_store(tmp_path / "s", ["the boat", "\u200b", "a lamp"], tokenizer)
    assert found.manifest["num_documents"] == 2
    assert found.manifest["num_without_tokens"] == 1


def test_unknown_tokens_are_counted(tmp_path, tokenizer):
    assert build_store(tmp_path / "s", ["the \u4e16 boat \u754c"], tokenizer).manifest["num_unknown"] == 2


def test_a_failure_leaves_nothing(tmp_path, tokenizer):
    def broken():
        yield "the boat"
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        build_store(tmp_path / "s", broken(), tokenizer)
    assert list(tmp_path.iterdir()) == []


def test_a_loader_process_opens_it_anew(store):
    other = pickle.loads(pickle.dumps(store))
    assert isinstance(other, TokenStore)
    assert np.array_equal(other.tokens(0, 5), store.tokens(0, 5))
