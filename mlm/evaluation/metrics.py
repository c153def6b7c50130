"""Scores of predictions over a whole set; each is defined for any predictions and labels.

torchmetrics collects predictions over batches and ranks, and computes the scores of numbers in float64. Its scores
of classes are not used, because they are quotients in float32, take C^2 memory to count, and its Matthews
correlation is not 0 for constant predictions. Here all of them follow from three counts a class.

- where a formula would divide by 0 (constant predictions, one class only) the score is 0, as in scikit-learn

Sizes: N examples, B a batch, C classes (1 for a number).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.regression import mean_absolute_error, mean_squared_error, pearson_corrcoef
from torchmetrics.utilities import dim_zero_cat

from mlm.config.model import LabelType
from mlm.evaluation.predictor import softmax

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

MAX_AUC_CLASSES = 100
"""With more classes there is no ROC AUC, which sorts all examples once a class."""


class LabelledPredictions(Metric):
    """Collects the logits of a labelled set over batches and ranks.

    On several ranks each may have any number of batches, also none, and an example may come more than once, as a
    sampler that pads repeats some.
    """

    full_state_update = False
    rows: list[Tensor] | Tensor
    logits: list[Tensor] | Tensor

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("logits", [], dist_reduce_fx="cat")

    def update(self, rows: Tensor, logits: Tensor) -> None:
        """Add a batch.

        Args:
            rows: (B,) int64, the number of each example in the set.
            logits: (B, C).
        """
        assert isinstance(self.rows, list), "a metric is updated before it is synchronised"
        assert isinstance(self.logits, list), "a metric is updated before it is synchronised"
        self.rows.append(rows)
        self.logits.append(logits.detach().float().flatten())

    def sync(self, *args: Any, **kwargs: Any) -> None:
        """Gather the batches of all ranks."""
        if not self.rows:  # torchmetrics would send float32 here, and other ranks int64
            self.update(
                torch.zeros(0, dtype=torch.int64, device=self.device), torch.zeros(0, device=self.device)
            )
        super().sync(*args, **kwargs)

    def compute(self) -> Floats:
        """Return the logits of all examples in the order of their numbers, each once, (N, C)."""
        rows, logits = (dim_zero_cat(state).cpu().numpy() for state in (self.rows, self.logits))
        _, first = np.unique(rows, return_index=True)
        return logits.reshape(len(rows), -1)[first].astype(np.float64)


def confusion_matrix(labels: Ints, predictions: Ints, num_classes: int) -> Ints:
    """Return how often each label (row) was predicted as each class (column), (C, C).

    Args:
        labels: (N,) in [0, C).
        predictions: (N,) in [0, C).
        num_classes: C.
    """
    cells = np.bincount(labels * num_classes + predictions, minlength=num_classes**2)
    return cells.reshape(num_classes, num_classes)


def accuracy(counts: Ints) -> float:
    """Return the share of the examples that are predicted right; 0 without examples.

    Args:
        counts: (C, 3), see `class_counts`; also of the next two.
    """
    examples, _, right = counts.sum(0)
    return float(right / max(examples, 1))


def class_scores(counts: Ints) -> dict[str, Floats]:
    """Return precision, recall and F1 of each class, (C,) each; 0 where a class is never predicted or absent."""
    examples, predicted, right = counts.T
    sizes = {"precision": predicted, "recall": examples, "f1": (examples + predicted) / 2}
    return {name: right / np.maximum(size, 0.5) for name, size in sizes.items()}


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
    pair = targets, predictions
    if len(targets) < 2 or not all(
        np.isfinite(series).all() and (series != series[0]).any() for series in pair
    ):
        return 0.0
    x, y = (torch.from_numpy(series / np.abs(series).max()) for series in pair)  # squares have a range
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


def roc_auc(labels: Bools, scores: Floats) -> float | None:
    """Return how often a positive example scores above a negative one, ties counting half.

    torchmetrics' own is float32.

    Args:
        labels: (N,).
        scores: (N,); if one is not finite, the result is 0.

    Returns:
        The area under the ROC curve; None if all labels are equal.
    """
    positive = int(labels.sum())
    pairs = positive * (len(labels) - positive)
    if not pairs:
        return None
    if not np.isfinite(scores).all():
        return 0.0
    return float((_ranks(scores)[labels].sum() - positive * (positive + 1) / 2) / pairs)


def macro_roc_auc(labels: Bools, scores: Floats) -> dict[str, float]:
    """Return the mean ROC AUC of all columns (N, C) as `roc_auc`; empty if it is undefined for one of them."""
    if not 0 < labels.shape[1] <= MAX_AUC_CLASSES:
        return {}
    areas = [roc_auc(*column) for column in zip(labels.T, scores.T, strict=True)]
    defined = [area for area in areas if area is not None]
    return {"roc_auc": float(np.mean(defined))} if len(defined) == len(areas) else {}


def set_scores(labels: Bools, predictions: Bools) -> dict[str, float]:
    """Return the scores of predictions of any number of labels, each (N, C).

    F1 micro counts every label of every text alike, macro is the mean over the labels, of which one that
    neither occurs nor is predicted scores 0; subset accuracy is the share of the texts with all labels right.
    """
    right = (labels & predictions).sum(0)
    both = labels.sum(0) + predictions.sum(0)
    return {
        "f1_micro": float(2 * right.sum() / max(both.sum(), 1)),
        "f1_macro": float((2 * right / np.maximum(both, 1)).mean()),
        "subset_accuracy": float((labels == predictions).all(1).sum() / max(len(labels), 1)),
    }


def predicted(label_type: LabelType, logits: Floats) -> npt.NDArray[Any]:
    """Return what logits (N, C) say: (N,) ids of classes or numbers, or for multilabel (N, C) bool."""
    if label_type == "multilabel":
        return logits > 0
    return logits[:, 0] if label_type == "regression" else logits.argmax(1)


def class_counts(labels: npt.NDArray[Any], logits: Floats) -> Ints:
    """Return how often each class occurs, is predicted, and is predicted correctly, (C, 3).

    Args:
        labels: (N,) ids of classes, or (N, C) bool.
        logits: (N, C).
    """
    if labels.ndim == 2:
        predictions = predicted("multilabel", logits)
        return np.stack([labels.sum(0), predictions.sum(0), (labels & predictions).sum(0)], axis=1)
    chosen = logits.argmax(1)
    parts = labels.astype(np.int64), chosen, chosen[chosen == labels]
    return np.stack([np.bincount(part, minlength=logits.shape[1]) for part in parts], axis=1)


def counts_of_classes(labels: Sequence[str], ids: npt.NDArray[Any], logits: Floats) -> dict[str, Any]:
    """Return the names of the classes, and by name the three counts of `class_counts`, precision and recall."""
    counts = class_counts(ids, logits)
    columns = dict(zip(("examples_counts", "predicted_counts", "right_counts"), counts.T, strict=True))
    columns |= {f"class_{name}": values for name, values in class_scores(counts).items() if name != "f1"}
    by_name = {name: dict(zip(labels, values.tolist(), strict=True)) for name, values in columns.items()}
    return {"labels": list(labels), **by_name}


def class_table(counts: Mapping[str, Any]) -> list[str]:
    """Return a table of the counts, precision, recall and F1 of each class, a row a class.

    Args:
        counts: a dictionary with the entries of `counts_of_classes`; without labels the table is empty.
    """
    labels = counts.get("labels", [])
    if not labels:
        return []
    columns = [list(counts[f"{name}_counts"].values()) for name in ("examples", "predicted", "right")]
    scores = class_scores(np.array(columns).T).values()
    width = max(5, *map(len, labels))
    lines = ["", f"  {'class':{width}}  examples  predicted  right  precision  recall      f1"]
    for label, n, p, r, *of_class in zip(labels, *columns, *scores, strict=True):
        precision, recall, f1 = of_class
        lines.append(f"  {label:{width}}  {n:8,}  {p:9,}  {r:5,}  {precision:9.4f}  {recall:6.4f}  {f1:6.4f}")
    return lines


def score_table(scores: Mapping[str, float]) -> list[str]:
    """Return a line for each score or count, numbers flush right."""
    cells = {
        name: f"{value:,.4f}" if isinstance(value, float) else f"{value:,}" for name, value in scores.items()
    }
    left, right = max(map(len, cells)), max(map(len, cells.values()))
    return [f"{name:{left}}  {cell:>{right}}" for name, cell in cells.items()]


def task_metrics(label_type: LabelType, labels: npt.NDArray[Any], logits: Floats) -> dict[str, float]:
    """Return the scores of a model's outputs, the one that ranks epochs first.

    Args:
        label_type: what the labels are.
        labels: (N,) ids of classes, or numbers, or (N, C) bool.
        logits: (N, C), for numbers (N, 1).
    """
    if label_type == "multilabel":
        return set_scores(labels, predicted(label_type, logits)) | macro_roc_auc(labels, logits)
    if label_type == "regression":
        return number_scores(labels.astype(np.float64), logits[:, 0].astype(np.float64))
    counts = class_counts(labels, logits)
    f1_of_class = class_scores(counts)["f1"]
    scores = {"accuracy": accuracy(counts)}
    if len(counts) == 2:
        scores["f1"] = float(f1_of_class[1])  # of class 1, the other being the background
    scores["matthews_correlation"] = matthews_correlation(counts)
    # A class that neither occurs nor is predicted does not count, as in scikit-learn.
    scores["f1_macro"] = float(f1_of_class[counts.any(1)].mean()) if counts.any() else 0.0
    if len(counts) == 2:
        area = roc_auc(labels == 1, logits[:, 1] - logits[:, 0])
        return scores if area is None else scores | {"roc_auc": area}
    if not counts[:, 0].all() or len(counts) > MAX_AUC_CLASSES:
        return scores
    return scores | macro_roc_auc(labels[:, None] == np.arange(len(counts)), softmax(logits))


def number_scores(targets: Floats, predictions: Floats) -> dict[str, float]:
    """Return the scores of predicted numbers (N,), the one that ranks epochs first."""
    x, y = torch.from_numpy(predictions), torch.from_numpy(targets)
    return {
        "pearson": pearson(targets, predictions),
        "spearman": spearman(targets, predictions),
        "mae": float(mean_absolute_error(x, y)),
        "rmse": float(mean_squared_error(x, y, squared=False)),
    }
