"""The zip for the GLUE server: names of files, columns, spelling of labels, and answers matched by name."""

from __future__ import annotations

import zipfile

import numpy as np
import pytest
import torch

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig
from mlm.data.examples import encode_examples
from mlm.data.glue import TASKS, read_part, submitted_parts
from mlm.evaluation.glue import answer, spell, write_submission
from mlm.evaluation.predictor import predict_logits
from mlm.hub.pretrained import load_classifier
from mlm.hub.saving import save_pretrained

BITS, TWO_WAY = {"0", "1"}, {"entailment", "not_entailment"}
THREE_WAY = {"entailment", "neutral", "contradiction"}
SPELLING = {
    "AX": THREE_WAY,
    "CoLA": BITS,
    "MNLI-m": THREE_WAY,
    "MNLI-mm": THREE_WAY,
    "MRPC": BITS,
    "QNLI": TWO_WAY,
    "QQP": BITS,
    "RTE": TWO_WAY,
    "SST-2": BITS,
    "STS-B": None,
    "WNLI": BITS,
}


def test_eleven_files_as_the_server_wants_them(tmp_path):
    answers = {}
    for task, spec in TASKS.items():
        for name in submitted_parts(task).values():
            columns = len(spec.labels)
            logits = np.random.default_rng(0).normal(size=(40, columns))
            answers[name] = spell(task, logits, ClassifierConfig(spec.labels, spec.label_type))
    write_submission(tmp_path / "submission.zip", answers)
    with zipfile.ZipFile(tmp_path / "submission.zip") as archive:
        assert sorted(archive.namelist()) == [f"{name}.tsv" for name in SPELLING]
        for name, spelling in SPELLING.items():
            header, *rows = archive.read(f"{name}.tsv").decode().removesuffix("\n").split("\n")
            cells = [row.split("\t") for row in rows]
            assert header == "index\tprediction"
            assert [index for index, _ in cells] == [str(number) for number in range(40)]
            assert spelling is None or {prediction for _, prediction in cells} == spelling
    assert [path.name for path in tmp_path.iterdir()] == ["submission.zip"]


def test_scores_stay_within_the_scale():
    logits = np.array([[-0.3], [2.34567], [7.0]])
    assert spell("stsb", logits, ClassifierConfig(("score",), "regression")) == ["0.000", "2.346", "5.000"]


def test_classes_are_matched_by_name_whatever_their_order():
    """The order of a published checkpoint whose MNLI accuracy is 0.05 if its ids are taken as they are."""
    logits = np.eye(3)
    other = ClassifierConfig(("CONTRADICTION", "entailment", "Neutral"))
    assert spell("ax", logits, other) == ["contradiction", "entailment", "neutral"]
    with pytest.raises(
        InputError, match="the model's classes are LABEL_0, LABEL_1, LABEL_2, those of ax ent"
    ):
        spell("ax", logits, ClassifierConfig(("LABEL_0", "LABEL_1", "LABEL_2")))


def test_answers_are_those_of_the_model_in_the_order_of_the_file(glue_dir, model_folder, tmp_path, tokenizer):
    labels = ("contradiction", "entailment", "neutral")
    model = load_classifier(model_folder, ClassifierConfig(labels))
    examples = encode_examples(tokenizer, read_part("mnli", "test_mismatched", str(glue_dir)), 32)
    with torch.no_grad():  # so that its answers differ
        model.classifier.bias -= torch.tensor(predict_logits(model, examples, 8).mean(0))
    folder = save_pretrained(tmp_path / "nli", model, tokenizer, 64, "")
    found = answer(str(folder), "mnli", "test_mismatched", str(glue_dir), 32, batch_size=2)
    logits = predict_logits(model, examples, 8)
    assert found == [labels[best] for best in logits.argmax(1)]
    assert len(set(found)) > 1
