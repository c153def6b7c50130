import json
import shlex
import subprocess

import pytest
import torch
from run_files import column, folder_of, weights

from mlm.__main__ import main
from mlm.config.errors import InputError
from mlm.training.engine import Progress
from mlm.training.pretraining import pretrain
from mlm.training.run_folder import checkpoint_path, git_commit
from mlm.training.summary import warn_of_losses


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, capture_output=True)


def test_commit_of_the_code(tmp_path):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_commit(package) is None
    git(tmp_path, "init")
    assert git_commit(package) is None  # the checkout is somebody else's
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    commit = (tmp_path / ".git" / "refs" / "heads").glob("*")
    (head,) = (path.read_text().strip() for path in commit)
    assert git_commit(package) == head
    (package / "__init__.py").write_text("x = 1")
    assert git_commit(package) == f"{head}-dirty"
    assert git_commit(tmp_path / "nowhere") is None


def spoiled(tiny, **trainer):
    """A run whose rate is so high that the loss only rises."""
    bounds = {"max_steps": 12, "val_every": 2, "save_every": 2} | trainer
    return tiny(optimizer={"lr": 0.3}, trainer=bounds)


def test_a_model_worse_than_an_earlier_one_is_named(tiny, caplog):
    config = spoiled(tiny)
    pretrain(config)
    losses = column(config, "val/loss")
    assert min(losses) == losses[0] < losses[-1]
    assert f"the saved model (loss {losses[-1]:.3f} at step 12) is worse than that of step 0" in caplog.text


@pytest.mark.parametrize(
    ("losses", "message"),
    [
        (
            [5.0, 4.0, 3.0, 3.0, 3.0, 3.0],
            "the last two passes over the text changed nothing (loss 3.000 before, 3.000",
        ),
        ([5.0, 4.0, 3.0, 3.01, 3.005, 2.997], "changed nothing (loss 3.000 before, 2.997 now)"),
        ([5.0, 4.0, 3.0, 2.99, 2.98, 2.97], ""),
        ([5.0, 4.0, 3.0], ""),
        (
            [5.0, 3.0, 4.0, 4.0, 4.0, 4.0],
            "is worse than that of step 10 (loss 3.000), 4.0 passes over the text before",
        ),
    ],
)
def test_two_passes_that_change_nothing_are_named(losses, message, caplog):
    """Validations every ten steps, which are a pass."""
    rows = [{"step": 10 * number, "val/loss": loss} for number, loss in enumerate(losses)]
    rows.insert(1, {"step": 5, "train/loss": 1.0})
    progress = Progress(
        last={"loss": losses[-1]}, lowest=min((loss, 10 * n) for n, loss in enumerate(losses))
    )
    warn_of_losses(progress, rows, rows[-1]["step"], 10, keeps_best=False)
    assert message in caplog.text
    assert bool(message) == bool(caplog.text)


def test_the_best_model_is_saved_and_the_run_ends_without_a_better_one(tiny, caplog):
    config = spoiled(tiny, keep="best", early_stopping=2, max_steps=200)
    pretrain(config)
    losses = column(config, "val/loss")[1:]
    best = 2 * (1 + losses.index(min(losses)))
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert (summary["saved_step"], summary["steps"]) == (best, best + 4)
    assert summary["stopped_by"] == "trainer.early_stopping=2"
    assert summary["val_loss"] == pytest.approx(min(losses), abs=1e-4)
    path = checkpoint_path(folder_of(config) / "checkpoints", best)
    state = torch.load(path, weights_only=True)["state_dict"]
    saved = weights(config)
    assert any(torch.equal(saved[name], value) for name in saved for value in state.values())
    config.resume = True
    with caplog.at_level("INFO", "mlm"):
        pretrain(config)
    assert "nothing to do" in caplog.text


def test_printed_commands_can_be_typed(tiny, capsys):
    config = tiny(name="my run (#1)", trainer={"max_steps": 4})
    pretrain(config)
    lines = capsys.readouterr().out.splitlines()
    commands = {line[2:17].strip(): shlex.split(line[18:]) for line in lines if line.startswith("  ")}
    model = str(folder_of(config) / "model")
    assert commands["fill a mask"][:4] == ["mlm", "fill-mask", "--model", model]
    assert main(commands["fill a mask"][1:]) == 0
    assert commands["train longer"][-6:-4] == ["--name", "my run (#1)"]


def test_compiling_without_a_compiler_is_refused_before_anything_is_read(tiny, monkeypatch):
    monkeypatch.setenv("CXX", "/no/such/g++")
    config = tiny(trainer={"compile": True})
    with pytest.raises(InputError, match=r"trainer.compile=true needs a C\+\+ compiler and finds no /no"):
        pretrain(config)
    assert not folder_of(config).exists()
