"""The data of both scripts: which rows make up a step, and this rank's batches of them."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from time import monotonic
from typing import Any

import lightning.pytorch as pl
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

from mlm.config.commands import PretrainConfig
from mlm.config.data import IGNORE_INDEX
from mlm.config.files import find_config
from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.model import ModelConfig
from mlm.config.parse import from_plain, read_group, to_plain
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

Ints = npt.NDArray[np.int64]

SCRATCH_LENGTH = 512
"""Positions of random weights whose shape does not say."""

log = logging.getLogger(__name__)


class TrainingLoader:
    """An iterable over training batches that measures how long training waited for them.

    It is not a DataLoader, so a stock Trainer neither replaces its sampler nor expects a resumable state.
    Without `num_batches` of an epoch it is endless.
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


class StepDataModule(pl.LightningDataModule):
    """Batches of this rank, and which rows make up an optimizer step."""

    trainer: Any
    config: PretrainConfig | FinetuneConfig
    num_rows: int
    """Rows of one epoch."""
    tokens_per_step: float
    """Tokens of an optimizer step on average."""
    drawn_ahead = 0
    """Steps whose batches loader processes may draw before training reaches them."""

    @abstractmethod
    def step_rows(self, step: int, rows: int) -> Ints:
        """Return the row numbers of the optimizer step `step` (from 0) over all ranks, after `rows` rows."""

    @abstractmethod
    def num_tokens(self, rows: Ints) -> int:
        """Return the tokens of some rows, padding excluded."""

    @abstractmethod
    def _training_batches(self) -> Iterable[Any]:
        """Return this rank's batches from the run's current place on: without end in our own runs."""

    def train_dataloader(self) -> TrainingLoader:
        """Return the training batches: without end in our own runs, else one epoch."""
        epoch = self.steps_per_epoch * self.passes
        return TrainingLoader(self._training_batches, None if self.module().managed else epoch)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of one epoch."""
        return -(-self.num_rows // self.config.trainer.rows_per_step)

    @property
    def passes(self) -> int:
        """Forward passes per optimizer step on one device."""
        return int(self.trainer.accumulate_grad_batches)

    @property
    def micro_batch_size(self) -> int:
        """Rows per pass on one device, rounded up."""
        return -(-self.config.trainer.rows_per_step // (self.trainer.world_size * self.passes))

    def shares(self, rows: Ints) -> list[Ints]:
        """Return this rank's rows of an optimizer step, one array per pass; together all ranks have all."""
        first = self.trainer.global_rank * self.passes
        return np.array_split(rows, self.trainer.world_size * self.passes)[first : first + self.passes]

    def module(self) -> Any:
        """Return the module that is trained or validated."""
        return self.trainer.lightning_module


