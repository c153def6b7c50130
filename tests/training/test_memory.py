"""What the C library is asked for: what lasts lies apart, what steps free is kept, a user's choice stands."""

import os
import platform
import subprocess
import sys

import pytest
from launching import flags, inherited

from mlm.training import machine
from mlm.training.machine import (
    LARGE_BLOCK,
    MALLOC_CHOICES,
    MANY_BLOCKS,
    MMAP_MAX,
    MMAP_THRESHOLD,
    TOP_PAD,
    TRIM_THRESHOLD,
)
from mlm.training.pretraining import pretrain

pytestmark = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or platform.machine() != "x86_64",
    reason="elsewhere torch has an allocator of its own, or the C library is another",
)


def numbers_of(script: str, *arguments: object, **environment: str) -> list[int]:
    """The numbers on the last line of what a script writes, run where nobody has set the allocator."""
    unset = {name: value for name, value in inherited().items() if name not in MALLOC_CHOICES}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    output = subprocess.check_output(command, env=unset | environment, text=True, timeout=300)
    return [int(word) for word in output.strip().splitlines()[-1].split()]


FAULTS = """
import resource, runpy, sys, torch
from mlm.training.machine import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
if sys.argv[1] == "train":
    del sys.argv[:2]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        assert not end.code, end.code
for _ in range(6):
    torch.ones(10 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    torch.ones(10 * 2**20)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
"""Ten tables of 40 MB, one after the other: more than glibc ever keeps by itself. Before them some that find
their place: where the memory lies is left to chance, and the first may not fit where the next ones will."""


@pytest.mark.slow
def test_freed_memory_is_kept_unless_the_user_decides():
    (plain,) = numbers_of(FAULTS, "leave")
    assert numbers_of(FAULTS, "keep")[0] < plain / 3
    assert numbers_of(FAULTS, "keep", MALLOC_TRIM_THRESHOLD_="131072")[0] > plain / 3


def test_training_keeps_it(tiny):
    (plain,) = numbers_of(FAULTS, "leave")
    assert numbers_of(FAULTS, "train", *flags(tiny(trainer={"max_steps": 2})))[0] < plain / 3


KEPT = """
import torch
from mlm.training.machine import give_back_freed_memory, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1])

small = [torch.ones(2**13) for _ in range(3000)]
last_small = small[-1]
del small
before = resident()
keep_freed_memory()
after = resident()
tables = [torch.ones(2**20) for _ in range(50)]
whole, last = resident(), tables[-1]
del tables
kept = resident()
give_back_freed_memory()
print(before, after, whole, kept, resident())
"""
"""Many small tables, then fifty of 4 MB; the last ones, in use, stand at the end of the memory."""


@pytest.mark.slow
def test_what_was_freed_before_is_not_kept_and_what_was_kept_is_given_back():
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    before, after, whole, kept, left = (pages * page for pages in numbers_of(KEPT))
    assert after < before - 50  # MiB
    assert kept > whole - 20
    assert left < whole - 150


HOLES = """
import sys, torch
from mlm.training.machine import map_large_blocks

def resident():
    return int(open("/proc/self/statm").read().split()[1])

if sys.argv[1] == "map":
    map_large_blocks()
torch.ones(7 * 2**20)
tables = [torch.ones(2**20) for _ in range(50)]
whole = resident()
del tables[::2]
print(whole, resident())
"""
"""A block of 28 MB, which teaches glibc that such blocks are not for good, then 25 of 50 tables are freed."""


@pytest.mark.slow
def test_large_blocks_leave_no_holes_where_they_are_mapped():
    page = os.sysconf("SC_PAGE_SIZE") / 2**20
    held = {}
    for how in ("leave", "map"):
        before, after = (pages * page for pages in numbers_of(HOLES, how))
        held[how] = before - after
    assert held["leave"] < 10  # MiB
    assert held["map"] > 90


class Allocator:
    """Notes what it is told, in place of the C library, which would go on like that for the other tests."""

    def __init__(self):
        self.told = []

    def CDLL(self, _):
        return self

    def mallopt(self, option, value):
        self.told.append((option, value))

    def malloc_trim(self, _):
        self.told.append("give back")


def test_what_the_first_step_leaves_is_mapped_also_on_resume(tiny, monkeypatch):
    for name in MALLOC_CHOICES:
        monkeypatch.delenv(name, raising=False)
    for resume, steps in ((False, 2), (True, 4)):
        allocator = Allocator()
        monkeypatch.setattr(machine, "ctypes", allocator)
        pretrain(tiny(trainer={"max_steps": steps, "micro_batch_size": 4}, resume=resume))
        maps = ["give back", (MMAP_THRESHOLD, LARGE_BLOCK), (MMAP_MAX, MANY_BLOCKS)]
        keeps = ["give back", (MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2**26)]
        # A checkpoint is loaded, the start is validated, the first step is taken; the last is after the run.
        assert allocator.told == [*maps, *keeps, *maps, *keeps, "give back"]
