"""The end of a run: last scores, model folder, pictures, summary.json and what to do next."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch

from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.model import LabelType
from mlm.data.labelled import Examples, LabelledTask
from mlm.evaluation.commands import write_predictions
from mlm.evaluation.metrics import (
    class_table,
    confusion_matrix,
    counts_of_classes,
    predicted,
    task_metrics,
)
from mlm.evaluation.predictor import arguments, predict_logits
from mlm.files import replacing, write_json
from mlm.hub.pretrained import longest_row, pretraining_tokens
from mlm.hub.saving import model_card, save_pretrained
from mlm.model.loss import summed_label_loss
from mlm.training.datamodule import FinetuneDataModule
from mlm.training.engine import Progress, StepModule
from mlm.training.run_folder import METRICS, SUMMARY
from mlm.training.summary import duration, started_from
from mlm.training.tracking import track_table

CHECKED = 4
"""Held-out rows or examples on which the saved model is compared with the trained one."""
SAME_ANSWER: dict[LabelType, str] = {
    "classification": "only one class is predicted",
    "regression": "every text gets the same score",
    "multilabel": "every text gets the same labels",
}
"""Why a run taught the model nothing, by the type of the labels."""
CARD_FACTS = (
    *("task", "seed", "num_train_examples", "epoch", "val_loss"),
    *("optimizer", "lr", "weight_decay", "batch_size", "max_epochs", "versions"),
)
"""Entries of the summary that a fine-tuned model's card repeats."""
HELD_OUT = "held_out.npz"
"""File of a fold: `rows` (N,) that were held out, their `logits` (N, C) and `labels`."""
MAX_SHOWN_CLASSES = 20
"""With more classes, the table by class is in summary.json only, and no confusion matrix is drawn."""

log = logging.getLogger(__name__)


def scores_of(
    task: LabelledTask, examples: Examples, logits: npt.NDArray[np.float64], suffix: str = ""
) -> dict[str, float]:
    """Return the scores that the task asks for from logits (N, C), the one that ranks epochs first.

    `suffix` is added to their names.
    """
    assert examples.labels is not None, "scored examples have labels"
    scores = task_metrics(task.label_type, examples.labels, logits)
    return {f"{name}{suffix}": scores[name] for name in task.metrics or scores}


def failure(losses: Sequence[float], labels: npt.NDArray[Any], logits: npt.NDArray[np.float64]) -> str | None:
    """Return in words why a run taught the model nothing, by the mean loss of each epoch; None if it did.

    Labels are (N,) ids of classes, or numbers, or (N, C) bool; logits (N, C), for numbers (N, 1).
    """
    kind: LabelType = "regression" if labels.dtype.kind == "f" else "classification"
    kind = "multilabel" if labels.ndim == 2 else kind
    if len(np.unique(predicted(kind, logits), axis=0)) == 1 < len(np.unique(labels, axis=0)):
        return SAME_ANSWER[kind]
    if len(losses) > 1 and losses[-1] >= losses[0]:
        return "the training loss did not fall"
    return None


