"""Scores of predictions over a whole set; each is defined for any predictions and labels.

torchmetrics gathers predictions over batches and ranks, and computes the scores of numbers in float64. Its
scores of classes are quotients in float32 and take C^2 memory, and its Matthews correlation of constant
answers is not 0: here they all follow from three counts a class. Where a formula would divide by 0 the score
is 0, as in scikit-learn.

Sizes: N examples, B a batch, C classes (1 for a number).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import Metric
from torchmetrics.functional.regression import pearson_corrcoef
from torchmetrics.utilities import dim_zero_cat

from mlm.config.data import IGNORE_INDEX
from mlm.config.model import LabelType
from mlm.data.collate import MaskedBatch, MaskedRows, Rows
from mlm.data.sampler import ValidationSampler
from mlm.evaluation.predictor import softmax
from mlm.masking import Masking
from mlm.model.heads import MaskedLM
from mlm.model.loss import summed_cross_entropy

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

VALIDATION_SEED = 20_181_011
"""Seed of every validation mask, independent of the seed of the run, so that runs can be compared."""
MAX_AUC_CLASSES = 100
"""With more classes there is no ROC AUC, which ranks all examples once a class."""


class LabelledPredictions(Metric):
    """Gathers logits over batches and ranks; a rank may have no batch, or examples that others have too."""

    full_state_update = False
    rows: Any
    logits: Any

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("logits", [], dist_reduce_fx="cat")

    def update(self, rows: Tensor, logits: Tensor) -> None:
        """Add a batch: the number of each example in the set, (B,) int64, and its logits, (B, C)."""
        self.rows.append(rows.to(logits.device))
        self.logits.append(logits.detach().float().flatten())

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the batches of all ranks; a rank without any sends empty tensors of the right types."""
        if not self.rows:
            none = torch.zeros(0, device=self.device)
            self.update(none.long(), none)
        super().sync(*args, **kwargs)

    def compute(self) -> Floats:
        """Return the logits of all examples in the order of their numbers, each once, (N, C)."""
        rows, logits = (dim_zero_cat(state).cpu().numpy() for state in (self.rows, self.logits))
        _, first = np.unique(rows, return_index=True)
        return logits.reshape(len(rows), -1)[first].astype(np.float64)


