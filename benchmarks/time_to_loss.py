"""How long until the loss of the other side is reached: whole runs, from the command to the saved model.

    python benchmarks/time_to_loss.py --work runs/race                  # 2 threads: about two hours
    python benchmarks/time_to_loss.py --work runs/race --steps 100 --seeds 1 --lrs 5e-4 1e-3   # 15 minutes

Both sides train on the same text with the same vocabulary, rows of the same length, and as many of them a
step. The other side is transformers' Trainer with BERT's mini size (`run_mlm_trainer.py`). Its learning rate
is swept in bf16, with warm-up, which the example has not by default; then every seed is trained with the
best one, in float32, in bf16, and in bf16 without dropout, compiled. Their final loss is the goal. The sides
take turns, seed by seed.

Ours is the default model and optimizer, in runs of several lengths, each with its whole schedule. What counts
is the time of the shortest one whose final loss is at most the goal: nothing is interpolated. Times are those
of processes from start to exit: imports, reading prepared text, training, saving.

One scorer judges both, after the fact: it opens the saved folders with transformers, in float32, and computes
the loss of the same masked tokens of the same held-out text. That text comes as rows of one document
(`single`) and as rows cut from a stream of documents (`stream`), which is what the other side trains on.
What was run is kept in --work, so that the command can be stopped and given again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

from measuring import (
    ALLOCATORS,
    environment,
    machine_facts,
    median,
    run_child,
    table,
    write_documents,
    write_result,
    write_tokenizer,
)

SEQ_LEN, ROWS, MASK_RATE = 128, 32, 0.15
HELD_OUT_EVERY = 33
"""One document in so many is held out."""
SCORED_ROWS = 512
VARIANTS: dict[str, list[str]] = {
    "fp32": [],
    "bf16": ["--bf16"],
    "best": ["--bf16", "--dropout", "0", "--compile"],
}
WARMUP = 0.06
Rows = tuple[list[list[int]], list[list[int]]]


class Race:
    """The inputs, the runs and their results.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace):
        self.options, self.work = options, Path(options.work).absolute()
        self.work.mkdir(parents=True, exist_ok=True)
        self.train, self.held_out = self.work / "train.txt", self.work / "held_out.txt"
        self.env = environment(options.threads, options.allocator)
        if not (self.work / "tokenizer").exists():
            self._write_inputs()

    def _write_inputs(self) -> None:
        whole = self.work / "text.txt"
        if self.options.text:
            shutil.copy(self.options.text, whole)
        else:
            write_documents(whole)
        lines = whole.read_text(encoding="utf-8").splitlines(keepends=True)
        order = random.Random(0).sample(range(len(lines)), len(lines))
        held_out = set(order[::HELD_OUT_EVERY])
        for path, wanted in ((self.train, False), (self.held_out, True)):
            chosen = (line for number, line in enumerate(lines) if (number in held_out) == wanted)
            path.write_text("".join(chosen), encoding="utf-8")
        write_tokenizer(self.train, self.work / "tokenizer", 8192)

    def run(self, name: str, words: list[object]) -> dict[str, Any]:
        """Return time and losses of a run, which is done only once."""
        kept = self.work / "results" / f"{name}.json"
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            folder = self.work / name
            shutil.rmtree(folder, ignore_errors=True)
            child = run_child(words, self.env)
            scored = run_child(
                ["benchmarks/time_to_loss.py", "--work", self.work, "--score", folder], self.env
            )
            result = {"seconds": child.seconds, "cpu_s": child.cpu_s, **scored.json()}
            kept.write_text(json.dumps(result))
            shutil.rmtree(folder)
        found: dict[str, Any] = json.loads(kept.read_text())
        losses = f"loss {found['single']:.3f} (single), {found['stream']:.3f} (stream)"
        print(f"{name}: {found['seconds']:.0f} s, {losses}", flush=True)
        return found

    def theirs(self, variant: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
        """Train the other side once."""
        name = f"theirs-{variant}-lr{lr:g}-seed{seed}-steps{steps}"
        words: list[object] = ["benchmarks/run_mlm_trainer.py", "--text", self.train, "--tokenizer"]
        words += [
            self.work / "tokenizer",
            "--cache",
            self.work / "theirs-cache",
            "--output",
            self.work / name,
        ]
        words += ["--steps", steps, "--lr", lr, "--warmup", WARMUP, "--seed", seed]
        return self.run(name, [*words, "--rows", ROWS, "--seq_len", SEQ_LEN, *VARIANTS[variant]])

    def ours(self, steps: int, seed: int) -> dict[str, Any]:
        """Train our side once."""
        name = f"ours-seed{seed}-steps{steps}"
        words: list[object] = ["train.py", "--data.sources", self.train, "--data.document", "line"]
        words += ["--tokenizer.path", self.work / "tokenizer", "--data.cache_dir", self.work / "cache"]
        words += ["--runs_dir", self.work, "--name", name, "--seed", seed, "--trainer.max_steps", steps]
        return self.run(name, [*words, "--data.seq_len", SEQ_LEN, "--trainer.global_batch_size", ROWS])


def scored_rows(text: Path, tokenizer_folder: Path) -> dict[str, Rows]:
    """Return ids and labels (-100: not predicted) of the held-out rows, the same whoever is scored."""
    from mlm.tokenizer import SpecialTokens, load_tokenizer

    tokenizer = load_tokenizer(tokenizer_folder)
    special, size = SpecialTokens.from_tokenizer(tokenizer), tokenizer.get_vocab_size()
    lines = text.read_text(encoding="utf-8").splitlines()
    documents = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    framed = [[special.cls, *ids, special.sep] for ids in documents if ids]
    single = [[*ids[: SEQ_LEN - 1], special.sep] if len(ids) > SEQ_LEN else ids for ids in framed]
    joined = [id_ for ids in framed for id_ in ids]
    stream = [joined[at : at + SEQ_LEN] for at in range(0, len(joined) - SEQ_LEN + 1, SEQ_LEN)]
    return {
        "single": mask_rows(single[:SCORED_ROWS], special.ids, special.mask, size),
        "stream": mask_rows(stream[:SCORED_ROWS], special.ids, special.mask, size),
    }


def mask_rows(rows: list[list[int]], special: tuple[int, ...], mask: int, size: int) -> Rows:
    """Hide tokens of some rows, 80 % as the mask, 10 % as a random token, 10 % left as they are."""
    draw = random.Random(20181011)
    inputs, labels = [], []
    ordinary = sorted(set(range(size)) - set(special))
    for row in rows:
        shown, wanted = list(row), [-100] * len(row)
        for place, id_ in enumerate(row):
            if id_ in special or draw.random() >= MASK_RATE:
                continue
            wanted[place] = id_
            kind = draw.random()
            shown[place] = mask if kind < 0.8 else draw.choice(ordinary) if kind < 0.9 else id_
        inputs.append(shown)
        labels.append(wanted)
    return inputs, labels


def score(model_folder: Path, rows: dict[str, Rows]) -> dict[str, float]:
    """Return the mean loss of the predicted tokens in nats, for each kind of row."""
    import torch
    from transformers import AutoModelForMaskedLM

    model = AutoModelForMaskedLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    found = {}
    for kind, (inputs, labels) in rows.items():
        total, count = 0.0, 0
        for ids, wanted in zip(inputs, labels, strict=True):
            places = [place for place, id_ in enumerate(wanted) if id_ >= 0]
            if not places:
                continue
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, places]
            targets = torch.tensor(wanted)[places]
            total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
            count += len(places)
        found[kind] = total / count
    return found


