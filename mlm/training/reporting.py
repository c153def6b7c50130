"""What a run tells while it trains: the metrics table, the tracked run and the progress bar."""

from __future__ import annotations

import csv
import json
import logging
import netrc
import os
import re
import secrets
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger
from tqdm import tqdm

from mlm.config.errors import InputError
from mlm.config.experiment import RunConfig
from mlm.config.parse import to_plain
from mlm.config.training import LoggingConfig
from mlm.cores import busy_seconds, cores_to_run_on
from mlm.launch import is_first_process
from mlm.training.callbacks import Progress, StepCallback
from mlm.training.tracked import tracked_step

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
    "masking/rate",
    "masking/mask_token",
    "masking/random_token",
    "masking/unchanged",
    "optim/skipped",
    "throughput/tokens_per_second",
    "throughput/wait_share",
]
CONNECT_TIMEOUT_S = 3.0
"""How long the tracking server may take to answer at all."""
INIT_TIMEOUT_S = 20.0
"""How long it may take to open a run."""
FINISH_TIMEOUT_S = 20.0
"""How long it may take to upload what is left at the end; the rest stays in the run folder."""
LOOK_EVERY_S = 10.0
"""Seconds between two looks at who uses the cores."""
LEAST_OTHERS = 0.3
"""Cores that others use before it is worth a word."""
WAITING = "OMP_WAIT_POLICY"
"""Says whether threads that wait for others keep their cores busy meanwhile; read when torch is loaded."""
FLUSH_EVERY = 10
"""Steps whose numbers are fetched from the device together, so that the device is not asked at every step."""


class MetricsTable(StepCallback):
    """Writes one row an optimizer step to metrics.csv and to the trackers.

    A tracked run cannot be cut: steps that a resumed run does again, alike, are not tracked again.
    """

    def __init__(self, path: Path, progress: Progress):
        self.path, self.progress = path, progress
        self._tracked = -1
        """The newest step in the tracked run."""
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Begin the table, or cut what an earlier run wrote after the checkpoint it resumes from."""
        super().on_train_start(trainer, module)
        self._tokens = self.progress.tokens
        if trainer.is_global_zero:
            kept = [row for row in read_metrics(self.path) if row["step"] <= trainer.global_step]
            partial = self.path.with_suffix(".tmp")
            with partial.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS)
                writer.writeheader()
                writer.writerows(kept if trainer.global_step else [])
            partial.replace(self.path)
            if trainer.loggers:
                self._tracked = tracked_step(self.path.parent)
                self._track(trainer.loggers, kept)  # what a killed tracker did not write
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
        """Write what was noted; on a full disk, try again next time."""
        rows = [{name: _number(value) for name, value in row.items()} for row in self._rows]
        size = self.path.stat().st_size if self.path.exists() else 0
        try:
            with self.path.open("a", newline="") as file:
                csv.DictWriter(file, COLUMNS).writerows(rows)
        except OSError as error:
            log.warning("cannot write %s: %s", self.path, error.strerror)
            os.truncate(self.path, size)
            return
        self._rows = []
        if trainer.loggers and rows:
            self._track(trainer.loggers, rows)

    def _track(self, loggers: list[Any], rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if row["step"] > self._tracked:
                self._tracked = row["step"]
                shown = {name: value for name, value in row.items() if name != "step"}
                shown |= {"trainer/global_step": row["step"], "hours": row["elapsed_s"] / 3600}
                for logger in loggers:
                    logger.experiment.log(shown, step=row["step"], commit=True)

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Write what was noted, and end the tracked run: after an error nobody else does."""
        if trainer.is_global_zero:
            self.flush(trainer)
        end_tracking(trainer)

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """End the tracked run."""
        end_tracking(trainer)


def end_tracking(trainer: pl.Trainer) -> None:
    """End the tracked run, so that the next one of this process is its own."""
    if trainer.is_global_zero and trainer.loggers:
        import wandb

        wandb.finish()


