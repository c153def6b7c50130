"""A run that was stopped, in whatever way and place, ends with the bits of one that never was.

The signals and kills are real. What has to die does so in a forked process, which shares the imports.
"""

import errno
import json
import os
import random
import resource
import shutil
import signal
import sys
import threading
import time
import traceback
import zipfile
from dataclasses import replace

import pytest
import torch
from launching import run_ranks, stopped_at
from run_files import assert_equal_weights, column, folder_of, metrics, weights

from mlm.config.data import MaskingConfig
from mlm.config.errors import InputError
from mlm.config.training import ScheduleConfig
from mlm.masking import mask_rate_at
from mlm.training.pretraining import prepare, pretrain, train
from mlm.training.run_folder import find_checkpoint, run_folder

MUON = {"name": "muon", "lr": 5e-3}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}
DATA = {"max_documents": 283}
ROWS = 459
BATCH = {"global_batch_size": ROWS // 3, "max_steps": 8, "val_every": 4, "save_every": 3}
"""Three steps a pass: the text is gone through at steps 3 and 6, the third pass has steps 7 and 8."""


def train_with(config, hook):
    """Run, with a hook that sees the model before each of its forward passes."""
    with run_folder(config) as folder:
        corpus, model = prepare(config)
        assert config.data.max_documents is None or len(corpus.train) == ROWS
        model.register_forward_pre_hook(hook)
        return train(config, folder, corpus, model)


def at_pass(number, act, training=True):
    """Return a hook that acts in one forward pass, counted from 1, of training or of validation."""
    count = iter(range(1, 10**6))

    def hook(model, inputs):
        if model.training == training and next(count) == number:
            act()

    return hook


def tensors_in(tree):
    """Return the tensors in nested lists and dictionaries, in their order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    values = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else []
    return [tensor for value in values for tensor in tensors_in(value)]


def assert_same_run(config, whole):
    for name in ("step", "tokens", "train/loss", "optim/lr", "optim/grad_norm", "val/loss"):
        assert column(config, name) == column(whole, name), name
    assert_equal_weights(weights(config), weights(whole))
    ends = [find_checkpoint(folder_of(one) / "checkpoints").content for one in (config, whole)]
    states = [tensors_in(end["optimizer_states"]) for end in ends]
    assert len(states[0]) > 10
    assert all(map(torch.equal, *states))
    assert not list((folder_of(config) / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("number", "step", "workers", "optimizer", "model", "micro"),
    [
        (signal.SIGTERM, 3, 0, None, {}, None),
        (signal.SIGUSR1, 6, 2, MUON, DROPOUT, 51),
        (signal.SIGINT, 7, 2, None, DROPOUT, None),
        (signal.SIGUSR1, 1, 0, MUON, {}, 51),
    ],
    ids=["SIGTERM-pass-end", "SIGUSR1-second-pass-end", "SIGINT-third-pass", "SIGUSR1-first-step"],
)
def test_signals(tiny, number, step, workers, optimizer, model, micro):
    parts = {"optimizer": optimizer, "model": model, "data": DATA | {"num_workers": workers}}
    trainer = BATCH | {"micro_batch_size": micro}
    whole, config = (tiny(name=name, trainer=trainer, **parts) for name in ("whole", "parts"))
    pretrain(whole)
    passes = 3 if micro else 1
    # In the middle of the step, of its passes too.
    hook = at_pass(step * passes - passes // 2, lambda: os.kill(os.getpid(), number))
    assert train_with(config, hook) == 128 + number
    assert find_checkpoint(folder_of(config) / "checkpoints").step == step
    assert pretrain(replace(config, resume=True)) == 0
    assert_same_run(config, whole)


def test_two_stops_one_after_the_other_and_several_runs_in_one_folder(tiny):
    whole, config = tiny(name="whole", trainer=BATCH, data=DATA), tiny(trainer=BATCH, data=DATA)
    pretrain(whole)
    stop = at_pass(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_with(config, stop) == 128 + signal.SIGTERM
    stop = at_pass(3, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_with(replace(config, resume=True), stop) == 128 + signal.SIGTERM
    assert find_checkpoint(folder_of(config) / "checkpoints").step == 5
    pretrain(replace(config, resume=True))
    assert_same_run(config, whole)


def in_child(work):
    """Do something in a forked process and return its exit code, negative after a signal."""
    child = os.fork()
    if child == 0:
        status = 99
        try:
            status = work()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_before_rename():
    """Die when the next checkpoint is written and still has its temporary name."""
    sys.addaudithook(
        lambda event, args: kill() if event == "os.rename" and ".step-" in str(args[0]) else None
    )


def die_in_the_middle_of_a_file():
    """Let the system end this process when it has written a third of a checkpoint."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


@pytest.mark.parametrize(
    ("number", "act", "training", "left", "workers"),
    [
        (5, kill, True, 3, 2),
        (2, kill, False, 3, 0),  # a validation is one pass: that after step 4
        pytest.param(6, kill_before_rename, True, 3, 2, marks=pytest.mark.slow),
        (6, die_in_the_middle_of_a_file, True, 3, 0),
        pytest.param(2, kill, True, None, 0, marks=pytest.mark.slow),
    ],
    ids=["step", "validation", "before-rename", "half-a-file", "before-any-checkpoint"],
)
def test_kills(tiny, number, act, training, left, workers):
    parts = {"trainer": BATCH, "data": DATA | {"num_workers": workers}}
    whole, config = tiny(name="whole", model=DROPOUT, **parts), tiny(model=DROPOUT, **parts)
    pretrain(whole)
    assert in_child(lambda: train_with(config, at_pass(number, act, training))) < 0
    folder = folder_of(config) / "checkpoints"
    assert bool(list(folder.glob(".step-00000006*"))) == (number == 6)
    found = find_checkpoint(folder)
    assert (found.step if found else None) == left
    assert pretrain(replace(config, resume=True)) == 0
    assert_same_run(config, whole)


def test_half_a_row_of_the_table_is_left_out(tiny):
    whole, config = tiny(name="whole"), tiny()
    pretrain(whole)
    assert train_with(config, at_pass(6, lambda: os.kill(os.getpid(), signal.SIGTERM))) > 0
    with (folder_of(config) / "metrics.csv").open("a") as file:
        file.write("1")
    pretrain(replace(config, resume=True))
    assert_same_run(config, whole)


def test_with_a_time_limit(tiny):
    """One that is not reached, so that the clock decides nothing."""
    trainer = {"max_steps": 30, "max_time": "1h", "val_every": 12}
    whole, config = (tiny(name=name, trainer=trainer, model=DROPOUT) for name in ("whole", "run"))
    pretrain(whole)
    stop = at_pass(17, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert train_with(config, stop) == 128 + signal.SIGTERM
    assert pretrain(replace(config, resume=True)) == 0
    assert_same_run(config, whole)


def test_another_micro_batch_goes_on_with_the_next_global_batch(tiny):
    whole, config = tiny(name="whole", trainer=BATCH, data=DATA), tiny(trainer=BATCH, data=DATA)
    pretrain(whole)
    assert train_with(config, at_pass(4, lambda: os.kill(os.getpid(), signal.SIGTERM))) > 0
    pretrain(replace(config, resume=True, trainer=replace(config.trainer, micro_batch_size=17)))
    assert column(config, "tokens") == column(whole, "tokens")
    assert column(config, "train/loss") == pytest.approx(column(whole, "train/loss"), abs=1e-5)
    assert_equal_weights(weights(config), weights(whole), atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize(
    ("first", "longer"),
    [
        ({"max_tokens": 1000}, lambda steps: {"max_tokens": 2000}),
        ({"max_time": "1s"}, lambda steps: {"max_steps": steps + 3, "max_time": "1h"}),
    ],
    ids=["tokens", "time"],
)
def test_a_run_with_another_bound_than_steps_can_be_made_longer(tiny, first, longer):
    masking = MaskingConfig(mask_rate=0.5, final_mask_rate=0.1)
    config = tiny(
        trainer={"max_steps": None, **first},
        model={"num_hidden_layers": 1},
        schedule=ScheduleConfig("constant"),
        masking=masking,
    )
    pretrain(config)
    steps = json.loads((folder_of(config) / "summary.json").read_text())["steps"]
    assert pretrain(replace(config, resume=True)) == 0  # the same bound: nothing to do
    assert json.loads((folder_of(config) / "summary.json").read_text())["steps"] == steps
    bounds = longer(steps)
    pretrain(replace(config, resume=True, trainer=replace(config.trainer, **bounds)))
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["steps"] > steps
    name, value = next(iter(bounds.items()))
    assert summary["stopped_by"] == f"trainer.{name}={value}"
    assert min(column(config, "optim/lr")[steps:]) > 0
    if name == "max_tokens":  # the mask rate goes on with the line of the new length
        line = [mask_rate_at(masking, step, 0, summary["steps"]) for step in range(steps, summary["steps"])]
        assert column(config, "masking/rate")[steps:] == pytest.approx(line, abs=0.06)


def test_a_run_stopped_between_validations_and_resumed_to_less_is_scored_as_it_is(tiny):
    often = tiny(name="often", trainer={"max_steps": 8, "val_every": 3, "save_every": 3})
    whole = replace(often, name="whole", trainer=replace(often.trainer, val_every=100))
    pretrain(often)
    pretrain(whole)
    config = stopped_at(6, whole)
    pretrain(replace(config, resume=True, trainer=replace(config.trainer, max_steps=4)))
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["val_loss"] == pytest.approx(column(often, "val/loss")[2], abs=1e-5)


@pytest.mark.parametrize("max_steps", [8, 5])
def test_a_step_that_is_reached_already_changes_nothing(tiny, caplog, max_steps):
    config = tiny()
    pretrain(config)
    asked = replace(config, resume=True, trainer=replace(config.trainer, max_steps=max_steps))
    before = {path: path.read_bytes() for path in folder_of(config).rglob("*") if path.is_file()}
    with caplog.at_level("INFO"):
        assert pretrain(asked) == 0
    assert f"nothing to do: step 8 was reached, and with it trainer.max_steps={max_steps}" in caplog.text
    assert {path: path.read_bytes() for path in folder_of(config).rglob("*") if path.is_file()} == before


def test_a_longer_run_goes_on_with_the_schedule_of_its_new_length(tiny):
    config = tiny(schedule=ScheduleConfig(name="linear", warmup_steps=0))
    pretrain(config)
    pretrain(replace(config, resume=True, trainer=replace(config.trainer, max_steps=16)))
    assert column(config, "optim/lr")[8:] == pytest.approx([5e-3 * (16 - step) / 16 for step in range(8, 16)])
    assert [int(row["step"]) for row in metrics(config)] == list(range(17))


@pytest.mark.slow
def test_another_number_of_processes_goes_on_with_the_next_global_batch(tiny):
    """Two processes for the first half, one for the second."""
    constant = {"schedule": ScheduleConfig("constant")}
    whole, config = (tiny(name=name, trainer={"max_steps": 8}, **constant) for name in ("whole", "run"))
    pretrain(whole)
    half = replace(config, trainer=replace(config.trainer, max_steps=4, devices=2))
    run_ranks(half, timeout=120)
    pretrain(replace(config, resume=True))
    for name in ("step", "tokens"):
        assert column(config, name) == column(whole, name)
    assert column(config, "train/loss") == pytest.approx(column(whole, "train/loss"), abs=1e-5)
    assert_equal_weights(weights(config), weights(whole), atol=1e-5, rtol=1e-3)


@pytest.mark.slow
def test_processes_with_a_time_limit_plan_and_stop_together(tiny):
    """Each has a clock of its own; one that stopped a step later would wait for ever."""
    limited = {"max_steps": None, "max_time": "2s", "val_every": 1000, "save_every": 1000, "devices": 2}
    config = tiny(trainer=limited)
    run_ranks(config, timeout=120)
    progress = find_checkpoint(folder_of(config) / "checkpoints").content["progress"]
    assert len(column(config, "step")) - 1 <= progress["planned_steps"]


@pytest.mark.slow
def test_fifty_random_kills_in_a_run_of_200_steps(tiny):
    trainer = {"max_steps": 200, "val_every": 7, "save_every": 2, "micro_batch_size": 4}
    parts = {"trainer": trainer, "optimizer": MUON, "model": DROPOUT, "data": {"num_workers": 0}}
    whole, config = tiny(name="whole", **parts), tiny(**parts)
    pretrain(whole)
    draw = random.Random(0)
    reached, started = [], time.monotonic()
    for number in range(50):
        found = find_checkpoint(folder_of(config) / "checkpoints")
        done = found.step if found else 0
        passes = max(2 * (3 * number - done) + draw.randint(1, 8), 1)
        delay = draw.uniform(0, 0.06)  # some three steps
        hook = at_pass(passes, lambda delay=delay: threading.Timer(delay, kill).start())
        start = replace(config, resume=number > 0)
        assert in_child(lambda start=start, hook=hook: train_with(start, hook)) == -signal.SIGKILL
        reached.append(done)
    print(f"50 kills at steps {reached}, {time.monotonic() - started:.0f} s")
    assert pretrain(replace(config, resume=True)) == 0
    assert_same_run(config, whole)


def test_a_finished_run_without_checkpoints_is_not_trained_over(tiny):
    config = tiny()
    pretrain(config)
    folder = folder_of(config)
    shutil.rmtree(folder / "checkpoints")
    before = (folder / "model" / "model.safetensors").read_bytes()
    with pytest.raises(InputError, match=r"checkpoints are gone.*--init"):
        pretrain(replace(config, resume=True))
    assert (folder / "model" / "model.safetensors").read_bytes() == before
    assert (folder / "summary.json").exists()


def test_a_damaged_table_of_metrics_is_named(tiny):
    config = tiny(trainer={"max_steps": 4})
    pretrain(config)
    with (folder_of(config) / "metrics.csv").open("a") as file:
        file.write("garbage\n\0\n")
    with pytest.raises(InputError, match=r"metrics\.csv is damaged"):
        pretrain(replace(config, resume=True, trainer=replace(config.trainer, max_steps=8)))


def test_a_run_whose_start_is_gone_resumes_to_the_bit(tiny, tmp_path):
    pretrain(tiny(name="base"))
    start = tmp_path / "start"
    shutil.copytree(folder_of(tiny(name="base")) / "model", start)
    whole = tiny(name="whole", init=str(start))
    pretrain(whole)
    stopped = stopped_at(4, whole)
    shutil.rmtree(start)
    assert pretrain(replace(stopped, resume=True)) == 0
    assert_equal_weights(weights(stopped), weights(whole))
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        files = [folder_of(one) / "model" / name for one in (whole, stopped)]
        assert files[0].read_text() == files[1].read_text()


@pytest.mark.parametrize("error", [errno.EIO, errno.ESTALE])
def test_a_checkpoint_that_cannot_be_read_is_kept_and_no_run_starts_at_0(tiny, monkeypatch, error):
    whole = tiny()
    pretrain(whole)
    config = stopped_at(4, whole)
    table = (folder_of(config) / "metrics.csv").read_text()

    def fail(path, *arguments, **options):
        raise OSError(error, os.strerror(error), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(zipfile, "ZipFile", fail)
        with pytest.raises(InputError, match=r"step-00000004.ckpt cannot be read"):
            pretrain(replace(config, resume=True))
    assert (folder_of(config) / "checkpoints" / "step-00000004.ckpt").exists()
    assert (folder_of(config) / "metrics.csv").read_text() == table
    assert pretrain(replace(config, resume=True)) == 0
    assert_equal_weights(weights(config), weights(whole))


def test_damaged_checkpoints_do_not_start_a_run_at_0(tiny):
    whole = tiny()
    pretrain(whole)
    config = stopped_at(4, whole)
    table = (folder_of(config) / "metrics.csv").read_text()
    (folder_of(config) / "checkpoints" / "step-00000004.ckpt").write_bytes(b"junk")
    for _ in range(2):  # the second time the file has another name already
        with pytest.raises(InputError, match=r"all checkpoints of .* are damaged"):
            pretrain(replace(config, resume=True))
    assert (folder_of(config) / "metrics.csv").read_text() == table
