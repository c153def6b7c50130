"""The launcher of this process and its rank, from the environment variables of torchrun and SLURM."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from mlm.config.errors import require

PARENT = "MLM_PARENT"
"""Environment variable with the process that started this one as one of several, if that was ours."""
SCRIPTS = {"train.py": "mlm pretrain", "finetune.py": "mlm finetune"}
"""The scripts of the repository and the same commands where only the package is installed."""
FIRST_PROCESS_S = 5.0
"""How long the first process of a run may take to report a mistake that all processes make."""


@dataclass(frozen=True)
class Launch:
    """The processes that a launcher started for this run."""

    launcher: str
    """torchrun or srun."""
    devices: int
    """Processes a node."""
    num_nodes: int
    """Machines."""

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.devices * self.num_nodes


def launched() -> Launch | None:
    """Return the processes of torchrun or SLURM's srun; None: this process was started by itself."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        return Launch("torchrun", here, int(os.environ["WORLD_SIZE"]) // here)
    tasks, nodes = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("NTASKS", "NNODES"))
    # A batch script sees the same variables as its steps; with one task it needs no srun.
    if "SLURM_PROCID" in os.environ and ("SLURM_STEP_ID" in os.environ or tasks > 1):
        require(tasks % nodes == 0, "SLURM_NTASKS", tasks, f"is not the same on each of {nodes} nodes")
        return Launch("srun", tasks // nodes, nodes)
    return None


def is_first_process() -> bool:
    """Return whether this is the process of a run that may create and refuse run folders."""
    # torchrun numbers the processes by itself, in whatever order SLURM started it on the nodes.
    ranks = ("RANK",) if "RANK" in os.environ else ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
    return all(os.environ.get(rank, "0") == "0" for rank in ranks)


def wait_for_first_process() -> None:
    """Let the first process end the run with the same message; exit if the parent is gone."""
    parent, deadline = os.getppid(), time.monotonic() + FIRST_PROCESS_S
    while time.monotonic() < deadline:
        if os.getppid() != parent:
            raise SystemExit(2)
        time.sleep(0.1)


def command_for(script: str) -> str:
    """Return how to start one of SCRIPTS, in the way that the user started this program."""
    return f"python {script}" if Path(sys.argv[0]).name in SCRIPTS else SCRIPTS[script]
