"""The Predictor of notebooks says what the commands write, and loads torch only for a model."""

from __future__ import annotations

import csv
import json
import subprocess
import sys

import numpy as np
import pytest
import torch

import mlm.hub.pretrained
from mlm import Predictor
from mlm.__main__ import main
from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.evaluation.predictor import pick_device
from mlm.hub.saving import save_pretrained
from mlm.model.heads import SequenceClassifier

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
KINDS = {"classification": ("a", "b", "c"), "multilabel": ("a", "b", "c"), "regression": ("stars",)}


@pytest.fixture
def build(tmp_path, tokenizer):
    """Saves a random classifier whose answers differ."""

    def build(label_type="classification", text_pairs=None):
        torch.manual_seed(0)
        config = ModelConfig(**SIZES, type_vocab_size=2, initializer_range=0.3)
        config = config.resolve(tokenizer.get_vocab_size(), 64)
        head = ClassifierConfig(KINDS[label_type], label_type, text_pairs=text_pairs)
        model = SequenceClassifier(config, head)
        return save_pretrained(tmp_path / "classifier", model, tokenizer, 64, "# tiny")

    return build


@pytest.fixture
def table(tmp_path, documents):
    """A file of texts, pairs and labels."""
    path = tmp_path / "in.jsonl"
    texts = [*documents[:20], "", "the old lamp " * 200]
    rows = [{"text": text, "b": documents[n], "label": "abc"[n % 3]} for n, text in enumerate(texts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("label_type", KINDS)
def test_answers_are_those_of_the_command(build, table, tmp_path, label_type, pairs, caplog):
    folder, output = build(label_type), tmp_path / "out.csv"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    words = ["predict", "--model", str(folder), "--input", str(table), "--output", str(output)]
    assert main([*words, *(["--text_pair_column", "b"] if pairs else [])]) == 0
    caplog.clear()
    predictor = Predictor(folder, device="cpu", batch_size=64)
    texts, seconds = [row["text"] for row in rows], [row["b"] for row in rows]
    found = predictor.predict(texts, seconds if pairs else None)
    assert "of the examples are cut to 64 tokens" in caplog.text
    with output.open(newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    for prediction, row in zip(found, written, strict=True):
        shares = {name: f"{share:.6f}" for name, share in prediction.probabilities.items()}
        assert shares == {name: row[f"probability_{name}"] for name in shares}
        if label_type == "regression":
            assert f"{prediction.label:.7g}" == row["label"]
            assert not shares
        else:
            labels = (prediction.label,) if label_type == "classification" else prediction.label
            assert "|".join(labels) == row["label"]
            assert list(shares) == ["a", "b", "c"]
    assert predictor.predict([]) == []


def test_vectors_are_those_of_the_command_whatever_was_loaded_before(build, table, tmp_path):
    folder, output = build(), tmp_path / "out.npy"
    words = ["embed", "--model", str(folder), "--input", str(table), "--output", str(output)]
    assert main([*words, "--pooling", "cls", "--max_length", "16"]) == 0
    texts = [json.loads(line)["text"] for line in table.read_text().splitlines()]
    predictor = Predictor(folder, max_length=16)
    for _ in range(2):
        assert np.array_equal(predictor.embed(texts, pooling="cls"), np.load(output))
        predictor.predict(texts)  # the same encoder, with a head


def test_mistakes_are_named(build, model_folder):
    predictor = Predictor(build(text_pairs=True))
    with pytest.raises(InputError, match="pairs=null leaves a text out: the model was trained on pairs"):
        predictor.predict(["the lamp"])
    with pytest.raises(InputError, match="texts='the lamp' is one text; give a list of texts"):
        predictor.embed("the lamp")
    with pytest.raises(InputError, match="max_length=65 is longer"):
        Predictor(build(), max_length=65)
    with pytest.raises(InputError, match="was not trained to fill masks"):
        Predictor(build()).fill_mask("the [MASK]")
    with pytest.raises(InputError, match="holds no classifier but ModernBertForMaskedLM"):
        Predictor(model_folder).predict(["the lamp"])


def test_a_device_is_taken_by_its_name_and_otherwise_the_best(monkeypatch):
    assert pick_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert pick_device().type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(pick_device(rank=rank)) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:0"]


def test_evaluating_a_classifier_reads_its_weights_once(build, table, monkeypatch):
    folder, read = build(), []

    def read_tensors(path):
        read.append(path)
        return original(path)

    original = mlm.hub.pretrained.read_tensors
    monkeypatch.setattr(mlm.hub.pretrained, "read_tensors", read_tensors)
    assert main(["evaluate", "--model", str(folder), "--input", str(table)]) == 0
    assert len(read) == 1


def loaded_after(code: str) -> set[str]:
    """Return which of some slow packages a program has imported."""
    slow = "{'torch', 'torchmetrics', 'lightning'}"
    code += f"\nimport json, sys\nprint(json.dumps([*{slow} & set(sys.modules)]))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_reading_and_tokenizing_load_no_torch(table, model_folder):
    code = f"""
from mlm import Predictor
from mlm.data.examples import batches_in_order, encode_examples
from mlm.data.labelled import read_table
from mlm.evaluation.commands import read_examples
from mlm.tokenizer import load_tokenizer
examples = read_examples(read_table({str(table)!r}), "text", "b")
encoded = encode_examples(load_tokenizer({str(model_folder)!r}), examples, 64)
assert encoded.arrays(batches_in_order(encoded.lengths, 8)[0])["input_ids"].shape == (8, 64)
"""
    assert loaded_after(code) == set()


def test_a_mistake_in_the_file_shows_before_torch_is_loaded(table, model_folder, tmp_path):
    words = ["predict", "--model", str(model_folder), "--input", str(table), "--text_column", "none"]
    code = f"""
from mlm.__main__ import main
try:
    main({[*words, "--output", str(tmp_path / "out.csv")]!r})
except SystemExit as stop:
    assert stop.code == 2
"""
    assert loaded_after(code) == set()


def test_predicting_loads_no_torchmetrics(table, build, tmp_path):
    """It takes as long to import as torch."""
    words = ["predict", "--model", str(build()), "--input", str(table), "--output", str(tmp_path / "out.csv")]
    assert loaded_after(f"from mlm.__main__ import main\nassert main({words!r}) == 0") == {"torch"}
