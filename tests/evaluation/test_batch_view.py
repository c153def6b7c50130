import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stores import build_store
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mlm.__main__ import main
from mlm.config.commands import InspectConfig
from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.data.collate import Rows
from mlm.data.corpus import prepare_corpus
from mlm.data.packing import pack_documents
from mlm.evaluation.batch_view import RowView, training_batch
from mlm.tokenizer import SpecialTokens

MARK = re.compile(r"\{([^{}>]+)(?:>([^{}]+))?\}")


@pytest.fixture
def config(tmp_path, documents):
    path = tmp_path / "text.txt"
    path.write_text("\n".join(documents))
    corpus = CorpusConfig([SourceConfig(str(path))], document="line", seq_len=32, num_proc=1)
    return InspectConfig(data=corpus, tokenizer=TokenizerConfig(vocab_size=120), name="x")


def shown(config):
    """What is printed of each row of the batch, on lines without end, and the batch itself."""
    corpus = prepare_corpus(config.data, config.tokenizer)
    drawn, batch = training_batch(config, corpus)
    view = RowView(corpus.train, corpus.tokenizer)
    return (
        [list(view.lines(row, drawn, batch, 10**6)) for row in range(len(drawn.rows))],
        batch,
        corpus,
        drawn,
    )


@pytest.mark.parametrize("packing", ["isolate", "concat", "none"])
@pytest.mark.parametrize(
    "tokenizer", [{}, {"vocab_size": 300, "type": "bpe"}, {"lowercase": False}], ids=["words", "bpe", "cased"]
)
def test_without_the_marks_it_is_the_text_and_the_marks_are_the_masks(config, packing, tokenizer):
    config = replace(
        config,
        data=replace(config.data, packing=packing),
        tokenizer=TokenizerConfig(**{"vocab_size": 120, **tokenizer}),
        masking=replace(config.masking, mask_rate=0.4, random_token_fraction=0.2, mask_token_fraction=0.5),
    )
    rows, batch, corpus, drawn = shown(config)
    original, numbers = corpus.train.render(drawn.rows)
    marks = [MARK.findall(" ".join(lines[1:])) for lines in rows]
    for ids, real, lines in zip(original, (numbers > 0).sum(1), rows, strict=True):
        text = " ".join(line.strip().partition(" ")[2] for line in lines[1:])
        text = MARK.sub(lambda mark: mark[1], text)
        expected = corpus.tokenizer.decode(ids[:real].tolist(), skip_special_tokens=False)
        assert re.sub(r"\s|Ġ", "", text) == re.sub(r"\s|(?<=\])##", "", expected)
        assert len(lines) - 1 == (ids == corpus.train.special.sep).sum()
    kinds = [mark[1] for found in marks for mark in found]
    assert len(kinds) == batch["num_masked"]
    assert kinds.count("[MASK]") == batch["num_hidden"]
    assert kinds.count("") == batch["num_masked"] - batch["num_hidden"] - batch["num_random"]


def test_words_are_whole_and_documents_apart(config):
    rows, *_ = shown(config)
    text = MARK.sub(lambda mark: mark[1], " ".join(line for lines in rows for line in lines))
    assert "the old keeper" in text
    assert "a letter from the north" in text
    assert all(line.strip()[0].isdigit() and "[CLS]" in line for lines in rows for line in lines[1:])


def test_parts_of_a_longer_document_are_told(config, documents):
    Path(config.data.sources[0].path).write_text(" ".join(documents))
    rows, *_ = shown(config)
    assert sum(line.startswith("  1+ [CLS]") for lines in rows for line in lines[1:]) >= 30


def test_an_unknown_kind_of_vocabulary_has_a_space_between_tokens(tmp_path):
    letters = {
        name: number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc"])
    }
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in letters], unk_id=1))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    tokenizer.add_special_tokens(list(letters)[:5])
    store = build_store(tmp_path / "store", ["abc"], tokenizer)
    special = SpecialTokens.from_tokenizer(tokenizer)
    rows = Rows(store, pack_documents(store.documents, 8, "isolate"), special, 8, "isolate")
    view = RowView(rows, tokenizer)
    ids = rows.render(np.array([0]))[0][0, :5]
    assert view._words(ids, ids, {2}) == ["[CLS]", "a", "{b}", "c", "[SEP]"]


def test_lines_are_as_wide_as_the_terminal_and_colours_do_not_count(config):
    corpus = prepare_corpus(config.data, config.tokenizer)
    drawn, batch = training_batch(config, corpus)
    plain, coloured = (RowView(corpus.train, corpus.tokenizer, colours) for colours in (False, True))
    lines = list(plain.lines(0, drawn, batch, 60))
    assert max(map(len, lines[1:])) <= 60 < len(" ".join(lines[1:]))
    painted = "\n".join(coloured.lines(0, drawn, batch, 60))
    assert painted.count("\x1b[0m") == (batch["labels"][0] >= 0).sum() > 0
    assert re.sub(r"\x1b\[[\d;]*m", "", painted) == "\n".join(lines)


def test_batches_of_two_steps_differ_and_one_step_is_always_the_same(config):
    corpus = prepare_corpus(config.data, config.tokenizer)
    first, again, later = (
        training_batch(replace(config, step=step), corpus)[1]["input_ids"] for step in (3, 3, 4)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, later)


def test_the_command_takes_the_options_of_training(config, capsys):
    words = [
        "--config",
        "bert-mini",
        "--data.sources",
        config.data.sources[0].path,
        "--data.document",
        "line",
    ]
    words += ["--data.seq_len", "32", "--tokenizer.vocab_size", "120", "--data.num_proc", "1"]
    words += ["--masking.final_mask_rate", "0.35", "--trainer.max_steps", "11", "--trainer.max_time", "null"]
    assert main(["inspect", *words, "--step", "10", "--rows", "2"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^step 10 +\d+ rows of 32, pass", out, re.MULTILINE)
    assert "masking asks for 35.0%" in out
    assert re.search(r"shown as +\[MASK\] \d+ \(\d\d\.\d%\), another token", out)
    assert out.count("\nrow ") == 2
    assert "\x1b" not in out
    assert main(["inspect", *words, "--trainer.max_time", "5m", "--rows", "0"]) == 0
    assert "this is the rate of its start" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["--step", "--rows"])
def test_counts_are_not_negative(word, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["inspect", word, "-1"])
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"mlm inspect: error: {word[2:]}=-1 must be at least 0\n"