def race(options: argparse.Namespace) -> dict[str, Any]:
    """Run everything and return the result."""
    runs = Race(options)
    runs.ours(10, 0)  # the text is prepared once on both sides, and not in a run that counts
    runs.theirs("bf16", options.lrs[0], 0, 10)
    sweep = {lr: runs.theirs("bf16", lr, options.seeds[0], options.steps) for lr in options.lrs}
    lr = min(sweep, key=lambda each: sweep[each]["stream"])
    print(f"their best learning rate: {lr:g}", flush=True)
    theirs: dict[str, list[dict[str, Any]]] = {name: [] for name in options.variants}
    ours: dict[int, list[dict[str, Any]]] = {steps: [] for steps in sorted(options.our_steps)}
    for seed in options.seeds:  # the sides take turns
        for name, done in theirs.items():
            done.append(runs.theirs(name, lr, seed, options.steps))
        for steps, done in ours.items():
            done.append(runs.ours(steps, seed))
    return {
        "machine": machine_facts(),
        "threads": options.threads,
        "allocator": options.allocator,
        "their_steps": options.steps,
        "their_lr": lr,
        "sweep": sweep,
        "theirs": theirs,
        "ours": ours,
        "ratios": {
            kind: {name: speedups(found, ours, kind) for name, found in theirs.items()}
            for kind in ("single", "stream")
        },
    }


