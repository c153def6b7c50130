"""What a classifier says of texts: logits for scoring, and the `predict` command, which writes a file.

C classes (1 for a score), N examples.
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed
from torch import Tensor

from mlm.config.errors import InputError, require
from mlm.config.evaluation import Devices, PredictConfig
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.cores import share_cores
from mlm.data.examples import EncodedExamples, LabelledBatch, batches_in_order, encode_examples
from mlm.data.labelled import Examples, Table, read_table
from mlm.files import replacing
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_classifier, read_classifier_config
from mlm.launch import command_for, launched
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


def sigmoid(logits: Floats) -> Floats:
    """Return the probability of each label by itself, (N, C)."""
    return np.exp(-np.logaddexp(0.0, -logits))


def write_predictions(
    path: Path, ids: Iterable[str], logits: Floats, classifier: ClassifierConfig, separator: str = "|"
) -> None:
    """Write a CSV file with row, label and the probability of each class; it is whole or not there at all.

    Args:
        path: the file; replaced if it exists.
        ids: the name of each row.
        logits: (N, C).
        classifier: what the columns mean; for a score, the label is the number and there are no others.
        separator: stands between the labels of a text that may have any number of them.

    Raises:
        InputError: it stands in a label too.
    """
    names = [f"probability_{label}" for label in classifier.labels]
    if classifier.label_type == "regression":
        names, chances = [], np.zeros((len(logits), 0))
        labels = [f"{score:.7g}" for score in logits[:, 0]]
    elif classifier.label_type == "multilabel":
        chances, labels = sigmoid(logits), joined_labels(classifier.labels, logits > 0, separator)
    else:
        chances, labels = softmax(logits), [classifier.labels[best] for best in logits.argmax(1)]
    with replacing(path, "place") as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "label", *names])
        for row, label, shares in zip(ids, labels, chances, strict=True):
            writer.writerow([row, label, *(f"{share:.6f}" for share in shares)])


def joined_labels(names: Sequence[str], has: npt.NDArray[np.bool_], separator: str) -> list[str]:
    """Return the labels of each text in one piece; `has` is (N, C).

    Raises:
        InputError: the separator stands in a label too.
    """
    ambiguous = next((name for name in names if separator in name), None)
    if ambiguous is not None:
        raise InputError(f"label_separator={separator} stands in the label {ambiguous}; choose another")
    return [separator.join(names[number] for number in np.flatnonzero(row).tolist()) for row in has]


def max_length(model: ModelConfig, asked: int | None, key: str) -> int | None:
    """Return the most tokens of an example: what is asked for, else all that the model reads.

    Raises:
        InputError: more is asked for than the model reads.
    """
    longest = model.max_position_embeddings
    if asked is not None and longest is not None and asked > longest:
        longer = f"leave it out, or make a model of longer rows: {command_for('train.py')} --branch RUN "
        longer += f"--data.seq_len {asked}"
        raise InputError(
            f"{key}={asked} is longer than the model's max_position_embeddings={longest}; {longer}"
        )
    return asked or longest


def tell_truncated(number: int, total: int, name: str, longest: int | None) -> None:
    """Log how many of all examples were too long, if any."""
    if number:
        log.warning("%s: %.1f %% of the examples are cut to %s tokens", name, 100 * number / total, longest)


@dataclass(frozen=True)
class Said:
    """What a model says of texts."""

    logits: Floats
    """(N, C)"""
    num_truncated: int
    """Texts that were too long."""
    longest: int | None
    """Tokens they were cut to; None: the model knows no bound."""
    classifier: ClassifierConfig
    """What the logits mean."""


def say(
    folder: str | Path, examples: Examples, longest: int | None, batch_size: int, devices: Devices = "auto"
) -> Said | None:
    """Let a model say something of all examples, with any number of processes; each takes every n-th one.

    Args:
        folder: of the model.
        examples: (N).
        longest: most tokens of an example; None: as far as the model reads.
        batch_size: examples a pass.
        devices: processes to start; auto: none if torchrun started some, else one for each GPU.

    Returns:
        The answers in the order of the examples; None in a process of torchrun that is not the first.

    Raises:
        InputError: the folder holds no classifier, or it reads less than `longest`.
    """
    launch = launched()
    if launch is not None and launch.world_size > 1:
        return _say_together(folder, examples, longest, batch_size)
    there = torch.cuda.device_count()
    number = max(there, 1) if devices == "auto" else devices
    require(not there or number <= there, "devices", number, f"is more than the {there} GPU(s) here")
    number = min(number, len(examples))
    task = partial(_say_share, folder, examples, longest, batch_size, number)
    if number == 1:
        return task(0)
    # Started anew and not copied: CUDA and threads do not survive a copy.
    with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as pool:
        return _in_order(list(pool.map(task, range(number))))


def _say_share(
    folder: str | Path, examples: Examples, longest: int | None, batch_size: int, number: int, rank: int
) -> Said:
    """Let the model speak of the examples rank, rank + number, ..."""
    share_cores(number)
    model, tokenizer = load_classifier(folder), load_tokenizer(folder)
    model.config.check_fit(num_ids(tokenizer), seq_len=1)
    longest = max_length(model.config, longest, "max_length")
    encoded = encode_examples(tokenizer, examples.take(np.arange(rank, len(examples), number)), longest)
    gpus = torch.cuda.device_count()
    logits = predict_logits(model.to(f"cuda:{rank % gpus}" if gpus else "cpu"), encoded, batch_size)
    return Said(logits, encoded.num_truncated, longest, model.classifier_config)


def _say_together(
    folder: str | Path, examples: Examples, longest: int | None, batch_size: int
) -> Said | None:
    """Take this process's share, and give it to the first."""
    torch.distributed.init_process_group("gloo")
    try:
        rank, number = torch.distributed.get_rank(), torch.distributed.get_world_size()
        share = _say_share(folder, examples, longest, batch_size, number, rank)
        shares: list[Any] | None = [None] * number if rank == 0 else None
        torch.distributed.gather_object(share, shares)
        return _in_order(shares) if shares else None
    finally:
        torch.distributed.destroy_process_group()


