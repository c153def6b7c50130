"""Weights & Biases: never a prompt, never a wait, never the end of a run."""

import os
import subprocess
import sys

import pytest

from mlm.config.errors import InputError
from mlm.config.training import LoggingConfig
from mlm.training.reporting import resolve_tracking

NOWHERE = "http://127.0.0.1:9"  # the discard port: connections are refused


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_plain_wish_is_taken_as_it_is(mode):
    assert resolve_tracking(LoggingConfig(wandb=mode)).wandb == mode


def test_the_environment_wins_and_must_be_a_mode(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert resolve_tracking(LoggingConfig(wandb="offline")).wandb == "disabled"
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
        "from mlm.training.reporting import resolve_tracking;"
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
