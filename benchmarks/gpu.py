"""Training steps on one GPU: `python benchmarks/gpu.py`, at most 8 minutes.

Needs torch 2.11 or newer and this repository, nothing else; with transformers installed it is measured too.
Rows of S tokens are packed with documents of random length; every variant takes whole optimizer steps (AdamW,
fused, bfloat16) on the same batches, which lie on the device:

- padded: one document a row, what is left is padding, torch's fused kernel with a mask: the plain way
- masked: packed rows, the fused kernel with a mask of documents
- varlen: packed rows, attention by document, nothing is computed for what documents do not see of each other
- compiled: the same, compiled with static shapes; graphs: and replayed as one CUDA graph
- transformers: BERT of the same size, padded rows, every position predicted, compiled, SDPA, bfloat16

Tokens are those of documents. MFU is useful arithmetic (`mlm.plan`: attention to the own document, head and
last layer at masked positions only; beside it with the layers counted whole, as papers do) over what the chip
can do, by its data sheet, or by a large product measured here where it is not known. Steps run under torch's
check for host-device synchronisation: one that waits for the device ends in an error.
Writes results/gpu.json and a picture (if matplotlib is there).
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from mlm.config.data import IGNORE_INDEX  # noqa: E402
from mlm.config.model import ModelConfig  # noqa: E402
from mlm.config.training import OptimizerConfig  # noqa: E402
from mlm.model.heads import MaskedLM  # noqa: E402
from mlm.model.loss import summed_cross_entropy  # noqa: E402
from mlm.optim import build_optimizer, set_learning_rate  # noqa: E402
from mlm.plan import flops_per_token, total_parameters  # noqa: E402

PEAKS = {
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "T4": 65e12,
    "4090": 165e12,
    "3090": 71e12,
}
"""Dense bfloat16 FLOP/s with float32 sums, by the data sheets (T4: float16); the first name that fits."""
SHAPES = {
    "5M": ModelConfig(vocab_size=8192),
    "17M": ModelConfig(
        vocab_size=30528, hidden_size=256, num_hidden_layers=7, num_attention_heads=4, intermediate_size=768
    ),
    "30M": ModelConfig(
        vocab_size=30528, hidden_size=384, num_hidden_layers=10, num_attention_heads=6, intermediate_size=1024
    ),
    "base": ModelConfig(
        vocab_size=30528,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=2048,
    ),
}
MASK_RATE, MEAN_DOCUMENT, LEAST_DOCUMENT = 0.15, 60.0, 8
BATCHES, WARM, CLIP = 4, 8, 1.0
DEVICE = "cuda"
Step = Callable[[int], None]
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def document_lengths(total: int, seq_len: int, draw: torch.Generator) -> list[int]:
    """Return lengths of documents of `total` tokens together, log-normal, none longer than a row."""
    lengths: list[int] = []
    while sum(lengths) < total:
        drawn = torch.randn(256, generator=draw).mul(0.9).exp().mul(MEAN_DOCUMENT * 0.667)
        lengths += [min(max(int(length), LEAST_DOCUMENT), seq_len) for length in drawn]
    return lengths


def packed_mask(rows: int, seq_len: int, draw: torch.Generator) -> Tensor:
    """Return (rows, seq_len) document numbers: documents fill each row, the last one is cut to fit."""
    mask = torch.zeros(rows, seq_len, dtype=torch.int64)
    lengths = iter(document_lengths(2 * rows * seq_len, seq_len, draw))
    for row in mask:
        at, number = 0, 1
        while seq_len - at >= LEAST_DOCUMENT:
            length = min(next(lengths), seq_len - at)
            row[at : at + length] = number
            at, number = at + length, number + 1
    return mask


def padded_mask(rows: int, seq_len: int, draw: torch.Generator) -> Tensor:
    """Return (rows, seq_len), one document a row."""
    lengths = torch.tensor(document_lengths(rows * seq_len, seq_len, draw)[:rows])
    return (torch.arange(seq_len) < lengths[:, None]).long()


def tokens_seen(masks: list[Tensor]) -> int:
    """Return how many tokens one attends to on average, itself included: those of its document."""
    numbered = [(mask + (mask.shape[1] + 1) * torch.arange(len(mask))[:, None])[mask > 0] for mask in masks]
    lengths = torch.cat([numbers.unique(return_counts=True)[1] for numbers in numbered]).double()
    return round((lengths.square().sum() / lengths.sum()).item())


def make_batch(mask: Tensor, vocab_size: int, draw: torch.Generator) -> Batch:
    """Return ids, mask, masked positions (B, M) and labels (B, M) for a mask of documents."""
    slots = math.ceil(MASK_RATE * mask.shape[1])
    ids = torch.randint(5, vocab_size, mask.shape, generator=draw)
    order = torch.rand(mask.shape, generator=draw).masked_fill_(mask == 0, 2.0)
    places = order.argsort(dim=1)[:, :slots]
    wanted = torch.arange(slots) < (MASK_RATE * (mask > 0).sum(1, keepdim=True)).round().clamp(min=1)
    labels = ids.gather(1, places).masked_fill(~wanted, IGNORE_INDEX)
    return ids.scatter(1, places, 4), mask, places, labels


class Run:
    """A model with its optimizer, and the batches it trains on.

    Args:
        model: on the device.
        forward: the summed loss of a batch.
        batches: on the device.
    """

    def __init__(self, model: torch.nn.Module, forward: Callable[[Batch], Tensor], batches: list[Batch]):
        self.model, self.forward, self.batches = model, forward, batches
        config = OptimizerConfig(name="adamw", lr=1e-3)
        self.optimizer = build_optimizer(model, config)
        set_learning_rate(self.optimizer, 1.0)
        self.counts = [(labels != IGNORE_INDEX).sum() for *_, labels in batches]

    def step(self, number: int) -> None:
        """Take one optimizer step; nothing waits for the device."""
        at = number % len(self.batches)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.forward(self.batches[at]) / self.counts[at]
        loss.backward()
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, (CLIP / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.optimizer.zero_grad()


def our_run(config: ModelConfig, batches: list[Batch], variant: str) -> Run:
    """Return one of our variants, ready to train."""
    model = MaskedLM(config).to(DEVICE).train()
    if variant not in ("padded", "masked"):
        model.encoder.documents_per_row = 1 + max(int(mask.max()) for _, mask, *_ in batches)
    if variant == "compiled":
        model.compile(dynamic=False)
    elif variant == "graphs":
        model.compile(dynamic=False, mode="reduce-overhead")

    def forward(batch: Batch) -> Tensor:
        if variant == "graphs":
            torch.compiler.cudagraph_mark_step_begin()
        ids, mask, places, labels = batch
        return summed_cross_entropy(model(ids, mask, places), labels)

    return Run(model, forward, batches)


def their_run(config: ModelConfig, batches: list[Batch]) -> Run | None:
    """Return transformers' BERT, compiled; None where it is not installed."""
    try:
        from transformers import BertConfig, BertForMaskedLM
    except ImportError:
        return None
    sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
    sizes |= {"num_hidden_layers": config.num_hidden_layers, "intermediate_size": 4 * config.hidden_size}
    sizes |= {"num_attention_heads": config.num_attention_heads, "max_position_embeddings": 512}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    longest = max(sizes["max_position_embeddings"], batches[0][0].shape[1])
    model = (
        BertForMaskedLM(BertConfig(**sizes | rates | {"max_position_embeddings": longest})).to(DEVICE).train()
    )
    model.compile(dynamic=False)

    def forward(batch: Batch) -> Tensor:
        ids, mask, places, labels = batch
        logits = model(input_ids=ids, attention_mask=mask).logits
        everywhere = torch.full_like(ids, IGNORE_INDEX).scatter(1, places, labels)
        return summed_cross_entropy(logits, everywhere)

    return Run(model, forward, batches)