class MaskedLMScores(Metric):
    """Loss, perplexity and accuracy over masked tokens, summed over batches and ranks in float64.

    With the names of `sources` also `loss/NAME` of each that has such tokens.
    On MPS, which has no float64, in float32. `kwargs` are of `torchmetrics.Metric`, such as
    `sync_on_compute=False` for the batches of one rank alone.
    """

    full_state_update = False
    summed_loss: Tensor
    num_correct: Tensor
    num_masked: Tensor

    of_source: Tensor

    def __init__(self, device: torch.device | str = "cpu", sources: Sequence[str] = (), **kwargs: Any):
        super().__init__(**kwargs)
        self.sources = sources
        dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64
        for name in ("summed_loss", "num_correct", "num_masked"):
            self.add_state(name, torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("of_source", torch.zeros((2, len(sources)), dtype=dtype), dist_reduce_fx="sum")
        self.to(device)

    def update(self, logits: Tensor, labels: Tensor, sources: Tensor | None = None) -> None:
        """Add logits (..., V), labels (...), IGNORE_INDEX where nothing is predicted, and sources (...)."""
        logits = logits.detach().float()  # a CPU finds the largest of bfloat16 four times slower
        masked = labels != IGNORE_INDEX
        self.summed_loss += summed_cross_entropy(logits.flatten(0, -2)[None], labels.flatten()[None])
        self.num_correct += ((logits.argmax(-1) == labels) & masked).sum()
        self.num_masked += masked.sum()
        if self.sources and sources is not None:
            losses = F.cross_entropy(logits[masked], labels[masked], reduction="none")
            sums = torch.stack([losses, torch.ones_like(losses)]).to(self.of_source.dtype)
            self.of_source.index_add_(1, sources[masked], sums)

    def compute(self) -> dict[str, float]:
        """Return means over the masked tokens (loss in nats, perplexity, masked_accuracy), and num_masked."""
        sums = torch.stack([self.summed_loss, self.num_correct, self.num_masked])
        loss, correct, masked = sums.tolist()
        loss /= max(masked, 1)
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp overflows
        scores = {"loss": loss, "perplexity": perplexity, "masked_accuracy": correct / max(masked, 1)}
        found = zip(self.sources, *self.of_source.tolist(), strict=True)
        scores |= {f"loss/{name}": total / number for name, total, number in found if number}
        return scores | {"num_masked": int(masked)}


def frozen_batches(
    rows: Rows, masking: Masking, batch_size: int, rank: int = 0, world_size: int = 1
) -> DataLoader[MaskedBatch]:
    """Return every row of a rank's share once, always with the same masks."""
    sampler = ValidationSampler(len(rows), batch_size, rank, world_size)
    return DataLoader(MaskedRows(rows, masking, VALIDATION_SEED), sampler=sampler, batch_size=None)


@torch.no_grad()
def score_batches(
    model: MaskedLM,
    batches: Iterable[MaskedBatch],
    device: torch.device,
    sync: bool = True,
    sources: Sequence[str] = (),
) -> dict[str, float]:
    """Return what `MaskedLMScores` computes over batches, for a model on the device, in its current mode.

    `sync` adds the batches of all ranks, each of which then has to call this.
    """
    scores = MaskedLMScores(device, sources, sync_on_compute=sync)
    for batch in batches:
        inputs = (batch[name].to(device) for name in ("input_ids", "attention_mask", "masked_positions"))
        places = batch["sources"].to(device) if sources else None
        scores.update(model(*inputs), batch["labels"].to(device), places)
    return scores.compute()


def confusion_matrix(labels: Ints, predictions: Ints, num_classes: int) -> Ints:
    """Return how often each label (row) was predicted as each class (column), (C, C); both are (N,) ids."""
    cells = np.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def predicted(label_type: LabelType, logits: Floats) -> npt.NDArray[Any]:
    """Return the answers for logits (N, C): (N,) ids of classes or numbers, or for multilabel (N, C) bool."""
    if label_type == "multilabel":
        return logits > 0
    return logits[:, 0] if label_type == "regression" else logits.argmax(1)


def class_counts(labels: npt.NDArray[Any], logits: Floats) -> Ints:
    """Return how often each label, (N,) ids or (N, C) bool, occurs, is predicted, and is right, (C, 3)."""
    if labels.ndim == 2:
        answers = predicted("multilabel", logits)
        return np.stack([labels.sum(0), answers.sum(0), (labels & answers).sum(0)], axis=1)
    chosen = logits.argmax(1)
    parts = labels.astype(np.int64), chosen, chosen[chosen == labels]
    return np.stack([np.bincount(part, minlength=logits.shape[1]) for part in parts], axis=1)


def class_scores(counts: Ints) -> dict[str, Floats]:
    """Return precision, recall and F1 of each class, (C,) each, from the counts of `class_counts`."""
    examples, chosen, right = counts.T
    sizes = {"precision": chosen, "recall": examples, "f1": (examples + chosen) / 2}
    return {name: right / np.maximum(size, 0.5) for name, size in sizes.items()}


def accuracy(counts: Ints) -> float:
    """Return the share of the examples that are predicted correctly; 0 without examples."""
    examples, _, right = counts.sum(0)
    return float(right / max(examples, 1))


def matthews_correlation(counts: Ints) -> float:
    """Return the correlation of labels and predictions, for any number of classes.

    Gorodkin 2004 (doi:10.1016/j.compbiolchem.2004.09.006); for two classes it is Matthews' coefficient.
    """
    of_label, of_prediction, right = counts.astype(np.float64).T
    total = of_label.sum()
    covariance = right.sum() * total - of_label @ of_prediction
    variances = (total**2 - of_label @ of_label) * (total**2 - of_prediction @ of_prediction)
    return float(covariance / math.sqrt(variances)) if variances > 0 else 0.0


def pearson(targets: Floats, predictions: Floats) -> float:
    """Return the linear correlation of two series (N,); 0 if one is constant or not finite."""
    pair = np.stack([targets, predictions])
    if pair.size < 4 or not np.isfinite(pair).all() or (pair == pair[:, :1]).all(1).any():
        return 0.0
    x, y = torch.from_numpy(pair / np.abs(pair).max(1, keepdims=True))  # squares have a range
    return float(pearson_corrcoef(x, y).nan_to_num())


def spearman(targets: Floats, predictions: Floats) -> float:
    """Return the correlation of the ranks of two series (N,); 0 if one is constant or not finite.

    torchmetrics' own adds 1e-6 to the denominator, which shows in short series.
    """
    if not (np.isfinite(targets).all() and np.isfinite(predictions).all()):
        return 0.0
    return pearson(_ranks(targets), _ranks(predictions))


def _ranks(values: Floats) -> Floats:
    """Return the rank of each value from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


def _roc_auc(labels: Bools, scores: Floats) -> dict[str, float]:
    """Return the mean over the columns (N, C) of how often a positive example scores above a negative one.

    Ties count half. Empty where a column has no positive or no negative example; 0 if a score is not finite.
    torchmetrics' own is float32.
    """
    positive = labels.sum(0)
    pairs = positive * (len(labels) - positive)
    if not pairs.all():
        return {}
    if not np.isfinite(scores).all():
        return {"roc_auc": 0.0}
    sums = [_ranks(column)[chosen].sum() for column, chosen in zip(scores.T, labels.T, strict=True)]
    return {"roc_auc": float(((sums - positive * (positive + 1) / 2) / pairs).mean())}


def task_metrics(label_type: LabelType, labels: npt.NDArray[Any], logits: Floats) -> dict[str, float]:
    """Return the scores of a model's outputs, the one that ranks epochs first.

    Labels are (N,) ids of classes, or numbers, or (N, C) bool; logits are (N, C), for numbers (N, 1).
    """
    if label_type == "multilabel":
        return _set_scores(labels, logits)
    if label_type == "regression":
        targets, predictions = labels.astype(np.float64), logits[:, 0].astype(np.float64)
        errors = predictions - targets
        return {
            "pearson": pearson(targets, predictions),
            "spearman": spearman(targets, predictions),
            "mae": float(np.abs(errors).mean()),
            "rmse": float(np.sqrt((errors**2).mean())),
        }
    counts = class_counts(labels, logits)
    f1 = class_scores(counts)["f1"]
    of_class_1 = {"f1": float(f1[1])} if len(counts) == 2 else {}  # the other class is the background
    seen = counts.any(1)  # the others do not count in the mean, as in scikit-learn
    area: dict[str, float] = {}
    if len(counts) == 2:
        area = _roc_auc(labels[:, None] == 1, logits[:, 1:] - logits[:, :1])
    elif len(counts) <= MAX_AUC_CLASSES:  # the mean of each class against the rest
        area = _roc_auc(labels[:, None] == np.arange(len(counts)), softmax(logits))
    return {
        "accuracy": accuracy(counts),
        **of_class_1,
        "matthews_correlation": matthews_correlation(counts),
        "f1_macro": float(f1[seen].mean()) if seen.any() else 0.0,
        **area,
    }


def _set_scores(labels: Bools, logits: Floats) -> dict[str, float]:
    """Return the scores of any number of labels a text.

    F1 micro counts every label of every text alike, macro is the mean over the labels, of which one that
    neither occurs nor is predicted scores 0; subset accuracy is the share of the texts with all labels right.
    """
    counts = class_counts(labels, logits)
    examples, chosen, right = counts.sum(0)
    exact = (labels == predicted("multilabel", logits)).all(1).sum()
    return {
        "f1_micro": float(2 * right / max(examples + chosen, 1)),
        "f1_macro": float(class_scores(counts)["f1"].mean()),
        "subset_accuracy": float(exact / max(len(labels), 1)),
        **(_roc_auc(labels, logits) if labels.shape[1] <= MAX_AUC_CLASSES else {}),
    }


def counts_of_classes(labels: Sequence[str], ids: npt.NDArray[Any], logits: Floats) -> dict[str, Any]:
    """Return the names of the classes, and by name the counts of `class_counts`, precision and recall."""
    counts = class_counts(ids, logits)
    columns = dict(zip(("examples_counts", "predicted_counts", "right_counts"), counts.T, strict=True))
    columns |= {f"class_{name}": values for name, values in class_scores(counts).items() if name != "f1"}
    by_name = {name: dict(zip(labels, values.tolist(), strict=True)) for name, values in columns.items()}
    return {"labels": list(labels), **by_name}


def class_table(counts: Mapping[str, Any]) -> list[str]:
    """Return a row for each class of `counts_of_classes`, with F1; no rows if there are no labels."""
    if not (labels := counts.get("labels")):
        return []
    columns = [list(counts[f"{name}_counts"].values()) for name in ("examples", "predicted", "right")]
    scores = zip(*class_scores(np.array(columns).T).values(), strict=True)
    width = max(5, *map(len, labels))
    lines = ["", f"  {'class':{width}}  examples  predicted  right  precision  recall      f1"]
    for label, n, p, r, (precision, recall, f1) in zip(labels, *columns, scores, strict=True):
        lines.append(f"  {label:{width}}  {n:8,}  {p:9,}  {r:5,}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}")
    return lines


def score_table(scores: Mapping[str, float]) -> list[str]:
    """Return a line for each score or count, numbers flush right."""
    cells = [f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" for value in scores.values()]
    left, right = max(map(len, scores)), max(map(len, cells))
    return [f"{name:{left}}  {cell:>{right}}" for name, cell in zip(scores, cells, strict=True)]
