import pytest

from mlm.config.errors import InputError
from mlm.config.training import TrainerConfig
from mlm.launch import Launch, command_for, is_first_process, launched
from mlm.startup.checks import check_launch

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "RANK": "5",
    "LOCAL_RANK": "1",
}
SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "6",
    "SLURM_NNODES": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}
BATCH = {"SLURM_NTASKS": "1", "SLURM_NNODES": "1", "SLURM_PROCID": "0"}


@pytest.fixture
def environment(monkeypatch):
    def put(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, None),
        (TORCHRUN, Launch("torchrun", 4, 2)),
        (SRUN, Launch("srun", 2, 3)),
        (SRUN | TORCHRUN, Launch("torchrun", 4, 2)),
        (BATCH, None),
    ],
)
def test_who_started_how_many(environment, variables, launch):
    environment(variables)
    assert launched() == launch


@pytest.mark.parametrize(
    ("variables", "first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "1"}, False),
        ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False),
        ({"SLURM_PROCID": "1"}, False),
        ({"RANK": "0", "LOCAL_RANK": "0", "SLURM_PROCID": "1"}, True),  # torchrun numbers nodes as it likes
        (TORCHRUN, False),
    ],
)
def test_which_process_is_the_first(environment, variables, first):
    environment(variables)
    assert is_first_process() is first


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"devices": 8}, r"trainer.devices=8 but torchrun started 4 process\(es\) a node; leave it out"),
        ({"num_nodes": 1}, r"trainer.num_nodes=1 but torchrun started 2 node\(s\)"),
        ({"global_batch_size": 12}, r"global_batch_size=12 must be a multiple of 8 device"),
    ],
)
def test_what_contradicts_the_launcher_is_refused(environment, asked, message):
    trainer = TrainerConfig(**asked)
    check_launch(trainer)
    environment(TORCHRUN)
    with pytest.raises(InputError, match=message):
        check_launch(trainer)
    check_launch(TrainerConfig(devices=4, num_nodes=2))


def test_uneven_tasks_are_refused(environment):
    environment(SRUN | {"SLURM_NTASKS": "7"})
    with pytest.raises(InputError, match="SLURM_NTASKS=7 is not the same on each of 3 nodes"):
        launched()


@pytest.mark.parametrize(
    ("started", "expected"),
    [
        ("/home/me/mlm/train.py", "python finetune.py"),
        ("finetune.py", "python finetune.py"),
        ("/opt/venv/bin/mlm", "mlm finetune"),
        ("/opt/venv/lib/mlm/__main__.py", "mlm finetune"),
    ],
)
def test_commands_are_told_as_this_one_was_started(monkeypatch, started, expected):
    monkeypatch.setattr("sys.argv", [started, "--name", "train.py"])
    assert command_for("finetune.py") == expected