class PretrainDataModule(StepDataModule):
    """Masked rows of text for this rank; without a prepared `corpus` it is made when the Trainer asks."""

    corpus: Corpus

    def __init__(self, config: PretrainConfig | dict[str, Any], corpus: Corpus | None = None):
        super().__init__()
        config = from_plain(PretrainConfig, config)
        self.config: PretrainConfig = config
        workers = config.data.num_workers
        self.drawn_ahead = 2 + 2 * (2 if workers is None else workers)  # 1 by Lightning, 2 by each process
        if corpus is not None:
            self._set_corpus(corpus)

    def _set_corpus(self, corpus: Corpus) -> None:
        self.corpus, size = corpus, self.config.trainer.rows_per_step
        self.num_rows, self.tokens_per_step = len(corpus.train), corpus.train.tokens_per_row * size
        self._order = TrainingSampler(self.num_rows, self.config.seed, size, size, parts=corpus.train.parts)

    def prepare_data(self) -> None:
        """Read, tokenize and pack the text, on one process per machine."""
        self.setup("")

    def setup(self, stage: str) -> None:
        """Open the prepared text."""
        if not hasattr(self, "corpus"):
            self._set_corpus(prepare_text(self.config))

    def step_rows(self, step: int, rows: int) -> Ints:
        """Return the row numbers of the optimizer step that begins after `rows` rows."""
        return self._order.rows(self._index(rows)).rows

    def _epoch_end(self, rows: int) -> int:
        """Return the number of rows at which the epoch that holds row number `rows` ends."""
        return (rows // self.num_rows + 1) * self.num_rows

    def _index(self, rows: int) -> Ints:
        """Return the places in the run of the rows of a step; under a stock Trainer epochs are whole."""
        end = rows + self.config.trainer.rows_per_step
        return np.arange(rows, end if self.module().managed else min(end, self._epoch_end(rows)))

    def num_tokens(self, rows: Ints) -> int:
        """Return the tokens of some rows, padding excluded."""
        return self.corpus.train.num_tokens(rows)

    def _training_batches(self) -> DataLoader[MaskedBatch]:
        rate, workers = self.config.masking.highest_mask_rate, self.config.data.num_workers
        masking = build_masking(self.config.masking, rate, self.corpus.tokenizer)
        on_gpu = self.trainer.strategy.root_device.type == "cuda"
        return DataLoader(
            MaskedRows(self.corpus.train, masking, self.config.seed),
            sampler=self._shares(),
            batch_size=None,
            num_workers=(2 if on_gpu else 0) if workers is None else workers,
            pin_memory=on_gpu,
        )

    def _shares(self) -> Iterator[RowBatch]:
        """Yield this rank's rows from the run's current place on, with the mask rate of their step."""
        module = self.module()
        step, rows = module.progress.step, module.progress.rows
        rate_at, end = self._mask_rates(), None if module.managed else self._epoch_end(rows)
        while end is None or rows < end:
            index, rate = self._index(rows), rate_at(step)
            for share in self.shares(index):
                yield self._order.rows(share)._replace(mask_rate=rate)
            step, rows = step + 1, rows + len(index)

    def _mask_rates(self) -> Callable[[int], float]:
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
            total = planned_steps(settings, self.tokens_per_step)
        return lambda step: mask_rate_at(masking, step, 0, total)

    def val_dataloader(self) -> TrainingLoader:
        """Return the held-out rows of this rank, with frozen masks at a rate that no schedule moves."""
        settings = self.config.masking
        masking = build_masking(settings, settings.validation_mask_rate, self.corpus.tokenizer)
        trainer, size = self.trainer, self.micro_batch_size
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

    `selects`: the scores of this run choose among runs.
    """

    task: LabelledTask
    parts: Parts

    def __init__(self, config: FinetuneConfig | dict[str, Any], selects: bool = False):
        super().__init__()
        config = from_plain(FinetuneConfig, config)
        self.config: FinetuneConfig = config
        self.selects = selects or config.trainer.keep == "best"
        self._batches: tuple[int, list[Ints]] = (-1, [])
        """The newest epoch that was asked for, and its batches."""

    def setup(self, stage: str) -> None:
        """Read and tokenize the task."""
        if hasattr(self, "parts"):
            return
        config = self.config
        key = json.dumps(
            [config.task, config.glue_dir, config.selection, self.selects, to_plain(config.data)]
        )
        self.task = _keep_last("task", key, lambda: choose_task(config, self.selects))
        _describe(self.task)
        source = config.tokenizer if config.model == SCRATCH else config.model
        self.tokenizer = load_tokenizer(model_folder(str(source)))
        is_new = config.model == SCRATCH
        shape = scratch_shape(config, self.tokenizer) if is_new else read_shape(str(config.model))
        shape.check_fit(num_ids(self.tokenizer), seq_len=1)
        longest = resolve_max_length(shape, config.data.max_length, "data.max_length")
        key = json.dumps([key, tokenizer_digest(self.tokenizer), longest])
        self.parts = _keep_last("parts", key, lambda: _encode_parts(self.task, self.tokenizer, longest))
        mean, self.num_rows = self.parts.train.lengths.mean(), len(self.parts.train)
        self.tokens_per_step = float(mean) * config.trainer.rows_per_step
        longest = self.parts.max_length
        log.info("the longest example has %d tokens, the mean of training is %.0f", longest, mean)

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

    def _training_batches(self) -> Iterator[LabelledBatch]:
        module = self.module()
        epoch, first = divmod(module.progress.step, self.steps_per_epoch)
        for number in count(epoch) if module.managed else [epoch]:
            for rows in self._batches_of(number)[first if number == epoch else 0 :]:
                for share in self.shares(rows):
                    yield self.parts.train[share]

    def val_dataloader(self) -> TrainingLoader:
        """Return this rank's share of the validation examples, each once."""
        trainer, examples = self.trainer, self.parts.validation
        batches = batches_in_order(examples.lengths, 2 * self.micro_batch_size)
        mine = batches[trainer.global_rank :: trainer.world_size]
        most = -(-len(batches) // trainer.world_size)
        mine += batches[: most - len(mine)]  # the ranks need equally many; an example counts once
        return TrainingLoader(lambda: (examples[rows] for rows in mine), len(mine))


def _encode_parts(task: LabelledTask, tokenizer: Tokenizer, longest: int | None) -> Parts:
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


def forget() -> None:
    """Forget the examples of earlier runs, whose files may have changed."""
    _LAST.clear()


def _keep_last(kind: str, key: str, make: Callable[[], Any]) -> Any:
    """Return the value of the run before if it has the same key: the runs of a suite share a task."""
    if kind not in _LAST or _LAST[kind][0] != key:
        _LAST.pop(kind, None)  # first, so that both are never in memory
        _LAST[kind] = key, make()
    return _LAST[kind][1]


def _describe(task: LabelledTask) -> None:
    """Log sizes and classes of the task."""
    sizes = f"{len(task.train):,} training and {len(task.validation):,} validation examples"
    log.info("task %s: %s (%s)", task.name, sizes, task.validation_is)
    if task.label_type != "regression":
        assert task.train.labels is not None, "training examples have labels"
        counts = label_counts(task.labels, task.train.labels)
        sizes = shorten([f"{label} {number:,}" for label, number in counts.items()])
        log.info("%d classes: %s", len(counts), sizes)
        if empty := [label for label, number in counts.items() if not number]:
            log.warning("classes without a training example, which cannot be learnt: %s", shorten(empty))


def scratch_shape(config: FinetuneConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the shape of an encoder of random weights: that of a model, or of a file of `configs/model`."""
    source = str(config.model_config)
    if is_model(source):
        return read_shape(source)
    shape = read_group(ModelConfig, find_config(source, "model"))
    return shape.resolve(num_ids(tokenizer), config.data.max_length or SCRATCH_LENGTH)
