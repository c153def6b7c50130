"""Fine-tuning: an encoder with a new head is trained on labelled texts, scored every epoch, and saved.

- to Lightning the whole run is one epoch, the batches of `EpochSampler`; callbacks act where one of ours ends
- scores are those of the whole validation set
- the model of the last epoch is kept, so that its scores are honest; `trainer.keep=best` chooses by the very
  examples it is then reported on
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader

from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.model import ClassifierConfig
from mlm.counter import random_bits
from mlm.data.docs_task import read_docs_task
from mlm.data.examples import EncodedExamples, EpochSampler, LabelledBatch, encode_examples
from mlm.data.labelled import LabelledTask, label_counts, read_task
from mlm.evaluation.metrics import confusion_matrix, task_metrics
from mlm.evaluation.predict import (
    arguments,
    classify,
    max_length,
    predict_logits,
    tell_truncated,
    write_predictions,
)
from mlm.hub.card import model_card
from mlm.hub.download import model_folder
from mlm.hub.families import architecture_of
from mlm.hub.pretrained import load_classifier, save_pretrained
from mlm.hub.tokenizer_config import longest_row
from mlm.model.attention import fused_blocks
from mlm.model.heads import SequenceClassifier
from mlm.model.loss import mean_loss
from mlm.optim.optimizer import build_optimizer, set_learning_rate
from mlm.optim.schedule import learning_rate_factor, warmup_steps
from mlm.tokenizer import load_tokenizer, num_ids
from mlm.training.callbacks import GracefulStop, Progress
from mlm.training.epochs import Epoch, EpochTable, EpochValidation, Stopwatch
from mlm.training.pretraining import rescale_and_clip
from mlm.training.reporting import ProgressBar, build_tracker, resolve_tracking
from mlm.training.run_folder import run_folder
from mlm.training.summary import write_summary
from mlm.training.trainer import build_trainer

WIDE, HIGH_RATE = 512, 1e-4
"""From this width on, a learning rate above this one is warned of."""
CHECKED_EXAMPLES = 4
"""Examples on which the saved model is compared with the trained one."""
MAX_SHOWN_CLASSES = 20
"""With more classes, the table by class stays in summary.json."""

log = logging.getLogger(__name__)


class FinetuneModule(pl.LightningModule):
    """A classifier with its loss, optimizer and schedule.

    Args:
        model: what is trained.
        config: optimizer, schedule and seed.
        progress: the counters of the run.
    """

    def __init__(self, model: SequenceClassifier, config: FinetuneConfig, progress: Progress):
        super().__init__()
        self.model, self.config, self.progress = model, config, progress
        self.last_loss: Tensor | float = math.nan
        self.learning_rate = 0.0
        self._loss_sum: Tensor | float = 0.0
        self._num_examples = 0

    def training_step(self, batch: LabelledBatch, batch_idx: int) -> Tensor:
        """Return the mean loss of a batch."""
        torch.manual_seed(int(random_bits(self.config.seed, batch_idx).item()) >> 1)  # for dropout
        labels = batch["labels"]
        assert labels is not None, "training examples have labels"
        loss = mean_loss(classify(self.model, batch), labels)
        self.last_loss = loss.detach()
        self._loss_sum = self._loss_sum + self.last_loss * len(labels)
        self._num_examples += len(labels)
        self.progress.rows += len(labels)
        self.progress.tokens += batch["num_tokens"]
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Clip the gradient and set the learning rate."""
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        rescale_and_clip(gradients, torch.ones((), device=self.device), self.config.optimizer.clip_norm)
        total = self.progress.planned_steps
        assert total, "the length of the run is known from the start"
        factor = learning_rate_factor(self.config.schedule, self.global_step, total)
        set_learning_rate(optimizer, factor)
        self.learning_rate = factor * self.config.optimizer.lr

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return build_optimizer(self.model, self.config.optimizer, fused_blocks(self.model))

    def take_epoch_loss(self) -> float:
        """Return the mean loss of the examples trained on since this was last asked."""
        mean = float(self._loss_sum) / max(self._num_examples, 1)
        self._loss_sum, self._num_examples = 0.0, 0
        return mean


@dataclass(frozen=True)
class Prepared:
    """What a run starts from."""

    task: LabelledTask
    tokenizer: Tokenizer
    model: SequenceClassifier
    train: EncodedExamples
    validation: EncodedExamples
    test: EncodedExamples | None

    @property
    def max_length(self) -> int:
        """Tokens of the longest example."""
        return max(int(part.lengths.max()) for part in (self.train, self.validation))

    @property
    def truncated_fraction(self) -> float:
        """Share of the examples that are cut."""
        number = self.train.num_truncated + self.validation.num_truncated
        return number / (len(self.train) + len(self.validation))


def finetune(config: FinetuneConfig) -> int:
    """Fine-tune an encoder on labelled texts, from the files to a saved model: the `finetune` command.

    Returns:
        The exit status: 0, or 128 + the signal that stopped the run.

    Raises:
        InputError: something the user has to change; the run folder made for it is removed again.
    """
    config = replace(config, logging=resolve_tracking(config.logging))
    with run_folder(config) as folder:
        return train(config, folder, prepare(config))


