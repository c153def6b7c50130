"""Long texts in windows: every token is covered, and the answer is the mean over the windows."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score

from mlm.config.commands import EvaluateConfig, PredictConfig
from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.data.examples import encode_examples
from mlm.data.labelled import Examples
from mlm.evaluation.commands import evaluate, predict
from mlm.evaluation.predictor import Predictor, softmax
from mlm.hub.pretrained import load_classifier
from mlm.hub.saving import save_pretrained
from mlm.model.heads import SequenceClassifier

LONGEST = 16
KINDS = [(("calm", "loud", "odd"), "classification"), (("stars",), "regression"), (("a", "b"), "multilabel")]


@pytest.fixture
def build(tmp_path, tokenizer):
    def build(labels=KINDS[0][0], label_type="classification", has_pairs=None):
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        torch.manual_seed(0)
        config = ModelConfig(**sizes, initializer_range=0.3).resolve(tokenizer.get_vocab_size(), LONGEST)
        model = SequenceClassifier(config, ClassifierConfig(labels, label_type, text_pairs=has_pairs))
        return str(save_pretrained(tmp_path / "classifier", model, tokenizer, LONGEST, "# tiny"))

    return build


@pytest.fixture
def texts(documents):
    """Short and long ones, and one that fits exactly."""
    return [documents[0][:20], " ".join(documents[:6]), "", " ".join(documents[6:8]), documents[9][:12]]


def windows_by_hand(tokenizer, text, longest=LONGEST):
    """The rule of the docstring: windows of `longest` tokens that share a quarter of their content."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    (cls, *content, sep) = tokenizer.encode(text).ids
    size = longest - 2
    step = size - size // 4
    starts = [0]
    while starts[-1] + size < len(content):
        starts.append(starts[-1] + step)
    windows = [content[start : start + size] for start in starts]
    assert len(windows[-1]) > size // 4 or len(windows) == 1
    return [[cls, *window, sep] for window in windows], content


@pytest.mark.parametrize("longest", [8, 9, LONGEST, 33])
def test_windows_follow_the_rule_and_hold_every_token(tokenizer, texts, longest):
    encoded = encode_examples(tokenizer, Examples(texts), longest, windows=True)
    plain = encode_examples(tokenizer, Examples(texts), longest)
    np.testing.assert_array_equal(encoded.ids, plain.ids)  # the first windows are the truncated texts
    assert (encoded.num_truncated, plain.num_truncated > 0) == (0, True)
    rest, owners = encoded.further
    for row, text in enumerate(texts):
        ours = [encoded, *(rest for _ in range((owners == row).sum()))]
        places = [row, *np.flatnonzero(owners == row)]
        found = [
            part.ids[part.offsets[at] : part.offsets[at + 1]].tolist()
            for part, at in zip(ours, places, strict=True)
        ]
        expected, content = windows_by_hand(tokenizer, text, longest)
        assert found == expected
        shared = (longest - 2) // 4
        rebuilt = found[0][1:-1] + [token for window in found[1:] for token in window[1 + shared : -1]]
        assert rebuilt == content


@pytest.mark.parametrize(("labels", "label_type"), KINDS)
def test_answer_is_the_mean_of_the_logits_of_the_windows(build, tokenizer, texts, labels, label_type):
    folder = build(labels, label_type)
    model = load_classifier(folder).eval()
    expected = []
    for text in texts:
        windows, _ = windows_by_hand(tokenizer, text)
        with torch.no_grad():
            logits = [
                model(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.long)) for ids in windows
            ]
        expected.append(torch.cat(logits).double().mean(0).numpy())
    predictor = Predictor(folder, "cpu", batch_size=3, long_texts="windows")
    found = predictor.logits(predictor.encode(Examples(texts)))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    answers = predictor.predict(texts)
    if label_type == "classification":
        shares = [list(answer.probabilities.values()) for answer in answers]
        np.testing.assert_allclose(shares, softmax(np.array(expected)), atol=1e-5)
        assert [answer.label for answer in answers] == [labels[best] for best in np.argmax(expected, 1)]
    elif label_type == "regression":
        np.testing.assert_allclose([answer.label for answer in answers], np.array(expected)[:, 0], atol=1e-5)


def test_texts_that_fit_get_the_same_answer_to_the_bit(build, texts):
    folder = build()
    cut, windows = (Predictor(folder, "cpu", batch_size=2, long_texts=way) for way in ("truncate", "windows"))
    before, now = (one.logits(one.encode(Examples(texts))) for one in (cut, windows))
    is_long = np.array([len(windows_by_hand(cut.tokenizer, text)[0]) > 1 for text in texts])
    assert is_long.tolist() == [False, True, False, True, False]
    assert (before == now).all(1).tolist() == (~is_long).tolist()
    short = [text for text, long in zip(texts, is_long, strict=True) if not long]
    assert cut.predict(short) == windows.predict(short)


def test_commands_read_in_windows(build, texts, tmp_path):
    folder, output = build(), tmp_path / "out.csv"
    expected = Predictor(folder, "cpu", long_texts="windows").predict(texts)
    labels = ["calm"] * len(texts)
    rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
    table = tmp_path / "in.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predict(PredictConfig(folder, [str(table)], str(output), long_texts="windows"))
    with output.open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    assert [row["label"] for row in found] == [one.label for one in expected]
    for row, one in zip(found, expected, strict=True):
        assert float(row["probability_calm"]) == pytest.approx(one.probabilities["calm"], abs=1e-5)
    report = tmp_path / "report.json"
    evaluate(EvaluateConfig(folder, [str(table)], long_texts="windows", output=str(report)))
    accuracy = accuracy_score(labels, [one.label for one in expected])
    assert json.loads(report.read_text())["accuracy"] == pytest.approx(accuracy)


def test_pairs_and_texts_without_a_file_are_refused(build, tmp_path):
    folder = build(has_pairs=True)
    refused = r"long_texts=windows is for single texts, and these are pairs; leave it out"
    with pytest.raises(InputError, match=refused):
        Predictor(folder, "cpu", long_texts="windows").predict(["a"], ["b"])
    table = tmp_path / "in.csv"
    table.write_text("text,b\nx,y\n")
    options = {"text_pair_column": "b", "long_texts": "windows"}
    with pytest.raises(InputError, match=refused):
        predict(PredictConfig(folder, [str(table)], str(tmp_path / "out.csv"), **options))
    with pytest.raises(InputError, match="long_texts=windows is about a labelled file; give it with --input"):
        EvaluateConfig(folder, long_texts="windows")