def _number(value: Any) -> Any:
    """Return a tensor's value, floats with seven digits."""
    value = value.item() if isinstance(value, torch.Tensor) else value
    value = int(value) if isinstance(value, bool) else value
    return float(f"{value:.7g}") if isinstance(value, float) else value


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a metrics table, numbers as numbers, cells that are empty left out.

    A last line that a killed process did not finish is left out too.
    """
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        lines = [line for line in file if line.endswith("\n")]
    try:
        rows = [{name: float(cell) for name, cell in row.items() if cell} for row in csv.DictReader(lines)]
        return [{**row, "step": int(row["step"]), "tokens": int(row["tokens"])} for row in rows]
    except (ValueError, TypeError, KeyError, csv.Error) as error:
        raise InputError(
            f"{path} is damaged ({error}); put it right, or move it away to begin anew"
        ) from None


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

    def on_exception(self, trainer: pl.Trainer, module: Any, exception: BaseException) -> None:
        """Close the bar, so that what is told has a line of its own."""
        self.teardown(trainer, module, "fit")

    def teardown(self, trainer: pl.Trainer, module: Any, stage: str) -> None:
        """Close the bar."""
        if hasattr(self, "_bar"):
            self._bar.close()


class BusyCores(StepCallback):
    """Tells once that other programs use the cores on which torch's threads wait for each other."""

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        """Begin anew."""
        super().on_train_start(trainer, module)
        threads = torch.get_num_threads()
        self._threads = threads * trainer.num_devices
        waits = module.device.type == "cpu" and threads > 1 and WAITING not in os.environ
        self._has_told = not (waits and is_first_process())
        self._before: tuple[float, float, float] | None = None

    def on_step_end(self, trainer: pl.Trainer, module: Any) -> None:
        """Compare what was used with what we used, every LOOK_EVERY_S seconds until it is told.

        The first step is left out: processes of ours may compile the model in it.
        """
        if self._has_told or (self._before and time.monotonic() - self._before[0] < LOOK_EVERY_S):
            return
        now, before = self._read(), self._before
        self._before = now
        if now is None or before is None:
            return
        wall, own, all_of_it = (after - before for after, before in zip(now, before, strict=True))
        others, cores = (all_of_it - own * trainer.num_devices) / wall, cores_to_run_on()
        if others >= LEAST_OTHERS and others + self._threads > cores:
            log.warning(
                "other programs use %.1f of the %d cores, on which our threads wait for each other: as long "
                "as they run, a start with %s=passive before the command is faster",
                others,
                cores,
                WAITING,
            )
            self._has_told = True

    def _read(self) -> tuple[float, float, float] | None:
        """Return seconds of the clock, of this process, and of all programs on these cores."""
        busy = busy_seconds()
        return None if busy is None else (time.monotonic(), time.process_time(), busy)


def resolve_tracking(config: LoggingConfig) -> LoggingConfig:
    """Decide between online, offline and disabled, without a prompt and within seconds.

    Raises:
        InputError: online is asked for and cannot be had, or $WANDB_MODE is no mode.
    """
    wanted = os.environ.get("WANDB_MODE") or config.wandb
    wanted = "offline" if wanted == "dryrun" else wanted
    if wanted not in ("auto", "online", "offline", "disabled"):
        raise InputError(f"WANDB_MODE={wanted} is none of online, offline, disabled")
    if wanted in ("auto", "online"):
        obstacle = _obstacle_to_tracking() if is_first_process() else "another process tracks"
        if obstacle and wanted == "online":
            raise InputError(f"logging.wandb=online: {obstacle}; take offline, and upload with `wandb sync`")
        if obstacle and obstacle != NOT_LOGGED_IN:
            log.warning("Weights & Biases: %s; tracking offline", obstacle)
        wanted = "offline" if obstacle else "online"
    return replace(config, wandb=wanted)  # type: ignore[arg-type]


NOT_LOGGED_IN = "not logged in (wandb login)"


