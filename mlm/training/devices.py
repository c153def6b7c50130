"""Many runs on several GPUs: each is a process that sees one of them."""

from __future__ import annotations

import logging
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import torch

from mlm.config.finetune import FinetuneConfig
from mlm.config.parse import dump_config
from mlm.files import write_text
from mlm.training.trainer import resolve_accelerator

USER_ERROR = 2
"""Exit status of a process that told the user what to change."""
ERROR = ": error: "
"""What stands before that."""

log = logging.getLogger(__name__)


def visible_devices(config: FinetuneConfig) -> list[str]:
    """Return the GPUs a run may use, as CUDA_VISIBLE_DEVICES names them; none where it runs elsewhere."""
    if resolve_accelerator(config.trainer.on_one_device(1)) != "gpu":
        return []
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(number) for number in range(torch.cuda.device_count())]


def run_on_devices(
    runs: Sequence[FinetuneConfig], devices: Sequence[str], fail: Callable[[FinetuneConfig, str], None]
) -> int:
    """Do runs in parallel, one on each device at a time; return 0 or the first other exit status.

    Args:
        runs: they are independent of each other. What one prints goes into a file beside its folder.
        devices: as `visible_devices` names them.
        fail: is told of a run that ended with a user's mistake, and its message; the others go on.
    """
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for device in devices:
        free.put(device)
    running: list[subprocess.Popen[bytes]] = []
    ended: list[int] = []

    def run_one(run: FinetuneConfig) -> None:
        device = free.get()
        try:
            if not any(ended):
                ended.append(_run_process(run, device, running, fail))
        finally:
            free.put(device)

    # Without it a SIGTERM would end this process alone, and leave the others running.
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        with ThreadPoolExecutor(len(devices)) as pool:
            try:
                list(pool.map(run_one, runs))
            except BaseException:
                ended.append(1)
                for process in running:
                    process.terminate()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)
    return next((status for status in ended if status), 0)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _run_process(
    run: FinetuneConfig,
    device: str,
    running: list[subprocess.Popen[bytes]],
    fail: Callable[[FinetuneConfig, str], None],
) -> int:
    folder = Path(run.runs_dir)
    folder.mkdir(parents=True, exist_ok=True)
    settings, output = folder / f"{run.name}.yaml", folder / f"{run.name}.log"
    write_text(settings, dump_config(run))
    log.info("%s/%s on device %s; output: %s", folder, run.name, device, output)
    with output.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlm", "finetune", "--config", str(settings)],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": device},
        )
        running.append(process)
        status = process.wait()
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() or ["no output"]
    told = next((line for line in reversed(lines) if ERROR in line), lines[-1]).rpartition(ERROR)[2]
    if status == USER_ERROR:
        log.warning("%s/%s failed: %s", folder, run.name, told)
        fail(run, told)
        return 0
    if status:
        log.error("%s/%s ended with status %d: %s", folder, run.name, status, told)
    return 128 - status if status < 0 else status
