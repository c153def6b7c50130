"""The processes of a run: how they find each other, and how they end together.

- under torchrun or srun the launcher starts and ends them, and says how many there are
- otherwise the first process starts the others of its machine, each with the same command line
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    LightningEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from torch import Tensor

from mlm.launch import launched

LOOK_EVERY_S = 0.3
"""Seconds between two looks at another process."""

log = logging.getLogger(__name__)


def cluster_environment() -> ClusterEnvironment:
    """Return how the processes find each other; what a signal means is decided by `GracefulStop` alone."""
    launch = launched()
    if launch is None:
        return LightningEnvironment()
    if launch.launcher == "torchrun":
        return TorchElasticEnvironment()
    if "SLURM_STEP_ID" not in os.environ:
        log.warning("waiting for %d processes of this job; start them with srun", launch.world_size)
    os.environ.setdefault("SLURM_NTASKS_PER_NODE", str(launch.devices))
    return SLURMEnvironment(auto_requeue=False)


def join_after_restart(backend: str) -> None:
    """Let processes that torchrun started anew find each other, and not those that ended.

    torchrun keeps its table of addresses over restarts, and the new processes would call at the old ones.
    The agents of several nodes each count restarts by themselves, so that there the number is no common name:
    they keep no table if TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 is set.

    Args:
        backend: gloo or nccl.
    """
    launch, restarts = launched(), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if launch is None or launch.launcher != "torchrun" or launch.num_nodes > 1 or restarts == "0":
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(host, port, launch.world_size, is_master=False)
    torch.distributed.init_process_group(
        backend,
        store=torch.distributed.PrefixStore(f"restart-{restarts}", store),
        rank=int(os.environ["RANK"]),
        world_size=launch.world_size,
    )


class Launcher(_SubprocessScriptLauncher):
    """Starts the other processes of this machine; the first that fails ends all, with its exit status.

    Lightning's own would kill this process (exit status 137) even where the others ended as they should.
    """

    _is_over = False

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the processes, then call `function` in this one."""
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        self._call_children_scripts()
        threading.Thread(target=self._watch, name="watch-processes", daemon=True).start()
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            failed = self._failed(within_s=1.0) if isinstance(error, Exception) else None
            self._is_over = True
            self.kill(signal.SIGKILL)  # they may wait for this one without end
            if failed is None:
                raise
            raise SystemExit(_tell(failed)) from error
        self._is_over = True
        atexit.register(self.kill, signal.SIGKILL)  # until then there may be weights to be put together
        return result

    def _failed(self, within_s: float) -> subprocess.Popen[bytes] | None:
        """Return a process that failed by itself; above 128 are those that were asked to stop and did."""
        deadline = time.monotonic() + within_s
        while True:
            for other in self.procs:
                if other.poll() and other.returncode <= 128:
                    return other
            if self._is_over or time.monotonic() > deadline:
                return None
            time.sleep(LOOK_EVERY_S)

    def _watch(self) -> None:
        failed = self._failed(within_s=math.inf)
        time.sleep(1.0)  # this process may notice by itself, and end in good order
        if failed is not None and not self._is_over:
            self.kill(signal.SIGKILL)
            os._exit(_tell(failed))


def _tell(failed: subprocess.Popen[bytes]) -> int:
    """Tell of a process that was ended; return the exit status of the run."""
    if failed.returncode < 0:
        log.error("a process of this run was ended by signal %d; go on with --resume", -failed.returncode)
    return failed.returncode if failed.returncode > 0 else 1


def reduce_over_ranks(numbers: Tensor, how: torch.distributed.ReduceOp.RedOpType) -> Tensor:
    """Sum `numbers`, or take the largest, over all processes, in place; a GPU does so when it gets there.

    Lightning's own function lets every process wait for all others and for its GPU before.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.all_reduce(numbers, how)
    return numbers


def end_with_parent() -> None:
    """Let a process that `Launcher` started end with the one that started it, whatever it waits for."""
    if os.environ.get("LOCAL_RANK", "0") == "0" or launched() is not None:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_EVERY_S)
        os._exit(1)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()
