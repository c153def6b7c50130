"""Whole `train.py` runs against transformers' Trainer doing the job of its run_mlm example.

    python benchmarks/throughput.py                             # every case, 1 thread: 80 minutes
    python benchmarks/throughput.py --cases mini --threads 2    # one case: 15 minutes
    python benchmarks/throughput.py --cases mini --settings theirs-bf16 ours --steps 10 --rounds 1   # 2

Each run is a process of its own. Both sides read the same text with the same vocabulary, take the same number
of rows and tokens a step, save at the same steps, and run in the same environment with the same threads; the
settings of a case take turns, round after round. Tokens per second are those of the steps after the first
ones, up to the last but one (ours validates after the last); padding is not counted. Start-up is reported
beside it, as the seconds of the process outside its steps. Results of cases measured earlier stay in the
result file.

theirs: their defaults (float32); bf16; `best`: bf16, compiled, no dropout.
ours-equal: BERT's shape and dropout with AdamW on rows filled like theirs; ours-equal-no-dropout; ours: the
default model at this size with AdamW; ours-untouched: without what `train.py` tells the allocator;
ours-compiled: compiled; ours-muon: with the default optimizer; ours-two: two processes and twice the rows;
bare: `bare_loop.py`, the computation of `ours` without Lightning.
"""

from __future__ import annotations

import argparse
import csv
import os
import shutil
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from measuring import (
    ALLOCATORS,
    UNTOUCHED,
    environment,
    gated_width,
    machine_facts,
    median,
    read_result,
    run_child,
    table,
    write_documents,
    write_result,
    write_tokenizer,
)

WARM = 4
"""Steps before the time that counts: memory, caches, compilation."""


@dataclass(frozen=True)
class Case:
    """A size of the model and of its rows."""

    hidden: int = 256
    layers: int = 4
    vocab: int = 8192
    seq_len: int = 128
    rows: int = 32

    @property
    def heads(self) -> int:
        """Heads of width 64."""
        return self.hidden // 64


CASES = {
    "mini": Case(),
    "mini-30k": Case(vocab=30522),
    "small": Case(hidden=512),
    "6x384": Case(hidden=384, layers=6),
    "mini-512": Case(seq_len=512, rows=8),
}
THEIRS: dict[str, list[str]] = {
    "theirs-fp32": [],
    "theirs-bf16": ["--bf16"],
    "theirs-best": ["--bf16", "--compile", "--dropout", "0"],
}
DROPOUTS = ("embedding_dropout", "attention_dropout", "hidden_dropout")
ADAMW = ["--optimizer.name", "adamw"]
OURS = (
    *("ours-equal", "ours-equal-no-dropout", "ours", "ours-untouched", "ours-compiled", "ours-muon"),
    *("ours-two", "bare", "bare-muon"),
)
FEW = ("theirs-fp32", "theirs-bf16", "theirs-best", "ours", "ours-compiled")
"""What is measured of every case but the first, which gets all settings."""
COMPARED = {
    "ours / theirs-fp32": ("ours", "theirs-fp32"),
    "ours / theirs-bf16": ("ours", "theirs-bf16"),
    "ours / theirs-best": ("ours", "theirs-best"),
    "ours-untouched / theirs-fp32": ("ours-untouched", "theirs-fp32"),
    "ours-untouched / theirs-best": ("ours-untouched", "theirs-best"),
    "ours-compiled / theirs-best": ("ours-compiled", "theirs-best"),
    "ours-equal / theirs-fp32": ("ours-equal", "theirs-fp32"),
    "ours-equal / theirs-bf16": ("ours-equal", "theirs-bf16"),
    "ours-equal-no-dropout / theirs-best": ("ours-equal-no-dropout", "theirs-best"),
    "cost of Muon": ("ours", "ours-muon"),
    "cost of Lightning and callbacks": ("ours", "bare"),  # of the median step: no checkpoint in either
    "two processes / one": ("ours-two", "ours"),
}


def our_options(setting: str, case: Case) -> list[str]:
    """Return the options of train.py, or of the bare loop, for a setting."""
    words = ["--data.seq_len", f"{case.seq_len}", "--trainer.global_batch_size", f"{case.rows}"]
    shape = ["--model.hidden_size", f"{case.hidden}", "--model.num_hidden_layers", f"{case.layers}"]
    shape += ["--model.num_attention_heads", f"{case.heads}", "--model.vocab_size", f"{case.vocab}"]
    if setting.startswith("ours-equal"):
        words = ["--config", "bert-mini", *words, *shape, "--model.intermediate_size", f"{4 * case.hidden}"]
        words += ["--data.packing", "concat"]
        if setting == "ours-equal-no-dropout":
            words += [word for name in DROPOUTS for word in (f"--model.{name}", "0.0")]
        return words
    words += [*shape, "--model.intermediate_size", f"{gated_width(case.hidden)}"]
    words += [] if setting.endswith("muon") else ADAMW
    words += ["--trainer.compile", "true"] if setting == "ours-compiled" else []
    if setting == "ours-two":
        words[words.index("--trainer.global_batch_size") + 1] = f"{2 * case.rows}"
        words += ["--trainer.devices", "2"]
    return words


