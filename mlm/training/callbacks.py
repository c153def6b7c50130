"""What happens around the optimizer steps; each callback has one job.

They act after optimizer steps, never between the micro-batches of one, in the order of the list in
`run.py`: keep memory, time, plan, validate, record, count skipped steps, stop on a signal, save, show.
All share `module.progress`; `module.step_metrics` collects what the metrics table writes for the step.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.training import BaseTrainerConfig
from mlm.launch import is_first_process
from mlm.optim import warmup_steps
from mlm.training.datamodule import StepDataModule, TrainingLoader
from mlm.training.engine import Progress, StepCallback
from mlm.training.run_folder import checkpoint_path, checkpoint_step, saved_checkpoints

log = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2
"""The newest, and one more in case it cannot be read."""
SYNC_EVERY = 10
"""Steps, at most, between two waits for an accelerator: for skipped steps, for the time."""
PLANNING_STEPS = range(5, 15)
"""Steps whose duration fixes the length of a time-limited run, if they take at least PLANNING_TIME of it."""
PLANNING_TIME = 0.03
"""Share of the time limit that the measured steps last at least."""
PLANNED_SHARE = 0.97
"""Share of the time limit that is planned for: the rest absorbs slower stretches and the last checkpoint."""


class Diverged(InputError):
    """The loss is no longer finite."""


class Clock(StepCallback):
    """Measures time and waiting; first in the list, so that the others see the new numbers."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Start counting where the earlier run stopped."""
        super().on_train_start(trainer, module)
        self.restart(module.progress)

    def restart(self, progress: Progress) -> None:
        """Exclude the time since the last reading."""
        self._start = time.monotonic() - progress.elapsed_s
        self._waited_s = 0.0

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Read the clock."""
        before, loader = module.progress.elapsed_s, trainer.train_dataloader
        assert isinstance(loader, TrainingLoader)
        seconds, waited_s = self.now(module.progress) - before, loader.waited_s - self._waited_s
        wait_share, self._waited_s = waited_s / max(seconds, 1e-9), loader.waited_s
        module.step_metrics |= {"throughput/step_s": seconds, "throughput/wait_share": wait_share}

    def now(self, progress: Progress) -> float:
        """Return the seconds trained, up to this moment."""
        progress.elapsed_s = time.monotonic() - self._start
        return progress.elapsed_s


class Validation(StepCallback):
    """Scores the held-out rows every few steps, after the last one, and if `at_start` before the first."""

    reason: str | None = None
    """Why it ended the run, if it did."""

    def __init__(self, every: int, config: BaseTrainerConfig, clock: Clock, *, at_start: bool = True):
        self.every, self.config, self.clock, self.at_start = every, config, clock, at_start
        self.keep_best = max(config.keep_best, int(config.keep == "best"))

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Score the untrained model; its time does not count as training."""
        super().on_train_start(trainer, module)
        progress = module.progress
        if self.at_start and progress.first is None:
            start = time.monotonic()
            progress.first = self._score(trainer, module)
            progress.lowest = module.rank_of(progress.first), 0
            progress.validation_s = time.monotonic() - start
        self.clock.restart(progress)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Score if it is time, or if this was the last step."""
        progress, start = module.progress, time.monotonic()
        if progress.step % self.every == 0 or trainer.should_stop:
            progress.last, progress.validated_at = self._score(trainer, module), progress.step
            rank = module.rank_of(progress.last)
            if math.isfinite(rank):
                progress.best = sorted([*progress.best, (rank, progress.step)])[: self.keep_best]
                progress.lowest = min(progress.lowest or (rank, progress.step), (rank, progress.step))
            progress.validations_s += time.monotonic() - start
            self.clock.now(progress)
            module.on_validated(trainer)
            self.reason = None if trainer.should_stop else early_stop(self.config, progress, self.every)
            if self.reason:
                best = progress.best[0][1]
                log.info("stopped after step %d: none since step %d is better", progress.step, best)
                trainer.should_stop = True

    def _score(self, trainer: pl.Trainer, module: Any) -> dict[str, float]:
        module.eval()
        batches = trainer.datamodule.val_dataloader()  # type: ignore[attr-defined]
        with trainer.precision_plugin.forward_context(), torch.no_grad():
            for number, batch in enumerate(batches):
                module.validation_step(trainer.strategy.batch_to_device(batch), number)
        module.train()
        scores = module.compute_validation()
        module.step_metrics |= {f"val/{name}": value for name, value in scores.items()}
        return scores


def early_stop(config: BaseTrainerConfig, progress: Progress, every: int) -> str | None:
    """Return the option that ends a run without a better validation for long enough, None if it continues."""
    most, best = config.early_stopping, progress.best
    is_over = most is not None and best and -(-(progress.step - best[0][1]) // every) >= most
    return f"trainer.early_stopping={most}" if is_over else None


class Budget(StepCallback):
    """Fixes the length of the run in steps, and ends it at the first bound reached.

    It plans for validations every `val_every` steps; `epoch_steps` are those of all epochs, if they bound it.
    """

    def __init__(self, run: Any, data: StepDataModule, clock: Clock, val_every: int, epoch_steps: int | None):
        self.config, self.schedule, self.clock, self.val_every = run.trainer, run.schedule, clock, val_every
        self.drawn_ahead, self.epoch_steps = data.drawn_ahead, epoch_steps
        config = self.config
        by_tokens = (config.max_tokens or math.inf) / data.tokens_per_step
        self.allowed_steps = min(config.max_steps or math.inf, by_tokens, epoch_steps or math.inf)
        """Steps that all bounds but the time allow."""
        self.reason: str | None = None
        """The bound that ended the run."""
        if config.max_time is None and (excess := self._excess_of_warmup(math.ceil(self.allowed_steps))):
            raise InputError(f"{excess}; shorten schedule.warmup_steps or lengthen the run")

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Plan the steps if they are known: from the start, or from the throughput of a run made longer."""
        super().on_train_start(trainer, module)
        progress = module.progress
        done, elapsed_s = progress.step, progress.elapsed_s
        self._first = self._last_sync = (done, elapsed_s)
        self._next_sync = done + 1
        was_extended = progress.planned_for not in ((), self.config.bounds)
        progress.planned_for = self.config.bounds
        if self.config.max_seconds is None:
            progress.planned_steps = math.ceil(self.allowed_steps)
            progress.mask_rate_steps = 0, progress.planned_steps
        elif was_extended and done >= PLANNING_STEPS.stop:
            left_s = self.config.max_seconds * PLANNED_SHARE - elapsed_s
            self._fix(trainer, progress, elapsed_s / done, left_s)

    def _excess_of_warmup(self, planned: int) -> str | None:
        """Return in words that the warm-up is longer than the run, None if it is not."""
        warmup = warmup_steps(self.schedule, planned)
        text = "the warm-up of {:,} steps is longer than the run of {:,}: the peak rate is never reached"
        return text.format(warmup, planned) if warmup > planned else None

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Plan once the throughput is known; stop where a bound is reached."""
        progress = module.progress
        done = progress.step
        if done >= self._next_sync:
            last_done, last_s = self._last_sync
            progress.elapsed_s = self._agreed(trainer, self.clock.now(progress))
            self._last_sync = done, progress.elapsed_s
            self._next_sync = done + 1
            waits = trainer.world_size > 1 and module.device.type != "cpu"
            if waits and progress.planned_steps is not None:
                self._next_sync = done + steps_until_next_sync(done - last_done, progress.elapsed_s - last_s)
        if progress.planned_steps is None:
            self._plan(trainer, progress)
        self.reason = bound_reached(self.config, progress, self._last_sync[1], self.epoch_steps)
        trainer.should_stop = trainer.should_stop or self.reason is not None

    def _agreed(self, trainer: pl.Trainer, number: float) -> float:
        """Return the largest of the ranks' numbers: with a time limit they must plan and stop alike."""
        if trainer.world_size == 1 or self.config.max_seconds is None:
            return number
        wide = torch.float32 if trainer.strategy.root_device.type == "mps" else torch.float64
        tensor = torch.tensor(number, dtype=wide, device=trainer.strategy.root_device)
        return float(trainer.strategy.reduce(tensor, reduce_op="max"))

    def _plan(self, trainer: pl.Trainer, progress: Progress) -> None:
        """Fix the number of steps from the steps of an early window; it is stored and never changes again."""
        done, limit = progress.step, self.config.max_seconds
        assert limit is not None, "a run without a time limit is planned at its start"
        if done <= PLANNING_STEPS.start:
            self._first = (done, progress.elapsed_s)
            return
        first_step, first_s = self._first
        window_s = progress.elapsed_s - first_s
        if done >= PLANNING_STEPS.stop and window_s >= PLANNING_TIME * limit:
            step_s = window_s / (done - first_step) + progress.validation_s / self.val_every
            left_s = limit * PLANNED_SHARE - progress.elapsed_s - progress.validation_s
            progress.mask_rate_steps = None
            self._fix(trainer, progress, step_s, left_s)

    def _fix(self, trainer: pl.Trainer, progress: Progress, step_s: float, left_s: float) -> None:
        done = progress.step
        affordable = self._agreed(trainer, done + left_s / step_s)
        planned = max(int(min(affordable, self.allowed_steps)), done + 1)
        progress.planned_steps = planned
        first, _ = progress.mask_rate_steps or (done + self.drawn_ahead, planned)
        progress.mask_rate_steps = first, planned
        log.info("%s allows %s steps", self.config.max_time, f"{planned:,}")
        if excess := self._excess_of_warmup(planned):
            log.warning("%s", excess)


