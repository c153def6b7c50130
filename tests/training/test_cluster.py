"""The job script, with stand-ins for what SLURM brings."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "configs" / "cluster" / "pretrain.sbatch"
SRUN = """#!/bin/bash
echo "$@" > {folder}/arguments
trap 'exit 138' USR1
trap 'exit 143' TERM
touch {folder}/started
for _ in $(seq 600); do sleep 0.05; [ -e {folder}/end ] && exit $(cat {folder}/end); done
"""
SCONTROL = """#!/bin/bash
echo "$@" >> {folder}/requeued
"""


@pytest.mark.parametrize(
    ("event", "status", "requeued"),
    [(signal.SIGUSR1, 138, True), (signal.SIGTERM, 143, False), ("0", 0, False), ("2", 2, False)],
)
def test_the_job_goes_back_to_the_queue_only_when_its_time_is_up(tmp_path, event, status, requeued):
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        path = tmp_path / name
        path.write_text(text.format(folder=tmp_path))
        path.chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NAME": "mine",
        "SLURM_JOB_ID": "4711",
    }
    job = subprocess.Popen(["bash", str(SCRIPT), "--config", "bert-base"], env=os.environ | environment)
    try:
        deadline = time.monotonic() + 20
        while not (tmp_path / "started").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        if isinstance(event, str):
            (tmp_path / "end").write_text(event)
        else:
            job.send_signal(event)
        assert job.wait(20) == status
    finally:
        job.kill()
    words = (tmp_path / "arguments").read_text()
    assert "python train.py --name mine --resume auto --config bert-base" in words
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 4711\n"
