"""Run many fine-tuning runs on several GPUs: each is a process that sees one of them."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from mlm.config.finetune import FinetuneConfig
from mlm.config.parse import dump_config
from mlm.files import write_text
from mlm.training.processes import resolve_accelerator

POLL_S = 0.2
"""Seconds between two looks at the processes."""

log = logging.getLogger(__name__)


def visible_devices(config: FinetuneConfig) -> list[str]:
    """Return the GPUs a run may use, as in CUDA_VISIBLE_DEVICES; none if it runs elsewhere."""
    if resolve_accelerator(config.trainer) != "gpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def run_on_devices(runs: Sequence[tuple[FinetuneConfig, str]], devices: Sequence[str]) -> int:
    """Do independent runs in parallel, one per device at a time; return 0 or the first other exit status.

    The output of a run goes to a file beside its folder. A run that fails records that in its summary, and
    the others continue; after any other exit status no further run is started.

    Args:
        runs: configuration and title of each.
        devices: as in `visible_devices`.
    """
    waiting, status = list(runs), 0
    running: dict[str, tuple[FinetuneConfig, subprocess.Popen[bytes]]] = {}
    # By default SIGTERM would end this process alone, and the others would continue.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        while running or (waiting and not status):
            for device in devices:
                if device in running and running[device][1].poll() is not None:
                    status = status or _report(*running.pop(device))
                if device not in running and waiting and not status:
                    run, title = waiting.pop(0)
                    running[device] = run, _start(run, title, device)
            time.sleep(POLL_S)
    finally:
        for _, process in running.values():  # none, unless a signal or an error ends the loop
            process.terminate()
        for _, process in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return status


def _start(run: FinetuneConfig, title: str, device: str) -> subprocess.Popen[bytes]:
    folder = Path(run.runs_dir)
    settings, output = folder / f"{run.name}.yaml", folder / f"{run.name}.log"
    write_text(settings, dump_config(run))
    log.info("%s on device %s; output: %s", title, device, output)
    with output.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "mlm.training.suite", str(settings), title],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
        )


def _report(run: FinetuneConfig, process: subprocess.Popen[bytes]) -> int:
    """Log how a process ended, and return its exit status, 128 + n after signal n."""
    folder, status = Path(run.runs_dir, str(run.name)), process.returncode
    if status:
        log.error("%s ended with status %d; its output is %s", folder, status, f"{folder}.log")
        return 128 - status if status < 0 else status
    failed = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["failed"]
    if failed:
        log.warning("%s failed: %s", folder, failed)
    return 0