def prepare(config: FinetuneConfig) -> Prepared:
    """Read and tokenize the task, and put a head for it on the encoder."""
    task = read_task(config.data) if config.data.train else read_docs_task()
    describe(task)
    assert config.model, "the command line has chosen a model"
    tokenizer = load_tokenizer(model_folder(config.model))
    model = build_model(config, task)
    model.config.check_fit(num_ids(tokenizer), seq_len=1)
    longest = max_length(model.config, config.data.max_length, "data.max_length")
    parts = {"training": task.train, "validation": task.validation} | (
        {"test": task.test} if task.test else {}
    )
    encoded = {name: encode_examples(tokenizer, part, longest) for name, part in parts.items()}
    for name, part in encoded.items():
        tell_truncated(part, name, longest)
    prepared = Prepared(
        task, tokenizer, model, encoded["training"], encoded["validation"], encoded.get("test")
    )
    mean = prepared.train.lengths.mean()
    log.info("the longest example has %d tokens, the mean of training is %.0f", prepared.max_length, mean)
    return prepared


def describe(task: LabelledTask) -> None:
    """Log what the task is."""
    sizes = f"{len(task.train):,} training and {len(task.validation):,} validation examples"
    log.info("task %s: %s (%s)", task.name, sizes, task.validation_is)
    if task.label_type == "classification":
        assert task.train.labels is not None, "training examples have labels"
        counts = list(label_counts(task.labels, task.train.labels).items())
        shown = ", ".join(f"{label} {count:,}" for label, count in counts[:MAX_SHOWN_CLASSES])
        log.info("%d classes: %s%s", len(counts), shown, ", ..." if len(counts) > MAX_SHOWN_CLASSES else "")


def build_model(config: FinetuneConfig, task: LabelledTask) -> SequenceClassifier:
    """Load the encoder and put a head for the task on it; the seed decides what is new in it."""
    torch.manual_seed(config.seed)
    head = ClassifierConfig(task.labels, task.label_type, config.head.dropout)
    model = load_classifier(str(config.model), head, config.head.pooling)
    width, rate = model.config.hidden_size, config.optimizer.lr
    if width >= WIDE and rate > HIGH_RATE:
        log.warning("optimizer.lr=%g is high for an encoder of width %d; 2e-5 to 8e-5 are usual", rate, width)
    return model.train()


def train(config: FinetuneConfig, folder: Path, prepared: Prepared) -> int:
    """Train all epochs or until a signal arrives, then save; see `finetune`."""
    settings, model = config.trainer, prepared.model
    sampler = EpochSampler(prepared.train.lengths, settings.batch_size, config.seed, settings.max_epochs)
    steps = len(sampler)
    warmup = warmup_steps(config.schedule, steps)
    if warmup > steps:
        raise InputError(f"schedule.warmup_steps={warmup} is longer than the run, which has {steps} steps")
    progress = Progress(planned_steps=steps)
    validation = EpochValidation(
        prepared.task, prepared.validation, config, progress, sampler.steps_per_epoch
    )
    stop = GracefulStop()
    callbacks: list[pl.Callback] = [
        Stopwatch(progress),
        validation,
        EpochTable(folder / "metrics.csv", validation.history),
        stop,
        ProgressBar(progress),
    ]
    trainer = build_trainer(
        settings.on_one_device(steps), folder, callbacks, build_tracker(config, config.logging, folder)
    )
    module = FinetuneModule(model, config, progress)
    trainer.fit(module, DataLoader(prepared.train, sampler=sampler, batch_size=None))
    if stop.signal is not None:
        log.warning("stopped by signal %d after step %d of %d", stop.signal, trainer.global_step, steps)
        return 128 + stop.signal
    assert validation.kept, "a run ends with a validation"
    if validation.kept.weights:
        model.load_state_dict(validation.kept.weights)
    model.to(trainer.strategy.root_device)  # Lightning has put it back on the CPU
    finish(config, folder, prepared, validation.kept, progress)
    return 0


