"""The commands on trained models: `predict`, `evaluate`, `embed` and `fill-mask`.

Files are read before torch is loaded, so that mistakes in them show at once; each is an InputError.

Sizes: N examples, C classes (1 for a number).
"""

from __future__ import annotations

import csv
import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.config.commands import Devices, EmbedConfig, EvaluateConfig, FillMaskConfig, LongTexts, PredictConfig
from mlm.config.errors import InputError, require
from mlm.config.model import ClassifierConfig
from mlm.cores import share_cores
from mlm.data.labelled import (
    Examples,
    Table,
    label_array,
    label_names,
    label_numbers,
    read_table,
    read_texts,
)
from mlm.evaluation.predictor import (
    Floats,
    Predictor,
    check_pairs,
    check_windows,
    decide,
    progress_bar,
    warn_truncated,
)
from mlm.files import replacing, shorten, write_json
from mlm.launch import launched

Share = tuple[Floats, int, int | None]
"""Logits (N, C) of some texts, how many were too long, and the tokens they were cut to."""

log = logging.getLogger(__name__)


def predict(config: PredictConfig) -> int:
    """Label the rows of a file."""
    table = read_table(config.input, config.encoding, text_column=config.text_column)
    examples = read_examples(table, config.text_column, config.text_pair_column)
    ids = [str(number) for number in range(1, len(examples) + 1)]
    if config.id_column is not None:
        cells = (cell for _, cell in table.cells(config.id_column, "--id_column"))
        ids = ["" if cell is None else str(cell).encode("utf-8", "replace").decode("utf-8") for cell in cells]
    folder, classifier = _open_classifier(config)
    logits = _run_inference(config, folder, examples, config.devices)
    if logits is not None:
        write_predictions(Path(config.output), ids, logits, classifier, config.label_separator)
        print(f"{len(examples):,} rows labelled: {config.output}")
    return 0


def evaluate(config: EvaluateConfig) -> int:
    """Print the scores of a model on a text, or of a fine-tuned one on a labelled file."""
    facts = _score_text(config) if config.input is None else _score_table(config, config.input)
    if facts and config.output:
        write_json(Path(config.output), facts)
    return 0


def embed(config: EmbedConfig) -> int:
    """Write the vectors of the texts of a file."""
    texts = read_texts(config.input, config.text_column, config.encoding)
    share_cores(1)
    predictor = Predictor(config.model, batch_size=config.batch_size, max_length=config.max_length)
    vectors = predictor.embed(texts, config.pooling, config.normalize, shorten(config.input, 3))
    with replacing(Path(config.output), "place") as partial, partial.open("wb") as file:
        np.save(file, vectors)
    print(f"{vectors.shape[0]:,} vectors of {vectors.shape[1]} numbers: {config.output}")
    return 0


def fill_mask(config: FillMaskConfig) -> int:
    """Print candidates for each mask token of each text."""
    predictor = Predictor(config.model)
    for text in config.text:
        filled = predictor.fill_mask(text, config.top_k)
        print(text)
        for number, candidates in enumerate(filled, start=1):
            for token, probability in candidates:
                ids = [int(predictor.tokenizer.token_to_id(token) or 0)]
                spelt = predictor.tokenizer.decode(ids, skip_special_tokens=False)  # bytes as characters
                print(f"  mask {number}  {probability:7.2%}  {spelt.strip() or repr(spelt)}")
    return 0


def read_examples(table: Table, text_column: str, text_pair_column: str | None) -> Examples:
    """Return the texts of a file; InputError: a column does not exist, or a text is missing."""
    texts = table.texts(text_column, "--text_column")
    return Examples(texts, table.texts(text_pair_column, "--text_pair_column") if text_pair_column else None)


