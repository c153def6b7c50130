"""What happens between two epochs of fine-tuning: score, remember what to keep, write down."""

from __future__ import annotations

import csv
import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.data.examples import EncodedExamples
from mlm.data.labelled import Examples, LabelledTask
from mlm.evaluation.metrics import task_metrics
from mlm.evaluation.torch_backend import predict_logits
from mlm.model.loss import mean_loss
from mlm.training.callbacks import Progress, StepCallback
from mlm.training.reporting import end_tracking

log = logging.getLogger(__name__)


class Diverged(InputError):
    """The loss is no number any more."""


class Stopwatch(StepCallback):
    """Keeps the seconds of training; first in the list."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Start."""
        super().on_train_start(trainer, module)
        self._start = time.monotonic()

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Read the clock."""
        self.progress.elapsed_s = time.monotonic() - self._start


@dataclass
class Epoch:
    """What an epoch came to."""

    number: int
    """From 1."""
    metrics: dict[str, float]
    """Scores of the validation examples, the one that ranks epochs first."""
    loss: float
    """Mean loss of the validation examples."""
    logits: npt.NDArray[np.float64]
    """(N, C) of the validation examples."""
    weights: dict[str, Tensor] | None = None
    """A copy of the model's; None: the model still has them."""

    @property
    def rank(self) -> float:
        """The score by which the best epoch is chosen."""
        return next(iter(self.metrics.values()))


def scores_of(
    task: LabelledTask, examples: Examples, logits: npt.NDArray[np.float64], suffix: str = ""
) -> dict[str, float]:
    """Return the scores that the task asks for, the one that ranks epochs first.

    Args:
        task: says which.
        examples: (N) with labels.
        logits: (N, C).
        suffix: what to add to the names.
    """
    assert examples.labels is not None, "what is scored has labels"
    scores = task_metrics(task.label_type, examples.labels, logits)
    return {f"{name}{suffix}": scores[name] for name in task.metrics or scores}


@dataclass
class EpochValidation(StepCallback):
    """Scores the whole validation set after every epoch, and holds on to the epoch to keep."""

    task: LabelledTask
    examples: EncodedExamples
    config: FinetuneConfig
    progress: Progress
    steps_per_epoch: int
    history: list[dict[str, Any]] = field(default_factory=list)
    """A row of the metrics table for every epoch."""
    kept: Epoch | None = None
    """The newest epoch, or the best."""

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Score if this was the last step of an epoch."""
        number, rest = divmod(trainer.global_step, self.steps_per_epoch)
        if rest:
            return
        start = time.monotonic()
        train_loss = module.take_epoch_loss()
        epoch = self._score(number, trainer, module)
        if not (math.isfinite(train_loss) and math.isfinite(epoch.loss)):
            rate = self.config.optimizer.lr
            raise Diverged(f"the loss is not finite in epoch {number}: optimizer.lr={rate} is too high")
        self._keep(epoch, module)
        seconds = time.monotonic() - start
        self.progress.validation_s += seconds
        self.progress.elapsed_s += seconds
        self.progress.last = {"loss": epoch.loss}
        counts = {"step": trainer.global_step, "tokens": self.progress.tokens, "epoch": number}
        losses = {"train/loss": train_loss, "val/loss": epoch.loss}
        scores = {f"val/{name}": value for name, value in epoch.metrics.items()}
        rest_of_row = {"elapsed_s": self.progress.elapsed_s, "optim/lr": module.learning_rate}
        self.history.append({**counts, **losses, **scores, **rest_of_row})
        shown = ", ".join(f"{name} {value:.4f}" for name, value in {**losses, **scores}.items())
        log.info("epoch %d: %s", number, shown)
        self._stop_early(trainer, number)

    def _score(self, number: int, trainer: pl.Trainer, module: Any) -> Epoch:
        module.eval()
        with trainer.precision_plugin.forward_context():
            logits = predict_logits(module.model, self.examples, 2 * self.config.trainer.batch_size)
        module.train()
        loss = mean_loss(torch.from_numpy(logits), self.examples.label_tensor()).item()
        metrics = scores_of(self.task, self.task.validation, logits)
        return Epoch(number, metrics, loss, logits)

    def _stop_early(self, trainer: pl.Trainer, number: int) -> None:
        """End the run when the score has not risen for as many epochs as were granted."""
        patience, is_last = self.config.trainer.early_stopping, number == self.config.trainer.max_epochs
        if patience and not is_last and self.kept and number - self.kept.number >= patience:
            log.info("stopped after epoch %d: none since epoch %d is better", number, self.kept.number)
            trainer.should_stop = True

    def _keep(self, epoch: Epoch, module: Any) -> None:
        """Keep the newest epoch, or the best one, the earliest of equals."""
        if self.config.trainer.keep == "last":
            self.kept = epoch
        elif self.kept is None or epoch.rank > self.kept.rank:
            state = module.model.state_dict()
            epoch.weights = {name: tensor.detach().cpu().clone() for name, tensor in state.items()}
            self.kept = epoch


class EpochTable(StepCallback):
    """Writes a row an epoch to metrics.csv and to the trackers; whoever trains ends the tracked run."""

    def __init__(self, path: Path, history: list[dict[str, Any]]):
        self.path, self.history = path, history
        self._written = 0

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Write what is new."""
        if self._written == len(self.history):
            return
        row = self.history[-1]
        shown = {name: f"{value:.7g}" if isinstance(value, float) else value for name, value in row.items()}
        with self.path.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if not self._written:
                writer.writeheader()
            writer.writerow(shown)
        self._written += 1
        for logger in trainer.loggers:
            logger.log_metrics({name: row[name] for name in row if name != "step"}, step=row["step"])

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """End the tracked run of a failure."""
        end_tracking(trainer)
