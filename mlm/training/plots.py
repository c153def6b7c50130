"""Pictures of fine-tuning: the epochs of a run, its confusion matrix, and the scores of a suite."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure


def plot_epochs(history: list[dict[str, Any]], path: Path) -> None:
    """Draw both losses and the scores over the epochs."""
    figure, (losses, scores) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    epochs = [row["epoch"] for row in history]
    for name in history[0]:
        axes = losses if name.endswith("/loss") else scores if name.startswith("val/") else None
        if axes is not None:
            axes.plot(epochs, [row[name] for row in history], marker="o", ms=4, label=name)
    losses.set_ylabel("loss")
    scores.set_ylabel("score of the validation examples")
    for axes in (losses, scores):
        axes.set_xlabel("epoch")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def plot_confusion(confusion: npt.NDArray[np.int64], labels: list[str], path: Path) -> None:
    """Draw how often each class (row) was predicted as each (column), (C, C)."""
    size = 2.5 + 0.5 * len(labels)
    figure, axes = pyplot.subplots(figsize=(size, size))
    shares = confusion / np.maximum(confusion.sum(1, keepdims=True), 1)
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    for row, column in np.ndindex(*confusion.shape):
        color = "white" if shares[row, column] > 0.5 else "black"
        axes.text(column, row, f"{confusion[row, column]:,}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("label")
    _save(figure, path)


def plot_scores(tasks: Mapping[str, Any], averages: Mapping[str, Any], path: Path) -> None:
    """Draw the mean of every score with its standard deviation and the single runs, then the averages."""
    bars = [
        (f"{task}\n{metric.replace('_', chr(10))}", figures["mean"], figures["std"] or 0.0, figures["values"])
        for task, facts in tasks.items()
        for metric, figures in facts["metrics"].items()
    ]
    means = [(name.replace("_", chr(10)), facts["value"]) for name, facts in averages.items()]
    means = [(name, value) for name, value in means if value is not None]
    figure, axes = pyplot.subplots(figsize=(2 + 0.9 * (len(bars) + len(means)), 4.5))
    places = np.arange(len(bars))
    axes.bar(
        places, [bar[1] for bar in bars], yerr=[bar[2] for bar in bars], color="C0", alpha=0.6, capsize=3
    )
    for place, (_, _, _, values) in zip(places, bars, strict=True):
        axes.plot([place] * len(values), values, "k.", ms=4)
    of_means = len(bars) + np.arange(len(means)) + 0.5
    axes.bar(of_means, [value for _, value in means], color="C1")
    names = [bar[0] for bar in bars] + [name for name, _ in means]
    axes.set_xticks([*places, *of_means], names, fontsize=8)
    axes.axhline(0, color="gray", lw=0.7)
    axes.set_ylabel("score: mean and standard deviation")
    axes.grid(axis="y", alpha=0.3)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
