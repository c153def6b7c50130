"""Fine-tuning: a classifier on an encoder is trained on labelled texts, scored every epoch, and saved.

- scores are those of the whole validation set
- the model of the last epoch is kept, so that its scores are unbiased; `trainer.keep=best` chooses by the
  examples that it is then reported on, unless a part of train is held out for that
"""

from __future__ import annotations

import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.parse import from_plain, to_plain
from mlm.data.examples import LabelledBatch, class_weights
from mlm.data.labelled import LabelledTask
from mlm.evaluation.metrics import LabelledPredictions
from mlm.evaluation.predictor import arguments
from mlm.hub.pretrained import load_classifier, pretraining_tokens
from mlm.launch import launched
from mlm.model.adapt import default_rate, freeze, layer_decay
from mlm.model.heads import SequenceClassifier
from mlm.model.loss import summed_label_loss
from mlm.optim import build_optimizer
from mlm.tokenizer import tokenizer_digest
from mlm.training.callbacks import Diverged
from mlm.training.datamodule import FinetuneDataModule, scratch_shape
from mlm.training.engine import StepModule
from mlm.training.processes import enter_run
from mlm.training.results import finish_finetuning, scores_of
from mlm.training.run import restore, run_training
from mlm.training.run_folder import run_folder
from mlm.training.summary import started_from
from mlm.training.tracking import pretraining_run, resolve_tracking

log = logging.getLogger(__name__)