def finish_finetuning(
    module: StepModule,
    data: FinetuneDataModule,
    folder: Path,
    kept: int,
    logits: npt.NDArray[np.float64] | None,
    trainer: pl.Trainer | None,
    title: str | None,
) -> None:
    """Score, save model, pictures, test predictions and summary, and print the summary.

    `logits` (N, C) are those of the validation examples, None if not known for the weights of step `kept`.
    """
    config, task, parts, model, progress = module.config, data.task, data.parts, module.model, module.progress
    model.eval()
    if trainer is not None:
        model.to(trainer.strategy.root_device)  # Lightning has put it back on the CPU
    predict = partial(predict_logits, model, batch_size=2 * config.trainer.rows_per_step)
    logits = predict(examples=parts.validation) if logits is None else logits
    sets = {"": (task.validation, logits)}  # or all of dev, where a part of train selects the epoch
    sets |= {suffix: (task.scored[suffix], predict(examples=part)) for suffix, part in parts.scored.items()}
    metrics: dict[str, float] = {}
    for suffix, (part, its_logits) in sets.items():
        metrics |= scores_of(task, part, its_logits, suffix)
    examples, reported = sets[""]
    assert examples.labels is not None, "reported examples have labels"
    optimizer, settings = config.optimizer, config.trainer
    loss = summed_label_loss(torch.from_numpy(logits), parts.validation.label_tensor())
    summary: dict[str, Any] = {
        "task": task.name,
        "seed": config.seed,
        "metrics": metrics,
        "num_train_examples": len(task.train),
        "num_validation_examples": len(examples),
        "elapsed_s": progress.elapsed_s,
        "train_examples_per_second": progress.rows / (progress.elapsed_s - progress.validations_s),
        "model_dir": str(folder / "model"),
        "validation_examples": task.scored_is or task.validation_is,
        "dev_sizes": [size._asdict() for size in task.dev_sizes],
        "selection": _selection(config, task, scores_of(task, task.validation, logits), len(progress.epochs)),
        "failed": failure([row["train/loss"] for row in progress.epochs], examples.labels, reported),
        "epoch": -(-kept // data.steps_per_epoch),
        "num_epochs": len(progress.epochs),
        "val_loss": torch.div(*loss).item(),
        "label_type": task.label_type,
        "max_length": parts.max_length,
        "truncated_fraction": parts.truncated_fraction,
        "init": config.model,
        **started_from(config.model),
        "num_encoder_parameters": sum(weight.numel() for weight in model.encoder.parameters()),
        "has_pairs": task.train.pairs is not None,
        "optimizer": optimizer.name,
        "lr": optimizer.lr,
        "weight_decay": optimizer.weight_decay,
        "batch_size": settings.rows_per_step,
        "max_epochs": settings.max_epochs,
        "versions": {name: version(name) for name in ("mlm", "torch")},
    }
    if task.validation_rows is not None and config.data.fold:
        summary["fold"] = config.data.fold
        with replacing(folder / HELD_OUT, "place") as path, path.open("wb") as file:
            np.savez(file, rows=task.validation_rows, logits=logits, labels=examples.labels)
    if "" in task.scored:
        summary["selection_metrics"] = scores_of(task, task.validation, logits)
    if task.label_type != "regression":
        summary |= counts_of_classes(task.labels, examples.labels, reported)
    if task.label_type == "classification" and len(task.labels) <= MAX_SHOWN_CLASSES:
        predictions, number = reported.argmax(1), len(task.labels)
        summary["confusion"] = confusion_matrix(examples.labels, predictions, number).tolist()
    if parts.test:
        summary |= _report_test(data, model, folder, predict(examples=parts.test))
    _save_model(data, model, folder, summary, title)
    _draw(summary, progress, folder, trainer.loggers if trainer else [])
    write_json(folder / SUMMARY, summary)
    warn_of_failure(summary)
    if title is None:
        print(_finetuning_message(config, folder, summary))
    else:  # a part of a suite, which will show all in one table
        log.info("%s: %s", title, ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def _save_model(
    data: FinetuneDataModule, model: Any, folder: Path, summary: dict[str, Any], title: str | None
) -> None:
    """Write the model folder with its card; the saved model is compared on validation examples."""
    config = data.config
    facts = {name: summary[name] for name in CARD_FACTS} | summary["metrics"]
    # Examples were cut where the encoder ends, if nowhere before.
    longest = config.data.max_length or model.config.max_position_embeddings
    # The tokenizer is that of the model, or the one chosen for random weights.
    start = Path(str(config.tokenizer if config.model == SCRATCH else config.model))
    start = start.parent if start.is_file() and start.suffix != ".ckpt" else start
    save_pretrained(
        folder / "model",
        model,
        data.tokenizer,
        model_max_length=longest or longest_row(start, model.config) or data.parts.max_length,
        card=model_card(
            title or str(config.name),
            model.config,
            facts,
            model.classifier_config,
            summary.get("started_from"),
            config.card,
            summary["metrics"],
            data.tokenizer,
        ),
        rows=arguments(model, data.parts.validation[np.arange(min(len(data.parts.validation), CHECKED))]),
        start=start,
        tokens=None if config.model == SCRATCH else pretraining_tokens(str(config.model)),
    )


def _draw(summary: dict[str, Any], progress: Progress, folder: Path, loggers: Sequence[Any]) -> None:
    """Draw the epochs and the confusion matrix into the run folder; the tracker gets the matrix too."""
    from mlm.training.plots import plot_confusion, plot_epochs  # loads matplotlib

    plot_epochs(progress.epochs, folder / "plots" / "epochs.png")
    if counts := summary.get("confusion"):
        plot_confusion(np.array(counts), summary["labels"], folder / "plots" / "confusion.png")
        rows = [[label, *row] for label, row in zip(summary["labels"], counts, strict=True)]
        columns, picture = ["class", *summary["labels"]], folder / "plots" / "confusion.png"
        track_table(loggers, "confusion", columns, rows, picture)


def _selection(config: FinetuneConfig, task: LabelledTask, scores: dict[str, float], number: int) -> str:
    """Return in words how the epoch was chosen, by `scores` and among `number` epochs."""
    most = config.trainer.max_epochs
    if config.trainer.keep == "last":
        return "last epoch"
    where = task.validation_is if "" in task.scored else "the very examples reported: optimistic"
    best = f"best epoch by {next(iter(scores))} on {where}"
    return best if number == most else f"{best}, stopped early after {number} of {most} epochs"


def _report_test(
    data: FinetuneDataModule, model: Any, folder: Path, logits: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """Write the predictions of the test examples; return facts about them."""
    test, path = data.parts.test, folder / "test_predictions.csv"
    assert test is not None, "they were predicted"
    ids = map(str, range(1, len(test) + 1))
    write_predictions(path, ids, logits, model.classifier_config, data.config.data.label_separator)
    facts: dict[str, Any] = {"test_predictions": str(path), "num_test_examples": len(test)}
    if test.labels is not None:
        facts["test_metrics"] = task_metrics(data.task.label_type, test.labels, logits)
    return facts


def warn_of_failure(summary: dict[str, Any]) -> None:
    """Warn of a run that learnt nothing, or no more than the most frequent class, and of one class only."""
    hint = "the learning rate may be too high, the epochs too few, or the encoder hardly trained"
    counts, is_classes = summary.get("examples_counts", {}), summary["label_type"] == "classification"
    there = [label for label, count in counts.items() if count]
    if failed := summary["failed"]:
        named = [label for label, count in summary.get("predicted_counts", {}).items() if count]
        same = failed in SAME_ANSWER.values() and summary["label_type"] != "regression"
        answer = f": {', '.join(named) or 'none'}" if same else ""
        log.warning("%s%s; %s", failed, answer, hint)
    elif is_classes and len(there) > 1:
        most = max(counts, key=counts.__getitem__)
        share, accuracy = (
            n / sum(counts.values()) for n in (counts[most], sum(summary["right_counts"].values()))
        )
        if accuracy <= share:
            text = "accuracy %.4f is not above the %.4f of always answering %s; %s"
            log.warning(text, accuracy, share, most, hint)
    if len(there) == 1 and is_classes:
        text = "all validation examples are of one class, %s: correlations are 0 there by definition"
        log.warning(text, there[0])


def _score_lines(scores: dict[str, float], summary: dict[str, Any]) -> list[str]:
    """Return a line for each score; the F1 of two classes says of which one it is."""
    names = {name: f"f1 of {summary['labels'][1]}" if name == "f1" else name for name in scores}
    return [f"  {names[name]:22}{value:8.4f}" for name, value in scores.items()]


def _finetuning_message(config: FinetuneConfig, folder: Path, summary: dict[str, Any]) -> str:
    """Return the scores of the run, the places of its files, and the next commands."""
    epochs = "1 epoch" if summary["num_epochs"] == 1 else f"{summary['num_epochs']} epochs"
    rate = f"{summary['train_examples_per_second']:,.0f} examples/s"
    examples = f"{summary['num_validation_examples']:,} examples ({summary['validation_examples']})"
    lines = [
        f"\n{config.name}: task {summary['task']}, {epochs} in {duration(summary['elapsed_s'])}, {rate}\n",
        f"validation      {examples}; {summary['selection']}",
        *_score_lines(summary["metrics"], summary),
    ]
    if len(summary.get("labels", [])) <= MAX_SHOWN_CLASSES:
        lines += class_table(summary)
    if "test_metrics" in summary:
        lines.append(f"\ntest            {summary['num_test_examples']:,} examples")
        lines += _score_lines(summary["test_metrics"], summary)
    cut = f"{summary['truncated_fraction']:.1%} of the texts are cut"
    lines += [
        "",
        f"longest text    {summary['max_length']} tokens; {cut}",
        f"started from    {config.model}",
        f"model           {summary['model_dir']}",
        f"epochs          {folder / METRICS}, {folder / 'plots'}",
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
    return "" if value in (None, default) else f" --{name} {shlex.quote(str(value))}"