def finish(config: FinetuneConfig, folder: Path, prepared: Prepared, kept: Epoch, progress: Progress) -> None:
    """Save model, test predictions and summary, and print the summary."""
    task, model = prepared.task, prepared.model
    summary: dict[str, Any] = {
        "task": task.name,
        "seed": config.seed,
        "metrics": kept.metrics,
        "num_train_examples": len(task.train),
        "num_validation_examples": len(task.validation),
        "elapsed_s": progress.elapsed_s,
        "train_examples_per_second": progress.rows / (progress.elapsed_s - progress.validation_s),
        "model_dir": str(folder / "model"),
        "validation_examples": task.validation_is,
        "selection": f"best epoch by {next(iter(kept.metrics))} on them" if kept.weights else "last epoch",
        "epoch": kept.number,
        "val_loss": kept.loss,
        "label_type": task.label_type,
        "max_length": prepared.max_length,
        "truncated_fraction": prepared.truncated_fraction,
        "init": config.model,
    }
    if task.label_type == "classification":
        confusion = confusion_of(task, kept)
        summary["confusion"] = confusion.tolist()
        summary["labels"] = list(task.labels)
        summary["predicted_counts"] = dict(zip(task.labels, confusion.sum(0).tolist(), strict=True))
    if prepared.test:
        summary |= predict_test(config, folder, task, prepared.test, model)
    facts = {name: summary[name] for name in ("task", "seed", "num_train_examples", "epoch", "val_loss")}
    architecture = architecture_of(model.config, model.classifier_config)
    card = model_card(str(folder / "model"), model.config, facts | kept.metrics, architecture, task.labels)
    start, checked = str(config.model), np.arange(min(len(prepared.validation), CHECKED_EXAMPLES))
    save_pretrained(
        folder / "model",
        model,
        prepared.tokenizer,
        model_max_length=config.data.max_length or longest_row(start, model.config) or prepared.max_length,
        card=card,
        rows=arguments(model, prepared.validation[checked]),
        start=start,
    )
    write_summary(folder / "summary.json", summary)
    print(closing_message(config, folder, summary))
    if task.label_type == "classification":
        warn_of_one_class(summary["predicted_counts"])


def confusion_of(task: LabelledTask, kept: Epoch) -> npt.NDArray[np.int64]:
    """Return how often each class (row) of the validation examples was predicted as each (column)."""
    assert task.validation.labels is not None, "validation examples have labels"
    return confusion_matrix(task.validation.labels, kept.logits.argmax(1), len(task.labels))


def predict_test(
    config: FinetuneConfig, folder: Path, task: LabelledTask, test: EncodedExamples, model: SequenceClassifier
) -> dict[str, Any]:
    """Write what the model says of the test examples; return the facts about it."""
    logits = predict_logits(model.eval(), test, 2 * config.trainer.batch_size)
    path = folder / "test_predictions.csv"
    write_predictions(path, map(str, range(1, len(test) + 1)), logits, model.classifier_config)
    facts: dict[str, Any] = {"test_predictions": str(path), "num_test_examples": len(test)}
    if test.labels is not None:
        facts["test_metrics"] = task_metrics(task.label_type, test.labels, logits)
    return facts


def warn_of_one_class(counts: dict[str, int]) -> None:
    """Tell when a classifier says the same of every text, which its accuracy may hide."""
    predicted = [label for label, count in counts.items() if count]
    if len(predicted) == 1:
        text = "only one class is predicted: %s; the learning rate may be too high, "
        text += "the epochs too few, or the encoder hardly trained"
        log.warning(text, predicted[0])


def closing_message(config: FinetuneConfig, folder: Path, summary: dict[str, Any]) -> str:
    """Return what the run achieved, where things are, and the next command."""
    minutes, seconds = divmod(round(summary["elapsed_s"]), 60)
    duration = f"{config.trainer.max_epochs} epochs in {minutes} min {seconds} s"
    rate = f"{summary['train_examples_per_second']:,.0f} examples/s"
    examples = f"{summary['num_validation_examples']:,} examples ({summary['validation_examples']})"
    shown = {name: value for name, value in summary["metrics"].items() if name != "f1"}
    if "f1" in summary["metrics"]:
        shown[f"f1 of {summary['labels'][1]}"] = summary["metrics"]["f1"]
    lines = [
        f"\n{config.name}: task {summary['task']}, {duration}, {rate}\n",
        f"validation      {examples}; {summary['selection']}",
        *(f"  {name:22}{value:8.4f}" for name, value in shown.items()),
    ]
    if "test_metrics" in summary:
        lines.append(f"test            {summary['num_test_examples']:,} examples")
        lines += (f"  {name:22}{value:8.4f}" for name, value in summary["test_metrics"].items())
    if "confusion" in summary and len(summary["labels"]) <= MAX_SHOWN_CLASSES:
        lines += class_table(summary["labels"], np.array(summary["confusion"]))
    lines += [
        "",
        f"started from    {config.model}",
        f"model           {summary['model_dir']}",
        f"epochs          {folder / 'metrics.csv'}",
    ]
    if "test_predictions" in summary:
        lines.append(f"predictions     {summary['test_predictions']}")
    pair = config.data.text_pair_column
    columns = "" if config.data.text_column == "text" else f" --text_column {config.data.text_column}"
    columns += f" --text_pair_column {pair}" if pair else ""
    command = (
        f"mlm predict --model {summary['model_dir']} --input YOUR_TEXTS.csv --output labels.csv{columns}"
    )
    return "\n".join([*lines, "", "next", f"  label texts     {command}"])


def class_table(labels: list[str], confusion: npt.NDArray[np.int64]) -> list[str]:
    """Return lines that say for each class how often it occurs, is predicted, and is predicted rightly."""
    width = max(map(len, labels))
    rows = zip(labels, confusion.sum(1), confusion.sum(0), confusion.diagonal(), strict=True)
    header = f"  {'class':{width}}  examples  predicted  right"
    return ["", header, *(f"  {label:{width}}  {n:8,}  {p:9,}  {r:5,}" for label, n, p, r in rows)]
