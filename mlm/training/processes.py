"""The devices and processes of a run: what there is, how they start, find each other, agree and end.

- under torchrun or srun the launcher starts and ends them, and sets their number
- otherwise this program starts itself once per device, with the variables that torchrun sets, and supervises
  these processes. torchrun itself would do, but it ends its workers 30 s after a signal, whether or not their
  checkpoint is written, and turns every exit status into 1 and a page of text
"""

from __future__ import annotations

import atexit
import logging
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed
from lightning.fabric.plugins import environments
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from torch import Tensor

from mlm.config.errors import InputError, require
from mlm.config.training import BaseTrainerConfig
from mlm.cores import multiplies_bfloat16
from mlm.launch import PARENT, launched
from mlm.startup.command import RUN_NAME

POLL_S = 0.2
"""Seconds between two checks of other processes."""
GRACE_S = 1.0
"""Seconds that the other processes get to end by themselves after one has failed."""

log = logging.getLogger(__name__)


def enter_run(config: BaseTrainerConfig, name: str | None) -> int | None:
    """Check the hardware, then start the processes of a run, or join them as one of them.

    Returns the exit status of the run, None if this process itself is to train.
    """
    _end_with_parent()
    _check_hardware(config)  # not only after hours of preparation
    status = start_processes(config, name)
    if status is None:
        join_processes(config)
    return status


