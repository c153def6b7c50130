import json
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.data.corpus import prepare_corpus, prepare_evaluation, split_documents
from mlm.data.store import build_store


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
    assert "trained on and validated on" in caplog.text


def files_below(folder):
    """All files but the digest cache, which does not remember files that are still warm."""
    return sorted(os.path.join(d, f) for d, _, files in os.walk(folder) for f in files if f != "digests.json")


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
    content["normalizer"]["lowercase"] = False
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
