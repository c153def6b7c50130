"""Reports of a run while it trains: the metrics table, the progress bar, and busy cores."""

from __future__ import annotations

import csv
import logging
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tqdm import tqdm

from mlm.config.errors import InputError
from mlm.files import replacing
from mlm.training.engine import StepCallback
from mlm.training.tracking import end_tracking, track_rows, tracked_step

log = logging.getLogger(__name__)

FLUSH_EVERY = 10
"""Steps whose numbers are fetched from the device together, so that it is not asked at every step."""


class MetricsTable(StepCallback):
    """Writes one row per optimizer step to metrics.csv and to the trackers.

    The columns of `validation` follow those of the losses, `extra` ones those of the optimizer.
    """

    def __init__(self, path: Path, validation: Sequence[str], extra: Sequence[str]):
        self.path = path
        self.columns = ["step", "tokens", "elapsed_s", "train/loss", "val/loss", *validation]
        self.columns += ["optim/lr", "optim/grad_norm", *extra, "optim/skipped"]
        self.columns += ["throughput/tokens_per_second", "throughput/wait_share"]
        self._tracked = -1
        """The newest step in the tracked run."""
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Begin the table, or cut what an earlier run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, module)
        step, self._tokens = module.progress.step, module.progress.tokens
        if trainer.is_global_zero:
            kept = [row for row in read_metrics(self.path) if row["step"] <= step]
            # The sources of a resumed run may have other names, and with them its columns.
            self.columns = list(dict.fromkeys([*self.columns, *(name for row in kept for name in row)]))
            with (
                replacing(self.path, "place") as partial,
                partial.open("w", newline="", encoding="utf-8") as file,
            ):
                writer = csv.DictWriter(file, self.columns)
                writer.writeheader()
                writer.writerows(kept if step else [])
            if trainer.loggers:
                before = tracked_step(self.path.parent)  # a killed process may not have passed on all rows
                self._tracked = track_rows(trainer.loggers, self.path.parent, kept, before)
            if not step:
                self._add(module)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Note the numbers of this step."""
        if trainer.is_global_zero:
            self._add(module)
            if len(self._rows) >= FLUSH_EVERY:
                self._flush(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Write all rows up to the checkpoint: a resumed run continues with the next one."""
        if trainer.is_global_zero:
            self._flush(trainer)

    def _add(self, module: Any) -> None:
        progress, metrics, module.step_metrics = module.progress, module.step_metrics, {}
        seconds = metrics.pop("throughput/step_s", None)
        if seconds:
            metrics["throughput/tokens_per_second"] = (progress.tokens - self._tokens) / seconds
        self._tokens = progress.tokens
        counters = {"step": progress.step, "tokens": progress.tokens, "elapsed_s": progress.elapsed_s}
        self._rows.append(counters | metrics)

    def _flush(self, trainer: pl.Trainer) -> None:
        """Write the noted rows; on a full disk, try again next time."""
        rows = [{name: _number(value) for name, value in row.items()} for row in self._rows]
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", newline="", encoding="utf-8") as file:
                csv.DictWriter(file, self.columns).writerows(rows)
        except OSError as error:
            log.warning("cannot write %s: %s", self.path, error.strerror)
            with suppress(OSError):  # a half-written last line is left out when the table is read
                os.truncate(self.path, size)
            return
        self._rows = []
        self._tracked = track_rows(trainer.loggers, self.path.parent, rows, self._tracked)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Write the noted rows, and end the tracked run: after an error nothing else does."""
        if trainer.is_global_zero:
            self._flush(trainer)
        end_tracking(trainer)


def _number(value: Any) -> Any:
    """Return a tensor's value, floats with seven digits."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    value = int(value) if isinstance(value, bool) else value
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics table as numbers, without empty cells and an unfinished last line."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.endswith("\n")]
    try:
        rows = [{name: _cell(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)]
        return [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in rows]
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise InputError(
            f"{path} is damaged ({error}); repair it, or move it away to start a new table"
        ) from None


def _cell(text: str) -> float:
    return int(text) if text.isdecimal() else float(text)


class ProgressBar(StepCallback):
    """Shows loss, tokens per second and the time left."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Open the bar."""
        super().on_train_start(trainer, module)
        progress = module.progress
        self._bar = tqdm(
            desc="training",
            unit="step",
            initial=progress.step,
            total=progress.planned_steps,
            disable=not trainer.is_global_zero,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file need not hold every move
        )
        self._started = progress.tokens, progress.elapsed_s

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Move the bar."""
        progress = module.progress
        self._bar.total = progress.planned_steps
        if progress.step % FLUSH_EVERY == 0 or trainer.should_stop:
            tokens = progress.tokens - self._started[0]
            rate = tokens / max(progress.elapsed_s - self._started[1], 1e-9)
            shown = {"loss": f"{float(module.last_loss):.3f}", "tokens/s": f"{rate:,.0f}"}
            if progress.last:
                shown["val_loss"] = f"{progress.last['loss']:.3f}"
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(progress.step - self._bar.n)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Close the bar, so that the message has a line of its own."""
        self.teardown(trainer, module, "fit")  # so that the message has a line of its own

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """Close the bar."""
        if hasattr(self, "_bar"):
            self._bar.close()
