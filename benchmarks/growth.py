"""How tokens per second change with the size of the model, of the rows, of the vocabulary and of the corpus.

    python benchmarks/growth.py                                  # 1 thread: about 4 minutes
    python benchmarks/growth.py --panels width corpus --steps 4  # 3 minutes

The step of the default model with AdamW (forward, backward, clipping, update) on rows of random tokens, one
size changed at a time. For the corpus it is what depends on its size: token stores of 10 MB to 2 GB of text
are written (random ids, four bytes of text a token; 1 GB of disk), opened, their rows packed, and batches
drawn as training draws them; a step is that of the default model with its batch.
Every point is the median of several rounds, in which all points of a panel take turns. Beside tokens/s stands
useful arithmetic per second (`mlm.plan`): a flat line means that growth costs what it must.
Writes results/growth.json and a picture.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from measuring import gated_width, machine_facts, median, read_result, table, write_result

from mlm.config.data import MaskingConfig, prediction_slots
from mlm.config.model import ModelConfig
from mlm.config.training import OptimizerConfig, TrainerConfig
from mlm.data.collate import MaskedBatch, MaskedRows, Rows
from mlm.data.packing import pack_documents
from mlm.data.sampler import TrainingSampler
from mlm.data.store import TokenStore
from mlm.masking import Masking
from mlm.model.heads import MaskedLM
from mlm.model.loss import summed_cross_entropy
from mlm.optim import build_optimizer, set_learning_rate
from mlm.plan import flops_per_token
from mlm.tokenizer import SpecialTokens
from mlm.training.engine import rescale_and_clip
from mlm.training.machine import keep_freed_memory
from mlm.training.processes import resolve_precision

SPECIAL = SpecialTokens(pad=0, unk=1, cls=2, sep=3, mask=4)
TOKENS_A_STEP, MASK_RATE = 4096, 0.15
BYTES_A_TOKEN, DOCUMENT = 4, 200
"""Of a text, and tokens of a document on average."""
SHARD_TOKENS = 2**23
PANELS: dict[str, list[int]] = {
    "width": [128, 256, 384, 512, 768],
    "depth": [2, 4, 8, 12],
    "length": [64, 128, 256, 512, 1024],
    "vocabulary": [4096, 8192, 16384, 32768, 65536],
    "corpus": [10, 100, 500, 2000],
}
"""Values of each panel; of the corpus in megabytes of text."""


class Shape:
    """A model and a batch of random tokens to train it on.

    Args:
        panel: what is changed.
        value: its value.
    """

    def __init__(self, panel: str, value: int):
        sizes = {"width": 256, "depth": 4, "length": 128, "vocabulary": 8192} | {panel: value}
        self.seq_len, width = sizes["length"], sizes["width"]
        config = ModelConfig(
            vocab_size=sizes["vocabulary"],
            hidden_size=width,
            num_hidden_layers=sizes["depth"],
            num_attention_heads=width // 64,
            intermediate_size=gated_width(width),
            max_position_embeddings=self.seq_len,
        )
        self.model = MaskedLM(config).train()
        self.optimizer = build_optimizer(self.model, OptimizerConfig(name="adamw"))
        set_learning_rate(self.optimizer, 0.1)
        self.batch = self._batch()
        self.half = resolve_precision(TrainerConfig(), "cpu") == "bf16-mixed"
        self.flops = flops_per_token(config, self.seq_len, self.batch["num_masked"] / TOKENS_A_STEP)

    def _batch(self) -> MaskedBatch:
        rows, size = TOKENS_A_STEP // self.seq_len, self.model.config.vocab_size or 0
        slots = prediction_slots(self.seq_len, MASK_RATE)
        ids = torch.randint(5, size, (rows, self.seq_len))
        places = torch.rand(ids.shape).argsort(dim=1)[:, :slots]
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "masked_positions": places}
        return {**batch, "labels": ids.gather(1, places), "num_masked": places.numel()}  # type: ignore[typeddict-item, return-value]

    def step(self) -> float:
        """Take an optimizer step and return its seconds."""
        start = time.perf_counter()
        batch = self.batch
        with torch.autocast("cpu", torch.bfloat16, enabled=self.half):
            logits = self.model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
            summed_cross_entropy(logits, batch["labels"]).backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        rescale_and_clip(gradients, torch.tensor(1.0 / batch["num_masked"]), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def measure_shapes(panel: str, steps: int) -> dict[str, dict[str, float]]:
    """Return tokens and useful operations per second for each value of a panel."""
    shapes = {value: Shape(panel, value) for value in PANELS[panel]}
    seconds: dict[int, list[float]] = {value: [] for value in shapes}
    for number in range(steps + 1):
        for value, shape in shapes.items():
            took = shape.step()
            if number:  # the first one fills the caches
                seconds[value].append(took)
    rates = {value: TOKENS_A_STEP / median(times) for value, times in seconds.items()}
    return {
        str(value): {"tokens_per_second": rate, "useful_gflops": rate * shapes[value].flops / 1e9}
        for value, rate in rates.items()
    }


def write_store(folder: Path, num_tokens: int) -> None:
    """Write a token store of random documents: what `mlm prepare` makes of a text of that size."""
    draw = np.random.default_rng(0)
    folder.mkdir(parents=True)
    shards = []
    for first in range(0, num_tokens, SHARD_TOKENS):
        size = min(SHARD_TOKENS, num_tokens - first)
        cuts = np.unique(draw.integers(1, size, max(size // DOCUMENT, 1)))
        offsets = np.concatenate([[0], cuts, [size]]).astype(np.int64)
        ids = draw.integers(5, 8192, size, dtype=np.uint16)
        documents = len(offsets) - 1
        columns = {
            "input_ids": pa.LargeListArray.from_arrays(offsets, ids),
            "text_hash": pa.array(draw.integers(0, 2**63, documents, dtype=np.uint64)),
            "num_bytes": pa.array((np.diff(offsets) * BYTES_A_TOKEN).astype(np.uint64)),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        shards.append(f"shard-{len(shards):05d}.arrow")
        with pa.OSFile(str(folder / shards[-1]), "wb") as file, pa.ipc.new_stream(file, batch.schema) as out:
            out.write_batch(batch)
    (folder / "manifest.json").write_text(json.dumps({"shards": shards, "num_tokens": num_tokens}))


class Corpus:
    """A store of some size, its rows, and the batches of a run far into it.

    Args:
        megabytes: of text.
        work: where the store is written.
    """

    def __init__(self, megabytes: int, work: Path):
        folder = work / f"store-{megabytes}"
        write_store(folder, megabytes * 10**6 // BYTES_A_TOKEN)
        start = time.perf_counter()
        store = TokenStore(folder)
        self.open_s = time.perf_counter() - start
        documents = store.documents
        start = time.perf_counter()
        lengths = pack_documents(documents, 128, "isolate")
        self.pack_s = time.perf_counter() - start
        rows = Rows(store, lengths, SPECIAL, 128, "isolate")
        is_special = np.arange(8192) < 5
        self.rows = MaskedRows(rows, Masking(MaskingConfig(), MASK_RATE, SPECIAL.mask, is_special), 0)
        size = TOKENS_A_STEP // 128
        self.batches = iter(TrainingSampler(len(rows), 0, size, size, rows_consumed=len(rows) // 2))

    def draw(self) -> float:
        """Draw a batch and return its seconds."""
        start = time.perf_counter()
        _ = self.rows[next(self.batches)]
        return time.perf_counter() - start


def measure_corpora(steps: int) -> dict[str, dict[str, float]]:
    """Return for each size what a batch costs, and tokens per second of a step with its batch."""
    found = {}
    with tempfile.TemporaryDirectory() as work:
        corpora = {size: Corpus(size, Path(work)) for size in PANELS["corpus"]}
        shape = Shape("corpus", 0)
        seconds: dict[int, list[tuple[float, float]]] = {size: [] for size in corpora}
        for number in range(steps + 1):
            for size, corpus in corpora.items():
                for _ in range(20):
                    corpus.draw()
                both = corpus.draw(), shape.step()
                if number:
                    seconds[size].append(both)
        for size, corpus in corpora.items():
            batch_s, step_s = (median(times) for times in zip(*seconds[size], strict=True))
            found[str(size)] = {
                "tokens_per_second": TOKENS_A_STEP / (batch_s + step_s),
                "useful_gflops": TOKENS_A_STEP / (batch_s + step_s) * shape.flops / 1e9,
                "batch_ms": batch_s * 1e3,
                "open_s": corpus.open_s,
                "pack_s": corpus.pack_s,
            }
    return found


def draw(panels: dict[str, Any], path: Path) -> None:
    """Draw every panel: tokens per second, and useful arithmetic per second beside it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    units = {"vocabulary": "entries", "corpus": "MB of text", "length": "tokens a row", "depth": "layers"}
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.2 * len(panels), 3.2), squeeze=False)
    for axis, (panel, points) in zip(axes[0], panels.items(), strict=True):
        values = [int(value) for value in points]
        rates, useful = (
            [point[name] for point in points.values()] for name in ("tokens_per_second", "useful_gflops")
        )
        axis.plot(values, rates, "o-")
        axis.set_xscale("log", base=2 if panel != "corpus" else 10)
        axis.set_ylim(0, 1.1 * max(rates))
        axis.set_title(panel)
        axis.set_xlabel(units.get(panel, panel))
        other = axis.twinx()
        other.plot(values, useful, "s--", color="tab:gray")
        other.set_ylim(0, 1.2 * max(useful))
    axes[0][0].set_ylabel("tokens/s (line)")
    other.set_ylabel("useful GFLOP/s (dashes)")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--panels", nargs="+", choices=PANELS, default=list(PANELS))
    parser.add_argument("--steps", type=int, default=8, help="rounds of a panel")
    parser.add_argument("--largest", type=int, default=None, help="leave out values above this")
    options = parser.parse_args()
    torch.manual_seed(0)
    keep_freed_memory()
    kept = read_result("growth").get("panels", {})
    for panel in options.panels:
        if options.largest:
            PANELS[panel] = [value for value in PANELS[panel] if value <= options.largest]
        found = measure_corpora(options.steps) if panel == "corpus" else measure_shapes(panel, options.steps)
        kept[panel] = found
        header = (panel, *next(iter(found.values())))
        print(
            "\n" + table(header, [(v, *(f"{x:,.3g}" for x in point.values())) for v, point in found.items()])
        )
        facts = {"machine": machine_facts(), "threads": torch.get_num_threads(), "panels": kept}
        draw(kept, write_result("growth", facts))


if __name__ == "__main__":
    main()
