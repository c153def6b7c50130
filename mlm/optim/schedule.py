"""Learning-rate schedules as pure functions of the optimizer step.

`step` counts finished optimizer steps, so the first update has step 0 and the last one step `total - 1`. The
warm-up reaches the peak with update number `warmup`, and no update has a rate of 0.
"""

from __future__ import annotations

import math

from mlm.config.training import ScheduleConfig


def linear(progress: float) -> float:
    """Fall in a straight line; `progress` runs from 0 to 1 over the steps after the warm-up."""
    return 1 - progress


def cosine(progress: float) -> float:
    """Fall along half a cosine (Loshchilov & Hutter 2017, arXiv:1608.03983)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def inverse_sqrt_decay(progress: float) -> float:
    """Fall with 1 - sqrt (Hägele et al. 2024, arXiv:2405.18392)."""
    return 1 - math.sqrt(progress)


def warmup_steps(config: ScheduleConfig, total: int) -> int:
    """Return the warm-up of a run of `total` steps, in steps; the decay schedule has none."""
    if config.name == "decay":
        return 0
    if config.warmup_steps is not None:
        return config.warmup_steps
    return round(config.warmup_fraction * total)


def learning_rate_factor(config: ScheduleConfig, step: int, total: int) -> float:
    """Return the learning rate of the update after `step` finished ones, as a share of the peak.

    Args:
        config: shape and warm-up.
        step: finished optimizer steps, in [0, total).
        total: optimizer steps of the whole run.
    """
    warmup = warmup_steps(config, total)
    if step < warmup:
        return (step + 1) / warmup
    if config.name == "constant":
        return 1.0
    if config.name == "wsd":
        decay = max(round(config.decay_fraction * total), 1)
        start = max(total - decay, warmup)
        return 1.0 if step < start else inverse_sqrt_decay((step - start) / (total - start))
    fall = {"linear": linear, "cosine": cosine, "decay": inverse_sqrt_decay}[config.name]
    return fall((step - warmup) / (total - warmup))
