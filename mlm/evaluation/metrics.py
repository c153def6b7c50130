"""Scores of predictions over a whole set; each is defined whatever the predictions and labels are.

- everything about classes comes from three counts for each, so that nothing is ever averaged over batches,
  and tens of thousands of classes cost no more than they are
- where a formula would divide by 0 (constant predictions, one class only) the score is 0, as in scikit-learn

C classes, N examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mlm.config.model import LabelType

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


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


def f1(counts: Ints) -> float:
    """Return the harmonic mean of precision and recall of class 1, the other class being the background."""
    examples, said, right = counts[1].tolist()
    return 2 * right / (examples + said) if examples + said else 0.0


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
    if len(targets) < 2 or (targets == targets[0]).all() or (predictions == predictions[0]).all():
        return 0.0
    with np.errstate(all="ignore"):
        x, y = (series / np.abs(series).max() for series in (targets, predictions))  # squares have a range
        x, y = x - x.mean(), y - y.mean()
        value = float((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)))
    return min(max(value, -1.0), 1.0) if math.isfinite(value) else 0.0


def spearman(targets: Floats, predictions: Floats) -> float:
    """Return the correlation of the ranks of two series (N,); 0 if one is constant or not finite."""
    if not (np.isfinite(targets).all() and np.isfinite(predictions).all()):
        return 0.0
    return pearson(_ranks(targets), _ranks(predictions))


def _ranks(values: Floats) -> Floats:
    """Return the rank of each value from 1; equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]


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
    """Return how often each class occurs, is predicted, and is predicted rightly, (C, 3).

    Args:
        labels: (N,) ids of classes, or (N, C) bool.
        logits: (N, C).
    """
    if labels.ndim == 2:
        said = predicted("multilabel", logits)
        return np.stack([labels.sum(0), said.sum(0), (labels & said).sum(0)], axis=1)
    chosen = logits.argmax(1)
    parts = labels.astype(np.int64), chosen, chosen[chosen == labels]
    return np.stack([np.bincount(part, minlength=logits.shape[1]) for part in parts], axis=1)


def counts_of_classes(labels: Sequence[str], ids: npt.NDArray[Any], logits: Floats) -> dict[str, Any]:
    """Return the names of the classes, and by name how often each occurs, is predicted, and is rightly."""
    counts = dict(zip(("examples", "predicted", "right"), class_counts(ids, logits).T.tolist(), strict=True))
    by_name = {name: dict(zip(labels, column, strict=True)) for name, column in counts.items()}
    return {"labels": list(labels), **{f"{name}_counts": table for name, table in by_name.items()}}


def class_table(counts: Mapping[str, Any]) -> list[str]:
    """Return lines that say for each class how often it occurs, is predicted, and is predicted rightly."""
    labels = counts.get("labels", [])
    if not labels:
        return []
    width = max(5, *map(len, labels))
    columns = (counts[f"{name}_counts"].values() for name in ("examples", "predicted", "right"))
    rows = zip(labels, *columns, strict=True)
    header = f"  {'class':{width}}  examples  predicted  right"
    return ["", header, *(f"  {label:{width}}  {n:8,}  {p:9,}  {r:5,}" for label, n, p, r in rows)]


def task_metrics(label_type: LabelType, labels: npt.NDArray[Any], logits: Floats) -> dict[str, float]:
    """Return the scores of a model's outputs, the one that ranks epochs first.

    Args:
        label_type: what the labels are.
        labels: (N,) ids of classes, or numbers, or (N, C) bool.
        logits: (N, C), for numbers (N, 1).
    """
    if label_type == "multilabel":
        return set_scores(labels, predicted(label_type, logits))
    if label_type == "regression":
        targets, scores = labels.astype(np.float64), logits[:, 0].astype(np.float64)
        return {"pearson": pearson(targets, scores), "spearman": spearman(targets, scores)}
    counts = class_counts(labels, logits)
    scores_of_classes = {"accuracy": accuracy(counts)}
    if len(counts) == 2:
        scores_of_classes["f1"] = f1(counts)
    return scores_of_classes | {"matthews_correlation": matthews_correlation(counts)}


import torch
import torchmetrics


class LabelledPredictions(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("rows", [], dist_reduce_fx="cat")
        self.add_state("logits", [], dist_reduce_fx="cat")

    def update(self, rows, logits):
        self.rows.append(rows)
        self.logits.append(logits.detach().double())

    def compute(self):
        rows, logits = (torch.cat(x) if isinstance(x, list) else x for x in (self.rows, self.logits))
        rows, logits = rows.cpu().numpy(), logits.cpu().numpy()
        _, first = np.unique(rows, return_index=True)
        return logits[first]