def speedups(
    theirs: list[dict[str, Any]], ours: dict[int, list[dict[str, Any]]], kind: str
) -> list[float | None]:
    """Return for each seed their time over that of our fastest run with at most their loss; None: no such."""
    found: list[float | None] = []
    for place, goal in enumerate(theirs):
        reached = [runs[place]["seconds"] for runs in ours.values() if runs[place][kind] <= goal[kind]]
        found.append(goal["seconds"] / min(reached) if reached else None)
    return found


def show(result: dict[str, Any]) -> None:
    """Print what was run, and the ratios."""
    facts = [(name, result[name]) for name in ("machine", "threads", "allocator", "their_steps", "their_lr")]
    print("\n" + ", ".join(f"{name} {value}" for name, value in facts) + "\n")
    groups = {f"theirs, {name}": runs for name, runs in result["theirs"].items()}
    groups |= {f"ours, {steps} steps": runs for steps, runs in result["ours"].items()}
    rows = [
        (name, *(f"{median([run[key] for run in runs]):.2f}" for key in ("seconds", "single", "stream")))
        for name, runs in groups.items()
    ]
    print(table(("run", "seconds", "loss, single", "loss, stream"), rows) + "\n")
    lines = []
    for kind, variants in result["ratios"].items():
        for name, found in variants.items():
            texts = [f"{ratio:.1f}" if ratio else "not reached" for ratio in found]
            lines.append((f"{name}, {kind} rows", " ".join(texts)))
    print(table(("times faster than theirs", "each seed"), lines))


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw final losses over the time they took."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(7, 4))
    for name, runs in result["theirs"].items():
        axis.plot(
            *zip(*((run["seconds"], run["stream"]) for run in runs), strict=True),
            "s",
            label=f"theirs, {name}",
        )
    points = [(run["seconds"], run["stream"]) for runs in result["ours"].values() for run in runs]
    axis.plot(*zip(*sorted(points), strict=True), "o", label="ours, each point a whole run")
    axis.set_xscale("log")
    axis.set_xlabel("seconds from the command to the saved model")
    axis.set_ylabel("loss on held-out text")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", required=True, help="folder that keeps inputs and results of finished runs")
    parser.add_argument("--text", default=None, help="a text of your own, a document a line")
    parser.add_argument("--steps", type=int, default=500, help="of the other side")
    parser.add_argument("--lrs", type=float, nargs="+", default=[2e-4, 5e-4, 1e-3, 2e-3])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--our_steps", type=int, nargs="+", default=[60, 80, 110, 150, 200, 300])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--allocator", choices=ALLOCATORS, default="default", help="of both sides")
    parser.add_argument("--score", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    work = Path(options.work)
    if options.score:
        rows = scored_rows(work / "held_out.txt", work / "tokenizer")
        print(json.dumps(score(Path(options.score, "model"), rows)))
        return
    os.environ["HF_HOME"] = str(work.absolute() / "theirs-cache")
    result = race(options)
    show(result)
    draw(result, write_result("time_to_loss", result))


if __name__ == "__main__":
    main()
