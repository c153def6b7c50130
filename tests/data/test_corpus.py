import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from stores import build_store

from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.data.corpus import (
    _store,
    prepare_corpus,
    prepare_evaluation,
    prepare_store,
    prepare_tokenizer,
    split_documents,
)
from mlm.data.text import Text
from mlm.tokenizer import encode_documents


def config(path, **options):
    return CorpusConfig(sources=[SourceConfig(str(path))], document="line", **{"seq_len": 32} | options)


VOCABULARY = TokenizerConfig(vocab_size=120)


@pytest.fixture
def text(tmp_path, documents):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(documents))
    return path


def spans(part):
    return set(zip(part.starts.tolist(), part.lengths.tolist(), strict=True))


def test_train_and_validation_share_nothing_and_lose_nothing(text, documents):
    corpus = prepare_corpus(config(text, validation_fraction=0.1), VOCABULARY)
    train, validation = (set() for _ in range(2))
    for rows, found in ((corpus.train, train), (corpus.validation, validation)):
        for start, length in zip(rows.table.pieces.starts, rows.table.pieces.lengths, strict=True):
            found |= set(range(int(start), int(start + length)))
    assert not train & validation
    assert len(train | validation) == corpus.store.documents.num_tokens
    assert 0.03 < len(validation) / corpus.store.documents.num_tokens < 0.2


def test_appending_moves_no_document_and_duplicates_stay_together(tmp_path, documents, tokenizer):
    before = build_store(tmp_path / "a", documents, tokenizer)
    after = build_store(tmp_path / "b", documents + documents[:100] + ["the lamp"] * 50, tokenizer)
    held = [spans(split_documents(store, 0.1, 10**9)[1]) for store in (before, after)]
    assert held[0] <= held[1]
    hashes = dict(zip(after.documents.starts.tolist(), after.text_hashes.tolist(), strict=True))
    inside = {hashes[start] for start, _ in held[1]}
    outside = {hashes[start] for start, _ in spans(split_documents(after, 0.1, 10**9)[0])}
    assert not inside & outside


def test_few_documents_are_divided_by_blocks_of_2000_tokens(tmp_path, documents, tokenizer):
    book = " ".join(documents)
    store = build_store(tmp_path / "a", [book, book + " the end"], tokenizer)
    train, validation = split_documents(store, 0.3, 10**9)
    starts = store.documents.starts
    for start, length in spans(train) | spans(validation):
        inside = start - starts[starts <= start].max()
        assert inside % 2000 == 0
        assert length <= 2000
    assert train.num_tokens + validation.num_tokens == store.documents.num_tokens
    assert validation.num_tokens > 0


@pytest.mark.parametrize("count", [1, 2, 3, 199, 200])
@pytest.mark.parametrize("fraction", [1e-9, 0.03, 1 - 1e-9])
def test_no_part_is_ever_empty(tmp_path, documents, tokenizer, count, fraction):
    store = build_store(tmp_path / "a", documents[:count], tokenizer)
    train, validation = split_documents(store, fraction, 10**9)
    assert train.num_tokens
    assert validation.num_tokens
    assert count == 1 or not spans(train) & spans(validation)


def test_validation_is_bounded_and_the_rest_of_it_is_not_trained_on(tmp_path, documents, tokenizer):
    store = build_store(tmp_path / "a", documents, tokenizer)
    train, validation = split_documents(store, 0.5, 10**9)
    same_train, bounded = split_documents(store, 0.5, 200)
    assert spans(train) == spans(same_train)
    assert spans(bounded) < spans(validation)
    assert bounded.num_tokens <= 200


def test_a_tiny_corpus_gives_one_row_and_a_warning(tmp_path, caplog):
    path = tmp_path / "tiny.txt"
    path.write_text("one sentence about a harbour\n")
    corpus = prepare_corpus(config(path, seq_len=512), VOCABULARY)
    assert (len(corpus.train), len(corpus.validation)) == (1, 1)
    assert "it is used for training and for validation" in caplog.text


def files_below(folder):
    """All files but the digest cache, which does not remember files that are still warm."""
    return sorted(os.path.join(d, f) for d, _, files in os.walk(folder) for f in files if f != "digests.json")