def _in_order(shares: Sequence[Said]) -> Said:
    """Put the shares together."""
    first, number = shares[0], len(shares)
    logits = np.zeros((sum(len(share.logits) for share in shares), first.logits.shape[1]))
    for rank, share in enumerate(shares):
        logits[rank::number] = share.logits
    return replace(first, logits=logits, num_truncated=sum(share.num_truncated for share in shares))


def read_examples(table: Table, text_column: str, text_pair_column: str | None) -> Examples:
    """Return the texts of a file.

    Raises:
        InputError: a column is not there, or a text is missing.
    """
    texts = table.texts(text_column, "--text_column")
    return Examples(texts, table.texts(text_pair_column, "--text_pair_column") if text_pair_column else None)


def check_pairs(classifier: ClassifierConfig | None, text_pair_column: str | None) -> None:
    """Check that a model gets as many texts as it was trained on.

    Raises:
        InputError: it would see one text of a pair, or two where it knows one.
    """
    pairs = classifier.text_pairs if classifier else None
    alone = bool(pairs) and text_pair_column is None
    hint = "leaves a text out: the model was trained on pairs; name the column of the second"
    require(not alone, "text_pair_column", "null", hint)
    needless = pairs is False and text_pair_column is not None
    hint = "is one too many: the model was trained on single texts"
    require(not needless, "text_pair_column", text_pair_column, hint)


def predict(config: PredictConfig) -> int:
    """Label the rows of a file: the `predict` command.

    Raises:
        InputError: no classifier or no texts where the configuration says.
    """
    table = read_table(config.input, config.encoding)
    examples = read_examples(table, config.text_column, config.text_pair_column)
    ids, folder = _row_ids(table, config.id_column), model_folder(config.model)
    check_pairs(read_classifier_config(folder), config.text_pair_column)
    said = say(folder, examples, config.max_length, config.batch_size, config.devices)
    if said is None:
        return 0
    tell_truncated(said.num_truncated, len(examples), table.name, said.longest)
    write_predictions(Path(config.output), ids, said.logits, said.classifier, config.label_separator)
    print(f"{len(examples):,} rows labelled: {config.output}")
    return 0


def _row_ids(table: Table, column: str | None) -> list[str]:
    if column is None:
        return [str(number) for number in range(1, len(table.rows) + 1)]
    ids = ("" if value is None else str(value) for _, value in table.cells(column, "--id_column"))
    return [one.encode("utf-8", "replace").decode("utf-8") for one in ids]  # as the texts are read