def start_processes(config: BaseTrainerConfig, name: str | None) -> int | None:
    """Run this command once on each device and wait, if the run needs several processes.

    All get the `name` of the run. Returns as `enter_run`.
    """
    devices, num_nodes = resolve_devices(config, resolve_accelerator(config))
    if launched() is not None or devices * num_nodes == 1:
        return None
    first = int(os.environ.get("NODE_RANK", "0")) * devices
    shared = {
        PARENT: str(os.getpid()),
        "TORCHELASTIC_RUN_ID": "mlm",
        "WORLD_SIZE": str(devices * num_nodes),
        "LOCAL_WORLD_SIZE": str(devices),
        "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or str(find_free_network_port()),
    } | ({RUN_NAME: name} if name else {})
    ranks = [{"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(devices)]
    spec = sys.modules["__main__"].__spec__
    module = ["-m", spec.name.removesuffix(".__main__")] if spec else [sys.argv[0]]
    command = [sys.executable, *module, *sys.argv[1:]]
    # A process group each: Ctrl-C in a terminal reaches this process alone, which passes it on once.
    children = [subprocess.Popen(command, env=os.environ | shared | rank, process_group=0) for rank in ranks]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for child in children:
            child.send_signal(number)

    passed_on = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = {number: signal.signal(number, pass_on) for number in passed_on}
    try:
        return _wait(children, name)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for child in children:
            child.kill()


def _wait(children: Sequence[subprocess.Popen[bytes]], name: str | None) -> int:
    """Return the exit status of the run; a process that fails ends the others, which may wait for it."""
    while any(child.poll() is None for child in children):
        failed = [child.returncode for child in children if child.returncode and child.returncode <= 128]
        if failed:
            time.sleep(GRACE_S)
            return _failure(failed[0], name)
        time.sleep(POLL_S)
    statuses = [child.returncode for child in children]
    return _failure(min(statuses), name) if min(statuses) < 0 else max(statuses)


def _failure(status: int, name: str | None) -> int:
    if status < 0:
        which = f" --name {shlex.quote(name)}" if name else ""
        log.error("a process of this run was ended by signal %d; continue with --resume%s", -status, which)
    return status if status > 0 else 1


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, if that was `start_processes`."""
    parent = os.environ.get(PARENT)
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def cluster_environment() -> environments.ClusterEnvironment:
    """Return how Lightning finds the processes; `GracefulStop` alone handles signals."""
    launch = launched()
    if launch is None:
        return environments.LightningEnvironment()
    if launch.launcher == "torchrun":
        return environments.TorchElasticEnvironment()
    if "SLURM_STEP_ID" not in os.environ:
        log.warning("waiting for %d processes of this job; start them with srun", launch.world_size)
    os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(launch.devices))
    return environments.SLURMEnvironment(auto_requeue=False)


def join_processes(config: BaseTrainerConfig) -> None:
    """Connect the processes of a run, before anything that they must agree on; a no-op for one process.

    torchrun keeps its table of addresses over restarts, in which restarted processes would find those that
    ended: a prefix keeps them apart. The agents of several nodes count restarts separately; they keep no
    table if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set.
    """
    launch = launched()
    if launch is None or launch.world_size == 1 or torch.distributed.is_initialized():
        return
    environment, on_gpu = cluster_environment(), resolve_accelerator(config) == "gpu"
    address = environment.main_address, environment.main_port
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address[0], str(address[1])
    if on_gpu:
        torch.cuda.set_device(environment.local_rank())
    store, restarts = None, os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts != "0" and launch.num_nodes == 1:
        shared = torch.distributed.TCPStore(*address, launch.world_size, is_master=False)
        store = torch.distributed.PrefixStore(f"restart-{restarts}", shared)
    backend, rank = "nccl" if on_gpu else "gloo", environment.global_rank()
    torch.distributed.init_process_group(backend, store=store, rank=rank, world_size=launch.world_size)
    atexit.register(lambda: torch.distributed.is_initialized() and torch.distributed.destroy_process_group())


def _several_processes() -> bool:
    return torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def agree(value: Any) -> Any:
    """Return the `value` of the first process, in all of them."""
    values = [value]
    if _several_processes():
        torch.distributed.broadcast_object_list(values, src=0)
    return values[0]


def reduce_over_ranks(numbers: Tensor, how: torch.distributed.ReduceOp.RedOpType) -> Tensor:
    """Reduce `numbers` over all processes, in place and without waiting for a GPU.

    Lightning's own function puts a barrier and a synchronisation of the GPU before it.
    """
    if _several_processes():
        torch.distributed.all_reduce(numbers, how)
    return numbers


def resolve_accelerator(config: BaseTrainerConfig) -> str:
    """Return cpu, gpu or mps: the configured one, or the best available."""
    available = {"cpu": True, "gpu": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if config.accelerator == "auto":
        return next(name for name in ("gpu", "mps", "cpu") if available[name])
    if not available[config.accelerator]:
        found = ", ".join(name for name, is_available in available.items() if is_available)
        raise InputError(f"trainer.accelerator={config.accelerator} is not on this machine; it has {found}")
    return config.accelerator


def resolve_devices(config: BaseTrainerConfig, accelerator: str) -> tuple[int, int]:
    """Return the number of devices per node and the number of nodes, if this machine can run them."""
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
    """Return the precision: bfloat16 where the hardware multiplies it faster than float32."""
    if config.precision == "16-mixed" and accelerator == "cpu":
        raise InputError("trainer.precision=16-mixed needs a GPU; on a CPU take bf16-mixed or 32-true")
    if config.precision != "auto":
        return config.precision
    has_bfloat16 = multiplies_bfloat16("cuda" if accelerator == "gpu" else accelerator)
    return "bf16-mixed" if has_bfloat16 else "32-true"


def _check_hardware(config: BaseTrainerConfig) -> None:
    """Raise InputError unless this machine has what `config` requires."""
    accelerator = resolve_accelerator(config)
    devices, num_nodes = resolve_devices(config, accelerator)
    config.accumulation(devices * num_nodes)
    resolve_precision(config, accelerator)
    if not config.compile:
        return
    # torch.compile needs C++ on a CPU, and C for a GPU's launcher.
    language, variable, default = ("C++", "CXX", "g++") if accelerator == "cpu" else ("C", "CC", "gcc")
    default = {"g++": "clang++", "gcc": "clang"}[default] if sys.platform == "darwin" else default
    name = os.environ.get(variable, default)
    rule = f"needs a {language} compiler and finds no {name}: install one, set {variable}, or leave it out"
    require(shutil.which(name) is not None, "trainer.compile", "true", rule)
