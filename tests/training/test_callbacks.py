"""Steps that are skipped, and checkpoints that are kept."""

import json
import math
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from run_files import assert_equal_weights, column, folder_of, weights

from mlm.config.errors import InputError
from mlm.config.parse import dump_config
from mlm.config.training import ScheduleConfig
from mlm.cores import available_cores, busy_seconds, cores_to_run_on
from mlm.data.sampler import TrainingSampler
from mlm.training import machine
from mlm.training.callbacks import SYNC_EVERY, steps_until_next_sync
from mlm.training.pretraining import prepare, pretrain, train
from mlm.training.run_folder import checkpoint_path, checkpoint_step, find_checkpoint, run_folder

MUON = {"name": "muon", "lr": 5e-3}


def run_with_broken_gradients(config, passes, value=math.nan):
    """Train; in these backward passes, counted from 1, the gradient of one weight is `value`."""
    with run_folder(config) as folder:
        corpus, model = prepare(config)
        count = iter(range(1, 10_000))

        def spoil(gradient):
            return torch.full_like(gradient, value) if next(count) in passes else gradient

        model.encoder.layers[0].attention.output.weight.register_hook(spoil)
        assert train(config, folder, corpus, model) == 0
        return corpus


def saved(config, step):
    return torch.load(checkpoint_path(folder_of(config) / "checkpoints", step), weights_only=True)


def flat(optimizer_state):
    """Return every tensor of an optimizer's state."""
    parts = optimizer_state.get("optimizers", [optimizer_state])
    return [t for part in parts for state in part["state"].values() for t in state.values()]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("optimizer", [None, MUON], ids=["adamw", "muon"])
def test_a_step_without_a_finite_gradient_changes_nothing_and_is_told(tiny, optimizer, value, caplog):
    trainer = {"max_steps": 2, "save_every": 1, "micro_batch_size": 4}
    config = tiny(optimizer=optimizer, trainer=trainer, schedule=ScheduleConfig(name="constant"))
    corpus = run_with_broken_gradients(config, passes={4}, value=value)
    before, after = (saved(config, step) for step in (1, 2))
    for name, tensor in before["state_dict"].items():
        assert torch.equal(tensor, after["state_dict"][name]), name
    states = [flat(checkpoint["optimizer_states"][0]) for checkpoint in (before, after)]
    assert len(states[0]) == len(states[1]) > 10
    assert all(map(torch.equal, *states))
    assert (after["progress"]["rows"], after["progress"]["skipped"]) == (16, 1)
    assert column(config, "optim/skipped") == [0, 1]
    assert json.loads((folder_of(config) / "summary.json").read_text())["skipped_steps"] == 1
    rows = TrainingSampler(len(corpus.train), config.seed, 8, 8).rows(np.arange(8, 16)).rows
    told = "step 2 skipped: its loss or gradient is not finite (learning rate 0.005, rows "
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [told + " ".join(map(str, rows)) + ")"]


def test_training_goes_on_after_a_skipped_step(tiny):
    config = tiny()
    run_with_broken_gradients(config, passes={1, 2, 5})
    assert column(config, "optim/skipped") == [1, 1, 0, 0, 1, 0, 0, 0]
    whole = tiny(name="whole")
    pretrain(whole)
    assert column(config, "optim/lr") == column(whole, "optim/lr")
    assert all(tensor.isfinite().all() for tensor in weights(config).values())
    assert column(config, "val/loss")[-1] < column(config, "val/loss")[0]


def test_too_many_in_a_row_end_the_run_and_the_good_checkpoint_is_named(tiny):
    config = tiny(trainer={"save_every": 1, "max_skipped_steps": 3})
    good = checkpoint_path(folder_of(config) / "checkpoints", 3)
    with pytest.raises(InputError, match=rf"3 steps in a row, 5 to 7 \(learning rate .*point, {good}$"):
        run_with_broken_gradients(config, passes={5, 6, 7})
    # The weights of step 4 may be why, and none were saved while nobody knew.
    assert find_checkpoint(good.parent).path == good
    assert (good.parent / "step-00000004.ckpt.broken").exists()
    assert column(config, "optim/skipped") == [0, 0, 0, 0, 1, 1, 1]
    assert pretrain(replace(config, resume=True)) == 0  # this time without the spoiled gradients
    whole = tiny(name="whole")
    pretrain(whole)
    assert_equal_weights(weights(config), weights(whole))
    assert column(config, "train/loss") == column(whole, "train/loss")


