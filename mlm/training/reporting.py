"""What a run tells while it trains: the metrics table, the tracked run and the progress bar."""

from __future__ import annotations

import csv
import logging
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tqdm import tqdm

from mlm.config.experiment import PretrainConfig
from mlm.config.parse import to_plain
from mlm.training.callbacks import Progress, StepCallback

log = logging.getLogger(__name__)

COLUMNS = [
    "step",
    "tokens",
    "elapsed_s",
    "train/loss",
    "val/loss",
    "val/perplexity",
    "val/masked_accuracy",
    "optim/lr",
    "optim/grad_norm",
    "throughput/tokens_per_second",
]
FLUSH_EVERY = 10
"""Steps whose numbers are fetched from the device together, so that the device is not asked at every step."""


class MetricsTable(StepCallback):
    """Writes one row an optimizer step to metrics.csv and to the trackers."""

    def __init__(self, path: Path, progress: Progress):
        self.path, self.progress = path, progress
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Begin the table, or cut what an earlier run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, module)
        self._tokens = self.progress.tokens
        if trainer.is_global_zero:
            kept = [row for row in read_metrics(self.path) if row["step"] <= trainer.global_step]
            with self.path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(kept if trainer.global_step else [])
            if not trainer.global_step:
                self._add(trainer, module)

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Note the numbers of this step."""
        if trainer.is_global_zero:
            self._add(trainer, module)
            if len(self._rows) >= FLUSH_EVERY:
                self.flush(trainer)

    def on_save_checkpoint(self, trainer: pl.Trainer, module: Any, checkpoint: dict[str, Any]) -> None:
        """Let the table reach as far as the checkpoint: a resumed run goes on with the next row."""
        if trainer.is_global_zero:
            self.flush(trainer)

    def _add(self, trainer: pl.Trainer, module: Any) -> None:
        metrics, module.step_metrics = module.step_metrics, {}
        seconds = metrics.pop("throughput/step_s", None)
        if seconds:
            metrics["throughput/tokens_per_second"] = (self.progress.tokens - self._tokens) / seconds
        self._tokens = self.progress.tokens
        progress = {"tokens": self.progress.tokens, "elapsed_s": self.progress.elapsed_s}
        self._rows.append({"step": trainer.global_step, **progress, **metrics})

    def flush(self, trainer: pl.Trainer) -> None:
        """Write what was noted."""
        rows = [{name: _number(value) for name, value in row.items()} for row in self._rows]
        self._rows = []
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerows(rows)
        for logger in trainer.loggers:
            for row in rows:
                logger.log_metrics({name: row[name] for name in row if name != "step"}, step=int(row["step"]))

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """End the tracked run, so that the next one of this process is its own."""
        if trainer.is_global_zero and trainer.loggers:
            import wandb

            wandb.finish()


def _number(value: Any) -> Any:
    """Return a tensor's value, floats with seven digits."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics table, numbers as numbers, cells that are empty left out."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(file)]
    return [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in rows]


class ProgressBar(StepCallback):
    """Shows loss, tokens per second and the time left."""

    def __init__(self, progress: Progress):
        self.progress = progress

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Open the bar."""
        super().on_train_start(trainer, module)
        self._bar = tqdm(
            desc="training",
            unit="step",
            initial=trainer.global_step,
            total=self.progress.planned_steps,
            disable=not trainer.is_global_zero,
            dynamic_ncols=True,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,  # a log file need not hold every move
        )
        self._started = self.progress.tokens, self.progress.elapsed_s

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Move the bar."""
        self._bar.total = self.progress.planned_steps
        if trainer.global_step % FLUSH_EVERY == 0 or trainer.should_stop:
            tokens = self.progress.tokens - self._started[0]
            rate = tokens / max(self.progress.elapsed_s - self._started[1], 1e-9)
            shown = {"loss": f"{float(module.last_loss):.3f}", "tokens/s": f"{rate:,.0f}"}
            if self.progress.last:
                shown["val_loss"] = f"{self.progress.last['loss']:.3f}"
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(trainer.global_step - self._bar.n)

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """Close the bar."""
        if hasattr(self, "_bar"):
            self._bar.close()


def build_tracker(config: PretrainConfig, folder: Path) -> Any:
    """Return a Weights & Biases logger, or False when it is disabled.

    The run id is kept in the run folder, so that a resumed run goes on in the same tracked run. Offline
    unless the user is logged in: there is never a prompt.
    """
    mode = os.environ.get("WANDB_MODE") or config.logging.wandb
    if mode == "disabled":
        return False
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    if mode == "auto":
        mode = "online" if wandb.login(prompt=False) else "offline"
    kept = folder / "wandb" / "run-id.txt"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(secrets.token_hex(4))
    return WandbLogger(
        name=config.name,
        project=config.logging.project,
        id=kept.read_text().strip(),
        save_dir=str(folder),
        offline=mode == "offline",
        mode=mode,
        config=to_plain(config),
        resume="allow" if mode == "online" else None,
    )
