from __future__ import annotations

import builtins
import logging
import tracemalloc

import numpy as np
import pytest

from mlm.config.errors import InputError
from mlm.data.store import _runs, distinct_texts, first_of_equals, first_of_similar


def brute_force(hashes: list[int]) -> list[bool]:
    return [value not in hashes[:place] for place, value in enumerate(hashes)]


@pytest.mark.parametrize("kinds", [1, 2, 30, 10**6])
@pytest.mark.parametrize("size", [0, 1, 500])
def test_the_first_of_equals_stays(kinds: int, size: int) -> None:
    draw = np.random.default_rng(0)
    values = draw.integers(0, 2**63, kinds, dtype=np.uint64) * np.uint64(2)
    hashes = values[draw.integers(0, kinds, size)]
    assert first_of_equals(hashes).tolist() == brute_force(hashes.tolist())


def test_equals_are_found_in_16_bytes_a_document() -> None:
    size = 500_000
    hashes = np.random.default_rng(0).integers(0, 2**63, size, dtype=np.uint64)
    tracemalloc.start()
    first_of_equals(hashes)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (peak + hashes.nbytes) / size <= 16


def jaccard(first: np.ndarray, second: np.ndarray) -> float:
    a, b = set(_runs(first)), set(_runs(second))
    return len(a & b) / len(a | b)


def similar_pairs() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    originals = [draw.integers(0, 8000, 200).astype(np.uint16) for _ in range(60)]
    copies = [document.copy() for document in originals]
    for number, copy in enumerate(copies):  # number // 3 tokens changed: from equal to quite different
        copy[draw.choice(200, number // 3, replace=False)] = 1
    return [*originals, *copies]


def test_similar_documents_are_found_as_by_comparing_all() -> None:
    pytest.importorskip("rensa")
    documents = similar_pairs()
    kept = np.ones(len(documents), np.bool_)
    kept[0] = False
    for similarity in (0.7, 0.8):
        stays = first_of_similar(documents, kept, similarity)
        assert stays[1:60].all()
        assert not stays[0]
        assert stays[60], "its original was left out before"
        for original, copy, stayed in zip(documents[1:60], documents[61:], stays[61:], strict=True):
            exact = jaccard(original, copy)
            if abs(exact - similarity) > 0.12:  # estimated to about 0.09
                assert stayed == (exact < similarity)
        assert np.array_equal(stays, first_of_similar(documents, kept, similarity))


def test_memory_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("rensa")
    with caplog.at_level(logging.INFO):
        first_of_similar(similar_pairs(), np.ones(120, np.bool_), 0.8)
    assert "index of 120 documents took" in caplog.text


def test_short_documents_are_compared_whole() -> None:
    pytest.importorskip("rensa")
    documents = [np.array(ids, np.uint16) for ids in ([1], [2], [1, 2], [1], [1, 2, 3, 4], [1, 2, 3, 4])]
    stays = first_of_similar(documents, np.ones(6, np.bool_), 0.8)
    assert stays.tolist() == [True, True, True, False, True, False]


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name == "rensa":
            raise ImportError
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match=r"near needs the package rensa: pip install 'mlm\[dedup\]'"):
        first_of_similar([], np.ones(0, np.bool_), 0.8)


def test_distinct_texts_keep_their_order() -> None:
    assert list(distinct_texts(iter(["b", "a", "b", "c", "a"]))) == ["b", "a", "c"]