def test_without_a_checkpoint_the_message_says_so(tiny):
    config = tiny(optimizer={"lr": 1e30, "clip_norm": 0.0}, trainer={"max_steps": 20, "save_every": 2})
    with pytest.raises(InputError, match=r"10 steps in a row, 2 to 11 .*no checkpoint is good"):
        pretrain(config)
    assert not list((folder_of(config) / "checkpoints").glob("step-*.ckpt"))


def steps_kept(config):
    return [checkpoint_step(path) for path in sorted((folder_of(config) / "checkpoints").glob("*.ckpt"))]


def test_the_newest_the_best_and_every_so_many_are_kept(tiny):
    trainer = {"max_steps": 11, "val_every": 1, "save_every": 3, "keep_best": 2, "keep_every": 5}
    # The rate is so low that no weight moves: of equal losses the first are the best.
    config = tiny(trainer=trainer, optimizer={"lr": 1e-12})
    pretrain(config)
    losses = dict(zip(range(12), column(config, "val/loss"), strict=True))
    best = sorted(range(1, 12), key=losses.__getitem__)[:2]
    assert steps_kept(config) == sorted({5, 10, 11, *best})
    assert best == [1, 2]
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert [entry["step"] for entry in summary["best"]] == best
    for step in best:
        assert saved(config, step)["progress"]["last"]["loss"] == pytest.approx(losses[step], rel=1e-6)


def test_a_validation_that_is_no_number_is_never_best(tiny):
    config = tiny(trainer={"max_steps": 4, "val_every": 1, "save_every": 2, "keep_best": 4})
    with run_folder(config) as folder:
        corpus, model = prepare(config)
        batches = sum(1 for _ in range(0, len(corpus.validation), 8))
        count = iter(range(10_000))

        def spoil(model, inputs, logits):
            return logits if model.training or next(count) // batches != 2 else logits * math.nan

        model.register_forward_hook(spoil)
        train(config, folder, corpus, model)
    losses = column(config, "val/loss")
    assert [math.isfinite(loss) for loss in losses] == [True, True, False, True, True]
    best = json.loads((folder / "summary.json").read_text())["best"]
    assert sorted(entry["step"] for entry in best) == [1, 3, 4]


def test_the_last_step_is_saved_and_names_agree_with_content(tiny):
    config = tiny(trainer={"max_steps": 25, "save_every": 10, "keep_every": 10, "val_every": 100})
    pretrain(config)
    assert steps_kept(config) == [10, 20, 25]
    for step in steps_kept(config):
        checkpoint = saved(config, step)
        assert checkpoint["global_step"] == step == checkpoint["progress"]["rows"] / 8
        (state,) = checkpoint["optimizer_states"]
        assert {float(one["step"]) for one in state["state"].values()} == {step}


def run_on_a_full_disk(config, steps, size):
    """Train; while these steps run, no file may grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    step = iter(range(1, 1000))

    def limit(model, inputs):
        if model.training:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size if next(step) in steps else soft, hard))

    with run_folder(config) as folder:
        corpus, model = prepare(config)
        model.register_forward_pre_hook(limit)
        try:
            return train(config, folder, corpus, model)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [20_000, 200], ids=["checkpoints", "checkpoints-and-table"])
def test_a_full_disk_does_not_end_the_run(tiny, size, caplog):
    whole, config = tiny(name="whole"), tiny(trainer={"save_every": 1, "keep_every": 1})
    pretrain(whole)
    caplog.clear()
    assert run_on_a_full_disk(config, {3, 4}, size) == 0
    told = [record.getMessage() for record in caplog.records if "checkpoints" in record.getMessage()]
    assert len(told) == 2
    assert re.search(
        r"cannot save .*step-00000003.ckpt: File too large; earlier checkpoints are kept", told[0]
    )
    assert steps_kept(config) == [1, 2, 5, 6, 7, 8]
    assert not list((folder_of(config) / "checkpoints").glob(".*"))
    assert_equal_weights(weights(config), weights(whole))
    assert column(config, "step") == list(range(9))


def test_a_disk_that_is_full_at_the_end_is_an_error_and_the_run_can_be_finished(tiny):
    whole, config = tiny(name="whole"), tiny()
    pretrain(whole)
    with pytest.raises(InputError, match=r"File too large.*free some space, then continue with.*--resume"):
        run_on_a_full_disk(config, {8}, 20_000)
    assert steps_kept(config) == [4]
    assert pretrain(replace(config, resume=True)) == 0
    assert_equal_weights(weights(config), weights(whole))
    assert column(config, "step") == list(range(9))


SPOILED_ON_RANK_1 = """
import os, sys
import torch
from mlm.config.commands import PretrainConfig
from mlm.startup.command import log_to_stderr, one_line_errors, parse_config
from mlm.training.pretraining import prepare, train
from mlm.training.processes import join_processes, start_processes
from mlm.training.run_folder import run_folder

