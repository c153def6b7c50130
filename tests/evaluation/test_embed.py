"""Vectors of texts against mean pooling by transformers."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, ModernBertModel

from mlm.__main__ import main
from mlm.config.commands import EmbedConfig
from mlm.config.errors import InputError
from mlm.evaluation.commands import embed
from mlm.startup.checks import check_files


@pytest.fixture
def sentences(tmp_path, documents):
    path = tmp_path / "sentences.txt"
    path.write_text("\n".join([*documents[:9], "", *documents[9:20]]) + "\n")
    return path


def embedded(config: EmbedConfig) -> np.ndarray:
    assert embed(config) == 0
    return np.load(config.output)


@pytest.fixture
def config(model_folder, sentences, tmp_path):
    return EmbedConfig(str(model_folder), str(sentences), str(tmp_path / "vectors.npy"), batch_size=4)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_vectors_are_those_of_transformers(config, pooling, model_folder, sentences):
    found = embedded(replace(config, pooling=pooling))
    tokenizer, model = (
        AutoTokenizer.from_pretrained(model_folder),
        ModernBertModel.from_pretrained(model_folder),
    )
    texts = sentences.read_text().splitlines()
    inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        hidden = model.eval()(**inputs).last_hidden_state
    mask = inputs["attention_mask"][..., None]
    expected = (hidden * mask).sum(1) / mask.sum(1) if pooling == "mean" else hidden[:, 0]
    expected = torch.nn.functional.normalize(expected, dim=-1).numpy()
    assert found.shape == (len(texts), 32)
    assert found.dtype == np.float32
    assert (found * expected).sum(1).min() > 0.99999


def test_batches_and_format_change_nothing(config, sentences, tmp_path):
    found = embedded(config)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, rtol=1e-5)
    np.testing.assert_allclose(embedded(replace(config, batch_size=100)), found, atol=1e-6)
    rows = [{"id": n, "words": text} for n, text in enumerate(sentences.read_text().splitlines())]
    table = tmp_path / "table.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    same = embedded(replace(config, input=str(table), text_column="words"))
    np.testing.assert_allclose(same, found, atol=1e-6)
    raw = embedded(replace(config, normalize=False))
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), found, atol=1e-6)


def test_command_writes_the_file(config, capsys):
    flags = ["--model", config.model, "--input", *config.input, "--output", config.output]
    assert main(["embed", *flags, "--max_length", "8"]) == 0
    assert "21 vectors of 32 numbers" in capsys.readouterr().out
    assert np.load(config.output).shape == (21, 32)


def test_mistakes_are_named(config, tmp_path):
    with pytest.raises(InputError, match="max_length=65 is longer"):
        embed(replace(config, max_length=65))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    with pytest.raises(InputError, match=r"empty.txt: has no rows"):
        embed(replace(config, input=str(empty)))
    with pytest.raises(InputError, match=r"must end in \.npy"):
        check_files(replace(config, output=str(tmp_path / "vectors.txt")))
    with pytest.raises(InputError, match="is neither file"):
        check_files(replace(config, input=str(tmp_path / "none.txt")))


def test_a_sentence_model_reads_as_far_as_it_was_trained(config, model_folder, sentences):
    (model_folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 8}))
    short = embedded(config)
    assert np.array_equal(short, embedded(replace(config, max_length=8)))
    (model_folder / "sentence_bert_config.json").write_text("{")
    with pytest.raises(InputError, match=r"sentence_bert_config\.json is damaged"):
        embedded(config)
    (model_folder / "sentence_bert_config.json").unlink()
    assert not np.array_equal(short, embedded(config))


def test_a_folder_is_no_output_nor_is_the_input(config, tmp_path):
    (tmp_path / "texts.npy").write_text("a\n")
    with pytest.raises(InputError, match="is an input"):
        check_files(replace(config, input=f"{tmp_path}/texts.npy", output=f"{tmp_path}/./texts.npy"))
    (tmp_path / "there.npy").mkdir()
    with pytest.raises(InputError, match="is a folder; name a file"):
        check_files(replace(config, output=str(tmp_path / "there.npy")))
