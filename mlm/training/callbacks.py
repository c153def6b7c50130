"""What happens around the optimizer steps; each callback has one job.

They act after optimizer steps, never between the micro-batches of one, in the order `pretrain` lists them:
keep memory, count, plan, validate, record, stop on a signal, save, show.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.experiment import PretrainConfig
from mlm.config.training import TrainerConfig
from mlm.data.collate import Rows
from mlm.data.sampler import TrainingSampler
from mlm.evaluation.masked_lm import MaskedLMScores, score_batches
from mlm.launch import is_first_process
from mlm.optim.schedule import warmup_steps
from mlm.training.checkpoint import checkpoint_path, checkpoint_step, saved_checkpoints
from mlm.training.sharding import ShardedStrategy, keep_company

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
"""The newest, and one more in case it cannot be read."""
LOOK_EVERY = 10
"""Steps, at most, between two questions on which an accelerator is waited for: skipped steps, the time."""
PLANNING_STEPS = range(5, 15)
"""Steps whose duration fixes the length of a time-limited run, if they take at least PLANNING_TIME of it."""
PLANNING_TIME = 0.03
"""Share of the time limit that the measured steps last at least."""
PLANNED_SHARE = 0.97
"""Share of the time limit that is planned for: the rest absorbs slower stretches and the last checkpoint."""


@dataclass
class Progress:
    """How far a run has come: beside weights and optimizer state, all that a resume needs; plain numbers."""

    rows: int = 0
    """Rows trained on."""
    tokens: int = 0
    """Tokens trained on, padding not counted."""
    elapsed_s: float = 0.0
    """Seconds of training, over all resumes, validation included."""
    planned_steps: int | None = None
    """Length of the run in optimizer steps; None until a time-limited run has measured its throughput."""
    mask_rate_steps: tuple[int, int] | None = None
    """Between which steps the mask rate moves: from the first whose batch nobody drew before the plan."""
    planned_for: tuple[int | str | None, ...] = ()
    """The bounds that this length follows from."""
    first: dict[str, float] | None = None
    """Validation scores before the first update."""
    validation_s: float = 0.0
    """Seconds that this validation took."""
    last: dict[str, float] | None = None
    """Newest validation scores."""
    validated_at: int = 0
    """After which step they were."""
    best: list[tuple[float, int]] = field(default_factory=list)
    """Loss and step of the best validations, best first, as many as checkpoints are kept for them."""
    skipped: int = 0
    """Optimizer steps skipped because loss or gradient was no number."""
    skipped_in_a_row: int = 0
    """How many of them ended with the newest step."""


class StepCallback(pl.Callback):
    """Calls `on_step_end` once after every optimizer step."""

    _seen = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Remember where the run (re)starts."""
        self._seen = trainer.global_step

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Pass on the end of a micro-batch that ended an optimizer step."""
        if trainer.global_step > self._seen:
            self._seen = trainer.global_step
            self.on_step_end(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Act after an optimizer step."""


class Clock(StepCallback):
    """Counts rows, tokens and seconds; first in the list, so that the others see the new numbers."""

    def __init__(self, config: PretrainConfig, progress: Progress, rows: Rows):
        self.progress, self.rows, self.batch_size = progress, rows, config.trainer.global_batch_size
        size = self.batch_size
        self.sampler = TrainingSampler(len(rows), config.seed, size, size, parts=rows.parts)
        self.tokens_per_step = rows.tokens_per_row * size
        """Tokens of an optimizer step on average."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Start counting where the earlier run stopped."""
        super().on_train_start(trainer, module)
        self.restart()

    def on_load_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Count as if earlier steps had had as many passes as those to come.

        Lightning ends a step where the number of all passes is a multiple of the passes a step: with another
        number of devices or another micro-batch the first step would be cut short.
        """
        passes = checkpoint["global_step"] * trainer.accumulate_grad_batches
        progress = checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]
        for counts in (progress["total"], progress["current"]):
            shift = passes - counts["ready"]
            counts.update({name: count + shift for name, count in counts.items()})

    def restart(self) -> None:
        """Let the time since the last reading pass uncounted."""
        self._start = time.monotonic() - self.progress.elapsed_s
        self._waited_s = 0.0

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Count."""
        first = self.progress.rows
        # Every rank knows the rows of all: no number has to travel.
        step = self.sampler.rows(np.arange(first, first + self.batch_size))
        self.progress.tokens += self.rows.num_tokens(step.rows)
        self.progress.rows += self.batch_size
        before = self.progress.elapsed_s
        loader: Any = trainer.train_dataloader
        seconds, waited_s = self.now() - before, loader.waited_s
        module.step_metrics["throughput/step_s"] = seconds
        module.step_metrics["throughput/wait_share"] = (waited_s - self._waited_s) / max(seconds, 1e-9)
        self._waited_s = waited_s

    def now(self) -> float:
        """Return the seconds trained, up to this moment."""
        self.progress.elapsed_s = time.monotonic() - self._start
        return self.progress.elapsed_s


