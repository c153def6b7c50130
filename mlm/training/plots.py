"""Pictures: losses of pretraining; epochs and confusion matrix of fine-tuning; the scores of a suite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt

matplotlib.use("Agg")

from matplotlib import pyplot
from matplotlib.figure import Figure


def plot_losses(metrics: list[dict[str, Any]], path: Path, unigram_entropy: float) -> None:
    """Draw training and validation loss over the tokens seen, and the learning rate below."""
    figure, (loss, rate) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, height_ratios=[4, 1])
    for name, style in (("train/loss", {"lw": 0.7, "alpha": 0.7}), ("val/loss", {"marker": "o", "ms": 4})):
        points = [(row["tokens"] / 1e6, row[name]) for row in metrics if name in row]
        loss.plot(*zip(*points, strict=True), label=name, **style)
    for name in dict.fromkeys(name for row in metrics for name in row if name.startswith("val/loss/")):
        points = [(row["tokens"] / 1e6, row[name]) for row in metrics if name in row]
        loss.plot(*zip(*points, strict=True), label=name, lw=0.7, ls="--")
    loss.axhline(unigram_entropy, ls=":", color="gray", label="word counts alone")
    loss.legend()
    points = [(row["tokens"] / 1e6, row["optim/lr"]) for row in metrics if "optim/lr" in row]
    rate.plot(*zip(*points, strict=True), color="gray")
    rate.set_xlabel("million tokens")
    for axes, label in ((loss, "loss (nats per masked token)"), (rate, "learning rate")):
        axes.set_ylabel(label)
        axes.grid(alpha=0.3)
    _save(figure, path)


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


def plot_confusion(confusion: npt.NDArray[np.int64], labels: Sequence[str], path: Path) -> None:
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


def plot_scores(tasks: Mapping[str, Any], averages: Mapping[str, Any], path: Path, title: str) -> None:
    """Draw the mean of every score with its standard deviation and the single runs, then the averages.

    Bars that include a failed run are hatched; scores are times 100. Tasks and averages as in `summarize`;
    averages that lack scores are left out.
    """
    bars = [
        (
            f"{task} {metric.replace('_', ' ')}",
            figures,
            facts["failed"].keys() & figures[f"by_{facts['runs']}"].keys(),
        )
        for task, facts in tasks.items()
        for metric, figures in facts["metrics"].items()
    ]
    means = [(facts["title"], facts["value"]) for facts in averages.values() if facts["value"] is not None]
    figure, axes = pyplot.subplots(figsize=(min(5 + 0.4 * (len(bars) + len(means)), 10), 5))
    for place, (_, figures, failed) in enumerate(bars):
        hatch = "///" if failed else None
        axes.bar(place, 100 * figures["mean"], color="C0", alpha=0.6, hatch=hatch)
        if figures["std"] is not None:
            axes.errorbar(place, 100 * figures["mean"], 100 * figures["std"], color="dimgray", capsize=3)
            axes.plot([place] * figures["n"], 100 * np.array(figures["values"]), "k.", ms=4)
    of_means = len(bars) + np.arange(len(means)) + 0.5
    axes.bar(of_means, [100 * value for _, value in means], color="C1")
    names = [bar[0] for bar in bars] + [name for name, _ in means]
    axes.set_xticks([*range(len(bars)), *of_means], names, fontsize=8, rotation=40, ha="right")
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.8, max([*range(len(bars)), *of_means], default=0) + 0.8)
    axes.axhline(0, color="gray", lw=0.7)
    axes.set_ylabel("score x 100")
    notes = [
        "bars: means",
        "lines: standard deviations, dots: runs" if any(bar[1]["n"] > 1 for bar in bars) else "",
        "hatched: with failed runs" if any(bar[2] for bar in bars) else "",
    ]
    axes.set_title(f"{title}\n{'; '.join(filter(None, notes))}", fontsize=9)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
