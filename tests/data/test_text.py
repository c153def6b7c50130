from __future__ import annotations

from itertools import chain, islice
from pathlib import Path

import pytest

from mlm.config.data import CorpusConfig, SourceConfig
from mlm.config.errors import InputError
from mlm.data.text import Text


def corpus(tmp_path: Path, *counts: int, weights: tuple[float | None, ...] = (), **options: object) -> Text:
    """A corpus of sources a, b, ... of so many documents each, all of 4 characters."""
    sources = []
    for number, count in enumerate(counts):
        path = tmp_path / f"{chr(97 + number)}.txt"
        path.write_text("".join(f"{path.stem}{line:03}\n" for line in range(count)))
        sources.append(SourceConfig(str(path), weight=weights[number] if weights else None))
    return Text(CorpusConfig(sources=sources, document="line", **options))  # type: ignore[arg-type]


def all_of(text: Text) -> list[str]:
    return list(chain.from_iterable(text.by_source("reading")))


def test_sources_come_in_order(tmp_path: Path) -> None:
    text = corpus(tmp_path, 3, 2)
    assert all_of(text) == ["a000", "a001", "a002", "b000", "b001"]
    assert [report.documents for report in text.reports] == [3, 2]
    assert text.share_read == 1.0


def test_first_documents_are_counted_over_all_sources(tmp_path: Path) -> None:
    assert all_of(corpus(tmp_path, 3, 2, 2, max_documents=4)) == ["a000", "a001", "a002", "b000"]
    assert list(corpus(tmp_path, 3, 2, 2, max_documents=4).sample(10**9)) == ["a000", "a001", "a002", "b000"]


def test_lengths_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"a\.txt: has no documents: 3 documents left out for their length"):
        all_of(corpus(tmp_path, 3, min_length=5))


def test_sample_takes_from_every_source_in_proportion(tmp_path: Path) -> None:
    taken = list(islice(corpus(tmp_path, 300, 100).sample(10**9), 40))
    assert 28 <= sum(document.startswith("a") for document in taken) <= 32
    taken = list(islice(corpus(tmp_path, 300, 100, weights=(1, 3)).sample(10**9), 40))
    assert 8 <= sum(document.startswith("a") for document in taken) <= 12
    assert list(corpus(tmp_path, 300, 100).sample(10**9))[:5] == ["a000", "b000", "a001", "a002", "a003"]


def test_whole_sample_is_the_whole_text(tmp_path: Path) -> None:
    text = corpus(tmp_path, 30, 10, 1)
    assert sorted(text.sample(10**9)) == sorted(all_of(text))


def test_digest_follows_what_is_read(tmp_path: Path) -> None:
    texts = [corpus(tmp_path, 3, 2), corpus(tmp_path, 3, 3), corpus(tmp_path, 3, 2, max_documents=9)]
    texts += [corpus(tmp_path, 3, 2, skip_bad_rows=True), corpus(tmp_path, 3, 2, min_length=1)]
    assert len({text.digest for text in texts}) == len(texts)
    assert corpus(tmp_path, 3, 2).digest == texts[0].digest
    assert corpus(tmp_path, 3, 2, weights=(1, 2)).digest == texts[0].digest
