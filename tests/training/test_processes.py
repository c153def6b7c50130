"""Several processes give the run that one process gives, whoever starts them."""

import pytest
from launching import (
    ALONE,
    assert_equal_weights,
    column,
    flags,
    free_port,
    launch,
    launch_together,
    run_ranks,
    torchrun,
    weights,
)

from mlm.training.pretraining import pretrain

STEPS = {"max_steps": 20, "val_every": 10, "save_every": 10}


@pytest.fixture
def alone(tiny):
    config = tiny(name="alone", trainer=STEPS)
    pretrain(config)
    return config


def assert_same_run(config, alone):
    """AdamW without dropout at the same global batch: losses and weights, whoever computes them."""
    for name in ("train/loss", "val/loss", "val/masked_accuracy"):
        assert column(config, name) == pytest.approx(column(alone, name), abs=1e-5)
    assert column(config, "tokens") == column(alone, "tokens")
    assert column(config, "step") == list(range(21))
    assert_equal_weights(weights(config), weights(alone), atol=1e-5, rtol=1e-4)


def test_the_plain_script_starts_the_processes_itself(tiny, alone):
    config = tiny(name="plain", trainer=STEPS | {"devices": 2})
    output = launch([*ALONE, *flags(config)])
    assert output.count("fill-mask") == 1  # the closing message, of the first process
    assert_same_run(config, alone)


def test_torchrun_says_how_many_there_are(tiny, alone):
    config = tiny(name="torchrun", trainer=STEPS)
    run_ranks(config)
    assert_same_run(config, alone)


def test_tasks_of_slurm(tiny, alone):
    """The variables that srun sets for two tasks on one node."""
    config = tiny(name="slurm", trainer=STEPS)
    job = {
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NAME": "pretrain",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "localhost",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    tasks = [job | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    run_ranks(config, environments=tasks)
    assert_same_run(config, alone)


@pytest.mark.slow
def test_two_nodes_under_torchrun(tiny, alone):
    config = tiny(name="nodes", trainer=STEPS | {"micro_batch_size": 2})
    nodes = torchrun("--nnodes", "2", "--nproc_per_node", "1")
    launch_together([[*nodes, "--node_rank", rank, *flags(config)] for rank in "01"], [{}, {}])
    assert_same_run(config, alone)