def steps_until_next_sync(steps: int, seconds: float) -> int:
    """Return how many steps GPUs take until they wait and agree on the time again: those of a second."""
    return max(min(int(steps / max(seconds, 1e-9)), SYNC_EVERY), 1)


def bound_reached(
    config: BaseTrainerConfig, progress: Progress, elapsed_s: float, epoch_steps: int | None = None
) -> str | None:
    """Name the bound that the run has reached, if any; `elapsed_s` is the same on all ranks."""
    done = progress.step
    if config.max_steps is not None and done >= config.max_steps:
        return f"trainer.max_steps={config.max_steps}"
    if epoch_steps is not None and done >= epoch_steps:
        return "trainer.max_epochs"
    all_planned = progress.planned_steps is not None and done >= progress.planned_steps
    if config.max_tokens is not None and (progress.tokens >= config.max_tokens or all_planned):
        return f"trainer.max_tokens={config.max_tokens}"
    if config.max_seconds is not None and (elapsed_s >= config.max_seconds or all_planned):
        return f"trainer.max_time={config.max_time}"
    return None


class SkippedSteps(StepCallback):
    """Counts and logs the steps with a non-finite loss or gradient; too many in a row end the run.

    It changed neither weights nor optimizer state; its rows count as trained on, and rate and step advance.
    """

    def __init__(self, config: BaseTrainerConfig, checkpoints: Path, save_every: int):
        self.config, self.checkpoints, self.save_every = config, checkpoints, save_every
        self._unread: list[tuple[Tensor, int, float, int]] = []

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Remember the rows of the first step."""
        super().on_train_start(trainer, module)
        self._rows_before = module.progress.rows

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Note the step; read the flags now and then, and always when a checkpoint is due."""
        step, rate = module.progress.step, max(group["lr"] for group in trainer.optimizers[0].param_groups)
        self._unread.append((module.skipped, step, rate, self._rows_before))
        self._rows_before = module.progress.rows
        periods = (SYNC_EVERY, self.save_every, self.config.keep_every or SYNC_EVERY)
        due = trainer.should_stop or any(step % every == 0 for every in periods)
        if due or module.device.type == "cpu":  # where an answer costs nothing
            skipped = torch.stack([flag for flag, *_ in self._unread]).tolist()
            for flag, (_, at, lr, rows) in zip(skipped, self._unread, strict=True):
                self._count(trainer, module.progress, flag, at, lr, rows)
            self._unread = []

    def _count(
        self, trainer: pl.Trainer, progress: Progress, skipped: bool, step: int, rate: float, before: int
    ) -> None:
        if not skipped:
            progress.skipped_in_a_row = 0
            return
        progress.skipped += 1
        progress.skipped_in_a_row += 1
        rows = trainer.datamodule.step_rows(step - 1, before)  # type: ignore[attr-defined]
        where = f"learning rate {rate:g}, rows {' '.join(map(str, rows))}"
        log.warning("step %d skipped: its loss or gradient is not finite (%s)", step, where)
        if (number := progress.skipped_in_a_row) >= self.config.max_skipped_steps:
            raise Diverged(
                f"the loss or its gradient was not finite in {number} steps in a row, {step - number + 1} to "
                f"{step} (learning rate {rate:g}): lower optimizer.lr or lengthen the warm-up; "
                f"{self._last_good(step - number)}"
            )

    def _last_good(self, last_finite: int) -> str:
        """Name the checkpoint to resume from; those with the weights that gave the loss are set aside."""
        first_fatal = checkpoint_path(self.checkpoints, last_finite)
        saved = saved_checkpoints(self.checkpoints)
        for path in saved if is_first_process() else []:
            if path >= first_fatal:
                path.rename(path.with_name(f"{path.name}.broken"))
        good = [path for path in saved if path < first_fatal]
        if not good:
            return "no checkpoint is good"
        return f"--resume continues from the last good checkpoint, {good[-1]}"