def test_validation_is_drawn_from_all_sources(tmp_path, documents):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join(f"{name} {document}" for document in documents))
    sources = [SourceConfig(str(tmp_path / f"{name}.txt")) for name in "ab"]
    options = CorpusConfig(
        sources=sources, document="line", validation_fraction=0.5, max_validation_tokens=500
    )
    corpus = prepare_corpus(options, VOCABULARY)
    boundary = corpus.store.sources[0]["num_tokens"]
    in_first = (corpus.validation.table.pieces.starts < boundary).mean()
    assert 0.2 < in_first < 0.8


def test_second_preparation_reuses_everything(text, caplog):
    prepare_corpus(config(text), VOCABULARY)
    cache = os.environ["MLM_CACHE"]
    before = files_below(cache)
    with caplog.at_level(logging.INFO):
        prepare_corpus(config(text), VOCABULARY)
    assert caplog.text.count("reusing") == 2
    assert files_below(cache) == before


def test_an_edited_file_is_read_again_even_with_the_same_time_and_size(text):
    first = prepare_corpus(config(text), VOCABULARY)
    stat = text.stat()
    text.write_text(text.read_text().replace("harbour", "harvest"))
    os.utime(text, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    second = prepare_corpus(config(text), VOCABULARY)
    assert second.store.folder != first.store.folder


def test_a_changed_tokenizer_at_the_same_path_gives_another_store(tmp_path, text, documents, tokenizer):
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    first = prepare_corpus(config(text), TokenizerConfig(path=str(path)))
    content = json.loads(path.read_text())
    assert content["normalizer"]["normalizers"].pop() == {"type": "Lowercase"}
    path.write_text(json.dumps(content))
    assert prepare_corpus(config(text), TokenizerConfig(path=str(path))).store.folder != first.store.folder


def test_one_store_serves_every_row_length_and_packing(text):
    stores = {
        prepare_corpus(config(text, seq_len=seq_len, packing=packing), VOCABULARY).store.folder
        for seq_len in (16, 64)
        for packing in ("isolate", "concat", "none")
    }
    assert len(stores) == 1


def test_max_documents_counts_documents_before_packing(text, documents, tokenizer):
    rows = prepare_evaluation(config(text, max_documents=2), tokenizer)
    assert rows.store.manifest["num_documents"] == 2
    assert rows.table.pieces.num_tokens == sum(map(len, encode_documents(tokenizer, documents[:2])))


def test_unigram_entropy_is_that_of_the_validation_tokens_under_training_counts(text):
    corpus = prepare_corpus(config(text, validation_fraction=0.2), VOCABULARY)

    def tokens(part):
        pieces = zip(part.table.pieces.starts.tolist(), part.table.pieces.lengths.tolist(), strict=True)
        return np.concatenate([corpus.store.tokens(*piece) for piece in pieces]).astype(int)

    size = corpus.tokenizer.get_vocab_size()
    train = np.bincount(tokens(corpus.train), minlength=size) + 1
    expected = -np.log(train / train.sum())[tokens(corpus.validation)].mean()
    assert corpus.unigram_entropy == pytest.approx(expected)


@pytest.mark.parametrize("content", ["", "\n \n\t\n"])
def test_text_without_documents_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=r"empty\.txt.*no documents"):
        prepare_corpus(config(path), VOCABULARY)


