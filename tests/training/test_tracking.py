"""Weights & Biases: never a prompt, never a wait, never the end of a run."""

import os
import shlex
import subprocess
import sys
import time
from dataclasses import replace

import pytest
from launching import ALONE, flags, launch, newest_step, run_ranks, started, wait_for
from read_wandb import read, records
from run_files import folder_of

from mlm.config.commands import PretrainConfig
from mlm.config.errors import InputError
from mlm.config.training import LoggingConfig
from mlm.startup.command import parse_config
from mlm.training.pretraining import pretrain
from mlm.training.tracking import resolve_tracking, tracked_step

NOWHERE = "http://127.0.0.1:9"  # the discard port: connections are refused


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_plain_wish_is_taken_as_it_is(mode):
    assert resolve_tracking(LoggingConfig(wandb=mode)).wandb == mode


@pytest.mark.parametrize(
    ("variables", "configured", "expected"),
    [
        ({"WANDB_MODE": "disabled"}, "auto", "disabled"),
        ({"WANDB_MODE": "dryrun"}, "auto", "offline"),
        ({"WANDB_MODE": "disabled"}, "offline", "offline"),
        ({"WANDB_MODE": "online"}, "disabled", "disabled"),
        ({"WANDB_DISABLED": "true"}, "auto", "disabled"),
        ({"WANDB_DISABLED": "true"}, "offline", "offline"),
    ],
)
def test_the_configuration_wins_over_the_environment(monkeypatch, variables, configured, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert resolve_tracking(LoggingConfig(wandb=configured)).wandb == expected


def test_a_variable_that_asks_for_more_than_there_is_is_named(monkeypatch, caplog):
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    resolve_tracking(LoggingConfig(wandb="offline"))
    assert "WANDB_LOG_MODEL has no effect here" in caplog.text


def test_the_mode_of_the_environment_must_be_one(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(InputError, match="WANDB_MODE=nonsense"):
        resolve_tracking(LoggingConfig())


@pytest.mark.parametrize("key", [None, "junk", "a" * 40])
def test_without_account_or_network_auto_is_offline_and_online_is_refused(key):
    """In a process of its own: the library remembers the environment it was first used in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    environment |= {"WANDB_BASE_URL": NOWHERE} | ({"WANDB_API_KEY": key} if key else {})
    code = (
        "from mlm.config.training import LoggingConfig;"
        "from mlm.training.tracking import resolve_tracking;"
        "print(resolve_tracking(LoggingConfig()).wandb);"
        "resolve_tracking(LoggingConfig(wandb='online'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert run.stdout.strip() == "offline"
    assert "InputError: logging.wandb=online" in run.stderr


OFFLINE = LoggingConfig(wandb="offline")


def tracked(config):
    """All files of the tracked run, in the order of their start."""
    return [read(path) for path in sorted(folder_of(config).glob("wandb/offline-run-*/*.wandb"))]


def assert_tracked_once(config, steps, parts):
    runs = tracked(config)
    assert len(runs) == parts
    assert len({run for run, *_ in runs}) == 1
    rows = [row for _, history, *_ in runs for row in history]
    assert [row["trainer/global_step"] for row in rows] == list(range(steps + 1))
    assert [row["_step"] for row in rows] == list(range(steps + 1))
    assert all("train/loss" in row for row in rows[1:])
    assert [row["trainer/global_step"] for row in rows if "val/loss" in row] == list(range(0, steps + 1, 4))
    tokens = [row["tokens"] for row in rows]
    assert tokens == sorted(tokens)
    assert all(row["hours"] >= 0 for row in rows)
    for _, _, settings, axes in runs:
        assert {"trainer/global_step", "tokens", "hours"} <= set(axes)
        assert settings["trainer"]["save_every"] == config.trainer.save_every
        assert settings["tokenizer_digest"]
        assert settings["token_store"]
        assert "git_commit" in settings


def test_every_step_is_tracked_once_over_two_resumes(tiny, monkeypatch):
    """Both times the steps after the checkpoint are done again."""
    from mlm.training import reporting

    config = tiny(logging=OFFLINE, trainer={"max_steps": 20, "save_every": 6})

    class Lost(Exception):
        pass

    for step in (10, 17):

        def lose(self, trainer, module, step=step, original=reporting.ProgressBar.on_step_end):
            original(self, trainer, module)
            if module.progress.step == step:
                raise Lost

        tracked, deadline = (-1 if step == 10 else 10), time.monotonic() + 60
        while tracked_step(folder_of(config)) != tracked:  # a process of wandb's writes the file
            assert time.monotonic() < deadline
            time.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(reporting.ProgressBar, "on_step_end", lose)
            with pytest.raises(Lost):
                pretrain(replace(config, resume=step > 10))
    pretrain(replace(config, resume=True))
    assert_tracked_once(config, steps=20, parts=3)
    assert tracked_step(folder_of(config)) == 20


def test_two_processes_track_one_run(tiny):
    config = tiny(logging=OFFLINE)
    run_ranks(config)
    assert_tracked_once(config, steps=8, parts=1)


def test_the_configuration_is_ours_and_can_be_read_back(tiny):
    config = tiny(logging=OFFLINE)
    pretrain(config)
    path = folder_of(config) / "config.yaml"
    again = parse_config(PretrainConfig, ["--config", str(path), "--name", "again"], prog="train.py")
    assert again == replace(config, name="again")


@pytest.mark.slow
def test_a_key_without_network_neither_asks_nor_waits(tiny):
    config = tiny(logging=LoggingConfig())
    environment = {"WANDB_BASE_URL": NOWHERE, "WANDB_API_KEY": "a" * 40}
    start = time.monotonic()
    output = launch([*ALONE, *flags(config)], environment)
    assert output.count("tracking offline") == 1
    assert time.monotonic() - start < 45  # the whole run, imports included
    assert_tracked_once(config, steps=8, parts=1)


@pytest.mark.slow
def test_kills_lose_no_tracked_step(tiny):
    config = tiny(logging=OFFLINE, trainer={"max_steps": 400, "save_every": 20, "val_every": 4})
    for step in (100, 200):
        with started([*ALONE, *flags(config, "--resume", "auto")]) as run:
            wait_for(lambda step=step: newest_step(config) >= step, run)
            run.kill()  # the tracker's own process lives on and writes what it was given
            run.wait()
            time.sleep(2)
    launch([*ALONE, *flags(config, "--resume", "auto")])
    assert_tracked_once(config, steps=400, parts=3)


@pytest.mark.parametrize(("mode", "expected"), [("offline", "True False"), ("disabled", "False False")])
def test_the_tracker_is_imported_before_torch_if_it_is_needed(mode, expected):
    code = (
        "import sys; from mlm.config.training import LoggingConfig;"
        "from mlm.training.tracking import import_tracker;"
        f"import_tracker(LoggingConfig(wandb={mode!r}));"
        "print(*(name in sys.modules for name in ('wandb.sdk.launch', 'torch')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def run_records(config):
    """The record of the run in each file of wandb, oldest first."""
    files = sorted(folder_of(config).glob("wandb/offline-run-*/*.wandb"))
    runs = [[one.run for one in records(path) if one.WhichOneof("record_type") == "run"] for path in files]
    return [first for first, *_ in runs]


def test_names_of_the_environment_are_used_and_kept_for_the_resumed_part(tiny, monkeypatch, capsys):
    config = tiny(name="my run", logging=OFFLINE, trainer={"max_steps": 4})
    variables = {
        "WANDB_PROJECT": "harbour",
        "WANDB_ENTITY": "port",
        "WANDB_TAGS": "a, b",
        "WANDB_NOTES": "first try",
        "WANDB_RUN_GROUP": "ships",
        "WANDB_RUN_ID": "x1y2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    pretrain(config)
    for name in variables:
        monkeypatch.delenv(name)
    capsys.readouterr()
    pretrain(replace(config, resume=True, trainer=replace(config.trainer, max_steps=6)))
    found = run_records(config)
    assert len(found) == 2
    for run in found:
        assert (run.run_id, run.project, run.entity) == ("x1y2", "harbour", "port")
        assert (list(run.tags), run.notes, run.run_group) == (["a", "b"], "first try", "ships")
    line = next(line for line in capsys.readouterr().out.splitlines() if "upload: " in line)
    command = shlex.split(line.partition("upload: ")[2].removesuffix(")"))
    parts = sorted(folder_of(config).glob("wandb/offline-run-*"))
    assert command == ["wandb", "sync", *map(str, parts)]


def test_a_flag_wins_over_the_project_of_the_environment(tiny, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "harbour")
    config = tiny(logging=LoggingConfig(wandb="offline", project="mine"), trainer={"max_steps": 2})
    pretrain(config)
    assert run_records(config)[0].project == "mine"


@pytest.mark.parametrize("name", ["WANDB_PROJECT", "WANDB_RUN_ID", "logging.project"])
def test_names_that_wandb_refuses_are_refused_before_anything_is_read(monkeypatch, name):
    config = LoggingConfig(wandb="offline", project="a/b" if name == "logging.project" else None)
    if name != "logging.project":
        monkeypatch.setenv(name, "a/b")
    with pytest.raises(InputError, match=f"{name}=a/b cannot contain any of"):
        resolve_tracking(config)
    assert resolve_tracking(replace(config, wandb="disabled")).wandb == "disabled"
