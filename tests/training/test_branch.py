"""A new run that starts where another one stands; the oracle is the same run made longer."""

import json
import os
from dataclasses import replace

import pytest
import torch
from launching import run_ranks
from run_files import assert_equal_weights, column, folder_of, weights

from mlm.config.commands import PretrainConfig
from mlm.config.errors import InputError
from mlm.config.training import ScheduleConfig
from mlm.startup.command import parse_config
from mlm.training.pretraining import pretrain
from mlm.training.run_folder import find_checkpoint

MUON = {"name": "muon", "lr": 5e-3}
CONSTANT = ScheduleConfig(name="constant", warmup_steps=2)
LEARNED = {"position_embedding": "learned"}


def parse(*words):
    return parse_config(PretrainConfig, list(words), prog="train.py")


class Code:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def stable(tiny):
    """Builds and trains a run at a constant rate."""

    def build(**options):
        config = tiny(name="stable", schedule=CONSTANT, **options)
        pretrain(config)
        return config

    return build


def branch_off(config, *words, start=None):
    """Return what a user gets who types these flags."""
    start = start or config.name
    return parse("--branch", start, "--runs_dir", config.runs_dir, "--name", "branch", *words)


@pytest.mark.parametrize("optimizer", [None, MUON], ids=["adamw", "muon"])
def test_a_branch_at_a_constant_rate_is_the_same_run_made_longer(stable, optimizer):
    """Weights, optimizer state and place in the data: all are needed for equal bits."""
    config = stable(optimizer=optimizer)
    branch = branch_off(config, "--schedule.name", "constant", "--schedule.warmup_steps", "0")
    assert pretrain(branch) == 0
    longer = replace(config, resume=True, trainer=replace(config.trainer, max_steps=16))
    pretrain(longer)
    assert column(branch, "step") == list(range(9))
    assert column(branch, "train/loss") == column(longer, "train/loss")[8:]
    assert column(branch, "val/loss") == column(longer, "val/loss")[2:]
    assert_equal_weights(weights(branch), weights(longer))
    assert column(branch, "tokens")[0] == 0


def test_a_decay_branch_has_its_own_length_and_schedule(stable):
    config = stable()
    branch = branch_off(config, "--schedule.name", "decay", "--trainer.max_steps", "4")
    assert branch.optimizer == config.optimizer
    assert (branch.model, branch.trainer.val_every) == (config.model, 4)
    assert pretrain(branch) == 0
    assert column(branch, "optim/lr") == pytest.approx([5e-3 * (1 - (n / 4) ** 0.5) for n in range(4)])
    assert column(branch, "val/loss")[0] == column(config, "val/loss")[-1]
    summary = json.loads((folder_of(branch) / "summary.json").read_text())
    assert summary["branch"].endswith("stable/checkpoints/step-00000008.ckpt")
    # Resumed, it is a run like any other, even when the run it came from is gone.
    (folder_of(config) / "checkpoints" / "step-00000008.ckpt").unlink()
    again = parse("--resume", "--name", "branch", "--runs_dir", config.runs_dir, "--trainer.max_steps", "6")
    assert pretrain(again) == 0
    assert column(again, "step") == list(range(7))


def test_a_second_phase_reads_longer_rows_from_the_first_one_on(stable, tmp_path):
    config = stable()
    named = folder_of(config) / "checkpoints" / "step-00000004.ckpt"
    branch = branch_off(config, "--data.seq_len", "64", start=str(named))
    assert branch.data.sources == config.data.sources
    assert pretrain(branch) == 0
    checkpoint = find_checkpoint(folder_of(branch) / "checkpoints").content
    assert checkpoint["progress"]["rows"] == 64
    assert checkpoint["identity"]["model.max_position_embeddings"] == 64
    (state,) = checkpoint["optimizer_states"]
    assert {float(one["step"]) for one in state["state"].values()} == {4 + 8}


def test_the_vocabulary_is_the_one_of_the_run_whatever_text_is_read(stable, tmp_path):
    config = stable()
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"quokkas number {n} hop over wallabies" for n in range(300)))
    branch = branch_off(config, "--data.sources", str(other), "--data.document", "line")
    assert pretrain(branch) == 0
    files = [(folder_of(run) / "tokenizer" / "tokenizer.json").read_bytes() for run in (config, branch)]
    assert files[0] == files[1]
    assert find_checkpoint(folder_of(branch) / "checkpoints").content["progress"]["rows"] == 64


def test_learned_positions_keep_their_number(stable):
    config = stable(model=LEARNED)
    shorter = branch_off(config, "--data.seq_len", "16")
    assert pretrain(shorter) == 0
    (table,) = (tensor for name, tensor in weights(shorter).items() if "position" in name)
    assert len(table) == 32
    longer = branch_off(config, "--data.seq_len", "64", "--name", "longer")
    with pytest.raises(InputError, match=r"table of 32 positions, and data.seq_len=64, .*only .*rotary"):
        pretrain(longer)
    assert not folder_of(longer).exists()


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["--model.hidden_size", "64"], "model.hidden_size is 64, but .*step-00000008.ckpt was .* 32"),
        (["--optimizer.name", "muon"], "optimizer.name is muon, but .* adamw"),
        (["--tokenizer.path", "null", "--tokenizer.vocab_size", "100"], "tokenizer is"),
    ],
)
def test_another_model_tokenizer_or_optimizer_is_refused_by_name(stable, words, name):
    config = stable(model={"vocab_size": 128})
    branch = branch_off(config, *words)
    with pytest.raises(InputError, match=f"cannot branch: {name}"):
        pretrain(branch)
    assert not folder_of(branch).exists()


def test_what_is_no_run_and_no_checkpoint_is_refused(stable, capsys, tmp_path):
    config = stable()
    with pytest.raises(SystemExit, match="2"):
        branch_off(config, start="stabel")
    assert "branch=stabel is neither a run nor a checkpoint; did you mean stable?" in capsys.readouterr().err
    mark = tmp_path / "mark"
    harm = folder_of(config) / "checkpoints" / "harm.ckpt"
    torch.save({"x": Code(mark)}, harm)
    with pytest.raises(InputError, match=r"harm.ckpt is not a complete checkpoint.*Weights only load failed"):
        pretrain(branch_off(config, start=str(harm)))
    assert not mark.exists()
    junk = folder_of(config) / "checkpoints" / "junk.ckpt"
    torch.save({"x": 1}, junk)
    with pytest.raises(InputError, match=r"junk.ckpt is not a complete checkpoint: it has no state_dict"):
        pretrain(branch_off(config, start="stable/checkpoints/junk.ckpt"))


@pytest.mark.slow
def test_a_branch_on_several_processes(stable):
    config = stable(trainer={"save_every": 4})
    branch = branch_off(config, "--schedule.name", "constant", "--schedule.warmup_steps", "0")
    run_ranks(replace(branch, trainer=replace(branch.trainer, devices=2)), timeout=120)
    longer = replace(config, resume=True, trainer=replace(config.trainer, max_steps=16))
    pretrain(longer)
    assert column(branch, "train/loss") == pytest.approx(column(longer, "train/loss")[8:], abs=1e-5)
    assert_equal_weights(weights(branch), weights(longer), atol=1e-5, rtol=1e-3)