def test_several_processes_prepare_together(text):
    """All of them get the same store, and it is built once."""
    code = (
        "import sys; from mlm.config.data import *; from mlm.data.corpus import prepare_corpus;"
        "c = CorpusConfig(sources=[SourceConfig(sys.argv[1])], document='line', seq_len=32);"
        "print(prepare_corpus(c, TokenizerConfig(vocab_size=120)).store.folder)"
    )
    runs = [
        subprocess.Popen([sys.executable, "-c", code, str(text)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    folders = {run.communicate(timeout=120)[0].strip() for run in runs}
    assert len(folders) == 1
    assert all(run.returncode == 0 for run in runs)


# ---------------------------------------------------------------------------- copies, mixes, log


REPEATS = ["a lamp"] * 100 + ["the boat"] * 100 + [f"line {number} stands alone" for number in range(5)]


def repeats(tmp_path, **options):
    path = tmp_path / "repeats.txt"
    path.write_text("\n".join(REPEATS))
    return config(path, **options)


def tokens_of(part, store):
    pieces = zip(part.table.pieces.starts.tolist(), part.table.pieces.lengths.tolist(), strict=True)
    return [tuple(store.tokens(*piece).tolist()) for piece in pieces]


def test_duplicates_are_reported_and_left_out_on_request(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        corpus = prepare_corpus(repeats(tmp_path), VOCABULARY)
    assert (
        "duplicates: 198 of 205 documents (96.6%) repeat an earlier one; data.deduplicate=exact"
        in caplog.text
    )
    assert len(tokens_of(corpus.train, corpus.store) + tokens_of(corpus.validation, corpus.store)) == 205
    corpus = prepare_corpus(repeats(tmp_path, deduplicate="exact"), VOCABULARY)
    pieces = tokens_of(corpus.train, corpus.store) + tokens_of(corpus.validation, corpus.store)
    assert len(pieces) == len(set(pieces)) == 7
    rows = prepare_evaluation(repeats(tmp_path, deduplicate="exact"), corpus.tokenizer)
    first = [REPEATS.index(text) for text in dict.fromkeys(REPEATS)]
    assert sorted(rows.table.pieces.starts.tolist()) == rows.store.documents.starts[first].tolist()
    assert rows.num_bytes == sum(len(text.encode()) for text in set(REPEATS))


def test_a_copy_in_another_source_is_left_out(tmp_path, documents):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join(documents[:250]))
    sources = [SourceConfig(str(tmp_path / f"{name}.txt")) for name in "ab"]
    corpus = prepare_corpus(CorpusConfig(sources=sources, document="line", deduplicate="exact"), VOCABULARY)
    boundary = corpus.store.sources[0]["num_tokens"]
    assert (corpus.train.table.pieces.starts < boundary).all()
    assert corpus.store.sources[1]["num_duplicates"] == 250


def test_near_copies_are_left_out_and_remembered(tmp_path, documents, monkeypatch):
    pytest.importorskip("rensa")
    book = " ".join(documents[:40])
    path = tmp_path / "near.txt"
    path.write_text("\n".join([book, f"{book} the end", *documents[40:]]))
    options = config(path, deduplicate="near")
    corpus = prepare_corpus(options, VOCABULARY)
    second = int(corpus.store.documents.starts[1])
    used = [*corpus.train.table.pieces.starts, *corpus.validation.table.pieces.starts]
    assert 0 in used
    assert second not in used
    monkeypatch.setattr("mlm.data.corpus.first_of_similar", None)
    prepare_corpus(config(path, deduplicate="near", seq_len=64), VOCABULARY)


def test_weights_are_shares_of_the_training_tokens(tmp_path, documents):
    texts = {"large": documents, "small": [f"{document} {document}" for document in documents[:30]]}
    sources = []
    for (name, lines), weight in zip(texts.items(), (3, 1), strict=True):
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
        sources.append(SourceConfig(str(tmp_path / f"{name}.txt"), weight=weight))
    options = CorpusConfig(sources=sources, document="line", seq_len=32)
    corpus = prepare_corpus(options, VOCABULARY)
    parts, pieces, offsets = corpus.train.parts, corpus.train.table.pieces, corpus.train.table.offsets
    assert [part.name for part in parts] == [source.path for source in sources]
    assert sum(part.num_rows for part in parts) == len(corpus.train)
    end = offsets[parts[0].num_rows]
    boundary = corpus.store.sources[0]["num_tokens"]
    assert (pieces.starts[:end] < boundary).all()
    assert (pieces.starts[end:] >= boundary).all()
    tokens = [pieces.lengths[:end].sum(), pieces.lengths[end:].sum()]
    drawn = [part.per_block / part.num_rows * count for part, count in zip(parts, tokens, strict=True)]
    assert drawn[0] / sum(drawn) == pytest.approx(0.75, abs=1e-3)
    again = prepare_corpus(options, VOCABULARY)  # from the cache
    assert again.train.parts == parts
    plain = CorpusConfig(sources=[SourceConfig(source.path) for source in sources], document="line")
    assert prepare_corpus(plain, VOCABULARY).train.parts == ()


def test_a_vocabulary_follows_the_weights(tmp_path, documents):
    texts = {"a": documents, "b": [document[::-1] for document in documents]}
    for name, lines in texts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    vocabularies = []
    for weights in ((1, 1), (1, 50), (50, 1)):
        pairs = zip(texts, weights, strict=True)
        sources = [SourceConfig(str(tmp_path / f"{name}.txt"), weight=weight) for name, weight in pairs]
        options = CorpusConfig(sources=sources, document="line")
        small = TokenizerConfig(vocab_size=120, max_bytes=10_000)
        vocabularies.append(prepare_corpus(options, small).tokenizer.get_vocab())
    assert "harbour" in vocabularies[2]
    assert "harbour" not in vocabularies[1]
    assert len({str(sorted(vocabulary)) for vocabulary in vocabularies}) == 3


def test_a_source_with_nothing_to_train_on_gives_its_weight_away(tmp_path, documents, caplog):
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("\n".join(documents[:250]))
    sources = [SourceConfig(str(tmp_path / f"{name}.txt"), weight=1) for name in "ab"]
    corpus = prepare_corpus(CorpusConfig(sources=sources, document="line", deduplicate="exact"), VOCABULARY)
    assert [part.name for part in corpus.train.parts] == [sources[0].path]
    assert "no text is left to train on; its weight goes to the others" in caplog.text


def test_unknown_tokens_are_reported_by_source(tmp_path, tokenizer, caplog):
    vocabulary = tmp_path / "tokenizer.json"
    tokenizer.save(str(vocabulary))
    for name, text in (("good", "the boat\n"), ("bad", "the harbour waits\u03c8 every \u2602 lamp\n")):
        (tmp_path / f"{name}.txt").write_text(text)
    sources = [SourceConfig(str(tmp_path / f"{name}.txt")) for name in ("good", "bad")]
    with caplog.at_level(logging.INFO):
        prepare_corpus(CorpusConfig(sources=sources, document="line"), TokenizerConfig(path=str(vocabulary)))
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert any("bad.txt" in line and "of the tokens are unknown" in line for line in warnings)
    assert not any("good.txt" in line for line in warnings)
    assert "unknown tokens: 2 (" in caplog.text


def test_facts_are_logged_again_when_the_cache_is_reused(text, caplog):
    with caplog.at_level(logging.INFO):
        prepare_corpus(config(text), VOCABULARY)
        first = [record.message for record in caplog.records if record.message != "packing rows of 32 tokens"]
        caplog.clear()
        prepare_corpus(config(text), VOCABULARY)
    again = [record.message for record in caplog.records]
    for line in first[first.index(next(line for line in first if "median" in line)) :]:
        assert line in again
    assert any("300 documents, median" in line for line in again)


def test_lengths_and_bad_rows_are_part_of_the_key(tmp_path, documents):
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in documents))
    options = [{}, {"min_length": 60}, {"max_length": 120}, {"skip_bad_rows": True}, {"max_documents": 290}]
    stores = [prepare_corpus(config(path, **option), VOCABULARY).store for option in options]
    assert len({store.folder for store in stores}) == len(options)
    lengths = [len(document) for document in documents]
    counts = [store.manifest["num_documents"] for store in stores]
    assert counts == [300, sum(n >= 60 for n in lengths), sum(n <= 120 for n in lengths), 300, 290]


def test_opening_does_not_count_again(text, monkeypatch):
    corpus = prepare_corpus(config(text), VOCABULARY)
    monkeypatch.setattr("mlm.data.store.TokenStore.counts", None)
    again = prepare_corpus(config(text), VOCABULARY)
    assert again.unigram_entropy == corpus.unigram_entropy


def test_machines_prepare_one_corpus(text):
    stores = [prepare_store(config(text), VOCABULARY, (number, 2))[1] for number in (2, 1)]
    assert sum(store is not None for store in stores) == 1
    assert prepare_corpus(config(text), VOCABULARY).store.folder == next(s.folder for s in stores if s)


def test_file_that_changes_while_it_is_read_leaves_nothing_behind(text):
    tokenizer = prepare_tokenizer(Text(config(text)), VOCABULARY)
    for begin in (lambda read: prepare_tokenizer(read, VOCABULARY), lambda read: _store(read, tokenizer)):
        text.write_text(text.read_text() + "\nanother harbour")
        read = Text(config(text))
        text.write_text("another keeper\n" * 300)
        with pytest.raises(InputError, match=r"text\.txt: changed while it was read; nothing"):
            begin(read)
    assert not [*read.cache.glob("stores/[!.]*")]
    assert len([*read.cache.glob("tokenizers/[!.]*")]) == 1
    assert prepare_corpus(config(text), VOCABULARY).store.manifest["num_documents"] == 300


def test_copies_elsewhere_are_reused_under_their_own_names(tmp_path, documents):
    corpora = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        sources = [SourceConfig(str(tmp_path / folder / f"{folder}-{part}.txt"), weight=1) for part in "ab"]
        for number, source in enumerate(sources):
            Path(source.path).write_text("\n".join(documents[number::2]))
        mix = CorpusConfig(sources=sources, document="line", seq_len=32)
        corpora.append(prepare_corpus(mix, VOCABULARY))
    assert corpora[0].store.folder == corpora[1].store.folder
    names = [source.path for source in sources]
    assert [source["path"] for source in corpora[1].store.sources] == names
    assert [part.name for part in corpora[1].train.parts] == names
    assert corpora[1].store.sources[0]["summary"].startswith("two-a.txt: 1 file, line")


DAMAGES = [
    ("stores/*/manifest.json", b""),
    ("stores/*/manifest.json", b"{}"),
    ("stores/*/manifest.json", None),
    ("stores/*/shard-00000.arrow", b""),
    ("stores/*/shard-00000.arrow", b"\0" * 4096),
    ("stores/*/rows-*/facts.json", b"[]"),
    ("stores/*/rows-*/train/starts.npy", b""),
    ("stores/*/rows-*/train/lengths.npy", b"\x93NUMPY"),
    ("stores/*/rows-*/validation/offsets.npy", None),
    ("tokenizers/*/tokenizer.json", b"{"),
    ("tokenizers/*/tokenizer.json", None),
]


@pytest.mark.parametrize(("name", "content"), DAMAGES)
def test_damage_in_the_cache_is_one_line_and_removing_it_helps(text, name, content):
    before = prepare_corpus(config(text), VOCABULARY)
    cache = before.store.folder.parent.parent
    (file,) = cache.glob(name)
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    message = r"^\S+ is damaged \(.+\); remove it, and the next run makes it again"
    with pytest.raises(InputError, match=message) as error:
        prepare_corpus(config(text), VOCABULARY)
    damaged = Path(str(error.value).split(" is damaged")[0])
    assert damaged in file.parents
    assert "\n" not in str(error.value)
    shutil.rmtree(damaged)
    assert prepare_corpus(config(text), VOCABULARY).unigram_entropy == before.unigram_entropy


def test_missing_package_is_reported_before_any_work(text, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(InputError, match="near needs the package rensa"):
        prepare_corpus(config(text, deduplicate="near"), VOCABULARY)
    cache = Text(config(text)).cache
    assert not [*cache.glob("*/[!.]*")]


def test_text_without_a_word_is_named(tmp_path):
    path = tmp_path / "blank.txt"
    path.write_text("\u200b\n" * 3)
    with pytest.raises(InputError, match=r"blank\.txt: has no text to learn a vocabulary from"):
        prepare_corpus(config(path), VOCABULARY)


def test_giant_word_gets_the_right_remedy(tmp_path):
    path = tmp_path / "giant.txt"
    path.write_text("x" * 5000)
    with pytest.raises(InputError, match="is too long: train one of type bpe") as error:
        prepare_corpus(config(path), VOCABULARY)
    assert "on this text" not in str(error.value)


def test_few_unknown_tokens_that_are_much_of_the_text_are_told(tmp_path, caplog):
    """A word too long for WordPiece is one token, however much of the text it is."""
    lines = [" ".join(["boat mill tide wall"] * 30) + " " + "\u0e41" * 250 for _ in range(10)]
    path = tmp_path / "thai.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    corpus = prepare_corpus(config(path), VOCABULARY)
    facts = corpus.store.manifest
    assert facts["num_unknown"] == 10
    assert facts["num_unknown_bytes"] == 10 * 750
    assert "%" in next(line for line in caplog.text.splitlines() if "of the text and" in line)
