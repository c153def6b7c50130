"""Which accelerator, devices and arithmetic a run uses: as configured, or the best that is available."""

from __future__ import annotations

import os

import torch

from mlm.config.errors import InputError, require
from mlm.config.training import BaseTrainerConfig
from mlm.launch import launched


def resolve_accelerator(config: BaseTrainerConfig) -> str:
    """Return cpu, gpu or mps: the configured one, or the best available.

    Raises:
        InputError: the configured one is not available.
    """
    available = {"cpu": True, "gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if config.accelerator == "auto":
        return next(name for name in ("gpu", "mps", "cpu") if available[name])
    if not available[config.accelerator]:
        found = ", ".join(name for name, is_available in available.items() if is_available)
        raise InputError(f"trainer.accelerator={config.accelerator} is not on this machine; it has {found}")
    return config.accelerator


def resolve_devices(config: BaseTrainerConfig, accelerator: str) -> tuple[int, int]:
    """Return the number of devices per node and the number of nodes.

    Raises:
        InputError: more GPUs are configured than available, or several nodes without a launcher.
    """
    launch = launched()
    available = torch.cuda.device_count() if accelerator == "gpu" else 1
    devices, num_nodes = (launch.devices, launch.num_nodes) if launch else (available, 1)
    devices = devices if config.devices == "auto" else config.devices
    num_nodes = num_nodes if config.num_nodes == "auto" else config.num_nodes
    alone = launch is None and "MASTER_ADDR" not in os.environ
    hint = "needs torchrun or srun, which start the processes of the other nodes"
    require(num_nodes == 1 or not alone, "trainer.num_nodes", num_nodes, hint)
    fits = accelerator != "gpu" or devices <= available
    require(fits, "trainer.devices", devices, f"is more than the {available} GPU(s) of this machine")
    return devices, num_nodes


def resolve_precision(config: BaseTrainerConfig, accelerator: str) -> str:
    """Return the arithmetic: bfloat16 where the hardware multiplies it faster than float32."""
    if config.precision == "16-mixed" and accelerator == "cpu":
        raise InputError("trainer.precision=16-mixed needs a GPU; on a CPU take bf16-mixed or 32-true")
    if config.precision != "auto":
        return config.precision
    if accelerator == "gpu":
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        cpu = torch.cpu.get_capabilities()
        has_bfloat16 = accelerator == "cpu" and bool(cpu.get("avx512_bf16") or cpu.get("amx_tile"))
    return "bf16-mixed" if has_bfloat16 else "32-true"


def check_hardware(config: BaseTrainerConfig) -> int:
    """Check that this machine has what `config` requires, and return the number of processes of the run.

    Raises:
        InputError: the machine lacks it.
    """
    accelerator = resolve_accelerator(config)
    devices, num_nodes = resolve_devices(config, accelerator)
    config.accumulation(devices * num_nodes)
    resolve_precision(config, accelerator)
    return devices * num_nodes
