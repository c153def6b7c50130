"""Our model, batches and optimizer in a plain loop: what the same computation costs without Lightning.

    python benchmarks/bare_loop.py [--steps 30] OPTIONS OF train.py

Beside tokens per second it measures the fastest matrix product of this process, which share of it the useful
arithmetic of training reaches (`mlm.plan`: padding not counted; head and last layer by masked positions, or
the last layer whole), and how long a step waits for its batch. The last line printed is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from measuring import median

from mlm.config.commands import PretrainConfig
from mlm.config.data import prediction_slots
from mlm.data.collate import MaskedBatch, MaskedRows, build_masking
from mlm.data.corpus import Corpus
from mlm.data.sampler import TrainingSampler
from mlm.model.heads import MaskedLM
from mlm.model.loss import summed_cross_entropy
from mlm.optim import build_optimizer, learning_rate_factor, set_learning_rate
from mlm.plan import flops_per_token
from mlm.startup.command import parse_config
from mlm.training.engine import rescale_and_clip
from mlm.training.machine import keep_freed_memory, map_large_blocks
from mlm.training.pretraining import prepare
from mlm.training.processes import resolve_precision

WARM = 4
"""Steps that are not counted."""
PARTS = ("batch", "forward", "backward", "update")
PEAK_SIZE, PEAK_TIMES = 2048, 12


class Loop:
    """Everything one step needs."""

    def __init__(self, config: PretrainConfig, corpus: Corpus, model: MaskedLM):
        map_large_blocks()
        self.config, self.model = config, model.train()
        self.half = resolve_precision(config.trainer, "cpu") == "bf16-mixed"
        self.optimizer = build_optimizer(model, config.optimizer)
        size = config.trainer.global_batch_size
        masking = build_masking(config.masking, config.masking.highest_mask_rate, corpus.tokenizer)
        self.rows = MaskedRows(corpus.train, masking, config.seed)
        self.batches = iter(TrainingSampler(len(corpus.train), config.seed, size, size))
        self.seconds: dict[str, list[float]] = {name: [] for name in PARTS}

    def step(self, number: int, total: int) -> MaskedBatch:
        """Take one optimizer step and note what its parts took."""
        times = [time.perf_counter()]
        batch = self.rows[next(self.batches)]
        times.append(time.perf_counter())
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
            loss = summed_cross_entropy(logits, batch["labels"])
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        scale = torch.tensor(1.0 / max(batch["num_masked"], 1))
        rescale_and_clip(gradients, scale, self.config.optimizer.clip_norm)
        set_learning_rate(self.optimizer, learning_rate_factor(self.config.schedule, number, total))
        self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        if number == 0:
            keep_freed_memory()
        for name, begin, end in zip(self.seconds, times, times[1:], strict=False):
            self.seconds[name].append(end - begin)
        return batch


def matmul_peak(dtype: torch.dtype) -> float:
    """Return the FLOP/s of a large matrix product, the median of several."""
    a, b = torch.randn(2, PEAK_SIZE, PEAK_SIZE).to(dtype)
    times = []
    for _ in range(PEAK_TIMES):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return 2 * PEAK_SIZE**3 / median(times[2:])


def measure(config: PretrainConfig, steps: int) -> dict[str, Any]:
    """Train for some steps and return the figures."""
    corpus, model = prepare(config)
    loop = Loop(config, corpus, model)
    dtype = torch.bfloat16 if loop.half else torch.float32
    peaks = [matmul_peak(dtype)]
    tokens, start = 0, 0.0
    for number in range(steps):
        if number == WARM:
            start = time.perf_counter()
        batch = loop.step(number, steps)
        tokens += batch["num_tokens"] * (number >= WARM)
    rate = tokens / (time.perf_counter() - start)
    peaks.append(matmul_peak(dtype))
    seq_len = config.data.seq_len
    masked_share = prediction_slots(seq_len, config.masking.highest_mask_rate) / seq_len
    useful, whole = (
        rate * flops_per_token(model.config, seq_len, masked_share, whole_layers)
        for whole_layers in (False, True)
    )
    parts = {name: median(seconds[WARM:]) for name, seconds in loop.seconds.items()}
    return {
        "tokens_per_second": rate,
        "useful_gflops": useful / 1e9,
        "peak_gflops": max(peaks) / 1e9,
        "share_of_peak": useful / max(peaks),
        "share_whole_layers": whole / max(peaks),
        "step_s": median([sum(step) for step in zip(*loop.seconds.values(), strict=True)][WARM:]),
        "wait_share": parts["batch"] / sum(parts.values()),
        "seconds": parts,
        "threads": torch.get_num_threads(),
    }


def main() -> None:
    words = sys.argv[1:]
    steps = 30
    if "--steps" in words:
        at = words.index("--steps")
        steps = int(words[at + 1])
        del words[at : at + 2]
    print(json.dumps(measure(parse_config(PretrainConfig, words, prog="bare_loop.py"), steps)))


if __name__ == "__main__":
    main()
