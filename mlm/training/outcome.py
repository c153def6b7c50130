"""The end of a fine-tuning run: last scores, model folder, pictures, summary.json and what to do next."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch.loggers import Logger
from tokenizers import Tokenizer

from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.model import LabelType
from mlm.data.labelled import Examples, LabelledTask
from mlm.evaluation.commands import write_predictions
from mlm.evaluation.metrics import class_table, confusion_matrix, counts_of_classes, predicted, task_metrics
from mlm.evaluation.predictor import arguments
from mlm.files import write_json
from mlm.hub.pretrained import longest_row
from mlm.hub.saving import model_card, save_pretrained
from mlm.model.heads import SequenceClassifier
from mlm.model.loss import summed_label_loss
from mlm.training.datamodule import Parts
from mlm.training.plots import plot_confusion, plot_epochs
from mlm.training.progress import Progress
from mlm.training.tracking import track_picture, track_table

Floats = npt.NDArray[np.float64]

CHECKED_EXAMPLES = 4
"""Examples on which the saved model is compared with the trained one."""
SAME_ANSWER: dict[LabelType, str] = {
    "classification": "only one class is predicted",
    "regression": "every text gets the same score",
    "multilabel": "every text gets the same labels",
}
"""Why a run taught the model nothing, by the type of the labels."""
MAX_SHOWN_CLASSES = 20
"""With more classes, the table by class stays in summary.json, and there is no confusion matrix."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """The result of training."""

    config: FinetuneConfig
    folder: Path
    task: LabelledTask
    tokenizer: Tokenizer
    model: SequenceClassifier
    """With the weights to keep, in evaluation mode."""
    parts: Parts
    logits: Floats
    """(N, C) of the validation examples."""
    scored: dict[str, Floats]
    """(N, C) of each of the sets to score once."""
    test: Floats | None
    """(N, C) of the test examples."""
    progress: Progress
    step: int
    """After which the weights were kept."""
    epoch: int
    """The same as a number of epochs."""

    @property
    def reported(self) -> tuple[Examples, Floats]:
        """The examples whose scores are reported, and their logits: dev if it did not select the epoch."""
        task = self.task
        if "" in task.scored:
            return task.scored[""], self.scored[""]
        return task.validation, self.logits

    def metrics(self) -> dict[str, float]:
        """Return the scores that are reported."""
        scores = scores_of(self.task, *self.reported)
        for suffix, part in self.task.scored.items():
            scores |= scores_of(self.task, part, self.scored[suffix], suffix)
        return scores

    def confusion(self) -> npt.NDArray[np.int64]:
        """Return how often each class (row) of the reported examples was predicted as each (column)."""
        examples, logits = self.reported
        assert examples.labels is not None, "validation examples have labels"
        return confusion_matrix(examples.labels, logits.argmax(1), len(self.task.labels))

    def selection(self) -> str:
        """Return how the epoch was chosen, in words."""
        settings, task = self.config.trainer, self.task
        if settings.keep == "last":
            return "last epoch"
        where = "them" if "" not in task.scored else task.validation_is
        best = f"best epoch by {next(iter(scores_of(task, task.validation, self.logits)))} on {where}"
        number, most = len(self.progress.epochs), settings.max_epochs
        return best if number == most else f"{best}, stopped early after {number} of {most} epochs"


def scores_of(
    task: LabelledTask, examples: Examples, logits: npt.NDArray[np.float64], suffix: str = ""
) -> dict[str, float]:
    """Return the scores that the task asks for, the one that ranks epochs first.

    Args:
        task: names them.
        examples: (N) with labels.
        logits: (N, C).
        suffix: added to the names.
    """
    assert examples.labels is not None, "scored examples have labels"
    scores = task_metrics(task.label_type, examples.labels, logits)
    return {f"{name}{suffix}": scores[name] for name in task.metrics or scores}


def failure(losses: Sequence[float], labels: npt.NDArray[Any], logits: Floats) -> str | None:
    """Return in words why a run taught the model nothing; None if it did.

    Args:
        losses: the mean training loss of each epoch.
        labels: (N,) ids of classes, or numbers, or (N, C) bool.
        logits: (N, C), for numbers (N, 1).
    """
    answer = predicts_one_class(labels, logits)
    if answer:
        return answer
    if len(losses) > 1 and losses[-1] >= losses[0]:
        return "the training loss did not fall"
    return None


def predicts_one_class(labels: npt.NDArray[Any], logits: Floats) -> str | None:
    """Return in words that every text gets the same answer, though their labels differ; else None."""
    kind: LabelType = "regression" if labels.dtype.kind == "f" else "classification"
    kind = "multilabel" if labels.ndim == 2 else kind
    said = predicted(kind, logits)
    if len(np.unique(said, axis=0)) != 1 or len(np.unique(labels, axis=0)) < 2:
        return None
    return SAME_ANSWER[kind]


def finish(outcome: Outcome, loggers: Sequence[Logger], title: str | None = None) -> None:
    """Save model, pictures, test predictions and summary, and print it; `title` is that of `finetune`."""
    config, folder, parts = outcome.config, outcome.folder, outcome.parts
    task, model, progress = outcome.task, outcome.model, outcome.progress
    examples, logits = outcome.reported
    assert examples.labels is not None, "what is reported has labels"
    losses = [row["train/loss"] for row in progress.epochs]
    is_split = "" in task.scored
    summary: dict[str, Any] = {
        "task": task.name,
        "seed": config.seed,
        "metrics": outcome.metrics(),
        "num_train_examples": len(task.train),
        "num_validation_examples": len(examples),
        "elapsed_s": progress.elapsed_s,
        "train_examples_per_second": progress.rows / (progress.elapsed_s - progress.validations_s),
        "model_dir": str(folder / "model"),
        "validation_examples": task.scored_is or task.validation_is,
        "dev_sizes": [size._asdict() for size in task.dev_sizes],
        "selection": outcome.selection(),
        "failed": failure(losses, examples.labels, logits),
        "epoch": outcome.epoch,
        "num_epochs": len(progress.epochs),
        "val_loss": torch.div(
            *summed_label_loss(torch.from_numpy(outcome.logits), parts.validation.label_tensor())
        ).item(),
        "label_type": task.label_type,
        "max_length": parts.max_length,
        "truncated_fraction": parts.truncated_fraction,
        "init": config.model,
        "num_encoder_parameters": sum(weight.numel() for weight in model.encoder.parameters()),
        "has_pairs": task.train.pairs is not None,
    }
    if is_split:
        summary["selection_metrics"] = scores_of(task, task.validation, outcome.logits)
    if task.label_type != "regression":
        summary |= counts_of_classes(task.labels, examples.labels, logits)
    if task.label_type == "classification" and len(task.labels) <= MAX_SHOWN_CLASSES:
        summary["confusion"] = outcome.confusion().tolist()
    if outcome.test is not None:
        summary |= report_test(outcome, outcome.test)
    summary |= settings_of(config)
    facts = {name: summary[name] for name in ("task", "seed", "num_train_examples", "epoch", "val_loss")}
    facts |= settings_of(config)
    name = title or str(config.name)
    card = model_card(name, model.config, facts | summary["metrics"], model.classifier_config)
    start, checked = tokenizer_folder(config), np.arange(min(len(parts.validation), CHECKED_EXAMPLES))
    save_pretrained(
        folder / "model",
        model,
        outcome.tokenizer,
        model_max_length=config.data.max_length or longest_row(start, model.config) or parts.max_length,
        card=card,
        rows=arguments(model, parts.validation[checked]),
        start=start,
    )
    draw(outcome, summary, loggers)
    write_json(folder / "summary.json", summary)
    warn_of_one_answer(summary)
    if title is None:
        print(closing_message(config, folder, summary))
    else:  # a part of a suite, which will show all in one table
        shown = ", ".join(f"{name} {value:.4f}" for name, value in summary["metrics"].items())
        log.info("%s: %s", title, shown)


def settings_of(config: FinetuneConfig) -> dict[str, Any]:
    """Return what a score depends on beside model, data and seed."""
    optimizer, trainer = config.optimizer, config.trainer
    return {
        "optimizer": optimizer.name,
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "batch_size": trainer.rows_per_step,
        "max_epochs": trainer.max_epochs,
        "versions": {name: version(name) for name in ("mlm", "torch")},
    }


def tokenizer_folder(config: FinetuneConfig) -> str:
    """Return the folder of the tokenizer: that of the model, or what random weights take it from."""
    source = str(config.tokenizer if config.model == SCRATCH else config.model)
    return str(Path(source).parent) if Path(source).is_file() else source


def draw(outcome: Outcome, summary: dict[str, Any], loggers: Sequence[Logger]) -> None:
    """Draw the epochs and the confusion matrix into the run folder, and give the matrix to the tracker."""
    plots = outcome.folder / "plots"
    plot_epochs(outcome.progress.epochs, plots / "epochs.png")
    labels = summary.get("labels", [])
    if "confusion" in summary:
        plot_confusion(np.array(summary["confusion"]), labels, plots / "confusion.png")
        rows = zip(labels, summary["confusion"], strict=True)
        track_table(loggers, "confusion", ["class", *labels], [[label, *row] for label, row in rows])
        track_picture(loggers, "plots/confusion", plots / "confusion.png")


def report_test(outcome: Outcome, logits: Floats) -> dict[str, Any]:
    """Write the predictions of the test examples; return facts about them."""
    test, task, path = outcome.parts.test, outcome.task, outcome.folder / "test_predictions.csv"
    assert test is not None, "they were predicted"
    ids, separator = map(str, range(1, len(test) + 1)), outcome.config.data.label_separator
    write_predictions(path, ids, logits, outcome.model.classifier_config, separator)
    facts: dict[str, Any] = {"test_predictions": str(path), "num_test_examples": len(test)}
    if test.labels is not None:
        facts["test_metrics"] = task_metrics(task.label_type, test.labels, logits)
    return facts


def warn_of_one_answer(summary: dict[str, Any]) -> None:
    """Tell when a model says the same of every text, which its scores may hide, or has to say it."""
    hint = "; the learning rate may be too high, the epochs too few, or the encoder hardly trained"
    if summary["label_type"] == "regression":
        if summary["failed"]:
            log.warning("%s%s", summary["failed"], hint)
        return
    named = [label for label, count in summary["predicted_counts"].items() if count]
    if len(named) < 2:
        said = f"only one class is predicted: {named[0]}" if named else "no label is ever predicted"
        log.warning("%s%s", said, hint)
    there = [label for label, count in summary["examples_counts"].items() if count]
    if len(there) == 1 and summary["label_type"] == "classification":
        text = "all validation examples are of one class, %s: correlations are 0 there by definition"
        log.warning(text, there[0])


def score_lines(scores: dict[str, float], summary: dict[str, Any]) -> list[str]:
    """Return a line for each score; the F1 of two classes says of which one it is."""
    names = {name: f"f1 of {summary['labels'][1]}" if name == "f1" else name for name in scores}
    return [f"  {names[name]:22}{value:8.4f}" for name, value in scores.items()]


def closing_message(config: FinetuneConfig, folder: Path, summary: dict[str, Any]) -> str:
    """Return what the run achieved, where things are, and the next command."""
    minutes, seconds = divmod(round(summary["elapsed_s"]), 60)
    epochs = "1 epoch" if summary["num_epochs"] == 1 else f"{summary['num_epochs']} epochs"
    duration = f"{epochs} in {minutes} min {seconds} s"
    rate = f"{summary['train_examples_per_second']:,.0f} examples/s"
    examples = f"{summary['num_validation_examples']:,} examples ({summary['validation_examples']})"
    lines = [
        f"\n{config.name}: task {summary['task']}, {duration}, {rate}\n",
        f"validation      {examples}; {summary['selection']}",
        *score_lines(summary["metrics"], summary),
    ]
    if len(summary.get("labels", [])) <= MAX_SHOWN_CLASSES:
        lines += class_table(summary)
    if "test_metrics" in summary:
        lines.append(f"\ntest            {summary['num_test_examples']:,} examples")
        lines += score_lines(summary["test_metrics"], summary)
    cut = summary["truncated_fraction"]
    lines += [
        "",
        f"longest text    {summary['max_length']} tokens; {cut:.1%} of the texts are cut",
        f"started from    {config.model}",
        f"model           {summary['model_dir']}",
        f"epochs          {folder / 'metrics.csv'}, {folder / 'plots'}",
    ]
    if "test_predictions" in summary:
        lines.append(f"predictions     {summary['test_predictions']}")
    data = config.data
    pair = data.text_pair_column or ("YOUR_SECOND_COLUMN" if summary["has_pairs"] else None)
    columns = _flag("text_column", data.text_column, "text") + _flag("text_pair_column", pair, None)
    label = _flag("label_column", data.label_column, "label")
    model = f"--model {shlex.quote(summary['model_dir'])}"
    lines += [
        "\nnext",
        f"  label texts     mlm predict {model} --input YOUR_TEXTS.csv --output labels.csv{columns}",
        f"  score others    mlm evaluate {model} --input YOUR_LABELLED.csv{columns}{label}",
    ]
    return "\n".join(lines)


def _flag(name: str, value: str | None, default: str | None) -> str:
    """Return an option of a command to type, or nothing where it has its default."""
    return "" if value in (None, default) else f" --{name} {shlex.quote(str(value))}"
