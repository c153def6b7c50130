"""FSDP2: the run and the checkpoints of any other strategy."""

import pytest
import torch
from launching import ALONE, flags, launch, run_ranks, stopped_at
from run_files import assert_equal_weights, column, folder_of, weights

from mlm.config.errors import InputError
from mlm.config.training import OptimizerConfig
from mlm.training.pretraining import pretrain

SHARDED = {"strategy": "fsdp2", "max_steps": 8, "micro_batch_size": 2}


def assert_same_run(config, other):
    for name in ("train/loss", "val/loss", "optim/grad_norm"):
        assert column(config, name) == pytest.approx(column(other, name), abs=1e-5)
    assert_equal_weights(weights(config), weights(other), atol=1e-5, rtol=1e-4)


def test_a_divided_model_trains_like_a_whole_one(tiny):
    """Its checkpoints hold what others hold, whole; an odd number of held-out batches does not hang."""
    alone, sharded = tiny(name="alone"), tiny(name="sharded", trainer=SHARDED)
    pretrain(alone)
    run_ranks(sharded)
    assert_same_run(sharded, alone)
    one, two = (
        torch.load(folder_of(config) / "checkpoints" / "step-00000004.ckpt", weights_only=True)
        for config in (alone, sharded)
    )
    assert {name: tensor.shape for name, tensor in one["state_dict"].items()} == {
        name: tensor.shape for name, tensor in two["state_dict"].items()
    }
    states = [content["optimizer_states"][0] for content in (one, two)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert states[0]["state"].keys() == states[1]["state"].keys()
    for number, entry in states[0]["state"].items():
        for name, value in entry.items():
            torch.testing.assert_close(states[1]["state"][number][name], value, atol=1e-5, rtol=1e-4)


def test_it_goes_on_bit_for_bit_and_with_any_strategy(tiny):
    whole = tiny(name="sharded", trainer=SHARDED)
    run_ranks(whole)
    parts = stopped_at(4, whole)
    run_ranks(parts, "--resume")
    assert column(parts, "train/loss") == column(whole, "train/loss")
    assert_equal_weights(weights(parts), weights(whole))
    ddp = stopped_at(4, parts, name="ddp")
    run_ranks(ddp, "--resume", "--trainer.strategy", "ddp")
    assert_same_run(ddp, whole)
    back = stopped_at(4, ddp, name="back")
    run_ranks(back, "--resume", "--trainer.strategy", "fsdp2")
    assert_same_run(back, whole)


def test_a_branch_takes_whole_state_into_parts(tiny):
    pretrain(tiny(name="trunk"))
    alone, sharded = tiny(name="alone", branch="trunk"), tiny(name="both", branch="trunk", trainer=SHARDED)
    pretrain(alone)
    run_ranks(sharded)
    assert_same_run(sharded, alone)


def test_muon_is_refused(tiny):
    with pytest.raises(InputError, match=r"name=muon needs whole matrices.*use adamw"):
        tiny(trainer=SHARDED, optimizer=vars(OptimizerConfig(name="muon")))


@pytest.mark.slow
def test_the_plain_script_ends_with_a_model(tiny):
    config = tiny(trainer=SHARDED | {"devices": 2, "max_steps": 2})
    launch([*ALONE, *flags(config)])
    assert weights(config)
