"""What a classifier says of texts: logits for scoring, and the `predict` command, which writes a file.

C classes (1 for a score), N examples.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.finetune import PredictConfig
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.data.cache import replacing
from mlm.data.examples import EncodedExamples, LabelledBatch, batches_in_order, encode_examples
from mlm.data.labelled import Examples, Table, read_table
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_classifier
from mlm.model.heads import SequenceClassifier
from mlm.tokenizer import load_tokenizer, num_ids

Floats = npt.NDArray[np.float64]

log = logging.getLogger(__name__)


def arguments(model: SequenceClassifier, batch: LabelledBatch) -> dict[str, Tensor]:
    """Return what the forward pass takes of a batch; token types only where the model knows them."""
    known = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    has_types = model.config.type_vocab_size > 1
    return known | {"token_type_ids": batch["token_type_ids"]} if has_types else known


def classify(model: SequenceClassifier, batch: LabelledBatch) -> Tensor:
    """Return the logits (B, C) of a batch on the model's device."""
    return model(**arguments(model, batch))


@torch.no_grad()
def predict_logits(model: SequenceClassifier, examples: EncodedExamples, batch_size: int) -> Floats:
    """Return the logits of all examples in their order, (N, C), without touching the mode of the model.

    Args:
        model: on any device.
        examples: (N).
        batch_size: examples a pass.
    """
    device = next(model.parameters()).device
    logits = np.zeros((len(examples), model.classifier.out_features))
    for rows in batches_in_order(examples.lengths, batch_size):
        batch = examples[rows]
        for name in ("input_ids", "attention_mask", "token_type_ids"):
            batch[name] = batch[name].to(device)
        logits[rows] = classify(model, batch).float().cpu().numpy()
    return logits


def softmax(logits: Floats) -> Floats:
    """Return the probabilities (N, C)."""
    exponentials = np.exp(logits - logits.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def write_predictions(path: Path, ids: Iterable[str], logits: Floats, classifier: ClassifierConfig) -> None:
    """Write a CSV file with row, label and the probability of each class; it is whole or not there at all.

    Args:
        path: the file; replaced if it exists.
        ids: the name of each row.
        logits: (N, C).
        classifier: what the columns mean; for a score, the label is the number and there are no others.
    """
    is_score = classifier.label_type == "regression"
    chances = np.zeros((len(logits), 0)) if is_score else softmax(logits)
    numbers = [f"{score:.7g}" for score in logits[:, 0]]
    labels = numbers if is_score else [classifier.labels[best] for best in logits.argmax(1)]
    names = [] if is_score else [f"probability_{label}" for label in classifier.labels]
    with replacing(path) as partial, partial.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "label", *names])
        for row, label, shares in zip(ids, labels, chances, strict=True):
            writer.writerow([row, label, *(f"{share:.6f}" for share in shares)])


def max_length(model: ModelConfig, asked: int | None, key: str) -> int | None:
    """Return the most tokens of an example: what is asked for, else all that the model reads.

    Raises:
        InputError: more is asked for than the model reads.
    """
    longest = model.max_position_embeddings
    if asked is not None and longest is not None and asked > longest:
        raise InputError(f"{key}={asked} is longer than the model's max_position_embeddings={longest}")
    return asked or longest


def tell_truncated(examples: EncodedExamples, name: str, longest: int | None) -> None:
    """Log how many examples were too long, if any."""
    if examples.num_truncated:
        share = examples.num_truncated / len(examples)
        log.warning("%s: %.1f %% of the examples are cut to %s tokens", name, 100 * share, longest)


def predict(config: PredictConfig) -> int:
    """Label the rows of a file: the `predict` command.

    Raises:
        InputError: no classifier or no texts where the configuration says.
    """
    folder = model_folder(config.model)
    model, tokenizer = load_classifier(folder), load_tokenizer(folder)
    model.config.check_fit(num_ids(tokenizer), seq_len=1)
    table = read_table(config.input, config.encoding)
    pair = config.text_pair_column
    texts = table.texts(config.text_column, "--text_column")
    pairs = table.texts(pair, "--text_pair_column") if pair else None
    longest = max_length(model.config, config.max_length, "max_length")
    examples = encode_examples(tokenizer, Examples(texts, pairs), longest)
    tell_truncated(examples, table.name, longest)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits = predict_logits(model.to(device), examples, config.batch_size)
    write_predictions(Path(config.output), _row_ids(table, config.id_column), logits, model.classifier_config)
    print(f"{len(examples):,} rows labelled: {config.output}")
    return 0


def _row_ids(table: Table, column: str | None) -> list[str]:
    if column is None:
        return [str(number) for number in range(1, len(table.rows) + 1)]
    return ["" if value is None else str(value) for _, value in table.cells(column, "--id_column")]
