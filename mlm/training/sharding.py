"""Training with weights, gradients and optimizer state divided among the devices (FSDP2).

Zhao et al. 2023 (arXiv:2304.11277). A checkpoint is the same single file as that of any other run: whole
tensors, written by the first process, so that a run can go on with another strategy or number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.strategies.strategy import Strategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from mlm.model.heads import MaskedLM, SequenceClassifier


def shard(model: MaskedLM | SequenceClassifier, mesh: Any) -> None:
    """Divide a model among the devices of `mesh`, layer by layer, in place."""
    for layer in model.encoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(value: Any) -> Any:
    """Return a tensor that is divided among the devices as a whole one; anything else as it is.

    All processes have to call it together.
    """
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(gradients: list[Tensor]) -> list[Tensor]:
    """Return the parts of the gradients that this process holds; they share their memory."""
    return [gradient.to_local() if isinstance(gradient, DTensor) else gradient for gradient in gradients]


def whole_model(model: Any) -> Any:
    """Return the model itself, or a copy on the CPU of one that is divided; all processes together."""
    state = model.state_dict()
    if not any(isinstance(value, DTensor) for value in state.values()):
        return model
    head = [model.classifier_config] if isinstance(model, SequenceClassifier) else []
    copy = type(model)(model.config, *head)
    copy.load_state_dict({name: whole(value) for name, value in state.items()})
    return copy


def _like(value: Any, model: Any) -> Any:
    """Divide `value` as `model` is divided."""
    if isinstance(model, DTensor) and isinstance(value, Tensor) and value.shape == model.shape:
        return distribute_tensor(value.to(model.device), model.device_mesh, model.placements)
    return value


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's FSDP2 strategy with checkpoints of whole tensors in one file."""

    def __init__(self, world_size: int) -> None:
        super().__init__(data_parallel_size=world_size, tensor_parallel_size=1)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Whether Lightning asks for the optimizer state: as with any other strategy."""
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return whole weights."""
        assert self.lightning_module is not None
        return {name: whole(value) for name, value in self.lightning_module.state_dict().items()}

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the whole state of an optimizer, in its own format."""
        inner = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        content = inner.state_dict()
        for number, state in content["state"].items():
            content["state"][number] = {name: whole(value) for name, value in state.items()}
        return dict(content)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Write one file, on the first process."""
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read the file; every process reads it for itself."""
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Divide the weights of the checkpoint."""
        assert self.lightning_module is not None
        mine = self.lightning_module.state_dict()
        state = {name: _like(value, mine.get(name)) for name, value in checkpoint["state_dict"].items()}
        self.lightning_module.load_state_dict(state, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Divide the optimizer state of the checkpoint."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            divided = {
                index: {name: _like(value, parameters[index]) for name, value in entry.items()}
                for index, entry in state["state"].items()
            }
            optimizer.load_state_dict({**state, "state": divided})