if __name__ == "__main__":
    config = parse_config(PretrainConfig, prog="launch")
    log_to_stderr()
    status = start_processes(config.trainer, config.name)
    if status is not None:
        sys.exit(status)
    join_processes(config.trainer)
    with one_line_errors("launch"), run_folder(config) as folder:
        corpus, model = prepare(config)
        step = iter(range(1, 100))
        bad = set(eval(os.environ["BAD_STEPS"])) if os.environ.get("LOCAL_RANK") == "1" else set()
        spoil = lambda gradient: gradient * float("nan") if next(step) in bad else gradient
        model.encoder.layers[0].attention.output.weight.register_hook(spoil)
        status = train(config, folder, corpus, model)
    sys.exit(status)
"""


def test_gpus_ask_each_other_for_the_time_once_a_second_and_soon_where_steps_are_slow():
    assert steps_until_next_sync(1, 30.0) == steps_until_next_sync(1, 0.9) == 1
    assert steps_until_next_sync(10, 2.0) == steps_until_next_sync(1, 0.2) == 5
    assert steps_until_next_sync(10, 0.01) == steps_until_next_sync(1, 0.0) == SYNC_EVERY


@pytest.mark.skipif(available_cores() < 2 or busy_seconds() is None, reason="one thread waits for no other")
@pytest.mark.parametrize(("waiting", "times"), [(None, 1), ("passive", 0)])
def test_programs_on_our_cores_are_told_once_unless_the_user_knows(tiny, monkeypatch, caplog, waiting, times):
    monkeypatch.setattr(machine, "CHECK_EVERY_S", 0.05)  # many checks in a run of 400 steps or 8 s
    monkeypatch.delenv(machine.WAIT_POLICY, raising=False)
    if waiting:
        monkeypatch.setenv(machine.WAIT_POLICY, waiting)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")  # else runs before this one decide
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(cores_to_run_on())]
    try:
        pretrain(tiny(trainer={"max_steps": 400, "max_time": "8s"}))
    finally:
        for other in others:
            other.kill()
            other.wait()
        torch.set_num_threads(threads)
    assert caplog.text.count("other programs use") == times


@pytest.mark.slow
@pytest.mark.parametrize(("bad", "status"), [("[3]", 0), ("[3, 4]", 2)])
def test_ranks_agree_on_skipping_and_on_stopping(tiny, tmp_path, bad, status):
    """Only the second of two processes has the NaN."""
    (tmp_path / "run.yaml").write_text(
        dump_config(tiny(trainer={"devices": 2, "max_skipped_steps": 2, "save_every": 1}))
    )
    script = tmp_path / "launch.py"
    script.write_text(SPOILED_ON_RANK_1)
    run = subprocess.run(
        [sys.executable, str(script), "--config", str(tmp_path / "run.yaml")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "BAD_STEPS": bad},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == status, run.stderr
    assert "step 3 skipped" in run.stderr
    assert ("step-00000001.ckpt" in run.stderr) == (status == 2)
    whole = tiny()
    flags = column(whole, "optim/skipped")
    assert flags[:4] == [0, 0, 1, int(status == 2)]
    if status == 0:
        assert all(tensor.isfinite().all() for tensor in weights(whole).values())
