"""Texts of their own to validate on: `data.validation`."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlm.__main__ import main
from mlm.config.commands import EvaluateConfig
from mlm.config.data import CorpusConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.data.corpus import prepare_corpus, prepare_evaluation
from mlm.startup.checks import check_sources

VOCABULARY = TokenizerConfig(vocab_size=120)


@pytest.fixture
def files(tmp_path, documents):
    parts = {"train": documents[:200], "other": documents[200:240], "mixed": documents[190:240]}
    for name, lines in parts.items():
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    return {name: str(tmp_path / f"{name}.txt") for name in parts}


def config(files, *validation, **options):
    own = [SourceConfig(files[name]) for name in validation]
    given = {"seq_len": 32, "document": "line"} | options
    return CorpusConfig(sources=[SourceConfig(files["train"])], validation=own, **given)


def tokens_of(rows):
    pieces = rows.table.pieces
    spans = zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
    return sorted(tuple(rows.store.tokens(*span).tolist()) for span in spans)


@pytest.mark.parametrize("options", [{}, {"deduplicate": "exact"}, {"packing": "concat"}, {"min_length": 20}])
def test_all_of_the_training_text_is_trained_on_and_the_own_text_validated_on(files, options):
    given = config(files, "other", **options)
    corpus = prepare_corpus(given, VOCABULARY)
    whole = prepare_evaluation(replace(given, validation=[]), corpus.tokenizer)
    alone = prepare_evaluation(replace(given, sources=given.validation, validation=[]), corpus.tokenizer)
    for rows, expected in ((corpus.train, whole), (corpus.validation, alone)):
        assert tokens_of(rows) == tokens_of(expected)
        assert len(rows) == len(expected)
    shared = prepare_corpus(replace(given, validation=[]), VOCABULARY)
    assert shared.store.folder == corpus.store.folder


@pytest.mark.parametrize("validation", [["other"], ["mixed"], ["other", "mixed"]])
def test_validation_documents_in_the_training_text_are_counted(files, validation, caplog, documents):
    lines = [line for name in validation for line in Path(files[name]).read_text().split("\n")]
    expected = sum(line in set(documents[:200]) for line in lines)
    for _ in range(2):  # prepared, and from the cache
        with caplog.at_level("INFO"):
            prepare_corpus(config(files, *validation), VOCABULARY)
        found = f"{expected} of {len(lines)} validation documents are in the training text"
        assert caplog.messages.count(found) == 1
        caplog.clear()


def test_a_bound_takes_a_part_of_the_own_text_and_the_training_text_stays(files):
    whole, part = (
        prepare_corpus(config(files, "other", max_validation_tokens=bound), VOCABULARY)
        for bound in (10**6, 300)
    )
    assert 0 < part.validation.table.pieces.num_tokens <= 300 < whole.validation.table.pieces.num_tokens
    assert set(tokens_of(part.validation)) <= set(tokens_of(whole.validation))
    assert tokens_of(part.train) == tokens_of(whole.train)


def test_the_entropy_is_that_of_the_own_text_under_the_training_counts(files):
    corpus = prepare_corpus(config(files, "other"), VOCABULARY)
    size = corpus.tokenizer.get_vocab_size()
    train, held_out = (
        np.bincount([token for piece in tokens_of(rows) for token in piece], minlength=size)
        for rows in (corpus.train, corpus.validation)
    )
    share = (train + 1) / (train + 1).sum()
    expected = -(held_out * np.log(share)).sum() / held_out.sum()
    assert corpus.unigram_entropy == pytest.approx(expected)


def test_options_of_one_source_are_read_and_only_the_training_text_counts_documents(files, tmp_path):
    table = tmp_path / "held.csv"
    table.write_bytes("body,id\ncaf\xe9 lamp,1\nthe lamp,2\n".encode("latin-1"))
    source = SourceConfig(str(table), text_column="body", encoding="latin-1")
    given = replace(config(files, max_documents=100), validation=[source])
    corpus = prepare_corpus(given, VOCABULARY)
    numbers = [len(rows.store.documents.starts) for rows in (corpus.train, corpus.validation)]
    assert numbers == [100, 2]


def test_conflicts_are_refused_in_one_line(files):
    with pytest.raises(InputError, match=r"data.validation_fraction=0.1 conflicts with data.validation, "):
        config(files, "other", validation_fraction=0.1)
    with pytest.raises(InputError, match=r"data.validation=\['a'\] have a weight; only data.sources are"):
        CorpusConfig(validation=[SourceConfig("a", weight=1.0)])
    with pytest.raises(InputError, match=r"data.validation=\['.*'\] is about training; .*data.sources"):
        EvaluateConfig(model="m", data=config(files, "other"))
    for name, fault in (("nowhere.txt", "no file, folder or glob"), ("hub:x", "hub:x is not of the form")):
        with pytest.raises(InputError, match=f"data.validation: {fault}") as error:
            check_sources([SourceConfig(name)], "data.validation")
        assert error.value.key == "data.validation"


def test_the_commands_take_it(files, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    words = ["--data.sources", files["train"], "--data.validation", files["other"], files["mixed"]]
    words += ["--data.document", "line", "--data.seq_len", "32", "--tokenizer.vocab_size", "120"]
    assert main(["prepare", *words]) == 0
    assert "14 of 90 validation documents are in the training text" in caplog.text
    assert "validation" in capsys.readouterr().out
    assert main(["inspect", *words, "--rows", "1"]) == 0
    assert "tokens" in capsys.readouterr().out
    path = tmp_path / "own.yaml"
    path.write_text(json.dumps({"data": {"validation": [files["other"]], "validation_fraction": 0.2}}))
    with pytest.raises(SystemExit, match="2"):
        main(["prepare", *words[:2], "--config", str(path)])
    assert f"{path}:1: data.validation_fraction=0.2 conflicts" in capsys.readouterr().err
