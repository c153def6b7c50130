"""One training run, the same for both scripts: restore, train until a bound or a signal."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl

from mlm.config.errors import DiskError, InputError
from mlm.config.training import BaseTrainerConfig
from mlm.cores import share_cores
from mlm.hub.checkpoint import Checkpoint, open_checkpoint
from mlm.launch import PARENT, is_first_process
from mlm.training import processes, run_folder
from mlm.training.callbacks import (
    Budget,
    CheckpointSaver,
    Clock,
    SkippedSteps,
    Validation,
    bound_reached,
    early_stop,
    save_failure,
)
from mlm.training.datamodule import StepDataModule
from mlm.training.engine import StepModule
from mlm.training.machine import BusyCores, GracefulStop, KeepFreedMemory, give_back_freed_memory
from mlm.training.reporting import MetricsTable, ProgressBar
from mlm.training.run_folder import METRICS, SUMMARY, resume_command
from mlm.training.sharding import ShardedStrategy, whole_model
from mlm.training.tracking import build_tracker, end_tracking

log = logging.getLogger(__name__)


def restore(folder: Path, module: StepModule) -> Checkpoint | None:
    """Return the checkpoint that a resumed run continues from, the first process's choice for all.

    Its counters are restored here, its weights and optimizer state when training starts.
    """
    if not module.config.resume:
        return None
    found = run_folder.find_checkpoint(folder / "checkpoints") if is_first_process() else None
    path = processes.agree(found.path if found else None)
    if path is None:
        if (folder / SUMMARY).exists() or (folder / "model").exists():
            raise InputError(
                f"{folder} is a finished run whose checkpoints are gone: there is nothing to resume; start "
                f"a new run from its weights with --{module.start_flag} {folder / 'model'}"
            )
        log.info("%s has no checkpoint: starting at step 0", folder)
        return None
    checkpoint = found or open_checkpoint(path)
    module.on_load_checkpoint(checkpoint.content)
    module.start = checkpoint.path
    return checkpoint


def run_training(
    folder: Path, module: StepModule, data: StepDataModule, checkpoint: Checkpoint | None, **tracked: Any
) -> int:
    """Train until a bound is reached or a signal arrives, then finish the run; return 0 or 128 + the signal.

    The run of a `checkpoint` may have reached its bound, or have finished. `tracked` is for `build_tracker`.
    """
    config, progress = module.config, module.progress
    settings = config.trainer
    val_every = settings.val_every or data.steps_per_epoch
    save_every = settings.save_every or data.steps_per_epoch
    epoch_steps = settings.max_epochs * data.steps_per_epoch if module.by_epoch else None
    if checkpoint:
        reached = bound_reached(settings, progress, progress.elapsed_s, epoch_steps)
        reached = reached or early_stop(settings, progress, val_every)
        if reached and (folder / SUMMARY).exists():
            log.info("nothing to do: step %d was reached, and with it %s", checkpoint.step, reached)
            return 0
        if reached:  # it was stopped after the last step
            module.load_state_dict(checkpoint.content["state_dict"])
            _finish(folder, module, data, reached, None)
            return 0
    if is_first_process():
        run_folder.keep_config(config, folder, is_new=not (checkpoint or config.resume))
    (folder / SUMMARY).unlink(missing_ok=True)
    module.managed = True
    clock, stop = Clock(), GracefulStop()
    budget = Budget(config, data, clock, val_every, epoch_steps)
    validation = Validation(val_every, settings, clock, at_start=not module.by_epoch)
    on_cpu = processes.resolve_accelerator(settings) == "cpu"
    callbacks: list[pl.Callback] = [
        *([KeepFreedMemory()] if on_cpu and not module.by_epoch else []),
        clock,
        budget,
        validation,
        MetricsTable(folder / METRICS, module.validation_columns, module.extra_columns),
        SkippedSteps(settings, folder / "checkpoints", save_every),
        stop,
        CheckpointSaver(folder / "checkpoints", settings, save_every, clock),
        BusyCores(),
        ProgressBar(),
    ]
    trainer = _build_trainer(settings, folder, callbacks, build_tracker(config, folder, **tracked))
    try:
        trainer.fit(module, datamodule=data)
    finally:
        stop.restore()
    if stop.signal is not None:
        log.warning("stopped by signal %d after step %d", stop.signal, progress.step)
        log.warning("continue with: %s", resume_command(config))
    else:
        module.model = whole_model(module.model)
        with stop.noting():
            _finish(folder, module, data, str(validation.reason or budget.reason), trainer)
    end_tracking(trainer)
    return 128 + stop.signal if stop.signal else 0


def _finish(
    folder: Path, module: StepModule, data: StepDataModule, reason: str, trainer: pl.Trainer | None
) -> None:
    """Save the results on the first process, also if the last checkpoint could not be; then report that."""
    if not is_first_process():
        return
    give_back_freed_memory()
    config, progress = module.config, module.progress
    failure: Exception | None = save_failure(trainer) if trainer else None
    try:
        kept = progress.best[0][1] if config.trainer.keep == "best" and progress.best else progress.step
        if kept != progress.step:
            content = open_checkpoint(run_folder.checkpoint_path(folder / "checkpoints", kept)).content
            module.load_state_dict(content["state_dict"])
        module.save_results(data, folder, reason, kept, trainer)
    except (OSError, DiskError) as error:
        failure = failure or error
    if failure:
        raise InputError(
            f"{folder}: the run ended, but not all of it could be saved ({failure}); free some space, then "
            f"continue with: {resume_command(config)}"
        )


def _build_trainer(
    config: BaseTrainerConfig, folder: Path, callbacks: list[pl.Callback], logger: Any
) -> pl.Trainer:
    """Build the Trainer of a managed run, which is one long Lightning epoch that `Budget` ends."""
    # Its messages about choices that are deliberate here are silenced.
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*dataloader is not resumable.*",
        ".*no `validation_step`.*",
        ".*`isinstance\\(treespec, LeafSpec\\)`.*",
        ".*litlogger.*",
        ".*FSDP2-wrapped module.*returned a view.*",  # the logits are never written to
        ".*not been set for this class.*",
        ".*smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=message)
    accelerator = processes.resolve_accelerator(config)
    devices, num_nodes = processes.resolve_devices(config, accelerator)
    world_size = devices * num_nodes
    # A launcher divides the cores itself.
    share_cores(int(os.environ["LOCAL_WORLD_SIZE"]) if PARENT in os.environ else 1)
    strategy: str | ShardedStrategy = config.strategy
    if config.strategy == "fsdp2":
        strategy = ShardedStrategy(world_size)
    elif config.strategy == "auto" and world_size > 1:
        strategy = "ddp"
    return pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
        precision=processes.resolve_precision(config, accelerator),  # type: ignore[arg-type]
        accumulate_grad_batches=config.accumulation(world_size),
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_autolog_hparams=False,
        logger=logger,
        callbacks=callbacks,
        plugins=[run_folder.AtomicCheckpointIO(), processes.cluster_environment()],
        default_root_dir=str(folder),
    )