class Validation(StepCallback):
    """Scores the held-out rows before the first step, every few steps, and after the last one."""

    def __init__(self, config: TrainerConfig, progress: Progress, clock: Clock):
        self.config, self.progress, self.clock = config, progress, clock

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Score the untrained model; its time is not counted as training."""
        super().on_train_start(trainer, module)
        if self.progress.first is None:
            start = time.monotonic()
            self.progress.first = self._score(trainer, module)
            self.progress.validation_s = time.monotonic() - start
        self.clock.restart()

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Score if it is time, or if this was the last step."""
        step = trainer.global_step
        if step % self.config.val_every == 0 or trainer.should_stop:
            self.progress.last, self.progress.validated_at = self._score(trainer, module), step
            if math.isfinite(self.progress.last["loss"]):
                ranked = sorted([*self.progress.best, (self.progress.last["loss"], step)])
                self.progress.best = ranked[: self.config.keep_best]
            self.clock.now()

    def _score(self, trainer: pl.Trainer, module: Any) -> dict[str, float]:
        module.eval()
        batches = module.trainer.datamodule.val_dataloader()
        with trainer.precision_plugin.forward_context():
            if isinstance(trainer.strategy, ShardedStrategy):
                keep_company(module.model, len(batches), trainer.strategy)
            sums = score_batches(module.model, batches, module.device)
        module.train()
        scores = MaskedLMScores.from_sums(trainer.strategy.reduce(sums, reduce_op="sum")).metrics()
        module.step_metrics |= {f"val/{name}": value for name, value in scores.items()}
        return scores


