"""Lightning's Trainer, set up for a loop whose data, validation, checkpoints and logs are our own."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher

from mlm.config.errors import InputError, require
from mlm.config.training import TrainerConfig
from mlm.cores import share_cores
from mlm.launch import launched
from mlm.training.checkpoint import AtomicCheckpointIO
from mlm.training.processes import Launcher, cluster_environment, join_after_restart
from mlm.training.sharding import ShardedStrategy


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


def resolve_devices(config: TrainerConfig, accelerator: str) -> tuple[int, int]:
    """Return the number of devices a node, and of nodes.

    Raises:
        InputError: more GPUs are asked for than there are.
    """
    launch = launched()
    there = torch.cuda.device_count() if accelerator == "gpu" else 1
    devices, num_nodes = (launch.devices, launch.num_nodes) if launch else (there, 1)
    devices = devices if config.devices == "auto" else config.devices
    num_nodes = num_nodes if config.num_nodes == "auto" else config.num_nodes
    alone = launch is None and "MASTER_ADDR" not in os.environ
    hint = "needs torchrun or srun, which start the processes of the other nodes"
    require(num_nodes == 1 or not alone, "trainer.num_nodes", num_nodes, hint)
    fits = accelerator != "gpu" or devices <= there
    require(fits, "trainer.devices", devices, f"is more than the {there} GPU(s) of this machine")
    return devices, num_nodes


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


def check_hardware(config: TrainerConfig) -> None:
    """Check that this machine has what `config` asks for.

    Raises:
        InputError: it has not.
    """
    accelerator = resolve_accelerator(config)
    devices, num_nodes = resolve_devices(config, accelerator)
    config.accumulation(devices * num_nodes)
    resolve_precision(config, accelerator)


def build_trainer(
    config: TrainerConfig, folder: Path, callbacks: list[pl.Callback], logger: Any
) -> pl.Trainer:
    """Build the Trainer.

    The run is one endless Lightning epoch that the `Budget` callback ends.
    """
    quiet_lightning()
    accelerator = resolve_accelerator(config)
    devices, num_nodes = resolve_devices(config, accelerator)
    world_size = devices * num_nodes
    share_cores(devices if launched() is None else 1)  # a launcher gives each of its processes its own
    accumulation, environment = config.accumulation(world_size), cluster_environment()
    strategy: str | ShardedStrategy = config.strategy
    if config.strategy == "fsdp2":
        strategy = ShardedStrategy(world_size)
    elif config.strategy == "auto" and world_size > 1:
        strategy = "ddp"
    trainer = pl.Trainer(
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        strategy=strategy,
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
        plugins=[AtomicCheckpointIO(), environment],
        default_root_dir=str(folder),
    )
    join_after_restart("nccl" if accelerator == "gpu" else "gloo")
    launcher = trainer.strategy.launcher
    if isinstance(launcher, _SubprocessScriptLauncher) and not environment.creates_processes_externally:
        trainer.strategy._launcher = Launcher(environment, launcher.num_processes, launcher.num_nodes)
    return trainer


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
        ".*FSDP2-wrapped module.*returned a view.*",  # nobody writes into the logits
        ".*not been set for this class.*",
        ".*smaller than the logging interval.*",
    ):
        warnings.filterwarnings("ignore", message=message)
