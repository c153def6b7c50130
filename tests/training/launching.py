"""Runs of the scripts as a user starts them: processes of their own, ended with the test whatever happens.

`launch` starts commands; `run_ranks` does what a launcher does, but forks a process that has imported
everything already, which spares seconds a test.
"""

import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from run_files import folder_of

from mlm.config.parse import dump_config

TRAIN = str(Path(__file__).parents[2] / "train.py")
ALONE = [sys.executable]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def torchrun(*options):
    address = ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    return [*TORCHRUN, "--nproc_per_node", "2", *address, *options]


def flags(config, *more):
    """The command line of a configuration: in a file, as a user would keep it."""
    path = Path(config.runs_dir).parent / f"{config.name}.yaml"
    path.write_text(dump_config(config))
    return [TRAIN, "--config", str(path), *more]


def inherited():
    """The environment, without the address of the tracker's process that belongs to the tests."""
    return {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}


@contextmanager
def started(command, environment=None):
    """A running command, what it prints, and the end of it and all it started."""
    with tempfile.TemporaryFile("w+") as output:
        run = subprocess.Popen(
            command,
            env=inherited() | {"OMP_NUM_THREADS": "1"} | (environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        run.output = output
        try:
            yield run
        finally:
            for process in [run.pid, *descendants(run.pid)]:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            run.wait()


def descendants(process):
    """All processes that one started, and those that these started."""
    listed = subprocess.run(["pgrep", "-P", str(process)], capture_output=True, text=True).stdout.split()
    return [found for child in map(int, listed) for found in (child, *descendants(child))]


def printed(run):
    run.output.seek(0)
    return run.output.read()


def finish(run, status=0, timeout=60):
    """Wait for the end and return what was printed."""
    with suppress(subprocess.TimeoutExpired):
        run.wait(timeout)
    assert run.returncode == status, printed(run)
    return printed(run)


def launch(command, environment=None, status=0, timeout=60):
    with started(command, environment) as run:
        return finish(run, status, timeout)


def launch_together(commands, environments, status=0):
    """Start several commands at once, as two machines would."""
    if not commands:
        return []
    with started(commands[0], environments[0]) as run:
        others = launch_together(commands[1:], environments[1:], status)
        return [finish(run, status), *others]


forks = multiprocessing.get_context("forkserver")
forks.set_forkserver_preload(["mlm.training.pretraining", "mlm.hub.families", "matplotlib.pyplot"])


def as_torchrun_says(world_size=2):
    """The variables that torchrun sets for the processes of one machine."""
    shared = {
        "TORCHELASTIC_RUN_ID": "test",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    return [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]


def _rank(arguments, environment, output):
    os.environ.clear()
    os.environ.update(environment)
    handle = os.open(output, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    torch.set_num_threads(1)
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


@contextmanager
def started_ranks(arguments, environments, output):
    """Running processes, one for each environment; all of them write to the file `output`."""
    processes = [
        forks.Process(target=_rank, args=(arguments, inherited() | environment, str(output)))
        for environment in environments
    ]
    try:
        for process in processes:
            process.start()
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.join()


def run_ranks(config, *more, environments=None, status=0, timeout=60):
    """Run train.py in two processes to its end, by default as torchrun would; return what they print."""
    output = Path(config.runs_dir).parent / f"{config.name}.log"
    output.unlink(missing_ok=True)
    with started_ranks(flags(config, *more), environments or as_torchrun_says(), output) as processes:
        for process in processes:
            process.join(timeout)
            assert process.exitcode is not None, f"hangs: {output.read_text()}"
    assert [process.exitcode for process in processes] == [status] * len(processes), output.read_text()
    return output.read_text()


def stopped_at(step, whole, **changes):
    """A run like one that was killed after the checkpoint of a step."""
    config = replace(whole, **{"name": f"{whole.name}-stopped"} | changes)
    shutil.copytree(folder_of(whole), folder_of(config))
    for path in (folder_of(config) / "checkpoints").iterdir():
        if path.name != f"step-{step:08d}.ckpt":
            path.unlink()
    (folder_of(config) / "summary.json").unlink()
    shutil.rmtree(folder_of(config) / "model")
    return config


def newest_step(config):
    return max((int(path.stem[-8:]) for path in folder_of(config).glob("checkpoints/step-*.ckpt")), default=0)


def wait_for(condition, run, timeout=60):
    deadline = time.monotonic() + timeout
    while not condition():
        assert run.poll() is None, printed(run)
        assert time.monotonic() < deadline, printed(run)
        time.sleep(0.02)
