"""Pretraining: the module that computes the loss, and the run around it.

The gradient of a step is that of the mean loss over the masked tokens of the *global* batch: every pass
back-propagates a sum, and the accumulated gradients are divided once, by all tokens masked in the step.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from mlm.config.errors import DiskError, InputError
from mlm.config.experiment import PretrainConfig
from mlm.config.model import ModelConfig
from mlm.config.parse import to_plain
from mlm.counter import random_bits
from mlm.data.collate import MaskedBatch
from mlm.data.corpus import ROWS_VERSION, Corpus, prepare_corpus
from mlm.hub.download import model_folder
from mlm.hub.pretrained import load_masked_lm
from mlm.launch import is_first_process
from mlm.model.attention import matrix_blocks
from mlm.model.heads import MaskedLM, rule_out_unused_ids
from mlm.model.loss import summed_cross_entropy
from mlm.model.vocabulary import extend_vocabulary
from mlm.optim.optimizer import build_optimizer, set_learning_rate, skip_step_if
from mlm.optim.schedule import learning_rate_factor
from mlm.plan import total_parameters
from mlm.tokenizer import added_pieces, load_tokenizer, num_ids, tokenizer_digest
from mlm.training.branch import branch_checkpoint, settle_branch, start_branch
from mlm.training.callbacks import (
    Budget,
    CheckpointSaver,
    Clock,
    Progress,
    SkippedSteps,
    Validation,
    bound_reached,
    save_failure,
)
from mlm.training.checkpoint import find_checkpoint
from mlm.training.datamodule import PretrainDataModule
from mlm.training.memory import KeepFreedMemory, give_back_freed_memory
from mlm.training.processes import end_with_parent, reduce_over_ranks
from mlm.training.reporting import BusyCores, MetricsTable, ProgressBar, build_tracker, resolve_tracking
from mlm.training.run_folder import METRICS, keep_config, resume_command, run_folder
from mlm.training.sharding import ShardedStrategy, local, shard, whole, whole_model
from mlm.training.stopping import GracefulStop
from mlm.training.summary import finish_run, provenance
from mlm.training.trainer import build_trainer, check_hardware, resolve_accelerator

UNPLANNED_STEPS = 1000
"""Length the schedule assumes during the few steps before a time-limited run knows its own."""

log = logging.getLogger(__name__)


class PretrainModule(pl.LightningModule):
    """A masked language model with its loss, optimizer and schedule.

    Args:
        model: what is trained.
        config: optimizer, schedule and seed.
        progress: the run's counters, saved with every checkpoint.
        identity: what a checkpoint must agree on with the run that resumes it.
    """

    def __init__(self, model: MaskedLM, config: PretrainConfig, progress: Progress, identity: dict[str, Any]):
        super().__init__()
        self.model, self.config, self.progress, self.identity = model, config, progress, identity
        self.step_metrics: dict[str, Any] = {}
        self.last_loss: Tensor | float = math.nan
        self.skipped: Tensor = torch.tensor(False)
        """Whether the newest step was skipped; on the device until somebody asks."""
        self.first_optimizer_state: dict[str, Any] = {}
        """Where a run that branches off another begins."""
        self._loss_sum: Tensor | float = 0.0
        self._counts = [0] * 4
        rates = model.config.embedding_dropout, model.config.attention_dropout, model.config.hidden_dropout
        self._has_dropout = any(rates)

    def training_step(self, batch: MaskedBatch, batch_idx: int) -> Tensor:
        """Return the summed loss of the masked tokens of one micro-batch."""
        if self._has_dropout:
            # Drawn from the place in the run, so that a resumed run drops the same units.
            bits = random_bits(self.config.seed, self.progress.rows, batch_idx, self.global_rank)
            torch.manual_seed(int(bits.item()) >> 1)
        logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        loss = summed_cross_entropy(logits, batch["labels"])
        self._loss_sum = self._loss_sum + loss.detach()
        counts = batch["num_masked"], batch["num_ordinary"], batch["num_hidden"], batch["num_random"]
        self._counts = [before + more for before, more in zip(self._counts, counts, strict=True)]
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn accumulated sums into the gradient of the mean, clip it, and set the learning rate.

        A step whose loss or gradient is no number is skipped: weights and optimizer state stay what they are.
        """
        on_gpu = self.device.type == "cuda"  # copies the numbers at once; elsewhere one has to wait for it
        counts = torch.tensor(self._counts, dtype=torch.float32).to(self.device, non_blocking=on_gpu)
        sums = torch.cat([torch.as_tensor(self._loss_sum).reshape(1), counts])
        loss_sum, num_masked, *others = reduce_over_ranks(sums, torch.distributed.ReduceOp.SUM)
        self._loss_sum, self._counts = 0.0, [0] * 4
        # Lightning divided each loss by the passes of the step, and DDP averaged over the ranks.
        undo = self.trainer.accumulate_grad_batches * self.trainer.world_size
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norm = rescale_and_clip(gradients, undo / num_masked.clamp(min=1), self.config.optimizer.clip_norm)
        total = self.progress.planned_steps or UNPLANNED_STEPS
        factor = learning_rate_factor(self.config.schedule, min(self.global_step, total - 1), total)
        set_learning_rate(optimizer, factor)
        loss = loss_sum / num_masked.clamp(min=1)
        self.last_loss = loss
        # The same on every rank: both are sums over all of them.
        self.skipped = ~(torch.isfinite(loss) & torch.isfinite(norm))
        skip_step_if(optimizer, self.skipped)
        self.step_metrics |= {
            "train/loss": loss,
            "optim/lr": factor * self.config.optimizer.lr,
            "optim/grad_norm": norm,
            "optim/skipped": self.skipped,
            **masking_shares(num_masked, *others),
        }

    def configure_model(self) -> None:
        """Divide the model among the devices if the strategy is to."""
        if isinstance(self.trainer.strategy, ShardedStrategy):
            shard(self.model, self.trainer.strategy.device_mesh["data_parallel"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        optimizer = build_optimizer(self.model, self.config.optimizer, matrix_blocks(self.model))
        self._constants = [{**group, "params": None} for group in optimizer.param_groups]
        return optimizer

    def on_train_start(self) -> None:
        """Let the configuration decide rates and decay, not the checkpoint that was just restored."""
        if self.first_optimizer_state:
            # As the strategy does it with a checkpoint: divided among the devices, if the weights are.
            self.trainer.strategy.load_optimizer_state_dict(
                {"optimizer_states": [self.first_optimizer_state]}
            )
        for group, constants in zip(self.trainer.optimizers[0].param_groups, self._constants, strict=True):
            group.update({name: value for name, value in constants.items() if name != "params"})

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters and identity."""
        checkpoint["progress"], checkpoint["identity"] = asdict(self.progress), self.identity

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counters; refuse a checkpoint of another model, tokenizer or corpus."""
        theirs = checkpoint.get("identity", {})
        differing = [name for name, mine in self.identity.items() if theirs.get(name) != mine]
        if differing:
            texts = (f"{name} is {self.identity[name]}, not {theirs.get(name)}" for name in differing)
            text = " (the text is another one)" if "corpus" in differing else ""
            raise InputError(
                f"cannot resume with something else than the checkpoint{text}: {'; '.join(texts)}"
            )
        for name, value in checkpoint["progress"].items():
            setattr(self.progress, name, value)
        if self.progress.planned_for != self.config.trainer.bounds:
            self.progress.planned_steps = None  # made longer or shorter: plan again


def masking_shares(
    num_masked: Tensor, num_ordinary: Tensor, hidden: Tensor, random: Tensor
) -> dict[str, Any]:
    """Return the share of the ordinary tokens that were predicted, and what stood in their places."""
    predicted = num_masked.clamp(min=1)
    return {
        "masking/rate": num_masked / num_ordinary.clamp(min=1),
        "masking/mask_token": hidden / predicted,
        "masking/random_token": random / predicted,
        "masking/unchanged": (num_masked - hidden - random) / predicted,
    }


def rescale_and_clip(gradients: list[Tensor], scale: Tensor, clip_norm: float) -> Tensor:
    """Multiply gradients by `scale`, then shrink them to `clip_norm` if they are longer; 0 means no bound.

    Returns:
        The norm after scaling and before clipping, a scalar.
    """
    norm = whole(torch.nn.utils.get_total_norm(gradients)) * scale
    if clip_norm:
        scale = scale * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(local(gradients), scale)
    return norm


def pretrain(config: PretrainConfig) -> int:
    """Run pretraining from text to a saved model, or go on with a stopped run.

    Returns:
        The exit status: 0, or 128 + the signal that stopped the run.

    Raises:
        InputError: something the user has to change; a run folder made for it is removed again.
    """
    end_with_parent()
    check_hardware(config.trainer)  # not only after hours of preparation
    config = replace(config, logging=resolve_tracking(config.logging))
    if config.branch and not config.resume:
        config = settle_branch(config)
    with run_folder(config) as folder:
        corpus, model = prepare(config)
        return train(config, folder, corpus, model)


def prepare(config: PretrainConfig) -> tuple[Corpus, MaskedLM]:
    """Prepare the corpus and build the model that fits its vocabulary, or load the one to start from."""
    if config.init:
        if config.model != ModelConfig():
            log.warning("model.* is ignored: the shape is that of init=%s", config.init)
        start = model_folder(config.init)
        torch.manual_seed(config.seed)  # for what the folder has not: a head, new tokens
        model = load_masked_lm(start)
        known, tokenizer = (load_tokenizer(start, words) for words in (None, config.tokenizer.add_tokens))
        size = num_ids(tokenizer)
        if pieces := added_pieces(known, tokenizer):
            log.info("%d words of %s are new tokens", len(pieces), config.tokenizer.add_tokens)
            model = extend_vocabulary(model, pieces)
        model.train()
        model.config.check_fit(size, config.data.seq_len)
        corpus = prepare_corpus(config.data, replace(config.tokenizer, path=str(start)))
    else:
        corpus = prepare_corpus(config.data, config.tokenizer)
        size = num_ids(corpus.tokenizer)
        resolved = config.model.resolve(size, config.data.seq_len)
        check_memory(resolved)
        torch.manual_seed(config.seed)
        model = MaskedLM(resolved)
    rule_out_unused_ids(model, size)
    model.encoder.gradient_checkpointing = config.trainer.gradient_checkpointing
    if config.trainer.compile:
        log.info("the model is compiled in the first step, which takes half a minute or more for it")
        model.compile()
    return corpus, model


def train(config: PretrainConfig, folder: Path, corpus: Corpus, model: MaskedLM) -> int:
    """Train until a bound is reached or a signal arrives, then save; see `pretrain`."""
    progress = Progress()
    module = PretrainModule(model, config, progress, identity_of(config, corpus, model))
    checkpoint = find_checkpoint(folder / "checkpoints") if config.resume else None
    reason: str | None = None
    failure: Exception | None = None
    if checkpoint:
        module.on_load_checkpoint(checkpoint.content)
        reason = bound_reached(config.trainer, progress, checkpoint.step, progress.elapsed_s)
    elif config.branch:
        start_branch(module, branch_checkpoint(config))
    elif config.resume and ((folder / "summary.json").exists() or (folder / "model").exists()):
        raise InputError(
            f"{folder} is a finished run whose checkpoints are gone: there is nothing to go on with; start "
            f"a new run from its weights with --init {folder / 'model'}"
        )
    elif config.resume:
        log.info("%s holds no whole checkpoint: starting at step 0", folder)
    if checkpoint and reason and (folder / "summary.json").exists():
        log.info("nothing to do: step %d was reached, and with it %s", checkpoint.step, reason)
        return 0
    if checkpoint and reason:  # stopped after the last step and before the end
        module.load_state_dict(checkpoint.content["state_dict"])
        step = checkpoint.step
    else:
        if is_first_process():
            keep_config(config, folder)
            (folder / "tokenizer").mkdir(exist_ok=True)
            (folder / "tokenizer" / "tokenizer.json").write_text(corpus.tokenizer.to_str(pretty=True))
        (folder / "summary.json").unlink(missing_ok=True)
        trainer, budget, stop = assemble(config, folder, corpus, progress)
        data = PretrainDataModule(corpus, config, progress)
        trainer.fit(
            module, datamodule=data, ckpt_path=checkpoint.path if checkpoint else None, weights_only=True
        )
        if stop.signal is not None:
            log.warning("stopped by signal %d after step %d", stop.signal, trainer.global_step)
            log.warning("go on with: %s", resume_command(config))
            return 128 + stop.signal
        step, reason, failure = trainer.global_step, budget.reason, save_failure(trainer)
    give_back_freed_memory()
    model = whole_model(model)
    if is_first_process():
        with what_is_not_saved_is_told(config, folder, failure):
            finish_run(config, folder, corpus, model, progress, step, str(reason))
    return 0


@contextmanager
def what_is_not_saved_is_told(
    config: PretrainConfig, folder: Path, failure: Exception | None
) -> Iterator[None]:
    """Save what is saved inside even where the last checkpoint could not be, then say what failed."""
    try:
        yield
    except (OSError, DiskError) as error:
        failure = failure or error
    if failure:
        raise InputError(
            f"{folder}: not all that the run ends with could be saved ({failure}); free some space, then go "
            f"on with: {resume_command(config)}"
        )


def check_memory(config: ModelConfig) -> None:
    """Refuse a model whose weights alone are larger than the memory of this machine."""
    needed = 4 * total_parameters(config)
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > available:
        raise InputError(
            f"a model of model.hidden_size={config.hidden_size} and model.num_hidden_layers="
            f"{config.num_hidden_layers} needs {needed / 1e9:,.0f} GB for its weights alone; "
            f"this machine has {available / 1e9:,.0f} GB"
        )


def assemble(
    config: PretrainConfig, folder: Path, corpus: Corpus, progress: Progress
) -> tuple[pl.Trainer, Budget, GracefulStop]:
    """Build the Trainer and its callbacks, which act in the order of the list."""
    clock = Clock(config, progress, corpus.train)
    budget = Budget(config, progress, clock)
    stop = GracefulStop()
    on_cpu = resolve_accelerator(config.trainer) == "cpu"
    callbacks: list[pl.Callback] = [
        *([KeepFreedMemory()] if on_cpu else []),
        clock,
        budget,
        Validation(config.trainer, progress, clock),
        MetricsTable(folder / METRICS, progress),
        SkippedSteps(config.trainer, progress, clock, folder / "checkpoints"),
        stop,
        CheckpointSaver(folder / "checkpoints", config.trainer, progress, clock),
        BusyCores(),
        ProgressBar(progress),
    ]
    facts = {"corpus": {"sources": {source["path"]: source for source in corpus.sources}}}
    tracker = build_tracker(config, config.logging, folder, facts | provenance(corpus))
    return build_trainer(config.trainer, folder, callbacks, tracker), budget, stop


def identity_of(config: PretrainConfig, corpus: Corpus, model: MaskedLM) -> dict[str, Any]:
    """Return what two runs must share for one to go on with the other's checkpoint, in plain values."""
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
