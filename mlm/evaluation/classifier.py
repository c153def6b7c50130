"""Scores of a fine-tuned model on a labelled file; classes are matched by their names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from mlm.config.evaluation import EvaluateConfig
from mlm.config.model import ClassifierConfig
from mlm.data.labelled import Table, label_array, label_names, label_numbers, read_table
from mlm.evaluation.metrics import class_table, counts_of_classes, score_table, task_metrics
from mlm.evaluation.predict import read_examples, run_inference
from mlm.evaluation.predictor import check_pairs, read_classifier, warn_truncated
from mlm.files import write_json
from mlm.hub.download import model_folder

log = logging.getLogger(__name__)


def evaluate_classifier(config: EvaluateConfig) -> int:
    """Print the scores of a fine-tuned model on a labelled file: the `evaluate` command with `input`.

    Raises:
        InputError: the file lacks a column, a text or a label, or has a label that the model does not know.
    """
    table = read_table(str(config.input), config.encoding)
    examples = read_examples(table, config.text_column, config.text_pair_column)
    folder = model_folder(config.model)
    classifier = read_classifier(folder)
    check_pairs(classifier, config.text_pair_column)
    labels = labels_of_model(table, config, classifier)  # mistakes in them show before hours of work
    found = run_inference(folder, examples, config.max_length, config.batch_size)
    if found is None:
        return 0
    warn_truncated(found.num_truncated, len(examples), table.name, found.max_length)
    facts: dict[str, Any] = task_metrics(classifier.label_type, labels, found.logits)
    facts["num_examples"] = len(examples)
    lines = score_table(facts)
    if classifier.label_type != "regression":
        counts = counts_of_classes(classifier.labels, labels, found.logits)
        lines += class_table(counts)
        predicted = [label for label, count in counts["predicted_counts"].items() if count]
        if not predicted:
            log.warning("no label is ever predicted")
        elif len(predicted) == 1:
            log.warning("only one class is predicted: %s", predicted[0])
        facts |= counts
    print("\n".join(lines))
    if config.output:
        write_json(Path(config.output), facts)
    return 0


def labels_of_model(table: Table, config: EvaluateConfig, classifier: ClassifierConfig) -> npt.NDArray[Any]:
    """Return the labels of a file as the model numbers them; `task_metrics` says in which form.

    Raises:
        InputError: a row has no label, or one that the model does not know.
    """
    cells = table.cells(config.label_column, "--label_column")
    if classifier.label_type == "regression":
        return label_numbers(cells)
    separator = config.label_separator if classifier.label_type == "multilabel" else None
    names = as_the_model_spells(label_names(cells, separator), classifier.labels)
    return label_array(names, classifier.labels, classifier.label_type, cells, "of the model")


def as_the_model_spells(names: Sequence[Sequence[str]], labels: Sequence[str]) -> list[list[str]]:
    """Return the names of each row's labels in the capitals of the model.

    Where a model does not name its classes (LABEL_0, LABEL_1, ...), numbers count as its ids, with a warning.
    """
    spelt = {label.lower(): label for label in labels}
    if len(spelt) < len(labels):  # some of its labels differ in capitals only
        spelt = {}
    known = spelt | {label: label for label in labels}
    if all(label == f"LABEL_{number}" for number, label in enumerate(labels)):
        numbers = {str(number): label for number, label in enumerate(labels)}
        if all(name in numbers for row in names for name in row):
            log.warning("the model does not name its classes, so that labels are taken for its ids")
            known |= numbers
    return [[known.get(name, known.get(name.lower(), name)) for name in row] for row in names]