class Budget(StepCallback):
    """Fixes the length of the run in steps, and ends it at the first bound reached."""

    def __init__(self, config: PretrainConfig, progress: Progress, clock: Clock):
        self.config, self.schedule = config.trainer, config.schedule
        workers = config.data.num_workers
        self.drawn_ahead = 2 + 2 * (2 if workers is None else workers)
        """Steps whose batches may be drawn already: one by Lightning, two by each loader process."""
        self.progress, self.clock = progress, clock
        by_tokens = (self.config.max_tokens or math.inf) / clock.tokens_per_step
        self.allowed_steps = min(self.config.max_steps or math.inf, by_tokens)
        """Steps that max_steps and max_tokens allow."""
        self.reason: str | None = None
        """The bound that ended the run."""
        if self.config.max_time is None and (excess := self._excess_of_warmup(math.ceil(self.allowed_steps))):
            raise InputError(f"{excess}; shorten schedule.warmup_steps or lengthen the run")

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Plan the steps if they are known: from the start, or from the throughput of a run made longer."""
        super().on_train_start(trainer, module)
        done, elapsed_s = trainer.global_step, self.progress.elapsed_s
        self._first = self._asked = (done, elapsed_s)
        self._asks_at = done + 1
        was_made_longer = self.progress.planned_for not in ((), self.config.bounds)
        self.progress.planned_for = self.config.bounds
        if self.config.max_seconds is None:
            self.progress.planned_steps = math.ceil(self.allowed_steps)
            self.progress.mask_rate_steps = 0, self.progress.planned_steps
        elif was_made_longer and done >= PLANNING_STEPS.stop:
            self._fix(trainer, elapsed_s / done, self.config.max_seconds * PLANNED_SHARE - elapsed_s)

    def _excess_of_warmup(self, planned: int) -> str | None:
        """Tell what is wrong if the warm-up is longer than the run."""
        warmup = warmup_steps(self.schedule, planned)
        if warmup <= planned:
            return None
        return (
            f"the warm-up of {warmup:,} steps is longer than the run of {planned:,}: the peak rate is never "
            "reached"
        )

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Plan once the throughput is known; stop where a bound is reached."""
        done = trainer.global_step
        if done >= self._asks_at:
            last_done, last_s = self._asked
            self.progress.elapsed_s = self._agreed(trainer, self.clock.now())
            self._asked = done, self.progress.elapsed_s
            self._asks_at = done + 1
            waits = trainer.world_size > 1 and module.device.type != "cpu"
            if waits and self.progress.planned_steps is not None:
                self._asks_at = done + steps_unasked(done - last_done, self.progress.elapsed_s - last_s)
        if self.progress.planned_steps is None:
            self._plan(trainer)
        self.reason = bound_reached(self.config, self.progress, done, self._asked[1])
        trainer.should_stop = trainer.should_stop or self.reason is not None

    def _agreed(self, trainer: pl.Trainer, number: float) -> float:
        """Return the largest of the ranks' numbers: with a time limit they must plan and stop alike."""
        if trainer.world_size == 1 or self.config.max_seconds is None:
            return number
        wide = torch.float32 if trainer.strategy.root_device.type == "mps" else torch.float64
        tensor = torch.tensor(number, dtype=wide, device=trainer.strategy.root_device)
        return trainer.strategy.reduce(tensor, reduce_op="max").item()

    def _plan(self, trainer: pl.Trainer) -> None:
        """Fix the number of steps from the steps of an early window; it is stored and never changes again."""
        done, limit = trainer.global_step, self.config.max_seconds
        assert limit is not None, "a run without a time limit is planned at its start"
        if done <= PLANNING_STEPS.start:
            self._first = (done, self.progress.elapsed_s)
            return
        first_step, first_s = self._first
        window_s = self.progress.elapsed_s - first_s
        if done >= PLANNING_STEPS.stop and window_s >= PLANNING_TIME * limit:
            step_s = window_s / (done - first_step) + self.progress.validation_s / self.config.val_every
            left_s = limit * PLANNED_SHARE - self.progress.elapsed_s - self.progress.validation_s
            self.progress.mask_rate_steps = None
            self._fix(trainer, step_s, left_s)

    def _fix(self, trainer: pl.Trainer, step_s: float, left_s: float) -> None:
        done = trainer.global_step
        affordable = self._agreed(trainer, done + left_s / step_s)
        planned = max(int(min(affordable, self.allowed_steps)), done + 1)
        self.progress.planned_steps = planned
        first, _ = self.progress.mask_rate_steps or (done + self.drawn_ahead, planned)
        self.progress.mask_rate_steps = first, planned
        log.info("%s allows %s steps", self.config.max_time, f"{planned:,}")
        if excess := self._excess_of_warmup(planned):
            log.warning("%s", excess)


def steps_unasked(steps: int, seconds: float) -> int:
    """Return after how many steps GPUs agree on the time again, as each time they wait: those of a second.

    Args:
        steps: since they last did.
        seconds: that these took, as all ranks know them.
    """
    return max(min(int(steps / max(seconds, 1e-9)), LOOK_EVERY), 1)


def bound_reached(config: TrainerConfig, progress: Progress, done: int, elapsed_s: float) -> str | None:
    """Name the bound that `done` steps and `elapsed_s`, the same on all ranks, have reached, if any."""
    if config.max_steps is not None and done >= config.max_steps:
        return f"trainer.max_steps={config.max_steps}"
    all_planned = progress.planned_steps is not None and done >= progress.planned_steps
    if config.max_tokens is not None and (progress.tokens >= config.max_tokens or all_planned):
        return f"trainer.max_tokens={config.max_tokens}"
    if config.max_seconds is not None and (elapsed_s >= config.max_seconds or all_planned):
        return f"trainer.max_time={config.max_time}"
    return None


