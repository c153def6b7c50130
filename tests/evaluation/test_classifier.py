"""Scores of a fine-tuned model on a file, against scikit-learn over what the stock class says."""

from __future__ import annotations

import json

import numpy as np
import pytest
import sklearn.metrics
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mlm.__main__ import main
from mlm.config.commands import EvaluateConfig
from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.evaluation.commands import evaluate
from mlm.hub.saving import save_pretrained
from mlm.model.heads import SequenceClassifier

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
LABELS = ("contradiction", "entailment", "neutral")


@pytest.fixture
def build(tmp_path, tokenizer):
    """Saves a random classifier whose opinions differ."""

    def build(labels=LABELS, label_type="classification"):
        torch.manual_seed(0)
        config = ModelConfig(**SIZES, initializer_range=0.3).resolve(tokenizer.get_vocab_size(), 64)
        model = SequenceClassifier(config, ClassifierConfig(labels, label_type))
        return str(save_pretrained(tmp_path / "classifier", model, tokenizer, 64, "# tiny"))

    return build


@pytest.fixture
def run(tmp_path):
    """Evaluates texts with these labels, and reads the figures."""

    def run(model, texts, labels, **options):
        path, output = tmp_path / "in.jsonl", tmp_path / "figures.json"
        rows = [{"text": text, "label": label} for text, label in zip(texts, labels, strict=True)]
        path.write_text("\n".join(map(json.dumps, rows)))
        assert evaluate(EvaluateConfig(model, str(path), output=str(output), **options)) == 0
        return json.loads(output.read_text())

    return run


def stock_logits(folder, texts):
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(texts, return_tensors="pt", truncation=True, padding=True)
    with torch.no_grad():
        return model(**inputs).logits.numpy()


@pytest.mark.parametrize("spelling", [str, str.upper, str.title])
def test_scores_go_by_the_names_of_the_classes(build, run, documents, spelling, capsys):
    """The ids of data sets that number the same classes otherwise play no part."""
    folder, texts = build(), documents[:60]
    names = np.array(["entailment", "neutral", "contradiction"])[
        np.random.default_rng(0).integers(3, size=60)
    ]
    facts = run(folder, texts, [spelling(str(name)) for name in names])
    said = [LABELS[best] for best in stock_logits(folder, texts).argmax(1)]
    assert facts["accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(names, said), abs=1e-9)
    expected = sklearn.metrics.matthews_corrcoef(names, said)
    assert facts["matthews_correlation"] == pytest.approx(expected, abs=1e-9)
    assert facts["num_examples"] == 60
    assert facts["predicted_counts"] == {label: said.count(label) for label in LABELS}
    assert facts["examples_counts"] == {label: names.tolist().count(label) for label in LABELS}
    out = capsys.readouterr().out
    assert "accuracy" in out
    assert "predicted  right" in out


def test_several_labels_and_numbers_are_scored_too(build, run, documents):
    texts = documents[:40]
    folder = build(("a", "b", "c"), "multilabel")
    sets = [["a"], ["b", "c"], [], ["c"]] * 10
    facts = run(folder, texts, sets)
    labels = np.array([[name in row for name in "abc"] for row in sets])
    said = stock_logits(folder, texts) > 0
    assert facts["f1_macro"] == pytest.approx(
        sklearn.metrics.f1_score(labels, said, average="macro", zero_division=0), abs=1e-9
    )
    assert facts["subset_accuracy"] == pytest.approx(sklearn.metrics.accuracy_score(labels, said))
    folder = build(("stars",), "regression")
    facts = run(folder, texts, [str(number % 7) for number in range(40)])
    expected = np.corrcoef(stock_logits(folder, texts)[:, 0], np.arange(40) % 7)[0, 1]
    assert facts["pearson"] == pytest.approx(expected, abs=1e-5)
    assert "labels" not in facts


def test_model_without_names_takes_its_ids_and_says_so(build, run, documents, caplog):
    folder, texts = build(("LABEL_0", "LABEL_1")), documents[:30]
    labels = [number % 2 for number in range(30)]
    facts = run(folder, texts, labels)
    assert facts["accuracy"] == pytest.approx((stock_logits(folder, texts).argmax(1) == labels).mean())
    assert "the model does not name its classes, so that labels are taken for its ids" in caplog.text
    with pytest.raises(InputError, match="label yes is not among the labels of the model: LABEL_0, LABEL_1"):
        run(folder, ["a", "b"], ["yes", "0"])


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["neutral", -1], r"in.jsonl, row 2 \(line 2\): label is -1, which means 'no label'"),
        (["neutral", None], r"in.jsonl, row 2 \(line 2\): label is missing"),
        ([1, "neutral"], r"row 1 \(line 1\): label 1 is not among the labels of the model: contradiction, "),
    ],
)
def test_rows_without_a_known_label_are_refused(build, run, tmp_path, labels, message):
    with pytest.raises(InputError, match=message):
        run(build(), ["a", "b"], labels)
    assert not (tmp_path / "figures.json").exists()


def test_command_says_what_is_wrong_in_one_line(build, tmp_path, capsys):
    model, path = build(), tmp_path / "in.csv"
    path.write_text("text,stars\nthe lamp,neutral\n")
    words = ["evaluate", "--model", model, "--input", str(path)]
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert "has no column label, but text, stars; name it with --label_column" in capsys.readouterr().err
    assert main([*words, "--label_column", "stars"]) == 0
    with pytest.raises(SystemExit):
        main(words[:3])
    assert "is a fine-tuned model; give a labelled file with --input" in capsys.readouterr().err
    for wrong, message in (
        (["--data.sources", str(path)], "and data.* are two texts; give one of them"),
        (["--input", "no.csv"], "input=no.csv is neither file"),
    ):
        with pytest.raises(SystemExit):
            main([*words, *wrong])
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--data.validation_fraction", "0.5"], ["--data.num_workers", "2"], ["--masking.mask_rate", "0.3"]],
)
def test_what_is_about_training_is_refused(build, tmp_path, capsys, words):
    with pytest.raises(SystemExit):
        main(["evaluate", "--model", build(), *words])
    line = f"mlm evaluate: error: {words[0][2:]}={words[1]} is about training; leave it out, or set it to "
    assert capsys.readouterr().err.startswith(line)


def test_model_without_a_classifier_is_refused(model_folder, run):
    with pytest.raises(InputError, match="holds no classifier"):
        run(str(model_folder), ["a"], ["b"])


def test_one_class_predicted_is_a_warning(build, run, caplog):
    run(build(), ["the lamp"] * 3, LABELS)
    assert "only one class is predicted: " in caplog.text
