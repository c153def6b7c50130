"""Where the time of one training step goes: `python benchmarks/profile_step.py [OPTIONS OF train.py]`.

Takes about a minute; writes results/profile_step.json and a picture. Every operation of torch's profiler is
counted once, by the time it took itself, and goes to the first group that fits:

- optimizer: inside the update (clipping, AdamW, Muon)
- head: works on the vocabulary, or on the masked positions alone, as most of the last layer does
- attention: works on scores, or on queries, keys and values by head (projections are matrix products)
- matmul: the other matrix products
- rest: norms, activations, embeddings, copies, and what Python does
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from bare_loop import WARM, Loop
from measuring import machine_facts, table, write_result
from torch.profiler import ProfilerActivity, profile, record_function

from mlm.config.commands import PretrainConfig
from mlm.startup.command import parse_config
from mlm.training.pretraining import prepare

STEPS = 4
GROUPS = ("matmul", "attention", "head", "optimizer", "rest")
PRODUCTS = {"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise"}


def group_of(name: str, shapes: Iterable[Any], inside_update: bool, sizes: dict[str, int]) -> str:
    """Return the group of an operation.

    Args:
        name: as the profiler calls it.
        shapes: of its inputs.
        inside_update: whether it ran within the optimizer's step.
        sizes: "vocabulary", "masked" (rows of the head's matrices), "heads" (of a batch), and "sequence".
    """
    if inside_update:
        return "optimizer"
    found = [list(shape) for shape in shapes if shape]
    if any(sizes["vocabulary"] in shape or sizes["masked"] in shape for shape in found):
        return "head"
    by_head = any(
        (len(shape) == 4 and sizes["sequence"] in shape[1:3]) or shape[:1] == [sizes["heads"]]
        for shape in found
    )
    if by_head:
        return "attention"
    return "matmul" if name in PRODUCTS else "rest"


def profile_steps(config: PretrainConfig) -> dict[str, Any]:
    """Return microseconds of a step by group and by operation."""
    corpus, model = prepare(config)
    loop = Loop(config, corpus, model)
    plain_step = loop.optimizer.step

    def marked_step(*arguments: Any, **named: Any) -> Any:
        with record_function("update"):
            return plain_step(*arguments, **named)

    loop.optimizer.step = marked_step  # type: ignore[method-assign]
    for number in range(WARM):
        batch = loop.step(number, WARM + STEPS)
    B, S = batch["input_ids"].shape
    sizes = {
        "vocabulary": model.config.vocab_size or 0,
        "masked": batch["masked_positions"].numel(),
        "heads": B * model.config.num_attention_heads,
        "sequence": S,
    }
    start = time.perf_counter()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for number in range(WARM, WARM + STEPS):
            loop.step(number, WARM + STEPS)
    step_us = (time.perf_counter() - start) / STEPS * 1e6
    groups: dict[str, float] = dict.fromkeys(GROUPS, 0.0)
    operations: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        group = group_of(event.name, event.input_shapes, _is_inside(event, "update"), sizes)
        took = event.self_cpu_time_total / STEPS
        groups[group] += took
        operations[f"{event.name} ({group})"] += took
    groups["rest"] += max(step_us - sum(groups.values()), 0.0)
    largest = sorted(operations.items(), key=lambda item: -item[1])[:25]
    return {"step_us": step_us, "groups_us": groups, "operations_us": dict(largest)}


def _is_inside(event: Any, name: str) -> bool:
    while event is not None:
        if event.name == name:
            return True
        event = event.cpu_parent
    return False


def draw(result: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.8))
    left = 0.0
    for name, share in result["shares"].items():
        axes.barh(0, share, left=left, label=f"{name} {share:.0%}")
        left += share
    axes.set_yticks([])
    axes.set_xlabel(f"share of one step, {result['step_us'] / 1000:.0f} ms")
    axes.legend(ncols=len(GROUPS), loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(write_result("profile_step", result).with_suffix(".png"), dpi=110)


def main() -> None:
    config = parse_config(PretrainConfig, sys.argv[1:], prog="profile_step.py")
    result: dict[str, Any] = {"machine": machine_facts(), "threads": torch.get_num_threads()}
    result |= {"arguments": " ".join(sys.argv[1:])}
    result |= profile_steps(config)
    whole = sum(result["groups_us"].values())
    result["shares"] = {name: took / whole for name, took in result["groups_us"].items()}
    rows = [(name, f"{us / 1000:.1f}", f"{us / whole:.1%}") for name, us in result["groups_us"].items()]
    print(table(("group", "ms", "share"), rows))
    operations = [
        (name, f"{us / 1000:.1f}", f"{us / whole:.1%}") for name, us in result["operations_us"].items()
    ]
    print(table(("operation", "ms", "share"), operations))
    draw(result)


if __name__ == "__main__":
    main()