class CheckpointSaver(StepCallback):
    """Saves every few steps, after the best validations and after the last step; removes what is not kept.

    Kept are the two newest, the best and, if configured, one every `keep_every` steps. Where a step was
    skipped, the weights may be the reason: they are not saved, unless the run ends with them.
    """

    def __init__(self, folder: Path, config: BaseTrainerConfig, save_every: int, clock: Clock):
        self.folder, self.config, self.save_every, self.clock = folder, config, save_every, clock

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Save if it is time, then remove the older checkpoints."""
        progress = module.progress
        step, best = progress.step, {step for _, step in progress.best}
        due = step % self.save_every == 0 or self._is_permanent(step)
        if not (trainer.should_stop or step in best or (due and not progress.skipped_in_a_row)):
            return
        self.clock.now(progress)
        trainer.save_checkpoint(checkpoint_path(self.folder, step))
        if trainer.is_global_zero and not save_failure(trainer):
            for path in saved_checkpoints(self.folder)[:-KEPT_CHECKPOINTS]:
                if checkpoint_step(path) not in best and not self._is_permanent(checkpoint_step(path)):
                    path.unlink()
            for leftover in self.folder.glob(".step-*.ckpt.*"):  # of a process that was killed
                if leftover.is_file():
                    leftover.unlink()

    def _is_permanent(self, step: int) -> bool:
        return self.config.keep_every is not None and step % self.config.keep_every == 0


def save_failure(trainer: pl.Trainer) -> OSError | None:
    """Return why the newest checkpoint could not be written, None if it could; only the first rank knows."""
    return getattr(trainer.strategy.checkpoint_io, "failure", None)