def _open_classifier(config: PredictConfig | EvaluateConfig) -> tuple[Path, ClassifierConfig]:
    """Return the folder and the head of a model that takes as many texts as the columns name."""
    from mlm.hub import pretrained

    folder = pretrained.model_folder(config.model)
    classifier = pretrained.read_classifier(folder)
    check_pairs(classifier, config.text_pair_column)
    check_windows(config.long_texts, config.text_pair_column is not None)
    return folder, classifier


def _run_inference(
    config: PredictConfig | EvaluateConfig, folder: Path, examples: Examples, devices: Devices = "auto"
) -> Floats | None:
    """Compute the logits (N, C) of all examples with any number of processes; each takes every n-th example.

    `devices` is the number of processes to start; auto: none if torchrun started some, else one for each GPU.
    Returns None in every process of torchrun but the first.
    """
    import torch

    infer = partial(_infer_share, folder, examples, config.max_length, config.batch_size, config.long_texts)
    launch = launched()
    if launch is not None and launch.world_size > 1:
        shares = _infer_under_torchrun(infer)
        if shares is None:
            return None
    else:
        gpus = torch.cuda.device_count()
        number = max(gpus, 1) if devices == "auto" else devices
        require(not gpus or number <= gpus, "devices", number, f"is more than the {gpus} GPU(s) here")
        number = min(number, len(examples))
        if number == 1:
            shares = [infer(1, 0)]
        else:  # spawned and not forked: CUDA and threads do not survive a fork
            with ProcessPoolExecutor(number, mp_context=get_context("spawn")) as pool:
                shares = list(pool.map(partial(infer, number), range(number)))
    logits = np.zeros((len(examples), shares[0][0].shape[1]))
    for rank, (share, _, _) in enumerate(shares):
        logits[rank :: len(shares)] = share
    name = shorten(config.input or [], 3)
    warn_truncated(sum(cut for _, cut, _ in shares), len(examples), name, shares[0][2])
    return logits


def _infer_share(
    folder: Path,
    examples: Examples,
    max_length: int | None,
    batch_size: int,
    long_texts: LongTexts,
    number: int,
    rank: int,
) -> Share:
    """Compute the logits of the examples rank, rank + number, ..."""
    from mlm.evaluation.predictor import pick_device

    share_cores(number)
    predictor = Predictor(folder, str(pick_device(rank=rank)), batch_size, max_length, long_texts)
    encoded = predictor.encode(examples.take(np.arange(rank, len(examples), number)))
    logits = predictor.logits(encoded, show_progress=rank == 0)
    return logits, encoded.num_truncated, predictor.max_length


def _infer_under_torchrun(infer: partial[Share]) -> list[Any] | None:
    """Compute the share of this process, and return those of all in the first."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        rank, number = dist.get_rank(), dist.get_world_size()
        shares: list[Any] | None = [None] * number if rank == 0 else None
        dist.gather_object(infer(number, rank), shares)
        return shares
    finally:
        dist.destroy_process_group()


def write_predictions(
    path: Path, ids: Iterable[str], logits: Floats, classifier: ClassifierConfig, separator: str = "|"
) -> None:
    """Write a CSV file with row, label and the probability of each class, atomically.

    A number is written as the label, without probabilities; `separator`, which may not be part of a label,
    between several labels of a text.
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


def _score_table(config: EvaluateConfig, paths: list[str]) -> dict[str, Any] | None:
    """Print and return the scores of a classifier; None in every process of torchrun but the first."""
    from mlm.evaluation.metrics import class_table, counts_of_classes, score_table, task_metrics

    table = read_table(paths, config.encoding)
    examples = read_examples(table, config.text_column, config.text_pair_column)
    folder, classifier = _open_classifier(config)
    labels = _labels_of_model(table, config, classifier)  # mistakes in them show before hours of work
    logits = _run_inference(config, folder, examples)
    if logits is None:
        return None
    facts: dict[str, Any] = task_metrics(classifier.label_type, labels, logits)
    facts["num_examples"] = len(examples)
    lines = score_table(facts)
    if classifier.label_type != "regression":
        counts = counts_of_classes(classifier.labels, labels, logits)
        lines += class_table(counts)
        predicted = [label for label, count in counts["predicted_counts"].items() if count]
        if not predicted:
            log.warning("no label is ever predicted")
        elif len(predicted) == 1:
            log.warning("only one class is predicted: %s", predicted[0])
        facts |= counts
    elif np.ptp(logits) == 0:
        log.warning("every text gets the same score: correlations are 0 there by definition")
    print("\n".join(lines))
    return facts