def steady_rate(ends_s: list[float], tokens: list[float]) -> float:
    """Return tokens per second from the end of step WARM to the end of the last but one.

    Args:
        ends_s: when each step ended, the first one first.
        tokens: tokens seen by then.
    """
    first, last = WARM - 1, len(ends_s) - 2
    return (tokens[last] - tokens[first]) / (ends_s[last] - ends_s[first])


class Bench:
    """The inputs of one case, and its runs.

    Args:
        options: the command line.
        case: the size.
        work: folder for text, vocabulary, caches and runs.
    """

    def __init__(self, options: argparse.Namespace, case: Case, work: Path):
        self.options, self.case, self.work = options, case, work
        self.env = environment(options.threads, options.allocator)
        self.text, self.tokenizer = work / "text.txt", work / f"tokenizer-{case.vocab}"
        if options.text:
            self.text = Path(options.text).absolute()
        elif not self.text.exists():
            write_documents(self.text)
        if not self.tokenizer.exists():
            write_tokenizer(self.text, self.tokenizer, case.vocab)

    def run(self, setting: str, steps: int | None = None) -> dict[str, float]:
        """Run one setting once."""
        run = self._theirs if setting in THEIRS else self._bare if setting.startswith("bare") else self._ours
        for folder in ("runs", "theirs"):
            shutil.rmtree(self.work / folder, ignore_errors=True)
        return run(setting, steps or self.options.steps)

    def _inputs(self) -> list[object]:
        words = ["--data.sources", self.text, "--data.document", "line", "--tokenizer.path", self.tokenizer]
        return [*words, "--data.cache_dir", self.work / "cache", "--runs_dir", self.work / "runs"]

    def _ours(self, setting: str, steps: int) -> dict[str, float]:
        often = max(steps // 2, 1)
        words = ["--name", "run", "--trainer.max_steps", steps, "--trainer.val_every", steps]
        words += ["--trainer.save_every", often, "--data.max_validation_tokens", 16384]
        env = self.env | ({"OMP_NUM_THREADS": "1"} if setting == "ours-two" else {})
        env = (UNTOUCHED if setting == "ours-untouched" else {}) | env
        child = run_child(["train.py", *self._inputs(), *our_options(setting, self.case), *words], env)
        with (self.work / "runs" / "run" / "metrics.csv").open(newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["step"] != "0"]
        ends, tokens = ([float(row[name]) for row in rows] for name in ("elapsed_s", "tokens"))
        return {
            "tokens_per_second": steady_rate(ends, tokens),
            "step_s": median([end - begin for begin, end in pairwise(ends)][WARM - 1 : -1]),
            "wait_share": median([float(row["throughput/wait_share"]) for row in rows[WARM:]]),
            "whole_s": child.seconds,
            "outside_steps_s": child.seconds - ends[-1],
            "cpu_s": child.cpu_s,
            "peak_bytes": child.peak_bytes,
        }

    def _theirs(self, setting: str, steps: int) -> dict[str, float]:
        case, words = self.case, ["benchmarks/run_mlm_trainer.py", "--text", self.text]
        words += ["--tokenizer", self.tokenizer, "--cache", self.work / "theirs-cache"]
        words += ["--output", self.work / "theirs", "--steps", steps, "--save_every", max(steps // 2, 1)]
        words += ["--hidden", case.hidden, "--layers", case.layers, "--heads", case.heads]
        words += ["--seq_len", case.seq_len, "--rows", case.rows, "--vocab", case.vocab, *THEIRS[setting]]
        child = run_child(words, self.env)
        facts = child.json()
        ends = facts["ends_s"]
        return {
            "tokens_per_second": steady_rate(
                ends, [facts["tokens_per_step"] * n for n in range(1, steps + 1)]
            ),
            "whole_s": child.seconds,
            "outside_steps_s": child.seconds - (ends[-1] - ends[0]),
            "cpu_s": child.cpu_s,
            "peak_bytes": child.peak_bytes,
        }

    def _bare(self, setting: str, steps: int) -> dict[str, float]:
        words = ["benchmarks/bare_loop.py", "--steps", steps, *self._inputs()]
        child = run_child([*words, *our_options(setting, self.case), "--name", "bare"], self.env)
        facts = child.json()
        kept = ("tokens_per_second", "step_s", "share_of_peak", "share_whole_layers", "useful_gflops")
        facts = {name: facts[name] for name in (*kept, "peak_gflops", "wait_share")}
        return {**facts, "cpu_s": child.cpu_s, "peak_bytes": child.peak_bytes}


def measure(options: argparse.Namespace, name: str, work: Path) -> dict[str, Any]:
    """Measure the settings of a case in turn, round after round."""
    bench = Bench(options, CASES[name], work)
    settings = options.settings or ([*THEIRS, *OURS] if name == "mini" else FEW)
    if options.threads > 1:
        settings = [setting for setting in settings if setting != "ours-two"]
    for setting in settings:  # what is prepared once and kept: rows, compiled kernels
        if setting in ("theirs-fp32", "theirs-bf16", "ours", "ours-compiled", "ours-equal"):
            bench.run(setting, WARM + 2)
    rounds: list[dict[str, dict[str, float]]] = []
    for number in range(options.rounds):
        rounds.append({})
        for setting in settings:
            rounds[-1][setting] = bench.run(setting)
            rate = rounds[-1][setting]["tokens_per_second"]
            print(f"{name}, round {number + 1}: {setting} {rate:,.0f} tokens/s", flush=True)
    return {
        "machine": machine_facts(),
        "threads": options.threads,
        "allocator": options.allocator,
        "steps": options.steps,
        "shape": vars(CASES[name]),
        "medians": medians(rounds),
        "ratios": ratios(rounds),
        "rounds": rounds,
    }


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the median of every figure of every setting."""
    return {
        setting: {name: median([one[setting][name] for one in rounds]) for name in figures}
        for setting, figures in rounds[0].items()
    }


def ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    """Return ratios of tokens per second within a round, their median over the rounds."""
    found = {}
    for title, (one, other) in COMPARED.items():
        if one in rounds[0] and other in rounds[0]:
            figure = "step_s" if "Lightning" in title else "tokens_per_second"
            pairs = [(each[one][figure], each[other][figure]) for each in rounds]
            found[title] = median([above / below for above, below in pairs])
            if title.startswith("cost"):
                found[title] -= 1.0
    memory = [
        one["ours"]["peak_bytes"] / one["theirs-fp32"]["peak_bytes"]
        for one in rounds
        if {"ours", "theirs-fp32"} <= one.keys()
    ]
    return found | ({"memory, ours / theirs-fp32": median(memory)} if memory else {})


def show(key: str, result: dict[str, Any]) -> None:
    """Print a case as tables."""
    print(f"\n{key}: {result['shape']}, allocator {result['allocator']}, {result['machine']}\n")
    rows = [
        (
            setting,
            f"{found['tokens_per_second']:,.0f}",
            f"{found['peak_bytes'] / 1e6:,.0f}",
            f"{found.get('outside_steps_s', float('nan')):.1f}",
            f"{found['share_of_peak']:.0%}" if "share_of_peak" in found else "",
            f"{found['share_whole_layers']:.0%}" if "share_whole_layers" in found else "",
            f"{found['wait_share']:.2%}" if "wait_share" in found else "",
        )
        for setting, found in result["medians"].items()
    ]
    header = (
        "setting",
        "tokens/s",
        "peak RSS, MB",
        "s outside steps",
        "share of matmul peak",
        "layers counted whole",
        "waits for data",
    )
    print(table(header, rows))
    print()
    print(table(("ratio", "median"), [(name, f"{found:.2f}") for name, found in result["ratios"].items()]))


def draw(cases: dict[str, Any], path: Path) -> None:
    """Draw tokens per second of every case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = -(-len(cases) // 3)
    figure, axes = pyplot.subplots(rows, 3, figsize=(12, 3 * rows), squeeze=False)
    for axis in axes.flat[len(cases) :]:
        axis.remove()
    for axis, (key, result) in zip(axes.flat, cases.items(), strict=False):
        rates = {name: found["tokens_per_second"] for name, found in result["medians"].items()}
        colours = ["tab:gray" if name in THEIRS else "tab:blue" for name in rates]
        axis.barh(list(rates), list(rates.values()), color=colours)
        axis.invert_yaxis()
        axis.set_title(key)
        axis.set_xlabel("tokens/s")
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--settings", nargs="+", choices=[*THEIRS, *OURS], default=None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="default", help="of both sides")
    parser.add_argument("--text", default=None, help="a text of your own, a document a line")
    parser.add_argument("--work", default=None, help="folder that keeps what is prepared; default: temporary")
    options = parser.parse_args()
    if options.steps < WARM + 4:
        parser.error(f"--steps must be at least {WARM + 4}")
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.work or temporary).absolute()
        work.mkdir(parents=True, exist_ok=True)
        os.environ["HF_HOME"] = str(work / "theirs-cache")
        for name in options.cases:
            key = f"{name}, {options.threads} thread(s)"
            key += "" if options.allocator == "default" else f", {options.allocator} allocator"
            found = measure(options, name, work)
            show(key, found)
            cases = read_result("throughput") | {key: found}
            draw(cases, write_result("throughput", cases))


if __name__ == "__main__":
    main()
