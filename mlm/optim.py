"""One optimizer for the whole model, and its learning rate over the steps.

- AdamW, or Muon on the hidden matrices and AdamW on the rest
- Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces a matrix's momentum by the
  nearest orthogonal matrix; scaled by 0.2 * sqrt(longer side), its updates have AdamW's size and share its
  learning rate (Liu et al. 2025, arXiv:2502.16982)
- each matrix of a stacked weight (those of each head; gate and value) is orthogonalised by itself: a linear
  layer says by its attribute `blocks` how many are stacked along rows and along columns
- weight decay acts on matrices only
- every parameter group carries `peak_lr`; the schedule sets `lr` to a share of it before each step
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mlm.config.training import OptimizerConfig, ScheduleConfig
from mlm.cores import multiplies_bfloat16

Share = Callable[[str], float]
"""The share of the learning rate that a parameter gets, by its name."""
NEWTON_SCHULZ_COEFFICIENTS = (
    (8.0934, -23.6204, 17.4462),
    (3.6366, -2.7219, 0.5365),
    (2.6613, -1.9772, 0.4526),
)
"""(a, b, c) of a x + b x^3 + c x^5 for each step, optimal for singular values in [0.01, 1] as the step before
leaves them (Amsel et al. 2025, arXiv:2505.16932). Three steps bring them as close to 1 as five with the usual
(3.4445, -4.7750, 2.0315)."""


def newton_schulz(matrices: Tensor) -> Tensor:
    """Return roughly the nearest orthogonal matrices, (n, rows, columns), in the type of `matrices`.

    Singular values above a hundredth of the matrix's norm end in [0.73, 1.27], up to rounding. Each step
    multiplies by a polynomial of the Gram matrix of the shorter side. The last step's Gram matrix is computed
    from the one before, so one product with the matrices serves both; in earlier steps the squares of small
    singular values would be lost in the rounding of large ones.
    """
    tall = matrices.size(1) > matrices.size(2)

    def gram_of(x: Tensor) -> Tensor:
        return x.mT @ x if tall else x @ x.mT

    def inner_first(inner: Tensor, outer: Tensor) -> tuple[Tensor, Tensor]:
        return (inner, outer) if tall else (outer, inner)

    x = matrices / matrices.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    *early, (a, b, c), (last_a, last_b, last_c) = NEWTON_SCHULZ_COEFFICIENTS
    for own, gram_share, square_share in early:
        gram = gram_of(x)
        factor = torch.baddbmm(gram, gram, gram, beta=gram_share, alpha=square_share)
        x = torch.baddbmm(x, *inner_first(x, factor), beta=own)
    gram = gram_of(x)
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    gram = factor @ gram @ factor
    last = torch.baddbmm(gram, gram, gram, beta=last_b, alpha=last_c)
    # The last step's factor is on the outside: inside, the step before would magnify its rounding.
    factor = torch.baddbmm(factor, *inner_first(factor, last), beta=last_a)
    return torch.matmul(*inner_first(x, factor))


class Muon(torch.optim.Optimizer):
    """Orthogonalised Nesterov momentum; a parameter is a stack of the `blocks` matrices its group names."""

    def __init__(self, groups: list[dict[str, Any]], momentum: float, weight_decay: float):
        defaults = {"lr": 0.0, "momentum": momentum, "weight_decay": weight_decay, "blocks": (1, 1)}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update every parameter that has a gradient."""
        assert closure is None, "CombinedOptimizer evaluates it"
        device = self.param_groups[0]["params"][0].device
        skip = getattr(self, "found_inf", torch.zeros((), device=device)).bool()
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for parameters in by_shape.values():
                self._update(parameters, group, skip)

    def _update(self, parameters: list[Tensor], group: dict[str, Any], skip: Tensor) -> None:
        """Update parameters of one shape together: one batched product is faster than several small ones.

        If `skip`, a bool scalar on the device, is true, everything is computed and nothing changes.
        """
        (down, across), momentum = group["blocks"], group["momentum"]
        # bfloat16 is precise enough, but a CPU that lacks it multiplies it several times slower than float32.
        dtype = torch.bfloat16 if multiplies_bfloat16(parameters[0].device.type) else torch.float32
        rows, columns = parameters[0].size(0) // down, parameters[0].size(1) // across
        directions = []
        for parameter in parameters:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            buffer = state["momentum_buffer"]
            assert parameter.grad is not None, "step() passes on parameters with gradients only"
            gradient = torch.where(skip, buffer, parameter.grad)
            buffer.lerp_(gradient, 1 - momentum)
            # Cast one by one: joined in float32 they would leave the cache.
            direction = gradient.lerp(buffer, momentum).to(dtype)
            blocks = direction.view(down, rows, across, columns).transpose(1, 2)
            directions.append(blocks.reshape(-1, rows, columns))
        updates = newton_schulz(torch.cat(directions))
        scale = torch.where(skip, 0.0, -group["lr"] * 0.2 * math.sqrt(max(rows, columns)))
        decay = torch.where(skip, 1.0, 1 - group["lr"] * group["weight_decay"])
        for parameter, blocks in zip(parameters, updates.split(down * across), strict=True):
            update = blocks.view(down, across, rows, columns).transpose(1, 2).reshape(parameter.shape)
            parameter.mul_(decay)
            parameter.addcmul_(update, scale)


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers with the interface of one: Lightning and checkpoints see a single list of groups.

    One optimizer alone keeps its own checkpoint format. Wrapped, a fused AdamW no longer declares that it
    unscales gradients itself, so with 16-mixed precision they are unscaled before they are clipped.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer):
        self.optimizers = optimizers
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self._share_groups()

    def _share_groups(self) -> None:
        # The same dictionaries: a learning rate set here is the one that the part uses.
        self.param_groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def step(self, closure: Any = None) -> Any:
        """Step each optimizer; return the loss that `closure`, if given, computes before."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the parts, in order; of one part its own state."""
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        return states[0] if len(states) == 1 else {"optimizers": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        states = [state_dict] if len(self.optimizers) == 1 else state_dict["optimizers"]
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
        self._share_groups()

    @property
    def state(self) -> defaultdict[Tensor, Any]:
        """The state of every parameter, merged."""
        parts = (optimizer.state for optimizer in self.optimizers)
        return defaultdict(dict, {key: value for part in parts for key, value in part.items()})

    @state.setter
    def state(self, value: object) -> None:
        pass  # the base class sets an empty state; ours is in the parts


def param_groups(
    model: nn.Module, config: OptimizerConfig, share: Share = lambda name: 1.0
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the groups for Muon, of the weights of linear layers, and for AdamW, of all other parameters."""
    linear = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
    blocks = {f"{name}.weight": getattr(module, "blocks", (1, 1)) for name, module in linear}
    matrices: dict[tuple[tuple[int, int], float], list[nn.Parameter]] = defaultdict(list)
    decayed: dict[float, list[nn.Parameter]] = defaultdict(list)
    plain: dict[float, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if config.name == "muon" and name in blocks:
            matrices[blocks[name], share(name)].append(parameter)
        else:
            (decayed if parameter.ndim >= 2 else plain)[share(name)].append(parameter)
    muon_lr = config.lr if config.muon_lr is None else config.muon_lr
    muon = [{"params": p, "blocks": n, "peak_lr": muon_lr * part} for (n, part), p in matrices.items()]
    adamw = [
        {"params": found, "peak_lr": config.lr * part, "weight_decay": decay}
        for groups, decay in ((decayed, config.weight_decay), (plain, 0.0))
        for part, found in groups.items()
    ]
    return muon, adamw


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, share: Share = lambda name: 1.0
) -> CombinedOptimizer:
    """Build the optimizer; learning rates are 0 until `set_learning_rate` is called."""
    muon, adamw = param_groups(model, config, share)
    rest = torch.optim.AdamW(adamw, lr=0.0, betas=config.betas, eps=config.eps, fused=True)
    parts = [Muon(muon, config.momentum, config.weight_decay)] if muon else []
    return CombinedOptimizer(*parts, rest)


def set_learning_rate(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to `factor` of its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * factor


def skip_step_if(optimizer: torch.optim.Optimizer, skip: Tensor) -> None:
    """Make the next step change neither weights nor state if `skip`, a bool scalar, is true.

    The device decides, without a transfer to the host; torch's fused optimizers call this `found_inf`.
    """
    for part in getattr(optimizer, "optimizers", [optimizer]):
        part.found_inf = skip.float()


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """Return the warm-up of a run of `total` steps, in steps; the decay schedule has none."""
    if config.name == "decay":
        return 0
    return round(config.warmup_fraction * total) if config.warmup_steps is None else config.warmup_steps


def learning_rate_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """Return the learning rate of the update after `step` finished ones, as a share of the peak.

    `step` is in [0, total), so the last update has step `total - 1`. The warm-up reaches the peak with update
    number `warmup`, and no update has a rate of 0. Cosine: Loshchilov & Hutter 2017, arXiv:1608.03983; the
    decay of wsd, 1 - sqrt: Hägele et al. 2024, arXiv:2405.18392.
    """
    start = warmup_steps(config, total)
    if step < start:
        return (step + 1) / start
    if config.name == "wsd":
        start = max(total - max(round(config.decay_fraction * total), 1), start)
    if config.name == "constant" or step < start:
        return 1.0
    progress = (step - start) / (total - start)
    if config.name == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress)) if config.name == "cosine" else 1 - math.sqrt(progress)
