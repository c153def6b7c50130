"""The data of both scripts: which rows make up a step, and this rank's batches of them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from mlm.config.commands import PretrainConfig
from mlm.config.data import IGNORE_INDEX
from mlm.config.files import find_config
from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.model import ModelConfig
from mlm.config.parse import read_group, to_plain
from mlm.data.collate import MaskedBatch, MaskedRows, build_masking
from mlm.data.corpus import Corpus, prepare_corpus
from mlm.data.examples import (
    EncodedExamples,
    LabelledBatch,
    batches_by_length,
    batches_in_order,
    encode_examples,
    label_counts,
)
from mlm.data.labelled import Examples, LabelledTask
from mlm.data.sampler import RowBatch, TrainingSampler
from mlm.data.tasks import choose_task
from mlm.evaluation.metrics import frozen_batches
from mlm.evaluation.predictor import resolve_max_length, warn_truncated
from mlm.files import shorten
from mlm.hub.download import model_folder
from mlm.hub.pretrained import read_shape
from mlm.masking import mask_rate_at
from mlm.plan import planned_steps
from mlm.startup.checks import is_model
from mlm.tokenizer import load_tokenizer, num_ids, tokenizer_digest
from mlm.training.engine import Ints, StepDataModule

SCRATCH_LENGTH = 512
"""Positions of random weights whose shape does not say."""

log = logging.getLogger(__name__)


class TrainingLoader:
    """An iterable over training batches that measures how long training waited for them.

    It is not a DataLoader, so a stock Trainer neither replaces its sampler nor expects a resumable state.

    Args:
        batches: returns an iterator from the run's current place on.
        num_batches: batches of an epoch; None: endless.
    """

    waited_s = 0.0
    """Seconds since it was built."""

    def __init__(self, batches: Callable[[], Iterable[Any]], num_batches: int | None = None):
        self._batches, self._num_batches = batches, num_batches

    def __iter__(self) -> Iterator[Any]:
        start = monotonic()
        for batch in self._batches():
            self.waited_s += monotonic() - start
            yield batch
            start = monotonic()

    def __len__(self) -> int:
        if self._num_batches is None:
            raise TypeError("an endless loader has no length")
        return self._num_batches


class PretrainDataModule(StepDataModule):
    """Masked rows of text for this rank.

    Args:
        config: the text, its masking, batch size and seed.
        corpus: the prepared text; None: prepared when the Trainer asks.
    """

    corpus: Corpus

    def __init__(self, config: PretrainConfig, corpus: Corpus | None = None):
        super().__init__()
        self.config: PretrainConfig = config
        if corpus is not None:
            self.set_corpus(corpus)

    def set_corpus(self, corpus: Corpus) -> None:
        """Use this text."""
        self.corpus, size = corpus, self.config.trainer.rows_per_step
        self._order = TrainingSampler(
            len(corpus.train), self.config.seed, size, size, parts=corpus.train.parts
        )

    def prepare_data(self) -> None:
        """Read, tokenize and pack the text, on one process per machine."""
        self.setup("")

    def setup(self, stage: str) -> None:
        """Open the prepared text."""
        if not hasattr(self, "corpus"):
            self.set_corpus(prepare_text(self.config))

    @property
    def num_rows(self) -> int:
        """Rows of one pass over the text."""
        return len(self.corpus.train)

    def step_rows(self, step: int, rows: int) -> Ints:
        """Return the row numbers of the optimizer step that begins after `rows` rows."""
        return self._order.rows(self._index(rows)).rows

    def _index(self, rows: int) -> Ints:
        """Return the places in the run of the rows of a step; under a stock Trainer epochs are whole."""
        end = rows + self.config.trainer.rows_per_step
        return np.arange(rows, end if self.module().managed else min(end, self.epoch_end(rows)))

    def num_tokens(self, rows: Ints) -> int:
        """Return the tokens of some rows, padding excluded."""
        return self.corpus.train.num_tokens(rows)

    def train_dataloader(self) -> TrainingLoader:
        """Return the training batches: without end in our own runs, else one pass per epoch."""
        rate = self.config.masking.highest_mask_rate
        masking = build_masking(self.config.masking, rate, self.corpus.tokenizer)
        rows, workers = MaskedRows(self.corpus.train, masking, self.config.seed), self.config.data.num_workers

        def batches() -> DataLoader[MaskedBatch]:
            return DataLoader(
                rows,
                sampler=self._shares(),
                batch_size=None,
                num_workers=(2 if self.on_gpu else 0) if workers is None else workers,
                pin_memory=self.on_gpu,
            )

        managed, steps = self.module().managed, -(-self.num_rows // self.config.trainer.rows_per_step)
        return TrainingLoader(batches, None if managed else steps * self.passes)

    def _shares(self) -> Iterator[RowBatch]:
        """Yield this rank's rows from the run's current place on, with the mask rate of their step."""
        module = self.module()
        step, rows = module.progress.step, module.progress.rows
        rate_at, end = self.mask_rates(), None if module.managed else self.epoch_end(rows)
        while end is None or rows < end:
            index, rate = self._index(rows), rate_at(step)
            for share in self.shares(index):
                yield self._order.rows(share)._replace(mask_rate=rate)
            step, rows = step + 1, rows + len(index)

    def mask_rates(self) -> Callable[[int], float]:
        """Return the mask rate as a function of the step.

        Loader processes ask ahead of training, so the length of a run comes from its bounds where it can. A
        run with a time limit learns its length on the way: until `Progress.mask_rate_steps` it is constant.
        """
        masking, settings, module = self.config.masking, self.config.trainer, self.module()
        total: int | None
        if not module.managed:
            total = module.planned_steps()
        elif settings.max_time is not None:
            progress = module.progress
            return lambda step: mask_rate_at(masking, step, *(progress.mask_rate_steps or (0, None)))
        else:
            total = planned_steps(settings, self.corpus.train.tokens_per_row * settings.rows_per_step)
        return lambda step: mask_rate_at(masking, step, 0, total)

    def val_dataloader(self) -> TrainingLoader:
        """Return the held-out rows of this rank, with frozen masks at a rate that no schedule moves."""
        masking = build_masking(
            self.config.masking, self.config.masking.validation_mask_rate, self.corpus.tokenizer
        )
        trainer, size = self._trainer_of(), self.micro_batch_size
        first, mine = (
            frozen_batches(self.corpus.validation, masking, size, rank, trainer.world_size)
            for rank in (0, trainer.global_rank)
        )

        def batches() -> Iterator[MaskedBatch]:
            yield from mine
            if len(mine) < len(first):  # the ranks need equally many: one more that predicts nothing
                batch = next(iter(first))
                batch["labels"] = torch.full_like(batch["labels"], IGNORE_INDEX)
                yield batch

        return TrainingLoader(batches, len(first))


def prepare_text(config: PretrainConfig) -> Corpus:
    """Prepare the text, with the tokenizer of the model to start from if there is one."""
    if config.init is None:
        return prepare_corpus(config.data, config.tokenizer)
    start = model_folder(config.init)
    if config.model != ModelConfig():
        log.warning("model.* is ignored: the shape is that of init=%s", config.init)
    read_shape(start).check_fit(num_ids(load_tokenizer(start)), config.data.seq_len)  # before hours of work
    return prepare_corpus(config.data, replace(config.tokenizer, path=str(start)))


@dataclass(frozen=True)
class Parts:
    """The tokenized examples of a task; see `LabelledTask`."""

    train: EncodedExamples
    validation: EncodedExamples
    test: EncodedExamples | None
    scored: dict[str, EncodedExamples]

    @property
    def max_length(self) -> int:
        """Tokens of the longest example."""
        return max(int(part.lengths.max()) for part in (self.train, self.validation))

    @property
    def truncated_fraction(self) -> float:
        """Share of the examples that are truncated."""
        number = self.train.num_truncated + self.validation.num_truncated
        return number / (len(self.train) + len(self.validation))


class FinetuneDataModule(StepDataModule):
    """Tokenized examples of a task for this rank, in batches of similar length.

    Args:
        config: the task and its batch size.
        selects: whether the scores of this run choose among runs.
    """

    task: LabelledTask
    parts: Parts

    def __init__(self, config: FinetuneConfig, selects: bool = False):
        super().__init__()
        self.config: FinetuneConfig = config
        self.selects = selects or config.trainer.keep == "best"
        self._batches: tuple[int, list[Ints]] = (-1, [])
        """The newest epoch that was asked for, and its batches."""

    def setup(self, stage: str) -> None:
        """Read and tokenize the task."""
        if hasattr(self, "parts"):
            return
        config = self.config
        wanted = json.dumps(
            [config.task, config.glue_dir, config.selection, self.selects, to_plain(config.data)]
        )
        self.task = keep_last("task", wanted, lambda: choose_task(config, self.selects))
        describe(self.task)
        self.tokenizer = choose_tokenizer(config)
        shape = (
            scratch_shape(config, self.tokenizer)
            if config.model == SCRATCH
            else read_shape(str(config.model))
        )
        shape.check_fit(num_ids(self.tokenizer), seq_len=1)
        longest = resolve_max_length(shape, config.data.max_length, "data.max_length")
        encoded_by = json.dumps([wanted, tokenizer_digest(self.tokenizer), longest])
        self.parts = keep_last("parts", encoded_by, lambda: encode_parts(self.task, self.tokenizer, longest))
        mean = self.parts.train.lengths.mean()
        log.info(
            "the longest example has %d tokens, the mean of training is %.0f", self.parts.max_length, mean
        )

    @property
    def num_rows(self) -> int:
        """Training examples."""
        return len(self.parts.train)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.num_rows // self.config.trainer.rows_per_step)

    def step_rows(self, step: int, rows: int) -> Ints:
        """Return the examples of an optimizer step."""
        epoch, number = divmod(step, self.steps_per_epoch)
        if epoch != self._batches[0]:
            self._batches = epoch, self._batches_of(epoch)
        return self._batches[1][number]

    def _batches_of(self, epoch: int) -> list[Ints]:
        size = self.config.trainer.rows_per_step
        return batches_by_length(self.parts.train.lengths, size, self.config.seed, epoch)

    def num_tokens(self, rows: Ints) -> int:
        """Return the tokens of some examples, padding excluded."""
        return int(self.parts.train.lengths[rows].sum())

    def train_dataloader(self) -> TrainingLoader:
        """Return the training batches: without end in our own runs, else one epoch."""
        managed = self.module().managed
        return TrainingLoader(self._train_batches, None if managed else self.steps_per_epoch * self.passes)

    def _train_batches(self) -> Iterator[LabelledBatch]:
        """Yield this rank's batches from the run's current place on."""
        module = self.module()
        epoch, first = divmod(module.progress.step, self.steps_per_epoch)
        for number in count(epoch) if module.managed else [epoch]:
            for rows in self._batches_of(number)[first if number == epoch else 0 :]:
                for share in self.shares(rows):
                    yield self.parts.train[share]

    def val_dataloader(self) -> TrainingLoader:
        """Return this rank's share of the validation examples, each once."""
        trainer, examples = self._trainer_of(), self.parts.validation
        batches = batches_in_order(examples.lengths, 2 * self.micro_batch_size)
        mine, most = (
            batches[trainer.global_rank :: trainer.world_size],
            -(-len(batches) // trainer.world_size),
        )
        mine += batches[: most - len(mine)]  # the ranks need equally many; an example counts once
        return TrainingLoader(lambda: (examples[rows] for rows in mine), len(mine))


def encode_parts(task: LabelledTask, tokenizer: Tokenizer, longest: int | None) -> Parts:
    """Tokenize all examples of a task, and report how many are truncated."""

    def encode(part: Examples, name: str) -> EncodedExamples:
        encoded = encode_examples(tokenizer, part, longest)
        warn_truncated(encoded.num_truncated, len(encoded), name, longest)
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
    """Return the value of the run before if it wanted the same: the runs of a suite share a task."""
    if kind not in _LAST or _LAST[kind][0] != wanted:
        _LAST.pop(kind, None)  # first, so that both are never in memory
        _LAST[kind] = wanted, make()
    return _LAST[kind][1]


def describe(task: LabelledTask) -> None:
    """Log sizes and classes of the task."""
    sizes = f"{len(task.train):,} training and {len(task.validation):,} validation examples"
    log.info("task %s: %s (%s)", task.name, sizes, task.validation_is)
    if task.label_type != "regression":
        assert task.train.labels is not None, "training examples have labels"
        counts = label_counts(task.labels, task.train.labels)
        log.info(
            "%d classes: %s", len(counts), shorten([f"{label} {count:,}" for label, count in counts.items()])
        )
        empty = [label for label, count in counts.items() if not count]
        if empty:
            log.warning("classes without a training example, which cannot be learnt: %s", shorten(empty))


def choose_tokenizer(config: FinetuneConfig) -> Tokenizer:
    """Load the tokenizer of the model, or the one configured for random weights."""
    source = config.tokenizer if config.model == SCRATCH else config.model
    assert source, "the command line has chosen one"
    return load_tokenizer(model_folder(source))


def scratch_shape(config: FinetuneConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the shape of an encoder of random weights: that of a model, or of a file of `configs/model`."""
    source = str(config.model_config)
    if is_model(source):
        return read_shape(source)
    shape = read_group(ModelConfig, find_config(source, "model"))
    return shape.resolve(num_ids(tokenizer), config.data.max_length or SCRATCH_LENGTH)