class SkippedSteps(StepCallback):
    """Counts and logs the steps whose loss or gradient was no number; too many in a row end the run.

    Such a step changed neither weights nor optimizer state; its rows count as trained on, and learning rate
    and step go on.
    """

    def __init__(self, config: TrainerConfig, progress: Progress, clock: Clock, checkpoints: Path):
        self.config, self.progress, self.clock, self.checkpoints = config, progress, clock, checkpoints
        self._unread: list[tuple[Tensor, int, float, int]] = []

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Note the step; ask the device now and then, and always when a checkpoint is due."""
        step, rate = trainer.global_step, max(group["lr"] for group in trainer.optimizers[0].param_groups)
        self._unread.append((module.skipped, step, rate, self.progress.rows - self.clock.batch_size))
        periods = (LOOK_EVERY, self.config.save_every, self.config.keep_every or LOOK_EVERY)
        due = trainer.should_stop or any(step % every == 0 for every in periods)
        if due or module.device.type == "cpu":  # where an answer costs nothing
            skipped = torch.stack([flag for flag, *_ in self._unread]).tolist()
            for flag, (_, at, lr, first_row) in zip(skipped, self._unread, strict=True):
                self._count(flag, at, lr, first_row)
            self._unread = []

    def _count(self, skipped: bool, step: int, rate: float, first_row: int) -> None:
        if not skipped:
            self.progress.skipped_in_a_row = 0
            return
        self.progress.skipped += 1
        self.progress.skipped_in_a_row += 1
        rows = self.clock.sampler.rows(np.arange(first_row, first_row + self.clock.batch_size)).rows
        log.warning(
            "step %d skipped: its loss or gradient is not finite (learning rate %g, rows %s)",
            step,
            rate,
            " ".join(map(str, rows)),
        )
        if self.progress.skipped_in_a_row >= self.config.max_skipped_steps:
            number = self.progress.skipped_in_a_row
            raise InputError(
                f"the loss or its gradient was not finite in {number} steps in a row, {step - number + 1} to "
                f"{step} (learning rate {rate:g}): lower optimizer.lr or lengthen the warm-up; "
                f"{self._last_good(step)}"
            )

    def _last_good(self, step: int) -> str:
        """Name the checkpoint to go on with; what holds the very weights that gave no number is set aside."""
        first_fatal = checkpoint_path(self.checkpoints, step - self.progress.skipped_in_a_row)
        saved = saved_checkpoints(self.checkpoints)
        for path in saved if is_first_process() else []:
            if path >= first_fatal:
                path.rename(path.with_name(f"{path.name}.broken"))
        good = [path for path in saved if path < first_fatal]
        if not good:
            return "no checkpoint is good"
        return f"--resume goes on from the last good checkpoint, {good[-1]}"


class CheckpointSaver(StepCallback):
    """Saves every few steps, after the best validations and after the last step; removes what is not kept.

    Kept are the two newest, the best and, if asked for, every so many steps. Where a step was skipped, the
    weights may be the reason: they are not saved, unless the run ends with them.
    """

    def __init__(self, folder: Path, config: TrainerConfig, progress: Progress, clock: Clock):
        self.folder, self.config, self.progress, self.clock = folder, config, progress, clock

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Save if it is time, then remove the older ones."""
        step, best = trainer.global_step, {step for _, step in self.progress.best}
        due = step % self.config.save_every == 0 or self._stays(step)
        if not (trainer.should_stop or step in best or (due and not self.progress.skipped_in_a_row)):
            return
        self.clock.now()
        trainer.save_checkpoint(checkpoint_path(self.folder, step))
        if trainer.is_global_zero and not save_failure(trainer):
            for path in saved_checkpoints(self.folder)[:-KEPT_CHECKPOINTS]:
                if checkpoint_step(path) not in best and not self._stays(checkpoint_step(path)):
                    path.unlink()
            for left in self.folder.glob(".step-*.ckpt.*"):  # by a process that was killed
                if left.is_file():
                    left.unlink()

    def _stays(self, step: int) -> bool:
        """Tell whether the checkpoint of a step is kept for ever."""
        return self.config.keep_every is not None and step % self.config.keep_every == 0


def save_failure(trainer: pl.Trainer) -> OSError | None:
    """Return why the newest checkpoint could not be written, None if it could; only the first rank knows."""
    return getattr(trainer.strategy.checkpoint_io, "failure", None)
