"""How many processor cores there are for us, and how many threads torch starts on them.

A container's quota (docker --cpus, a CPU limit of Kubernetes) shows neither in the number of cores nor in what
a process may run on: torch would start a thread for each core of the whole machine, and all of them would wait
for those that the quota stops.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def available_cores(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """Return how many cores this process may use: those it may run on, or the quota of its control groups.

    A quota is rounded down: a thread that is stopped keeps all others waiting.

    Args:
        own_groups: the file that names the groups of this process, see cgroups(7).
        groups: where they are mounted.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(int(min(cores, *_quotas(own_groups, groups), math.inf)), 1)


def share_cores(num_processes: int) -> None:
    """Let torch start as many threads as each of so many processes has cores, or as the user says.

    Never more than it would by itself.
    """
    import torch  # only now: counting cores needs none

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(min(torch.get_num_threads(), available_cores() // num_processes), 1))


def _quotas(own_groups: Path, groups: Path) -> Iterator[float]:
    """Yield the cores that each group allows of which this process is a member, with those around it."""
    with suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, place = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            root = groups / "cpu" if controllers else groups  # of version 1, of version 2
            # In a container the names may be those outside of it, where only the root is there.
            group = root / place.strip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
                yield _quota(folder)


def _quota(group: Path) -> float:
    with suppress(OSError, ValueError):  # "max 100000" is no number: no limit
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf
