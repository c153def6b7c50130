"""The CPU cores that this process may use, the threads that torch starts on them, and their arithmetic.

A container's quota (docker --cpus, a CPU limit of Kubernetes) changes neither the number of cores nor the
affinity mask: torch would start a thread for each core of the machine, and all of them would wait for those
that the quota stops.
"""

import math
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

STAT = Path("/proc/stat")
OWN_GROUPS, GROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")  # see cgroups(7)


def cores_to_run_on() -> int:
    """Return the number of CPUs in the affinity mask, ignoring quotas."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_cores(own_groups: Path = OWN_GROUPS, groups: Path = GROUPS) -> int:
    """Return how many cores this process may use: its affinity mask, or the quota of its control groups.

    A quota is rounded down: a thread that is stopped keeps all others waiting.
    """
    return max(int(min(cores_to_run_on(), *_quotas(own_groups, groups), math.inf)), 1)


def busy_seconds(stat: Path = STAT) -> float | None:
    """Return the busy time of the cores in the affinity mask, counted from the boot; None: not Linux."""
    with suppress(OSError, ValueError, AttributeError):  # the last where there is no affinity mask
        cores = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        rows = [line.split() for line in stat.read_text(encoding="utf-8").splitlines() if line]
        ticks = [[int(word) for word in row[1:9]] for row in rows if row[0] in cores]
        idle = sum(idle + waiting for _, _, _, idle, waiting, *_ in ticks)
        return (sum(map(sum, ticks)) - idle) / os.sysconf("SC_CLK_TCK") if ticks else None
    return None


def share_cores(num_processes: int) -> None:
    """Set torch's threads to the cores that each of several processes has, unless OMP_NUM_THREADS is set.

    Never more than torch had before the first call.
    """
    import torch  # only now: counting cores does not need it

    before = _threads_of_torch()
    # OpenMP too ignores anything but a number above 0, optionally with more after a comma.
    if not re.match(r"\s*\+?0*[1-9]", os.environ.get("OMP_NUM_THREADS", "")):
        torch.set_num_threads(max(min(before, available_cores() // num_processes), 1))


@cache
def multiplies_bfloat16(device_type: str) -> bool:
    """Return whether this machine's CPU or GPU (`cpu`, `cuda`) multiplies bfloat16 faster than float32."""
    import torch

    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    cpu = torch.cpu.get_capabilities()
    return device_type == "cpu" and bool(cpu.get("avx512_bf16") or cpu.get("amx_tile"))


@cache
def _threads_of_torch() -> int:
    """Return torch's number of threads at the first call."""
    import torch

    return torch.get_num_threads()


def _quotas(own_groups: Path, groups: Path) -> Iterator[float]:
    """Yield the cores that the groups of this process, and the groups around them, allow."""
    with suppress(OSError):
        # A group may have any name that a folder may have.
        for line in own_groups.read_text("utf-8", errors="surrogateescape").split("\n"):
            _, controllers, place = line.split(":", 2) if line.count(":") > 1 else ("", "none", "")
            if controllers and "cpu" not in controllers.split(","):
                continue
            # Groups of version 1 are mounted by the names of their controllers, and usually as cpu too.
            places = [groups / name for name in ("cpu", controllers)] if controllers else [groups]
            root = places[0] if places[0].exists() else places[-1]
            # In a container the names may be those of the host; then only the root exists.
            group = root / place.strip("/")
            for folder in (group, *group.parents[: len(group.parts) - len(root.parts)]):
                yield from _limits(folder)


def _limits(group: Path) -> Iterator[float]:
    with suppress(OSError, ValueError, ArithmeticError):  # "max 100000": no limit
        quota, period = (group / "cpu.max").read_text("utf-8").split()
        yield int(quota) / int(period)
    with suppress(OSError, ValueError, ArithmeticError):
        quota, period = ((group / f"cpu.cfs_{name}_us").read_text("utf-8") for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)
