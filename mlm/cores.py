"""How many processor cores there are for us, and how many threads torch starts on them.

A container's quota (docker --cpus, a CPU limit of Kubernetes) shows neither in the number of cores nor in
what a process may run on: torch would start a thread for each core of the machine, and all of them would wait
for those that the quota stops.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

STAT = Path("/proc/stat")
OWN_GROUPS = Path("/proc/self/cgroup")
GROUPS = Path("/sys/fs/cgroup")


def cores_to_run_on() -> int:
    """Return on how many cores this process may run, however little of them it may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """Return how many cores this process may use: those it runs on, or the quota of its control groups.

    A quota is rounded down: a thread that is stopped keeps all others waiting.

    Args:
        own_groups: the file that names the groups of this process, see cgroups(7).
        groups: where they are mounted.
    """
    return max(int(min(cores_to_run_on(), *_quotas(own_groups, groups), math.inf)), 1)


def busy_seconds(stat: Path = STAT) -> float | None:
    """Return how long the cores that this process may use have worked, each by itself, for whoever it was.

    Counted from some moment on, like `time.process_time`. None: the system does not tell; it is no Linux.

    Args:
        stat: the kernel's table, see proc(5).
    """
    with suppress(OSError, ValueError, AttributeError):  # the last where nobody may choose cores
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in stat.read_text().splitlines() if line]
        ticks = [[int(word) for word in row[1:9]] for row in rows if row[0] in cores]
        idle = sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks)
        return (sum(map(sum, ticks)) - idle) / os.sysconf("SC_CLK_TCK") if ticks else None
    return None


def share_cores(num_processes: int) -> None:
    """Let torch start as many threads as each of so many processes has cores, or as the user says.

    Never more than it would by itself.
    """
    import torch  # only now: counting cores needs none

    # Anything but a number above 0, maybe with more behind a comma, is ignored by OpenMP too.
    if not re.match(r"\s*\+?0*[1-9]", os.environ.get("OMP_NUM_THREADS", "")):
        torch.set_num_threads(max(min(torch.get_num_threads(), available_cores() // num_processes), 1))


def _quotas(own_groups: Path, groups: Path) -> Iterator[float]:
    """Yield the cores that each group allows of which this process is a member, with those around it."""
    with suppress(OSError):
        # A group may be called anything that a folder may.
        for line in own_groups.read_text(errors="surrogateescape").split("\n"):
            _, controllers, place = line.split(":", 2) if line.count(":") > 1 else ("", "none", "")
            if controllers and "cpu" not in controllers.split(","):
                continue
            # Those of version 1 are mounted apart, by the names of the controllers and usually as cpu too.
            places = [groups / name for name in ("cpu", controllers)] if controllers else [groups]
            root = places[0] if places[0].exists() else places[-1]
            # In a container the names may be those outside of it, where only the root is there.
            group = root / place.strip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
                yield _quota(folder)


def _quota(group: Path) -> float:
    with suppress(OSError, ValueError, ArithmeticError):  # "max 100000" is no number: no limit
        quota, period = (group / "cpu.max").read_text().split()
        return int(quota) / int(period)
    with suppress(OSError, ValueError, ArithmeticError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else math.inf
    return math.inf
