"""Lightning's Trainer, set up for a loop whose data, validation, checkpoints and logs are our own."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch

from mlm.config.errors import InputError
from mlm.config.training import TrainerConfig
from mlm.training.checkpoint import AtomicCheckpointIO


def resolve_accelerator(config: TrainerConfig) -> str:
    """Return cpu, gpu or mps: the one asked for, or the best there is.

    Raises:
        InputError: the one asked for is not there.
    """
    present = {"cpu": True, "gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if config.accelerator == "auto":
        return next(name for name in ("gpu", "mps", "cpu") if present[name])
    if not present[config.accelerator]:
        found = ", ".join(name for name, there in present.items() if there)
        raise InputError(f"trainer.accelerator={config.accelerator} is not on this machine; it has {found}")
    return config.accelerator


def resolve_devices(config: TrainerConfig, accelerator: str) -> int:
    """Return the number of devices a node."""
    if config.devices != "auto":
        return config.devices
    return torch.cuda.device_count() if accelerator == "gpu" else 1


def resolve_precision(config: TrainerConfig, accelerator: str) -> str:
    """Return the arithmetic: bfloat16 where the hardware multiplies it faster than float32."""
    if config.precision == "16-mixed" and accelerator == "cpu":
        raise InputError("trainer.precision=16-mixed needs a GPU; on a CPU take bf16-mixed or 32-true")
    if config.precision != "auto":
        return config.precision
    has_bfloat16 = {
        "cpu": torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
        "gpu": torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False),
        "mps": False,
    }
    return "bf16-mixed" if has_bfloat16[accelerator] else "32-true"


def build_trainer(
    config: TrainerConfig, folder: Path, callbacks: list[pl.Callback], logger: Any
) -> pl.Trainer:
    """Build the Trainer.

    The run is one endless Lightning epoch that the `Budget` callback ends.
    """
    quiet_lightning()
    accelerator = resolve_accelerator(config)
    devices = resolve_devices(config, accelerator)
    accumulation = config.accumulation(devices * config.num_nodes)
    return pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        num_nodes=config.num_nodes,
        strategy="ddp" if config.strategy == "auto" and devices * config.num_nodes > 1 else config.strategy,
        precision=resolve_precision(config, accelerator),  # type: ignore[arg-type]
        accumulate_grad_batches=accumulation,
        max_epochs=1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=logger,
        callbacks=callbacks,
        plugins=[AtomicCheckpointIO()],
        default_root_dir=str(folder),
    )


def quiet_lightning() -> None:
    """Silence what Lightning says about choices that are deliberate here."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*dataloader is not resumable.*",
        ".*no `validation_step`.*",
        ".*`isinstance\\(treespec, LeafSpec\\)`.*",
        ".*litlogger.*",
        ".*not been set for this class.*",
        ".*smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=message)
