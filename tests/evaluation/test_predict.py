"""Predictions against the stock class, and the file that the command writes."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mlm.config.commands import PredictConfig
from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.evaluation.commands import predict
from mlm.evaluation.predictor import check_pairs
from mlm.hub.saving import save_pretrained
from mlm.model.heads import SequenceClassifier

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
CLASSIC = {
    "norm_position": "post",
    "position_embedding": "learned",
    "activation": "gelu",
    "type_vocab_size": 2,
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), True),
}
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
LABELS = ("calm", "noisy, loud", 'the "rest"')


@pytest.fixture
def build(tmp_path, tokenizer):
    """Saves a random classifier whose opinions differ."""

    def build(labels=LABELS, label_type="classification", **switches):
        torch.manual_seed(0)
        config = ModelConfig(**SIZES, **switches, initializer_range=0.3).resolve(
            tokenizer.get_vocab_size(), 64
        )
        model = SequenceClassifier(config, ClassifierConfig(labels, label_type))
        return str(save_pretrained(tmp_path / "classifier", model, tokenizer, 64, "# tiny"))

    return build


@pytest.fixture
def run(tmp_path):
    """Predicts rows given as a list of dictionaries, and reads the output."""

    def run(model, rows, **options):
        path = tmp_path / "in.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        output = tmp_path / "out.csv"
        assert predict(PredictConfig(model, str(path), str(output), **options)) == 0
        with output.open(newline="", encoding="utf-8") as file:
            return list(csv.DictReader(file))

    return run


@pytest.mark.parametrize("switches", [{}, CLASSIC], ids=["modern", "classic"])
@pytest.mark.parametrize("pairs", [False, True])
def test_labels_and_probabilities_are_the_stock_class_s(build, run, documents, switches, pairs):
    folder = build(**switches)
    texts, seconds = documents[:30], documents[30:60]
    rows = [{"text": text, "b": second, "label": -1} for text, second in zip(texts, seconds, strict=True)]
    found = run(folder, rows, **({"text_pair_column": "b"} if pairs else {}), batch_size=7)
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert [row["row"] for row in found] == [str(number) for number in range(1, 31)]
    assert list(found[0]) == ["row", "label", *(f"probability_{label}" for label in LABELS)]
    for row, text, second in zip(found, texts, seconds, strict=True):
        words = (text, second) if pairs else (text,)
        inputs = tokenizer(*words, return_tensors="pt", truncation=True, max_length=64)
        with torch.no_grad():
            shares = model(**inputs).logits.softmax(-1)[0]
        assert row["label"] == model.config.id2label[int(shares.argmax())]
        assert [float(row[f"probability_{label}"]) for label in LABELS] == pytest.approx(
            shares.tolist(), abs=1e-5
        )


def test_classes_that_differ_in_capitals_only_are_told_apart(build, run, documents):
    folder = build(("Yes", "yes", "no"))
    found = run(folder, [{"text": text} for text in documents[:30]])
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    inputs = tokenizer(documents[:30], return_tensors="pt", truncation=True, padding=True)
    with torch.no_grad():
        said = [model.config.id2label[best] for best in model(**inputs).logits.argmax(-1).tolist()]
    assert [row["label"] for row in found] == said
    assert {"Yes", "yes"} <= set(said)


def test_half_a_surrogate_pair_in_an_id_is_replaced_as_in_texts(build, run):
    (found,) = run(build(), [{"text": "a lamp \ud800", "key": "k\ud800"}], id_column="key")
    assert found["row"] == "k?"


def test_a_score_is_written_as_a_number(build, run, documents):
    found = run(build(("stars",), "regression"), [{"text": text} for text in documents[:5]])
    assert list(found[0]) == ["row", "label"]
    assert len({float(row["label"]) for row in found}) == 5


def test_all_labels_of_a_text_are_written(build, run, documents, tmp_path):
    folder = build(("a", "b", "c"), "multilabel")
    found = run(folder, [{"text": text} for text in documents[:20]], label_separator=";")
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert model.config.problem_type == "multi_label_classification"
    for row, text in zip(found, documents, strict=False):
        with torch.no_grad():
            inputs = tokenizer(text, return_tensors="pt", truncation=True)
            shares = model(**inputs).logits.sigmoid()[0]
        assert [float(row[f"probability_{label}"]) for label in "abc"] == pytest.approx(
            shares.tolist(), abs=1e-5
        )
        assert row["label"] == ";".join(
            label for label, share in zip("abc", shares, strict=True) if share > 0.5
        )
    assert len({row["label"] for row in found}) > 1


def test_separator_that_stands_in_a_label_is_refused(build, run, tmp_path):
    with pytest.raises(InputError, match=r"label_separator=\| is part of the label b\|c; choose another"):
        run(build(("a", "b|c"), "multilabel"), [{"text": "a"}])
    assert not (tmp_path / "out.csv").exists()


def test_rows_are_the_same_for_any_batch_size_and_order(build, run, documents):
    folder, rows = build(), [{"text": text, "key": f"k{n}"} for n, text in enumerate(documents[:40])]
    one = run(folder, rows, batch_size=1, id_column="key")
    many = run(folder, rows[::-1], batch_size=64, id_column="key")
    assert [row["row"] for row in one] == [f"k{n}" for n in range(40)]
    for a, b in zip(one, many[::-1], strict=True):
        assert (a["row"], a["label"]) == (b["row"], b["label"])
        assert float(a["probability_calm"]) == pytest.approx(float(b["probability_calm"]), abs=2e-6)


@pytest.mark.parametrize("launcher", ["devices", "torchrun"])
def test_any_number_of_processes_writes_the_same_file(build, run, documents, tmp_path, launcher):
    texts = [*documents[:20], "the old lamp " * 200]
    folder, rows = build(), [{"text": text, "key": f"k{n}"} for n, text in enumerate(texts)]
    one = run(folder, rows, id_column="key")
    output = tmp_path / "many.csv"
    options = {"model": folder, "input": tmp_path / "in.jsonl", "output": output, "id_column": "key"}
    words = ["predict", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
    launch = [sys.executable, "-m"]
    if launcher == "torchrun":
        launch += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    else:
        words += ["--devices", "2"]
    done = subprocess.run(
        [*launch, "mlm", *words], capture_output=True, text=True, check=True, env={**os.environ, **NO_GPU}
    )
    assert done.stdout.count("21 rows labelled") == 1
    assert done.stderr.count("33.3 % of the examples are cut to 64 tokens") == 1
    with output.open(newline="", encoding="utf-8") as file:
        many = list(csv.DictReader(file))
    assert [row["row"] for row in many] == [f"k{n}" for n in range(21)]
    for a, b in zip(one, many, strict=True):
        assert a["label"] == b["label"]
        assert float(a["probability_calm"]) == pytest.approx(float(b["probability_calm"]), abs=2e-6)


def test_more_processes_than_rows_and_mistakes_in_them(build, run):
    assert len(run(build(), [{"text": "the lamp"}], devices=3)) == 1
    with pytest.raises(InputError, match="max_length=65 is longer"):
        run(build(), [{"text": "a"}, {"text": "b"}], devices=2, max_length=65)


def test_empty_and_cut_texts_are_predicted_too(build, run, caplog):
    found = run(build(), [{"text": ""}, {"text": "the old lamp " * 200}, {"text": "the old lamp"}])
    assert [row["row"] for row in found] == ["1", "2", "3"]
    assert all(np.isfinite(float(row["probability_calm"])) for row in found)
    assert "33.3 % of the examples are cut to 64 tokens" in caplog.text


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([{"body": "a"}], {}, "has no column text, but body; name it with --text_column"),
        ([{"text": "a"}], {"id_column": "key"}, "has no column key, but text; name it with --id_column"),
        ([{"text": "a"}, {"text": None}], {}, r"row 2 \(line 2\): text is missing"),
        (
            [{"text": "a"}],
            {"max_length": 65},
            "max_length=65 is longer than the model's max_position_embeddings=64",
        ),
    ],
)
def test_mistakes_are_told_and_leave_no_file(build, run, tmp_path, rows, options, message):
    with pytest.raises(InputError, match=message):
        run(build(), rows, **options)
    assert not (tmp_path / "out.csv").exists()


def test_model_without_a_classifier_is_refused(model_folder, run):
    with pytest.raises(
        InputError, match="holds no classifier but ModernBertForMaskedLM; mlm finetune makes one"
    ):
        run(str(model_folder), [{"text": "a"}])


@pytest.mark.parametrize(
    ("trained_on", "column", "message"),
    [
        (True, None, "text_pair_column=null leaves a text out: the model was trained on pairs"),
        (False, "b", "text_pair_column=b is one too many: the model was trained on single texts"),
        (True, "b", None),
        (None, "b", None),
        (None, None, None),
    ],
)
def test_a_model_gets_as_many_texts_as_it_was_trained_on(trained_on, column, message):
    classifier = ClassifierConfig(("no", "yes"), text_pairs=trained_on)
    if message is None:
        check_pairs(classifier, column)
        return
    with pytest.raises(InputError, match=message):
        check_pairs(classifier, column)


def test_several_files_and_plain_texts_are_labelled_in_their_order(build, run, documents, tmp_path):
    folder, output = build(), tmp_path / "texts.csv"
    expected = run(folder, [{"text": text} for text in documents[:9]])
    (tmp_path / "1.txt").write_text("\n".join(documents[:4]) + "\n")
    (tmp_path / "2.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents[4:9]))
    files = [str(tmp_path / "1.txt"), str(tmp_path / "2.jsonl")]
    assert predict(PredictConfig(folder, files, str(output))) == 0
    with output.open(newline="", encoding="utf-8") as file:
        assert list(csv.DictReader(file)) == expected
