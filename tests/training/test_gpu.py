"""What only a GPU shows; two processes need two of them."""

import pytest
import torch
from launching import ALONE, flags, launch, stopped_at, torchrun
from run_files import column, folder_of, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
GPU = {"accelerator": "gpu", "devices": "auto", "precision": "bf16-mixed", "micro_batch_size": 4}


def assert_close(config, other, atol=0.02):
    for name in ("train/loss", "val/loss"):
        assert column(config, name) == pytest.approx(column(other, name), abs=atol)


@pytest.mark.parametrize("optimizer", [None, {"name": "muon", "lr": 5e-3}])
@pytest.mark.parametrize("switches", [{}, {"compile": True}, {"gradient_checkpointing": True}])
def test_one_gpu_trains_and_goes_on(tiny, optimizer, switches):
    whole = tiny(name="whole", optimizer=optimizer, trainer=GPU | {"devices": 1} | switches)
    launch([*ALONE, *flags(whole)], timeout=300)
    parts = stopped_at(4, whole)
    launch([*ALONE, *flags(parts, "--resume")], timeout=300)
    assert_close(parts, whole)
    assert column(parts, "step") == list(range(9))


def test_a_gpu_trains_like_a_cpu(tiny):
    cpu = tiny(name="cpu", trainer={"max_steps": 8})
    gpu = tiny(name="gpu", trainer=GPU | {"devices": 1, "precision": "32-true"})
    for config in (cpu, gpu):
        launch([*ALONE, *flags(config)], timeout=300)
    assert_close(gpu, cpu, atol=1e-3)


@two_gpus
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_gpus_train_like_one(tiny, strategy):
    one = tiny(name="one", trainer=GPU | {"devices": 1})
    two = tiny(name="two", trainer=GPU | {"devices": 2, "strategy": strategy, "micro_batch_size": 2})
    launch([*ALONE, *flags(one)], timeout=300)
    launch([*torchrun(), *flags(two)], timeout=300)
    assert_close(two, one)
    parts = stopped_at(4, two)
    launch([*torchrun(), *flags(parts, "--resume")], timeout=300)
    assert_close(parts, two)
    assert weights(parts).keys() == weights(one).keys()
    content = torch.load(folder_of(two) / "checkpoints" / "step-00000008.ckpt", weights_only=True)
    assert all(type(tensor) is torch.Tensor for tensor in content["state_dict"].values())