def _obstacle_to_tracking() -> str | None:
    """Return why a run cannot be tracked online, None if it can."""
    import wandb

    os.environ.setdefault("WANDB_SILENT", "true")
    settings = wandb.setup().settings
    server = urlsplit(settings.base_url)
    has_key = settings.api_key or os.environ.get("WANDB_API_KEY") or _in_netrc(server.hostname)
    if not has_key:
        return NOT_LOGGED_IN
    try:
        port = server.port or (443 if server.scheme == "https" else 80)
        socket.create_connection((server.hostname or "", port), CONNECT_TIMEOUT_S).close()
        return None if wandb.login(prompt=False) else NOT_LOGGED_IN
    except OSError:
        return f"{server.hostname} cannot be reached"
    except Exception as error:  # whatever is wrong with the key, it must not end the run
        return " ".join(str(error).split())[:120]


def _in_netrc(host: str | None) -> bool:
    try:
        return netrc.netrc().authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def build_tracker(
    config: RunConfig,
    tracking: LoggingConfig,
    folder: Path,
    facts: dict[str, Any] | None = None,
    group: str | None = None,
) -> Any:
    """Return a Weights & Biases logger, or False when this process does not track.

    The run id is kept in the run folder, so that a resumed run goes on in the same tracked run.

    Args:
        config: stored with the run.
        tracking: resolved by `resolve_tracking`.
        folder: the run folder.
        facts: what else is stored with the run, in plain values.
        group: what the tracker shows the run under.
    """
    if tracking.wandb == "disabled" or not is_first_process():
        return False
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    kept = folder / "wandb" / "run-id.txt"
    if not kept.exists():
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(secrets.token_hex(4))
    online = tracking.wandb == "online"
    arguments: dict[str, Any] = {
        "dir": folder,
        "id": kept.read_text().strip(),
        "name": run_title(folder),
        "group": group,
        "project": tracking.project,
        "config": {**to_plain(config), **(facts or {})},
        "settings": wandb.Settings(
            init_timeout=INIT_TIMEOUT_S, finish_timeout=FINISH_TIMEOUT_S, silent=True, console="off"
        ),
    }
    try:
        run = wandb.init(
            **arguments, mode="online" if online else "offline", resume="allow" if online else None
        )
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        # The server answered before, so this is rare; training must not wait for it.
        log.warning("Weights & Biases: %s; tracking offline", " ".join(str(error).split())[:120])
        run = wandb.init(**arguments, mode="offline")
    for axis in ("trainer/global_step", "tokens", "hours"):
        run.define_metric(axis)
    run.define_metric("*", step_metric="trainer/global_step", step_sync=True)
    return WandbLogger(experiment=run)


def run_title(folder: Path) -> str:
    """Return the name of a run; a part of a suite or a grid also has the names of what it is a part of."""
    parts, number = folder.parts, 1
    number += bool(re.fullmatch(r"point-\d+", parts[-1]))
    number += 2 * bool(re.fullmatch(r"seed-\d+", parts[-number]))
    return "/".join(parts[-number:])


def pretraining_run(model: str) -> str:
    """Return the name of the run that pretrained a model, of the model itself where no run is known."""
    run = Path(model).parent
    try:
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return Path(model).name
    earlier = summary.get("init") if "task" in summary else None
    return pretraining_run(earlier) if earlier else run.name


def track_table(
    loggers: Sequence[Logger], name: str, columns: Sequence[str | int], rows: list[list[Any]]
) -> None:
    """Give a table to the tracked run, if there is one."""
    for logger in loggers:
        import wandb

        logger.experiment.log({name: wandb.Table(columns=list(columns), data=rows)})  # type: ignore[attr-defined]


def track_picture(loggers: Sequence[Logger], name: str, path: Path) -> None:
    """Give a picture to the tracked run, if there is one."""
    for logger in loggers:
        import wandb

        logger.experiment.log({name: wandb.Image(str(path))})  # type: ignore[attr-defined]
