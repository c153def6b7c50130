"""The engine of both scripts: what one optimizer step does, and the run around it.

- a pass back-propagates a *sum* of losses; before the optimizer step the gradients are divided once, by the
  number of masked tokens (or examples) of the whole global batch, over passes and ranks, then clipped
- a resume restores weights, optimizer state and `Progress`; Lightning's loops start at 0 each time,
  and nothing of their state is restored
- a `StepModule` is a plain LightningModule: under a stock Trainer its devices, precision, accumulation,
  clipping and limits win. Our own runs add the callbacks of `callbacks.py` and set `module.managed`
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from mlm.config.commands import PretrainConfig
from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.parse import to_plain
from mlm.counter import random_bits
from mlm.files import shorten
from mlm.optim import learning_rate_factor, set_learning_rate, skip_step_if
from mlm.training.processes import reduce_over_ranks
from mlm.training.sharding import ShardedStrategy, local, shard, whole

UNPLANNED_STEPS = 1000
"""Length the schedule assumes until a time-limited run knows its own, and where the length is unlimited."""

log = logging.getLogger(__name__)


@dataclass
class Progress:
    """How far a run has come, in plain values."""

    step: int = 0
    """Finished optimizer steps."""
    rows: int = 0
    """Rows trained on."""
    tokens: int = 0
    """Tokens trained on, padding excluded."""
    elapsed_s: float = 0.0
    """Seconds of training over all resumes, including validation."""
    planned_steps: int | None = None
    """Length of the run in optimizer steps; None until a time-limited run has measured its throughput."""
    mask_rate_steps: tuple[int, int] | None = None
    """Steps between which the mask rate moves: from the first whose batch was not drawn before the plan."""
    planned_for: tuple[int | str | None, ...] = ()
    """The bounds that this length follows from."""
    first: dict[str, float] | None = None
    """Validation scores before the first update."""
    validation_s: float = 0.0
    """Seconds of this validation."""
    validations_s: float = 0.0
    """Seconds of all validations after it."""
    last: dict[str, float] | None = None
    """Newest validation scores."""
    validated_at: int = 0
    """Step of the newest validation."""
    best: list[tuple[float, int]] = field(default_factory=list)
    """Rank (lower is better) and step of the best validations, best first, for each checkpoint kept."""
    lowest: tuple[float, int] | None = None
    """Rank and step of the best validation of all, kept or not."""
    skipped: int = 0
    """Optimizer steps skipped for a non-finite loss or gradient."""
    skipped_in_a_row: int = 0
    """How many of them ended with the newest step."""
    epoch_loss: tuple[float, float] = (0.0, 0.0)
    """Summed training loss since the last validation, and the weight it is divided by."""
    epochs: list[dict[str, Any]] = field(default_factory=list)
    """Fine-tuning: losses and scores of each epoch."""


class StepModule(pl.LightningModule):
    """One optimizer step: summed losses, one division, clipping, learning rate, skipping.

    `model` is its resolved shape in plain values, as a checkpoint holds it; None: made by `build_model`.
    """

    model: Any
    start_flag = "init"
    """Option of the command line that starts a new run from a model."""
    by_epoch = False
    """Whether epochs bound a run and are scored; else steps, and the untrained model is scored too."""
    validation_columns: Sequence[str] = ()
    """Columns of the metrics table with validation scores other than the loss; then others."""
    extra_columns: Sequence[str] = ()

    def __init__(self, config: PretrainConfig | FinetuneConfig, model: dict[str, Any] | None = None):
        super().__init__()
        self.save_hyperparameters({"config": to_plain(config), "model": model})
        self.config: Any = config
        self.model = None
        self.progress = Progress()
        self.identity: dict[str, Any] = {}
        """Facts that a checkpoint and the run that resumes it must share."""
        self.managed = False
        """Whether our own callbacks plan, validate and record; false under a stock Trainer."""
        self.start: Path | None = None
        """Checkpoint to take weights and optimizer state from when training starts."""
        self.step_metrics: dict[str, Any] = {}
        self.last_loss: Tensor | float = math.nan
        self.skipped: Tensor = torch.tensor(False)
        """Whether the newest step was skipped; on the device until it is read."""
        self._loss_sum: Tensor | float = 0.0
        self._counts: Tensor | float = 0.0
        self._is_sharded = False

    @abstractmethod
    def build_model(self) -> nn.Module:
        """Build the model from `hparams["model"]`, or for the data of `trainer.datamodule`."""

    @abstractmethod
    def describe_model(self) -> dict[str, Any]:
        """Return the shape of the model in plain values, from which `build_model` can build it."""

    @abstractmethod
    def identify(self, data: Any) -> dict[str, Any]:
        """Return in plain values what this run and one that resumes it must have in common."""

    @abstractmethod
    def summed_loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the summed loss of a batch, and (K,) counts, of which the first is to divide by."""

    @abstractmethod
    def build_optimizer(self) -> torch.optim.Optimizer:
        """Build the optimizer; every group carries `peak_lr`."""

    @abstractmethod
    def rank_of(self, scores: dict[str, float]) -> float:
        """Return the number that ranks validations; lower is better."""

    @abstractmethod
    def compute_validation(self) -> dict[str, float]:
        """Return the scores of all batches given to `validation_step` since, over all ranks, and reset."""

    @abstractmethod
    def save_results(
        self, data: Any, folder: Path, reason: str, kept: int, trainer: pl.Trainer | None
    ) -> None:
        """Save the results of a managed run on the first process; it has the weights of the step `kept`."""

    def on_validated(self, trainer: pl.Trainer) -> None:
        """Act after a validation of a managed run."""

    def on_step_loss(self, loss_sum: Tensor, divisor: Tensor) -> None:
        """Receive the loss of a step, summed over all ranks."""

    def count_metrics(self, counts: Tensor) -> dict[str, Any]:
        """Return metrics of a step from its counts (K,), summed over all ranks."""
        return {}

    def dropout_key(self, number: int) -> tuple[int, ...]:
        """Return the seed of the dropout in pass `number` of the run on this rank."""
        return self.progress.rows, number, self.global_rank

    def attach(self, model: nn.Module) -> None:
        """Train this model."""
        self.model = model
        self.hparams["model"] = self.describe_model()

    def configure_model(self) -> None:
        """Build the model if there is none, and divide it among the devices if the strategy does."""
        if self.model is None:
            self.attach(self.build_model())
        if self.data() is not None and not self.identity:
            self.identity = self.identify(self.data())
        strategy = self.trainer.strategy if self.has_trainer() else None
        if isinstance(strategy, ShardedStrategy) and not self._is_sharded:
            shard(self.model, strategy.device_mesh["data_parallel"])
            self._is_sharded = True

    def has_trainer(self) -> bool:
        """Return whether a Trainer holds this module; without one it was loaded from a checkpoint."""
        try:
            return self.trainer is not None
        except RuntimeError:
            return False

    def data(self) -> Any:
        """Return the Trainer's data module, None if it is not one of ours."""
        data = self.trainer.datamodule if self.has_trainer() else None  # type: ignore[attr-defined]
        return data if hasattr(data, "step_rows") else None

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load weights of this model, whose names may have the prefix of a compiled one."""
        state = {name.replace("_orig_mod.", ""): value for name, value in state_dict.items()}
        if different := sorted(state.keys() ^ self.state_dict().keys()):
            raise InputError(f"the weights are those of another model; they differ in {shorten(different)}")
        return super().load_state_dict(state, strict, assign)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the summed loss of one micro-batch."""
        # Dropout is seeded by the place in the run, so that a resumed run drops the same units.
        passes = self.trainer.accumulate_grad_batches
        number = self.progress.step * passes + batch_idx % passes
        bits = random_bits(self.config.seed, *self.dropout_key(number))
        torch.manual_seed(int(bits.item()) >> 1)
        loss, counts = self.summed_loss(batch)
        self._loss_sum = self._loss_sum + loss.detach()
        self._counts = self._counts + counts
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Turn accumulated sums into the gradient of the mean, clip it, and set the learning rate.

        A step with a non-finite loss or gradient is skipped: weights and optimizer state stay as they are.
        """
        on_gpu = self.device.type == "cuda"  # copies the numbers at once; elsewhere one has to wait for it
        counts = torch.as_tensor(self._counts).to(self.device, torch.float32, non_blocking=on_gpu)
        sums = torch.cat([torch.as_tensor(self._loss_sum).reshape(1).float(), counts])
        loss_sum, divisor, *_ = reduce_over_ranks(sums, torch.distributed.ReduceOp.SUM)
        self._loss_sum, self._counts = 0.0, 0.0
        # Lightning divided each loss by the passes of the step, and DDP averaged over the ranks.
        undo = self.trainer.accumulate_grad_batches * self.trainer.world_size
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        divisor = torch.where(divisor > 0, divisor, 1.0)
        bound, trainer = self.config.optimizer.clip_norm, self.trainer
        if trainer.gradient_clip_val is not None:  # a stock Trainer's own wins; by value: see below
            bound = trainer.gradient_clip_val * (trainer.gradient_clip_algorithm != "value")
        norm = rescale_and_clip(gradients, undo / divisor, bound)
        total = (self.progress.planned_steps if self.managed else self.planned_steps()) or UNPLANNED_STEPS
        factor = learning_rate_factor(self.config.schedule, min(self.progress.step, total - 1), total)
        set_learning_rate(optimizer, factor)
        self.last_loss = loss = loss_sum / divisor
        # The same on every rank: both are sums over all of them.
        self.skipped = ~(torch.isfinite(loss) & torch.isfinite(norm))
        skip_step_if(optimizer, self.skipped)
        self.step_metrics |= {
            "train/loss": loss,
            "optim/lr": factor * self.config.optimizer.lr,
            "optim/grad_norm": norm,
            "optim/skipped": self.skipped,
            **self.count_metrics(sums[1:]),
        }
        self.on_step_loss(loss_sum, sums[1])
        if (data := self.data()) is not None:
            rows = data.step_rows(self.progress.step, self.progress.rows)
            self.progress.rows += len(rows)
            self.progress.tokens += data.num_tokens(rows)
        self.progress.step += 1
        if not self.managed:
            self.log("train/loss", loss, prog_bar=True)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip by value if the Trainer asks for it; the norm is clipped where sums become means."""
        if gradient_clip_val and gradient_clip_algorithm == "value":
            torch.nn.utils.clip_grad_value_(self.model.parameters(), gradient_clip_val)

    def planned_steps(self) -> int:
        """Return the length of a stock Trainer's fit in optimizer steps."""
        steps = self.trainer.estimated_stepping_batches
        return int(steps) if math.isfinite(steps) and steps > 0 else UNPLANNED_STEPS

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Build the optimizer."""
        optimizer = self.build_optimizer()
        self._constants = [{**group, "params": None} for group in optimizer.param_groups]
        return optimizer

    def on_fit_start(self) -> None:
        """Restore weights and optimizer state of `start`, divided among the devices as the model is."""
        if not self.managed:
            self._warn_of_differences()
        if self.start is None:
            return
        strategy = self.trainer.strategy
        content = strategy.load_checkpoint(self.start, weights_only=True)
        strategy.load_model_state_dict(content)
        strategy.load_optimizer_state_dict(content)
        scaler = self.trainer.precision_plugin
        if state := content.get(type(scaler).__qualname__):
            scaler.load_state_dict(state)

    def _warn_of_differences(self) -> None:
        """Warn once where the configuration says something else than the stock Trainer, which wins."""
        trainer, config = self.trainer, self.config.trainer
        values = (
            ("max_steps", config.max_steps, trainer.max_steps),
            ("devices", config.devices, trainer.world_size),
            ("precision", config.precision, trainer.precision),
        )
        differing = [
            f"{name} {theirs} (configured: {mine})"
            for name, mine, theirs in values
            if mine not in (None, "auto", theirs) and theirs != -1
        ]
        if trainer.gradient_clip_val not in (None, self.config.optimizer.clip_norm):
            differing.append(f"gradient_clip_val {trainer.gradient_clip_val}")
        if differing:
            log.warning("the Trainer decides: %s", ", ".join(differing))

    def on_train_start(self) -> None:
        """Let the configuration decide rates and decay, not the checkpoint that was just restored."""
        for group, constants in zip(self.trainer.optimizers[0].param_groups, self._constants, strict=True):
            group.update({name: value for name, value in constants.items() if name != "params"})

    def on_validation_epoch_end(self) -> None:
        """Log the scores under a stock Trainer, pretraining's accuracy by its short name."""
        scores = self.compute_validation()
        shown = {f"val/{name.removeprefix('masked_')}": float(value) for name, value in scores.items()}
        self.log_dict(shown, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add counters and identity."""
        checkpoint["progress"], checkpoint["identity"] = asdict(self.progress), self.identity
        if self.managed:
            checkpoint["global_step"] = self.progress.step

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Restore the counters; refuse a checkpoint of another model, tokenizer or data."""
        theirs = checkpoint.get("identity", {})
        # Checkpoints of an earlier version do not say from which commit of the hub they started.
        old = {"started_from"} - theirs.keys()
        known = {name: mine for name, mine in self.identity.items() if name not in old}
        differing = [name for name, mine in known.items() if theirs.get(name) != mine]
        if differing:
            texts = (f"{name} is {self.identity[name]}, not {theirs.get(name)}" for name in differing)
            text = " (the text differs)" if "corpus" in differing else ""
            raise InputError(f"cannot resume from this checkpoint{text}: {'; '.join(texts)}")
        self.progress.step = checkpoint["global_step"]  # older checkpoints have it here alone
        for name, value in checkpoint["progress"].items():
            setattr(self.progress, name, value)
        if self.progress.planned_for != self.config.trainer.bounds:
            self.progress.planned_steps = None  # made longer or shorter: plan again


class StepCallback(pl.Callback):
    """Calls `on_step_end` once after every optimizer step."""

    _seen = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Remember where the run (re)starts."""
        self._seen = module.progress.step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass on the end of a micro-batch that ended an optimizer step."""
        if module.progress.step > self._seen:
            self._seen = module.progress.step
            self.on_step_end(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Act after an optimizer step."""


def rescale_and_clip(gradients: list[Tensor], scale: Tensor, clip_norm: float) -> Tensor:
    """Multiply gradients by `scale`, then shrink them to `clip_norm` if they are longer; 0 means no bound.

    Returns the norm after scaling and before clipping, a scalar.
    """
    norm = whole(torch.nn.utils.get_total_norm(gradients)) * scale
    if clip_norm:
        scale = scale * (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    torch._foreach_mul_(local(gradients), scale)
    return norm