class FinetuneModule(StepModule):
    """A classifier with its loss, optimizer and schedule.

    Both arguments may be plain values, as a checkpoint holds them; a `model` of None is made for the data.
    """

    config: FinetuneConfig
    model: SequenceClassifier
    start_flag = "model"
    by_epoch = True
    extra_columns = ("epoch",)

    def __init__(self, config: FinetuneConfig | dict[str, Any], model: dict[str, Any] | None = None):
        super().__init__(from_plain(FinetuneConfig, config), model)
        self.predictions = LabelledPredictions()
        self.logits: npt.NDArray[np.float64] | None = None
        """(N, C) of the newest validation."""
        self.title: str | None = None
        """Name of the run as a part of a suite."""
        self._unread: list[tuple[Tensor, Tensor]] = []

    def build_model(self) -> SequenceClassifier:
        """Build the model from its shape, or for the task."""
        if self.hparams["model"] is None:
            data: FinetuneDataModule = self.data()
            return build_model(self.config, data.task, data.tokenizer)
        shapes = self.hparams["model"]
        classifier = ClassifierConfig(
            **shapes["classifier"] | {"labels": tuple(shapes["classifier"]["labels"])}
        )
        return SequenceClassifier(from_plain(ModelConfig, shapes["encoder"]), classifier)

    def attach(self, model: nn.Module) -> None:
        """Train this model, at the learning rate that suits it if none is configured."""
        super().attach(model)
        config = self.config
        if config.optimizer.lr is None:
            tokens = 0 if config.model == SCRATCH else pretraining_tokens(str(config.model))
            rate, reason = default_rate(self.model, tokens, config.trainer.freeze)
            log.info("learning rate %g: %s; optimizer.lr sets another", rate, reason)
            self.config = replace(config, optimizer=replace(config.optimizer, lr=rate))
            self.hparams["config"] = to_plain(self.config)

    def describe_model(self) -> dict[str, Any]:
        """Return the shapes of encoder and classifier in plain values."""
        model = self.model
        return {"encoder": to_plain(model.config), "classifier": to_plain(model.classifier_config)}

    def identify(self, data: FinetuneDataModule) -> dict[str, Any]:
        """Return the facts that a run and its checkpoints must share, in plain values."""
        config, task = self.config, data.task
        return {
            "task": task.name,
            "labels": list(task.labels),
            "tokenizer": tokenizer_digest(data.tokenizer),
            "examples": data.parts.train.digest(),
            "seed": config.seed,
            "trainer.batch_size": config.trainer.rows_per_step,
            "optimizer.name": config.optimizer.name,
            **started_from(config.model),
            **{f"model.{name}": value for name, value in to_plain(self.model.config).items()},
        }

    def on_fit_start(self) -> None:
        """Weigh the classes, and restore what a resumed run starts from."""
        super().on_fit_start()
        task = self.trainer.datamodule.task  # type: ignore[attr-defined]
        weights = class_weights(self.config.head.class_weights, task.labels, task.train.labels)
        self._weights = None if weights is None else torch.from_numpy(weights).float().to(self.device)

    def summed_loss(self, batch: LabelledBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and what to divide by."""
        labels = batch["labels"]
        assert labels is not None, "training examples have labels"
        smoothing = self.config.head.label_smoothing
        logits = self.model(**arguments(self.model, batch))
        loss, divisor = summed_label_loss(logits, labels, self._weights, smoothing)
        return loss, divisor.reshape(1)

    def dropout_key(self, number: int) -> tuple[int, ...]:
        """Return the seed of dropout in pass `number` of the run on this rank."""
        return (number, self.global_rank) if self.global_rank else (number,)

    def on_step_loss(self, loss_sum: Tensor, divisor: Tensor) -> None:
        """Add to the loss of the epoch, unless the step is skipped; read once an epoch."""
        used = ~self.skipped
        self._unread.append((torch.where(used, loss_sum, 0.0), torch.where(used, divisor, 0.0)))

    def _read_epoch_loss(self) -> None:
        loss_sum, divisor = self.progress.epoch_loss
        for one_loss, one_divisor in self._unread:
            loss_sum, divisor = loss_sum + float(one_loss), divisor + float(one_divisor)
        self.progress.epoch_loss, self._unread = (loss_sum, divisor), []

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters, with the loss of the epoch so far, and identity."""
        self._read_epoch_loss()
        super().on_save_checkpoint(checkpoint)

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer, with layer-wise decay of the learning rate if configured."""
        settings, num_layers = self.config.optimizer, self.model.config.num_hidden_layers
        return build_optimizer(self.model, settings, layer_decay(settings.layer_decay, num_layers))

    def validation_step(self, batch: LabelledBatch, batch_idx: int) -> None:
        """Collect the logits of one batch of validation examples, in float32 as every command scores."""
        with torch.autocast(self.device.type, enabled=False):
            self.predictions.update(batch["rows"], self.model(**arguments(self.model, batch)))

    def compute_validation(self) -> dict[str, float]:
        """Return the loss and the scores that the task asks for, the one that ranks epochs first."""
        data: FinetuneDataModule = self.data()
        self.logits = self.predictions.compute()
        self.predictions.reset()
        labels = data.parts.validation.label_tensor()
        loss = torch.div(*summed_label_loss(torch.from_numpy(self.logits), labels)).item()
        return {"loss": loss, **scores_of(data.task, data.task.validation, self.logits)}

    def rank_of(self, scores: dict[str, float]) -> float:
        """Rank epochs by their first score, of which the highest is the best."""
        return -next(value for name, value in scores.items() if name != "loss")

    def on_validated(self, trainer: pl.Trainer) -> None:
        """Record the epoch; a loss that is not finite ends the run."""
        self._read_epoch_loss()
        progress, data = self.progress, self.data()
        loss_sum, divisor = progress.epoch_loss
        progress.epoch_loss = 0.0, 0.0
        number, scores = -(-progress.step // data.steps_per_epoch), dict(progress.last or {})
        losses = {"train/loss": loss_sum / divisor if divisor else math.nan, "val/loss": scores.pop("loss")}
        if not all(map(math.isfinite, losses.values())):
            rate = self.config.optimizer.lr
            raise Diverged(f"the loss is not finite in epoch {number}: optimizer.lr={rate} is too high")
        shown = losses | {f"val/{name}": value for name, value in scores.items()}
        counters = {"epoch": number, "step": progress.step, "elapsed_s": progress.elapsed_s}
        progress.epochs.append(counters | shown)
        self.step_metrics["epoch"] = number
        log.info("epoch %d: %s", number, ", ".join(f"{name} {value:.4f}" for name, value in shown.items()))

    def save_results(
        self, data: FinetuneDataModule, folder: Path, reason: str, kept: int, trainer: pl.Trainer | None
    ) -> None:
        """Save the results of the run; of a part of a suite, remove the checkpoints."""
        is_current = kept == self.progress.step == self.progress.validated_at
        finish_finetuning(self, data, folder, kept, self.logits if is_current else None, trainer, self.title)
        if self.title is not None:  # a part of a suite: of many runs, checkpoints would fill the disk
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def finetune(config: FinetuneConfig, *, selects: bool = False, title: str | None = None) -> int:
    """Fine-tune an encoder on one task with one seed; return 0, or 128 + the signal that stopped the run.

    `selects`: its scores will choose among runs. `title` is its name as a part of a suite, None: it is none.
    """
    if launched() is None and config.trainer.devices == "auto":  # several pay off for large batches only
        config = replace(config, trainer=replace(config.trainer, devices=1))
    if (status := enter_run(config.trainer, config.name)) is not None:
        return status
    config = replace(config, logging=resolve_tracking(config.logging))
    log.info("fine-tuning %s", config.model)
    with run_folder(config) as folder:
        data = FinetuneDataModule(config, selects)
        data.setup("fit")
        module = FinetuneModule(config)
        module.title = title
        module.attach(build_model(config, data.task, data.tokenizer))
        module.identity = module.identify(data)
        examples = data.task.validation
        names = scores_of(data.task, examples, np.zeros((len(examples), len(data.task.labels))))
        module.validation_columns = [f"val/{name}" for name in names]
        checkpoint, group = restore(folder, module), pretraining_run(str(config.model))
        return run_training(folder, module, data, checkpoint, group=group, title=title)


def build_model(config: FinetuneConfig, task: LabelledTask, tokenizer: Tokenizer) -> SequenceClassifier:
    """Load the encoder and put a head for the task on it; the seed decides its new weights."""
    torch.manual_seed(config.seed)
    has_pairs = task.train.pairs is not None
    head = ClassifierConfig(task.labels, task.label_type, config.head.dropout, has_pairs)
    if config.model == SCRATCH:
        shape = scratch_shape(config, tokenizer)
        model = SequenceClassifier(replace(shape, pooling=config.head.pooling or shape.pooling), head)
    else:
        model = load_classifier(str(config.model), head, config.head.pooling)
    freeze(model, config.trainer.freeze)
    model.encoder.gradient_checkpointing = config.trainer.gradient_checkpointing
    if config.trainer.compile:
        model.compile(dynamic=True)
    return model.train()
