"""Fine-tuning: an encoder with a new head is trained on labelled texts, scored every epoch, and saved.

- to Lightning the whole run is one epoch, the batches of `EpochSampler`; callbacks act where one of ours ends
- scores are those of the whole validation set
- the model of the last epoch is kept, so that its scores are honest; `trainer.keep=best` chooses by the very
  examples it is then reported on
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Sequence
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
from mlm.config.files import find_config
from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.parse import read_group, to_plain
from mlm.counter import random_bits
from mlm.data.examples import EncodedExamples, EpochSampler, LabelledBatch, encode_examples
from mlm.data.labelled import Examples, LabelledTask
from mlm.data.labels import class_weights, label_counts
from mlm.data.tasks import choose_task
from mlm.evaluation.predict import classify, max_length, predict_logits, tell_truncated
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_classifier, read_shape
from mlm.model.attention import matrix_blocks
from mlm.model.depth import freeze, layer_decay
from mlm.model.heads import SequenceClassifier
from mlm.model.loss import mean_loss
from mlm.optim.optimizer import build_optimizer, set_learning_rate
from mlm.optim.schedule import learning_rate_factor, warmup_steps
from mlm.startup.checks import is_model
from mlm.tokenizer import load_tokenizer, num_ids, tokenizer_digest
from mlm.training.callbacks import Progress
from mlm.training.epochs import EpochTable, EpochValidation, Stopwatch
from mlm.training.outcome import MAX_SHOWN_CLASSES, Outcome, Prepared, finish
from mlm.training.pretraining import rescale_and_clip
from mlm.training.reporting import (
    BusyCores,
    ProgressBar,
    build_tracker,
    end_tracking,
    pretraining_run,
    resolve_tracking,
)
from mlm.training.run_folder import run_folder
from mlm.training.stopping import GracefulStop
from mlm.training.trainer import build_trainer

WIDE, HIGH_RATE = 512, 1e-4
"""From this width on, a learning rate above this one is warned of."""
SCRATCH_LENGTH = 512
"""Positions of random weights whose shape says nothing of them."""

log = logging.getLogger(__name__)


class FinetuneModule(pl.LightningModule):
    """A classifier with its loss, optimizer and schedule.

    Args:
        model: what is trained.
        config: optimizer, schedule and seed.
        progress: the counters of the run.
        weights: (C,) what an example of each class counts in the loss; None: all the same.
    """

    weights: Tensor | None

    def __init__(
        self,
        model: SequenceClassifier,
        config: FinetuneConfig,
        progress: Progress,
        weights: npt.NDArray[np.float64] | None = None,
    ):
        super().__init__()
        tensor = None if weights is None else torch.from_numpy(weights).float()
        self.register_buffer("weights", tensor, persistent=False)
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
        smoothing = self.config.head.label_smoothing
        loss = mean_loss(classify(self.model, batch), labels, self.weights, smoothing)
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
        settings, num_layers = self.config.optimizer, self.model.config.num_hidden_layers
        share = layer_decay(settings.layer_decay, num_layers)
        return build_optimizer(self.model, settings, matrix_blocks(self.model), share)

    def take_epoch_loss(self) -> float:
        """Return the mean loss of the examples trained on since this was last asked."""
        mean = float(self._loss_sum) / max(self._num_examples, 1)
        self._loss_sum, self._num_examples = 0.0, 0
        return mean


def finetune(config: FinetuneConfig, selects: bool = False) -> int:
    """Fine-tune an encoder on one task with one seed, from the files to a saved model.

    Args:
        config: the run; several tasks or seeds are `suite.finetune_all`'s.
        selects: whether its scores will choose among runs.

    Returns:
        The exit status: 0, or 128 + the signal that stopped the run.

    Raises:
        InputError: something the user has to change; the run folder made for it is removed again.
    """
    config = replace(config, logging=resolve_tracking(config.logging))
    log.info("fine-tuning %s", config.model)
    with run_folder(config) as folder:
        return train(config, folder, prepare(config, selects))


def prepare(config: FinetuneConfig, selects: bool = False) -> Prepared:
    """Read and tokenize the task, and put a head for it on the encoder; see `finetune`."""
    selects = selects or config.trainer.keep == "best"
    wanted = json.dumps([config.task, config.glue_dir, config.selection, selects, to_plain(config.data)])
    task: LabelledTask = keep_last("task", wanted, lambda: choose_task(config, selects))
    describe(task)
    tokenizer = choose_tokenizer(config)
    model = build_model(config, task, tokenizer)
    model.config.check_fit(num_ids(tokenizer), seq_len=1)
    longest = max_length(model.config, config.data.max_length, "data.max_length")
    encoded_by = json.dumps([wanted, tokenizer_digest(tokenizer), longest])
    parts: Parts = keep_last("parts", encoded_by, lambda: encode_parts(task, tokenizer, longest))
    prepared = Prepared(task, tokenizer, model, parts.train, parts.validation, parts.test, parts.scored)
    mean = prepared.train.lengths.mean()
    log.info("the longest example has %d tokens, the mean of training is %.0f", prepared.max_length, mean)
    return prepared


@dataclass(frozen=True)
class Parts:
    """The tokenized examples of a task; see `LabelledTask`."""

    train: EncodedExamples
    validation: EncodedExamples
    test: EncodedExamples | None
    scored: dict[str, EncodedExamples]


def encode_parts(task: LabelledTask, tokenizer: Tokenizer, longest: int | None) -> Parts:
    """Tokenize all that a run needs of a task, and tell what is cut."""

    def encode(part: Examples, name: str) -> EncodedExamples:
        encoded = encode_examples(tokenizer, part, longest)
        tell_truncated(encoded.num_truncated, len(encoded), name, longest)
        return encoded

    return Parts(
        encode(task.train, "training"),
        encode(task.validation, "validation"),
        encode(task.test, "test") if task.test else None,
        {suffix: encode(part, f"validation{suffix}") for suffix, part in task.scored.items()},
    )


_LAST: dict[str, tuple[str, Any]] = {}
"""Until `forget` is called."""


def forget() -> None:
    """Forget the examples of earlier runs, whose files may have changed."""
    _LAST.clear()


def keep_last(kind: str, wanted: str, make: Callable[[], Any]) -> Any:
    """Return what the run before had, if it wanted the same: seeds and settings of a suite share a task."""
    if kind not in _LAST or _LAST[kind][0] != wanted:
        _LAST.pop(kind, None)  # first, so that both are never in memory
        _LAST[kind] = wanted, make()
    return _LAST[kind][1]


def describe(task: LabelledTask) -> None:
    """Log what the task is."""
    sizes = f"{len(task.train):,} training and {len(task.validation):,} validation examples"
    log.info("task %s: %s (%s)", task.name, sizes, task.validation_is)
    if task.label_type != "regression":
        assert task.train.labels is not None, "training examples have labels"
        counts = label_counts(task.labels, task.train.labels)
        shown = shorten([f"{label} {count:,}" for label, count in counts.items()])
        log.info("%d classes: %s", len(counts), shown)
        empty = [label for label, count in counts.items() if not count]
        if empty:
            log.warning("classes without a training example, which cannot be learnt: %s", shorten(empty))


def shorten(names: Sequence[str]) -> str:
    """Return the first of the names, as many as are shown."""
    return ", ".join(names[:MAX_SHOWN_CLASSES]) + (", ..." if len(names) > MAX_SHOWN_CLASSES else "")


def choose_tokenizer(config: FinetuneConfig) -> Tokenizer:
    """Load the tokenizer of the model, or the one that random weights are to have."""
    source = config.tokenizer if config.model == SCRATCH else config.model
    assert source, "the command line has chosen one"
    return load_tokenizer(model_folder(source))


def build_model(config: FinetuneConfig, task: LabelledTask, tokenizer: Tokenizer) -> SequenceClassifier:
    """Load the encoder and put a head for the task on it; the seed decides what is new in it."""
    torch.manual_seed(config.seed)
    has_pairs = task.train.pairs is not None
    head = ClassifierConfig(task.labels, task.label_type, config.head.dropout, has_pairs)
    if config.model == SCRATCH:
        shape = scratch_shape(config, tokenizer)
        model = SequenceClassifier(replace(shape, pooling=config.head.pooling or shape.pooling), head)
    else:
        model = load_classifier(str(config.model), head, config.head.pooling)
    width, rate = model.config.hidden_size, config.optimizer.lr
    if width >= WIDE and rate > HIGH_RATE:
        log.warning("optimizer.lr=%g is high for an encoder of width %d; 2e-5 to 8e-5 are usual", rate, width)
    freeze(model, config.trainer.freeze)
    return model.train()


def scratch_shape(config: FinetuneConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the shape of an encoder of random weights: that of a model, or of a file of `configs/model`."""
    source = str(config.model_config)
    if is_model(source):
        return read_shape(source)
    shape = read_group(ModelConfig, find_config(source, "model"))
    return shape.resolve(num_ids(tokenizer), config.data.max_length or SCRATCH_LENGTH)


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
        BusyCores(),
        ProgressBar(progress),
    ]
    tracker = build_tracker(config, config.logging, folder, group=pretraining_run(str(config.model)))
    trainer = build_trainer(settings.on_one_device(steps), folder, callbacks, tracker)
    labels = prepared.task.train.labels
    assert labels is not None, "training examples have labels"
    weights = class_weights(config.head.class_weights, prepared.task.labels, labels)
    module = FinetuneModule(model, config, progress, weights)
    trainer.fit(module, DataLoader(prepared.train, sampler=sampler, batch_size=None))
    try:
        if stop.signal is not None and trainer.global_step < steps:
            text = "stopped by signal %d after step %d of %d; nothing of this run is kept"
            log.warning(text, stop.signal, trainer.global_step, steps)
            return 128 + stop.signal
        assert validation.kept, "a run ends with a validation"
        with stop.noting():  # all is trained: nothing of it is given away now
            if validation.kept.weights:
                model.load_state_dict(validation.kept.weights)
            model.to(trainer.strategy.root_device).eval()  # Lightning has put it back on the CPU
            with trainer.precision_plugin.forward_context():
                logits = {
                    suffix: predict_logits(model, part, 2 * settings.batch_size)
                    for suffix, part in prepared.scored.items()
                }
            outcome = Outcome(config, folder, prepared, validation.kept, logits, validation.history, progress)
            finish(outcome, trainer.loggers)
    finally:
        end_tracking(trainer)
    return 128 + stop.signal if stop.signal is not None else 0
