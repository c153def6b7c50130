"""Several processes give the run that one process gives, whoever starts them."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import (
    ALONE,
    TRAIN,
    as_torchrun_says,
    finish,
    flags,
    free_port,
    inherited,
    launch,
    launch_together,
    newest_step,
    run_ranks,
    started,
    started_ranks,
    stopped_at,
    torchrun,
    wait_for,
)
from run_files import assert_equal_weights, column, folder_of, weights
from safetensors.torch import load_file

from mlm.config.data import SourceConfig
from mlm.config.training import LoggingConfig
from mlm.cores import available_cores
from mlm.training.pretraining import pretrain

MUON = {"name": "muon", "lr": 5e-3}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}
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


TELLS_THREADS = """
import sys, torch
from mlm.config.commands import PretrainConfig
from mlm.startup.command import parse_config
from mlm.training.pretraining import PretrainModule, pretrain

def tell(self):
    sys.stderr.write(f"threads: {torch.get_num_threads()}\\n")

PretrainModule.on_train_start = tell
sys.exit(pretrain(parse_config(PretrainConfig, prog="tells")))
"""


@pytest.mark.slow
def test_processes_that_we_start_share_the_cores(tiny, tmp_path):
    (script := tmp_path / "tells.py").write_text(TELLS_THREADS)
    _, *options = flags(tiny(trainer={"max_steps": 1, "devices": 2}))
    run = subprocess.run(
        [*ALONE, str(script), *options],
        env={name: value for name, value in inherited().items() if name != "OMP_NUM_THREADS"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("threads: ") == 2
    assert run.stderr.count(f"threads: {max(available_cores() // 2, 1)}\n") == 2


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


def test_muon_gets_the_same_gradients(tiny):
    """After one step its momentum is a fixed share of the gradient."""
    once = {"max_steps": 1, "val_every": 1, "save_every": 1}
    configs = [tiny(name=name, optimizer=MUON, trainer=once) for name in ("alone", "both")]
    pretrain(configs[0])
    run_ranks(configs[1])
    states = [
        torch.load(folder_of(config) / "checkpoints" / "step-00000001.ckpt", weights_only=True)
        for config in configs
    ]
    momenta = [
        [entry.get("momentum_buffer", entry.get("exp_avg")) for entry in part["state"].values()]
        for state in states
        for part in state["optimizer_states"][0]["optimizers"]
    ]
    assert len(momenta) == 4
    for one, two in zip(momenta[:2], momenta[2:], strict=True):
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_muon_trains_alike(tiny):
    """Its Newton-Schulz iteration rounds to bfloat16, so that weights differ a little more."""
    configs = [tiny(name=name, optimizer=MUON, trainer=STEPS) for name in ("alone", "both")]
    pretrain(configs[0])
    run_ranks(configs[1])
    for name in ("train/loss", "val/loss"):
        assert column(configs[1], name) == pytest.approx(column(configs[0], name), abs=1e-2)


@pytest.mark.parametrize("optimizer", [None, MUON])
def test_two_processes_resume_bit_for_bit(tiny, optimizer):
    whole = tiny(name="whole", optimizer=optimizer, model=DROPOUT, trainer={"micro_batch_size": 2})
    run_ranks(whole)
    parts = stopped_at(4, whole)
    run_ranks(parts, "--resume")
    for name in ("step", "tokens", "train/loss", "val/loss", "optim/lr", "optim/grad_norm"):
        assert column(parts, name) == column(whole, name), name
    assert_equal_weights(weights(parts), weights(whole))


def test_another_number_of_processes_goes_on_with_the_next_batch(tiny):
    """From one to two and from two to one with smaller passes: the losses of the run that never changed."""
    whole = tiny(name="alone")
    pretrain(whole)
    both = stopped_at(4, whole)
    run_ranks(both, "--resume")
    back = stopped_at(4, both, trainer=replace(both.trainer, micro_batch_size=1), resume=True)
    pretrain(back)
    for config in (both, back):
        for name in ("train/loss", "val/loss"):
            assert column(config, name) == pytest.approx(column(whole, name), abs=1e-5)
        assert column(config, "tokens") == column(whole, "tokens")
        assert_equal_weights(weights(config), weights(whole), atol=1e-5, rtol=1e-4)


def test_uneven_shares_do_not_hang(tiny, tmp_path, documents):
    """Five documents, one row a pass: one process has more held-out rows than the other."""
    path = tmp_path / "five.txt"
    path.write_text("\n".join(documents[:5]))
    data = {"sources": [SourceConfig(str(path))], "validation_fraction": 0.5}
    steps = {"max_steps": 6, "global_batch_size": 2, "micro_batch_size": 1, "val_every": 2}
    configs = [tiny(name=name, data=data, trainer=steps) for name in ("alone", "both")]
    pretrain(configs[0])
    run_ranks(configs[1])
    for name in ("step", "val/loss", "val/masked_accuracy"):
        assert column(configs[1], name) == pytest.approx(column(configs[0], name), abs=1e-5)


def test_only_the_first_process_writes(tiny):
    config = tiny()
    output = run_ranks(config)
    assert column(config, "step") == list(range(9))
    assert output.count("fill-mask") == 1
    assert output.count("rows of 32") == 2  # training and validation, told once each
    assert not list(Path.cwd().glob("lightning_logs"))


def test_a_mistake_of_all_is_told_once(tiny):
    config = tiny(data={"sources": [SourceConfig("nowhere.txt")]})
    output = Path(config.runs_dir).parent / "log"
    with started_ranks(flags(config), as_torchrun_says(), output) as (first, second):
        first.join(60)
        assert first.exitcode == 2
        second.join(1)
        assert second.exitcode is None  # torchrun ends it now, as the first one failed
    assert output.read_text().count("error:") == output.read_text().count("\n") == 1


def test_a_mistake_of_another_process_is_told_too(tiny):
    config = tiny(logging=LoggingConfig())
    output = Path(config.runs_dir).parent / "log"
    first, second = as_torchrun_says()
    with started_ranks(flags(config), [first, second | {"WANDB_MODE": "nonsense"}], output) as ranks:
        ranks[1].join(60)
        assert ranks[1].exitcode == 2
    assert output.read_text().count("error: WANDB_MODE=nonsense") == 1


@pytest.mark.slow
def test_torchrun_restarts_after_a_kill(tiny):
    """One worker is killed twice; both begin again at the last checkpoint, and nothing shows in the end."""
    steps = {"max_steps": 300, "save_every": 10, "val_every": 300}
    whole, killed = (
        tiny(name=name, optimizer=MUON, trainer=steps, model=DROPOUT) for name in ("whole", "killed")
    )
    launch([*torchrun(), *flags(whole)])
    command = [*torchrun("--max-restarts", "3"), *flags(killed, "--resume", "auto")]
    with started(command) as run:
        for step in (50, 150):
            wait_for(lambda step=step: newest_step(killed) >= step, run)
            os.kill(workers(run)[-1], signal.SIGKILL)
        finish(run)
    assert column(killed, "step") == list(range(301))
    assert column(killed, "train/loss") == column(whole, "train/loss")
    assert_equal_weights(weights(killed), weights(whole))


@pytest.mark.slow
def test_a_killed_process_ends_the_others(tiny):
    config = tiny(trainer={"max_steps": 10_000, "devices": 2})
    with started([*ALONE, *flags(config)]) as run:
        wait_for(lambda: newest_step(config) >= 4, run)
        os.kill(workers(run)[-1], signal.SIGKILL)
        assert "ended by signal 9; go on with --resume" in finish(run, status=1, timeout=30)


def workers(run):
    """The processes of a run, in the order of their start, without its helpers."""
    children = subprocess.run(["pgrep", "-P", str(run.pid), "-f", "train.py"], capture_output=True, text=True)
    return [int(line) for line in children.stdout.split()]


LABELLED = "text,label\n" + "".join(f"the keeper {n % 2} waits for {n},{n % 2}\n" for n in range(90))


def fine_tuned(tmp_path, encoder, name, *words):
    """The command line of a fine-tuning run without dropout."""
    (tmp_path / "table.csv").write_text(LABELLED)
    script = str(Path(TRAIN).with_name("finetune.py"))
    options = {
        "model": encoder,
        "data.train": tmp_path / "table.csv",
        "head.dropout": 0,
        "trainer.precision": "32-true",
        "trainer.batch_size": 8,
        "trainer.max_epochs": 2,
        "runs_dir": tmp_path / "runs",
        "logging.wandb": "disabled",
        "name": name,
    }
    return [script, *(f"--{key}={value}" for key, value in options.items()), *words]


def fine_tuned_weights(tmp_path, name):
    return load_file(tmp_path / "runs" / name / "model" / "model.safetensors")


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=pytest.mark.slow)])
def test_fine_tuning_on_two_processes_equals_one(tiny, alone, tmp_path, strategy):
    encoder, two = folder_of(alone) / "model", ("--trainer.devices=2", f"--trainer.strategy={strategy}")
    launch([*ALONE, *fine_tuned(tmp_path, encoder, "one")])
    launch([*ALONE, *fine_tuned(tmp_path, encoder, "two", *two)])
    assert_equal_weights(
        *(fine_tuned_weights(tmp_path, name) for name in ("two", "one")), atol=1e-5, rtol=1e-4
    )
    one, two = (
        json.loads((tmp_path / "runs" / name / "summary.json").read_text()) for name in ("one", "two")
    )
    assert one["metrics"]["accuracy"] == two["metrics"]["accuracy"]  # areas hang on the order of near ties
    assert one["val_loss"] == pytest.approx(two["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_fine_tuning_on_two_processes_resumes_to_the_bit_after_a_kill(tiny, alone, tmp_path):
    encoder, more = folder_of(alone) / "model", ("--trainer.devices=2", "--trainer.save_every=1")
    launch([*ALONE, *fine_tuned(tmp_path, encoder, "whole", *more)])
    folder = tmp_path / "runs" / "killed"
    with started([*ALONE, *fine_tuned(tmp_path, encoder, "killed", *more)]) as run:
        wait_for(lambda: len(list(folder.glob("checkpoints/step-*.ckpt"))) > 1, run)
        run.kill()
    launch([*ALONE, *fine_tuned(tmp_path, encoder, "killed", *more, "--resume")])
    assert_equal_weights(*(fine_tuned_weights(tmp_path, name) for name in ("whole", "killed")))
