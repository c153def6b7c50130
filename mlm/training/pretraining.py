"""Pretraining: the module that computes the loss, the data module that brings its batches, and the run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mlm.config.data import IGNORE_INDEX
from mlm.config.errors import InputError
from mlm.config.experiment import PretrainConfig
from mlm.config.launch import is_first_process
from mlm.config.model import ModelConfig
from mlm.config.parse import from_plain, to_plain
from mlm.data.collate import MaskedBatch, MaskedRows, build_masking
from mlm.data.corpus import ROWS_VERSION, Corpus, prepare_corpus
from mlm.data.sampler import RowBatch, TrainingSampler
from mlm.evaluation.masked_lm import MaskedLMScores, frozen_batches
from mlm.files import write_text
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_masked_lm, read_shape
from mlm.masking import mask_rate_at
from mlm.model.attention import matrix_blocks
from mlm.model.heads import MaskedLM, rule_out_unused_ids
from mlm.model.loss import summed_cross_entropy
from mlm.model.vocabulary import extend_vocabulary
from mlm.optim.optimizer import build_optimizer
from mlm.plan import planned_steps, total_parameters
from mlm.tokenizer import added_pieces, load_tokenizer, num_ids, tokenizer_digest
from mlm.training.branch import branch_checkpoint, settle_branch, start_branch
from mlm.training.engine import Ints, StepDataModule, StepModule, TrainingLoader
from mlm.training.hardware import check_hardware
from mlm.training.processes import end_with_parent, join_processes, start_processes
from mlm.training.run import Recipe, reached_before, report_save_failure, restore, train_until_end
from mlm.training.run_folder import run_folder
from mlm.training.sharding import whole_model
from mlm.training.summary import finish_run, provenance
from mlm.training.tracking import build_tracker, end_tracking, resolve_tracking

MASKING_COLUMNS = ("masking/rate", "masking/mask_token", "masking/random_token", "masking/unchanged")

log = logging.getLogger(__name__)


class PretrainModule(StepModule):
    """A masked language model with its loss, optimizer and schedule.

    Args:
        config: the configuration, or the plain values of one, as a checkpoint holds it.
        model: the resolved shape in plain values; None: made for the vocabulary of `trainer.datamodule`.
    """

    config: PretrainConfig
    model: MaskedLM

    def __init__(self, config: PretrainConfig | dict[str, Any], model: dict[str, Any] | None = None):
        super().__init__(from_plain(PretrainConfig, config), model)
        self.scores = MaskedLMScores()

    def build_model(self) -> MaskedLM:
        """Build the model from its resolved shape, or for the data."""
        if self.hparams["model"] is not None:
            return MaskedLM(from_plain(ModelConfig, self.hparams["model"]))
        return build_model(self.config, self.trainer.datamodule.corpus)  # type: ignore[attr-defined]

    def describe_model(self) -> dict[str, Any]:
        """Return the resolved shape in plain values."""
        return dict(to_plain(self.model.config))

    def configure_model(self) -> None:
        """Build the model, and note what a run that resumes this one must have in common."""
        super().configure_model()
        data = self.data()
        if isinstance(data, PretrainDataModule) and not self.identity:
            self.identity = identity_of(self.config, data.corpus, self.model)

    def summed_loss(self, batch: MaskedBatch) -> tuple[Tensor, Tensor]:
        """Return the summed loss of the masked tokens, and the counts of `MaskedBatch`."""
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        counts = batch["num_masked"], batch["num_ordinary"], batch["num_hidden"], batch["num_random"]
        return summed_cross_entropy(logits, batch["labels"]), torch.tensor(counts, dtype=torch.float64)

    def count_metrics(self, counts: Tensor) -> dict[str, Any]:
        """Return the share of ordinary tokens that were predicted, and what was in their places."""
        num_masked, num_ordinary, hidden, random = counts
        predicted = num_masked.clamp(min=1)
        shares = (
            num_masked / num_ordinary.clamp(min=1),
            hidden / predicted,
            random / predicted,
            (num_masked - hidden - random) / predicted,
        )
        return dict(zip(MASKING_COLUMNS, shares, strict=True))

    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        return build_optimizer(self.model, self.config.optimizer, matrix_blocks(self.model))

    def validation_step(self, batch: MaskedBatch, batch_idx: int) -> None:
        """Score one batch of held-out rows."""
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        self.scores.update(logits, batch["labels"])

    def compute_validation(self) -> dict[str, float]:
        """Return loss, perplexity and accuracy of the masked tokens."""
        scores = {name: float(value) for name, value in self.scores.compute().items() if name != "num_masked"}
        self.scores.reset()
        return scores

    def on_validation_epoch_end(self) -> None:
        """Log the scores under a stock Trainer."""
        scores = self.compute_validation()
        scores["accuracy"] = scores.pop("masked_accuracy")
        self.log_dict({f"val/{name}": value for name, value in scores.items()}, prog_bar=True)

    def rank_of(self, scores: dict[str, float]) -> float:
        """Rank validations by their loss."""
        return scores["loss"]


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
        self.corpus, size = corpus, self.config.trainer.global_batch_size
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
        end = rows + self.config.trainer.global_batch_size
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
                sampler=self._shares(),  # type: ignore[arg-type]
                batch_size=None,
                num_workers=(2 if self.on_gpu else 0) if workers is None else workers,
                pin_memory=self.on_gpu,
            )

        managed, steps = self.module().managed, -(-self.num_rows // self.config.trainer.global_batch_size)
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
        if not module.managed:
            total = module.planned_steps()
        elif settings.max_time is not None:
            progress = module.progress
            return lambda step: mask_rate_at(masking, step, *(progress.mask_rate_steps or (0, None)))
        else:
            total = planned_steps(settings, self.corpus.train.tokens_per_row * settings.global_batch_size)
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


def pretrain(config: PretrainConfig) -> int:
    """Run pretraining from text to a saved model, or continue a stopped run.

    Returns:
        The exit status: 0, or 128 + the signal that stopped the run.

    Raises:
        InputError: something the user has to change; a run folder made for it is removed again.
    """
    end_with_parent()
    check_hardware(config.trainer)  # not only after hours of preparation
    status = start_processes(config.trainer, config.name)
    if status is not None:
        return status
    join_processes(config.trainer)
    config = replace(config, logging=resolve_tracking(config.logging))
    if config.branch and not config.resume:
        config = settle_branch(config)
    with run_folder(config) as folder:
        corpus, model = prepare(config)
        return train(config, folder, corpus, model)


def prepare(config: PretrainConfig) -> tuple[Corpus, MaskedLM]:
    """Prepare the text and build the model that fits its vocabulary, or load the one to start from."""
    corpus = prepare_text(config)
    return corpus, build_model(config, corpus)


def prepare_text(config: PretrainConfig) -> Corpus:
    """Prepare the text, with the tokenizer of the model to start from if there is one."""
    if config.init is None:
        return prepare_corpus(config.data, config.tokenizer)
    start = model_folder(config.init)
    if config.model != ModelConfig():
        log.warning("model.* is ignored: the shape is that of init=%s", config.init)
    read_shape(start).check_fit(num_ids(load_tokenizer(start)), config.data.seq_len)  # before hours of work
    return prepare_corpus(config.data, replace(config.tokenizer, path=str(start)))


def build_model(config: PretrainConfig, corpus: Corpus) -> MaskedLM:
    """Build the model for the vocabulary of a text, or load the one to start from."""
    size = num_ids(corpus.tokenizer)
    torch.manual_seed(config.seed)  # for new weights: of all, of a missing head, of added tokens
    if config.init is None:
        shape = config.model.resolve(size, config.data.seq_len)
        check_memory(shape)
        model = MaskedLM(shape)
    else:
        start = model_folder(config.init)
        model = load_masked_lm(start)
        if pieces := added_pieces(load_tokenizer(start), corpus.tokenizer):
            log.info("%d words of %s are new tokens", len(pieces), config.tokenizer.add_tokens)
            model = extend_vocabulary(model, pieces)
        model.train()
        model.config.check_fit(size, config.data.seq_len)
    rule_out_unused_ids(model, size)
    model.encoder.gradient_checkpointing = config.trainer.gradient_checkpointing
    if config.trainer.compile:
        log.info("the model is compiled in the first step, which takes half a minute or more for it")
        model.compile()
    return model


def train(config: PretrainConfig, folder: Path, corpus: Corpus, model: MaskedLM) -> int:
    """Train until a bound is reached or a signal arrives, then save; see `pretrain`."""
    module, data = PretrainModule(config), PretrainDataModule(config, corpus)
    module.attach(model)
    module.identity = identity_of(config, corpus, model)
    checkpoint = restore(config, folder, module)
    if config.branch and checkpoint is None:
        start_branch(module, branch_checkpoint(config))
    settings = config.trainer
    reason = reached_before(config, module, checkpoint)
    if checkpoint and reason:
        if (folder / "summary.json").exists():
            log.info("nothing to do: step %d was reached, and with it %s", checkpoint.step, reason)
            return 0
        module.load_state_dict(
            checkpoint.content["state_dict"]
        )  # stopped after the last step, before the end
        with report_save_failure(config, folder, None):
            finish_run(config, folder, corpus, model, module.progress, reason)
        return 0
    if is_first_process():
        write_text(folder / "tokenizer" / "tokenizer.json", corpus.tokenizer.to_str(pretty=True))
    recipe = Recipe(
        tokens_per_step=corpus.train.tokens_per_row * settings.global_batch_size,
        val_every=settings.val_every,
        save_every=settings.save_every,
        validation_columns=("val/perplexity", "val/masked_accuracy"),
        extra_columns=MASKING_COLUMNS,
        num_workers=config.data.num_workers,
        keep_best=settings.keep_best,
    )
    facts = {"corpus": {"sources": {source["path"]: source for source in corpus.sources}}}
    tracker = partial(build_tracker, config, config.logging, folder, facts | provenance(corpus))
    end = train_until_end(config, folder, module, data, recipe, tracker)
    if end.signal is None:
        model = whole_model(model)
        if is_first_process():
            with end.stop.noting(), report_save_failure(config, folder, end.failure):
                finish_run(config, folder, corpus, model, module.progress, str(end.reason))
    assert end.trainer is not None, "it has trained"
    end_tracking(end.trainer)
    return 128 + end.stop.signal if end.stop.signal else 0


def check_memory(config: ModelConfig) -> None:
    """Refuse a model whose weights alone are larger than the memory of this machine.

    Raises:
        InputError: they are.
    """
    needed = 4 * total_parameters(config)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"a model of model.hidden_size={config.hidden_size} and model.num_hidden_layers="
            f"{config.num_hidden_layers} needs {needed / 1e9:,.0f} GB for its weights alone; "
            f"this machine has {available / 1e9:,.0f} GB"
        )


def identity_of(config: PretrainConfig, corpus: Corpus, model: MaskedLM) -> dict[str, Any]:
    """Return what two runs must have in common for one to resume the other's checkpoint, in plain values."""
    rows = ("seq_len", "packing", "validation_fraction", "max_validation_tokens", "deduplicate")
    return {
        "tokenizer": tokenizer_digest(corpus.tokenizer),  # first: with another one the store differs too
        "corpus": corpus.store.folder.name,
        "packing": ROWS_VERSION,
        "weights": [[part.num_rows, part.per_block] for part in corpus.train.parts] or None,
        "seed": config.seed,
        "optimizer.name": config.optimizer.name,
        **{f"data.{name}": getattr(config.data, name) for name in rows},
        **{f"model.{name}": value for name, value in to_plain(model.config).items()},
    }
