"""The `predict` command: labels for the rows of a file, by one process or several.

Sizes: N examples, C classes (1 for a number).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from mlm.config.errors import InputError, require
from mlm.config.evaluation import Devices, PredictConfig
from mlm.config.model import ClassifierConfig
from mlm.cores import share_cores
from mlm.data.labelled import Examples, Table, read_table
from mlm.evaluation.predictor import Floats, Predictor, check_pairs, decide, read_classifier, warn_truncated
from mlm.files import replacing
from mlm.launch import launched


@dataclass(frozen=True)
class Predictions:
    """The outputs of a model for some texts."""

    logits: Floats
    """(N, C)"""
    num_truncated: int
    """Texts that were too long."""
    max_length: int | None
    """Tokens they were cut to; None: the model has no limit."""


def run_inference(
    folder: str | Path,
    examples: Examples,
    max_length: int | None,
    batch_size: int,
    devices: Devices = "auto",
) -> Predictions | None:
    """Compute the logits of all examples with any number of processes; each takes every n-th example.

    Args:
        folder: of the model.
        examples: (N).
        max_length: most tokens of an example; None: as many as the model reads.
        batch_size: most examples a pass.
        devices: processes to start; auto: none if torchrun started some, else one for each GPU.

    Returns:
        The predictions in the order of the examples; None in every process of torchrun but the first.

    Raises:
        InputError: the folder holds no classifier, or it reads less than `max_length`.
    """
    import torch

    infer = partial(_infer_share, folder, examples, max_length, batch_size)
    launch = launched()
    if launch is not None and launch.world_size > 1:
        return _infer_under_torchrun(infer)
    gpus = torch.cuda.device_count()
    number = max(gpus, 1) if devices == "auto" else devices
    require(not gpus or number <= gpus, "devices", number, f"is more than the {gpus} GPU(s) here")
    number = min(number, len(examples))
    if number == 1:
        return infer(1, 0)
    # Spawned and not forked: CUDA and threads do not survive a fork.
    with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as pool:
        return gather_predictions(list(pool.map(partial(infer, number), range(number))))


def _infer_share(
    folder: str | Path, examples: Examples, max_length: int | None, batch_size: int, number: int, rank: int
) -> Predictions:
    """Compute the logits of the examples rank, rank + number, ..."""
    from mlm.evaluation.torch_backend import pick_device

    share_cores(number)
    predictor = Predictor(folder, str(pick_device(rank=rank)), batch_size, max_length)
    encoded = predictor.encode(examples.take(np.arange(rank, len(examples), number)))
    logits = predictor.logits(encoded, show_progress=rank == 0)
    return Predictions(logits, encoded.num_truncated, predictor.max_length)


def _infer_under_torchrun(infer: partial[Predictions]) -> Predictions | None:
    """Compute the share of this process, and send it to the first."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        rank, number = dist.get_rank(), dist.get_world_size()
        shares: list[Any] | None = [None] * number if rank == 0 else None
        dist.gather_object(infer(number, rank), shares)
        return gather_predictions(shares) if shares else None
    finally:
        dist.destroy_process_group()


def gather_predictions(shares: Sequence[Predictions]) -> Predictions:
    """Interleave the shares of all processes."""
    logits = np.zeros((sum(len(share.logits) for share in shares), shares[0].logits.shape[1]))
    for rank, share in enumerate(shares):
        logits[rank :: len(shares)] = share.logits
    return Predictions(logits, sum(share.num_truncated for share in shares), shares[0].max_length)


def write_predictions(
    path: Path, ids: Iterable[str], logits: Floats, classifier: ClassifierConfig, separator: str = "|"
) -> None:
    """Write a CSV file with row, label and the probability of each class, atomically.

    Args:
        path: the file; replaced if it exists.
        ids: the name of each row.
        logits: (N, C).
        classifier: the meaning of the columns; a number is written as the label, without probabilities.
        separator: written between the labels of a text that may have any number of them.

    Raises:
        InputError: the separator is part of a label.
    """
    labels, probabilities = decide(logits, classifier)
    names = [f"probability_{label}" for label in classifier.labels]
    if classifier.label_type == "regression":
        names, labels = [], [f"{score:.7g}" for score in labels]
    elif classifier.label_type == "multilabel":
        ambiguous = next((name for name in classifier.labels if separator in name), None)
        if ambiguous is not None:
            raise InputError(f"label_separator={separator} is part of the label {ambiguous}; choose another")
        labels = [separator.join(of_text) for of_text in labels]
    with replacing(path, "place") as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["row", "label", *names])
        for row, label, shares in zip(ids, labels, probabilities, strict=True):
            writer.writerow([row, label, *(f"{share:.6f}" for share in shares)])


def read_examples(table: Table, text_column: str, text_pair_column: str | None) -> Examples:
    """Return the texts of a file.

    Raises:
        InputError: a column does not exist, or a text is missing.
    """
    texts = table.texts(text_column, "--text_column")
    return Examples(texts, table.texts(text_pair_column, "--text_pair_column") if text_pair_column else None)


def predict(config: PredictConfig) -> int:
    """Label the rows of a file: the `predict` command.

    Raises:
        InputError: the model is not a classifier, or the file has no texts in the given columns.
    """
    table = read_table(config.input, config.encoding)
    examples = read_examples(table, config.text_column, config.text_pair_column)
    ids = _row_ids(table, config.id_column)

    from mlm.hub.download import model_folder  # after reading, so that mistakes in the file show at once

    folder = model_folder(config.model)
    classifier = read_classifier(folder)
    check_pairs(classifier, config.text_pair_column)
    found = run_inference(folder, examples, config.max_length, config.batch_size, config.devices)
    if found is None:
        return 0
    warn_truncated(found.num_truncated, len(examples), table.name, found.max_length)
    write_predictions(Path(config.output), ids, found.logits, classifier, config.label_separator)
    print(f"{len(examples):,} rows labelled: {config.output}")
    return 0


def _row_ids(table: Table, column: str | None) -> list[str]:
    if column is None:
        return [str(number) for number in range(1, len(table.rows) + 1)]
    ids = ("" if value is None else str(value) for _, value in table.cells(column, "--id_column"))
    return [one.encode("utf-8", "replace").decode("utf-8") for one in ids]  # as the texts are read