def _labels_of_model(table: Table, config: EvaluateConfig, classifier: ClassifierConfig) -> npt.NDArray[Any]:
    """Return the labels of a file as the model numbers them; `task_metrics` says in which form."""
    if classifier.label_type == "regression":
        return label_numbers(table.cells(config.label_column, "--label_column"))
    is_set = classifier.label_type == "multilabel"
    cells = (table.label_cells if is_set else table.cells)(config.label_column, "--label_column")
    separator = config.label_separator if classifier.label_type == "multilabel" else None
    names = _as_the_model_spells(label_names(cells, separator), classifier.labels)
    return label_array(names, classifier.labels, classifier.label_type, cells, "of the model")


def _as_the_model_spells(names: Sequence[Sequence[str]], labels: Sequence[str]) -> list[list[str]]:
    """Return the names of each row's labels in the capitals of the model.

    Where a model does not name its classes (LABEL_0, LABEL_1, ...), numbers count as its ids, with a warning.
    """
    known = {label.lower(): label for label in labels}
    if len(known) < len(labels):  # some of its labels differ in capitals only
        known = {}
    known |= {label: label for label in labels}
    if all(label == f"LABEL_{number}" for number, label in enumerate(labels)):
        numbers = {str(number): label for number, label in enumerate(labels)}
        if all(name in numbers for row in names for name in row):
            log.warning("the model does not name its classes, so that labels are taken for its ids")
            known |= numbers
    return [[known.get(name, known.get(name.lower(), name)) for name in row] for row in names]


def _score_text(config: EvaluateConfig) -> dict[str, float]:
    """Print and return the scores of a masked language model on a text, with frozen masks."""
    from mlm.data.collate import build_masking
    from mlm.data.corpus import prepare_evaluation
    from mlm.evaluation.metrics import frozen_batches, score_batches, score_table
    from mlm.evaluation.predictor import pick_device
    from mlm.hub import pretrained
    from mlm.tokenizer import load_tokenizer, num_ids

    folder = pretrained.model_folder(config.model)
    if pretrained.holds_classifier(folder):
        raise InputError(f"{folder} is a fine-tuned model; give a labelled file with --input")
    model, tokenizer = pretrained.load_masked_lm(folder, needs_head=True), load_tokenizer(folder)
    longest = model.config.max_position_embeddings or config.data.seq_len
    if config.data.seq_len > longest:
        log.info("rows of %d tokens, the longest that %s reads", longest, config.model)
        config = replace(config, data=replace(config.data, seq_len=longest))
    model.config.check_fit(num_ids(tokenizer), config.data.seq_len)
    rows = prepare_evaluation(config.data, tokenizer)
    masking = build_masking(config.masking, config.masking.validation_mask_rate, tokenizer)
    batches = frozen_batches(rows, masking, config.batch_size)
    share_cores(1)
    device = pick_device()
    with progress_bar("evaluating", "batch", iterable=batches) as bar:
        facts = score_batches(model.to(device).eval(), bar, device)
    num_tokens, num_bytes = rows.table.pieces.num_tokens, rows.num_bytes
    num_masked = facts.pop("num_masked")
    facts["nats_per_byte"] = facts["loss"] * num_tokens / num_bytes
    facts |= {"num_masked": num_masked, "num_tokens": num_tokens, "num_bytes": num_bytes}
    print("\n".join(score_table(facts)))
    return facts
