import os
import subprocess
import sys
import time

import pytest

from mlm.cores import available_cores, busy_seconds

HERE = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
THREADS = "import torch; from mlm.cores import share_cores; {}; print(torch.get_num_threads())"


def cores_of(tmp_path, own, files):
    """Count with groups whose files are given as {path below the mount: content}."""
    (tmp_path / "own").write_bytes(os.fsencode(own))
    for name, content in files.items():
        path = tmp_path / "mount" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return available_cores(tmp_path / "own", tmp_path / "mount")


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000\n"},
        {"a/b/cpu.max": "max 100000\n", "cpu.max": f"{100_000 * (HERE + 1)} 100000\n"},
        {"a/c/cpu.max": "100000 100000\n"},
        {"a/b/cpu.max": "nonsense\n"},
        {"a/b/cpu.max": "250000 0\n"},
        {"a/b/cpu.max": f"{'9' * 400} 100000\n"},
        {"a/b/cpu.max": ""},
    ],
)
def test_without_a_quota_the_affinity_mask_counts(tmp_path, files):
    assert cores_of(tmp_path, "0::/a/b\n", files) == HERE


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "100000 100000\n"}),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}),
        ("0::/\n", {"cpu.max": "50000 100000\n"}),
        # In a container with the names of the outside there is only the root.
        ("0::/docker/1a2b\n", {"cpu.max": "100000 100000\n"}),
        (
            "4:memory:/a\n2:cpu,cpuacct:/a\n",
            {"cpu/a/cpu.cfs_quota_us": "190000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
        ),
        (
            "2:cpu,cpuacct:/a\n",
            {"cpu,cpuacct/a/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "100000\n"},
        ),
        ("\nnonsense\n0:/\n0::/a\x0cb\xe9\n", {"a\x0cb\xe9/cpu.max": "100000 100000\n"}),
        (
            "2:cpuacct,cpu:/docker/1a2b\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "100000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        ),
    ],
)
def test_a_quota_is_kept_and_rounded_down(tmp_path, own, files):
    assert cores_of(tmp_path, own, files) == 1


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ("3:cpuset:/a\n", {"cpu/a/cpu.cfs_quota_us": "100000\n", "cpu/a/cpu.cfs_period_us": "100000\n"}),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "7\n", "cpu/a/cpu.cfs_period_us": "0\n"}),
        ("1:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": "-1\n", "cpu/a/cpu.cfs_period_us": "100000\n"}),
    ],
)
def test_version_1_without_a_limit(tmp_path, own, files):
    assert cores_of(tmp_path, own, files) == HERE


def test_without_control_groups(tmp_path):
    assert available_cores(tmp_path / "missing", tmp_path) == HERE


@pytest.mark.slow
def test_processes_share_the_cores_unless_the_user_sets_threads():
    def threads(call, **environment):
        mine = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        code = [sys.executable, "-c", THREADS.format(call)]
        return int(subprocess.run(code, env=mine | environment, capture_output=True, check=True).stdout)

    cores = available_cores()
    assert threads("share_cores(1)") == min(threads("pass"), cores)
    assert threads(f"share_cores({cores})") == threads(f"share_cores({10 * cores})") == 1
    later = f"share_cores({cores}); share_cores(1)"
    assert threads(later) == threads("share_cores(1)"), "a later run gets its cores back"
    for wanted in (f"{cores}", f" {cores},2"):
        wish = {"OMP_NUM_THREADS": wanted}
        assert threads(f"share_cores({10 * cores})", **wish) == threads("pass", **wish)
    for nonsense in ("", "0", "abc", "-3"):
        assert threads(f"share_cores({cores})", OMP_NUM_THREADS=nonsense) == 1


STAT = """cpu  900 0 900 900 0 0 0 0 0 0
cpu0 100 20 30 5000 70 6 4 40 300 0
{rest}intr 1 2 3
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no Linux")
def test_busy_seconds_of_the_own_cores(tmp_path):
    """All but idle and waiting for the disk; a guest's share is in the user's already."""
    before, path = os.sched_getaffinity(0), tmp_path / "stat"
    path.write_text(STAT.format(rest="cpu12 1000000 0 0 0 0 0 0 0 0 0\n"))
    os.sched_setaffinity(0, {0})
    try:
        assert busy_seconds(path) == pytest.approx(200 / os.sysconf("SC_CLK_TCK"))
    finally:
        os.sched_setaffinity(0, before)
    assert busy_seconds(tmp_path / "missing") is None
    path.write_text("\ncpu0 nonsense\n")
    assert busy_seconds(path) is None
    path.write_text("")
    assert busy_seconds(path) is None


def test_without_an_affinity_mask(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert busy_seconds() is None
    assert available_cores() >= 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="no Linux")
def test_the_own_work_is_in_what_the_cores_have_worked():
    before, own = busy_seconds(), time.process_time()
    while time.process_time() - own < 1.0:
        pass
    assert busy_seconds() - before > 0.9