def time_steps(step: Step, seconds: float) -> float:
    """Return the seconds a step takes, measured for about so long after warming up."""
    for number in range(WARM):
        step(number)
    torch.cuda.synchronize()
    start = time.perf_counter()
    step(0)
    torch.cuda.synchronize()
    times = max(int(seconds / (time.perf_counter() - start)), 3)
    torch.cuda.set_sync_debug_mode("error")
    try:
        start = time.perf_counter()
        for number in range(times):
            step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def chip_peak() -> tuple[float, str]:
    """Return the FLOP/s that MFU is measured against, and where the number is from."""
    name = torch.cuda.get_device_name()
    for part, peak in PEAKS.items():
        if part in name:
            return peak, f"data sheet of {part}"
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    return 2 * 8192**3 / time_steps(lambda _: torch.mm(a, b), 1.0), "a product of 8192 x 8192 matrices"


def measure(name: str, variant: str, options: argparse.Namespace, peak: float) -> dict[str, Any]:
    """Train one variant of one shape and return its figures."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    seq_len, rows = options.seq_len, options.tokens // options.seq_len
    config = replace(SHAPES[name], max_position_embeddings=seq_len)
    draw = torch.Generator().manual_seed(0)
    make_mask = padded_mask if variant in ("padded", "transformers") else packed_mask
    masks = [make_mask(rows, seq_len, draw) for _ in range(BATCHES)]
    vocab_size = config.vocab_size or 0
    batches = [tuple(part.to(DEVICE) for part in make_batch(mask, vocab_size, draw)) for mask in masks]
    run = their_run(config, batches) if variant == "transformers" else our_run(config, batches, variant)
    if run is None:
        return {"error": "transformers is not installed"}
    torch.cuda.reset_peak_memory_stats()
    step_s = time_steps(run.step, options.seconds)
    tokens = sum(int((mask > 0).sum()) for mask in masks) / BATCHES
    useful, whole = (
        tokens / step_s * flops_per_token(config, tokens_seen(masks), MASK_RATE, whole_layers)
        for whole_layers in (False, True)
    )
    return {
        "tokens_per_second": tokens / step_s,
        "step_ms": step_s * 1e3,
        "filled": tokens / (rows * seq_len),
        "mfu": useful / peak,
        "mfu_whole_layers": whole / peak,
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
    }


def run_all(options: argparse.Namespace) -> dict[str, Any]:
    """Measure every shape and variant as long as there is time."""
    end = time.monotonic() + 60 * options.minutes
    peak, source = chip_peak()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "peak_tflops": peak / 1e12,
        "peak_from": source,
        "seq_len": options.seq_len,
        "tokens_per_step": options.tokens,
    }
    print(json.dumps(result, indent=1))
    for name in options.shapes:
        parameters = total_parameters(replace(SHAPES[name], max_position_embeddings=options.seq_len))
        print(f"\n{name}: {parameters:,} parameters\n")
        print("| variant | tokens/s | MFU | layers whole | ms a step | GB |")
        print("|---|--:|--:|--:|--:|--:|")
        for variant in options.variants:
            if time.monotonic() > end - 40:  # compiling takes about so long
                print(f"| {variant} | no time left |||||")
                continue
            try:
                found = measure(name, variant, options, peak)
            except Exception as error:  # one variant that a chip cannot do leaves the others
                found = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            result.setdefault("runs", {})[f"{name} {variant}"] = found
            if "error" in found:
                print(f"| {variant} | {found['error']} |||||", flush=True)
            else:
                shares = f"{found['mfu']:.1%} | {found['mfu_whole_layers']:.1%}"
                numbers = f"{found['tokens_per_second']:,.0f} | {shares} | {found['step_ms']:.1f}"
                print(f"| {variant} | {numbers} | {found['peak_gb']:.1f} |", flush=True)
            torch.cuda.empty_cache()
    return result


def draw_runs(runs: dict[str, Any], path: Path) -> None:
    """Draw the MFU of every run."""
    try:
        import matplotlib
    except ImportError:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = {name: found["mfu"] for name, found in runs.items() if "mfu" in found}
    figure, axis = pyplot.subplots(figsize=(7, 1 + 0.28 * len(done)))
    axis.barh(list(done), list(done.values()))
    axis.invert_yaxis()
    axis.set_xlabel("MFU, useful arithmetic over the chip's")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    variants = ("padded", "masked", "varlen", "compiled", "graphs", "transformers")
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--variants", nargs="+", choices=variants, default=list(variants))
    parser.add_argument("--seq_len", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=65536, help="places of a step, padding included")
    parser.add_argument("--seconds", type=float, default=3.0, help="measured for each variant")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--output", default=str(ROOT / "benchmarks" / "results" / "gpu.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu.py: there is no CUDA device here; nothing was measured", file=sys.stderr)
        return 1
    result = run_all(options)
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    draw_runs(result.get("runs", {}), path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
