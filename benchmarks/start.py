"""From the command to the end of the first optimizer step, beside the import that nobody gets round.

    OMP_NUM_THREADS=1 python benchmarks/start.py     # 3 minutes

`train.py` starts on text that is prepared already, and validates before its first step; `import` is a process
that imports lightning.pytorch and ends. They take turns.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import ROOT, environment, machine_facts, median, run_child, table, write_result

STEPS = 10
"""The table of a run is written so many steps at a time."""
LITTLE_VALIDATION = ("--data.max_validation_tokens", "4096")
SETTINGS: dict[str, tuple[str, tuple[str, ...]]] = {
    "train.py, untracked, 4,096 tokens validated": ("disabled", LITTLE_VALIDATION),
    "train.py, untracked": ("disabled", ()),
    "train.py, tracked offline": ("offline", ()),
}
"""What is told of tracking, and further options."""


def seconds_to_first_step(work: Path, wandb: str, more: tuple[str, ...], env: dict[str, str]) -> float:
    """Start a run and return the seconds until its first step had ended."""
    table_path = work / "run" / "metrics.csv"
    words = ["train.py", "--runs_dir", str(work), "--name", "run", "--trainer.max_steps", f"{STEPS}"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *words, "--logging.wandb", wandb, *more],
        cwd=ROOT,
        env={**env, "WANDB_MODE": wandb},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    ends: dict[str, float] = {}
    while f"{STEPS}" not in ends and process.poll() is None:
        time.sleep(0.01)
        if table_path.exists():
            with table_path.open(newline="") as file:
                ends = {row["step"]: float(row["elapsed_s"] or 0) for row in csv.DictReader(file)}
    written = time.perf_counter() - start
    if process.wait():
        raise RuntimeError(f"{words}: status {process.returncode}")
    return written - (ends[f"{STEPS}"] - ends["1"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    env = environment(int(os.environ.get("OMP_NUM_THREADS", "1")), "default")
    found: dict[str, list[float]] = {name: [] for name in ("import", *SETTINGS)}
    for number in range(options.rounds + 1):  # the first one prepares the text and warms the disk
        times = {"import": run_child(["-c", "import lightning.pytorch"], env).seconds}
        for name, (wandb, more) in SETTINGS.items():
            with tempfile.TemporaryDirectory() as work:
                times[name] = seconds_to_first_step(Path(work), wandb, more, env)
        if number:
            for name, seconds in times.items():
                found[name].append(seconds)
    medians: dict[str, Any] = {name: median(seconds) for name, seconds in found.items()}
    write_result("start", {"machine": machine_facts(), "seconds": found, "medians": medians})
    rows = [(name, f"{value:.2f}", f"{value - medians['import']:.2f}") for name, value in medians.items()]
    print(table(("until the first step has ended", "s", "beyond the import, s"), rows))


if __name__ == "__main__":
    main()
