"""Text to packed training rows: ours against the way the run_mlm example of transformers does it.

    python benchmarks/data_path.py                     # two or three minutes, writes results/data_path.json
    python benchmarks/data_path.py --megabytes 50 --rounds 5

Both sides get the same text file, vocabulary, row length and number of cores, each round in a process of its
own with an empty cache, in turn. Times begin after the imports and end when the rows are on disk. The other
side is `datasets.map` for tokenization (with the special tokens mask) and for concatenation into blocks, with
processes or with the threads of the library, whichever is faster; then DataCollatorForLanguageModeling. Ours
is best-fit packing of isolated documents, the default. Ratios count: figures alone belong to the machine.
`batch_share` is what cutting out, masking and counting a batch takes of a training step of the default model.
The generated text has the words of the Python documentation, and new ones as often as texts of its size.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from prepare_memory import write_text

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "data_path.json"
SEQ_LEN, BATCH, BATCHES = 128, 64, 100
FAR_ROW = 10_000_000
BIG_TOKENS = 100_000_000
STEPS = 12


def corpus_config(options: argparse.Namespace) -> Any:
    from mlm.config.data import CorpusConfig, SourceConfig

    source = SourceConfig(options.text, document="line")
    return CorpusConfig([source], seq_len=SEQ_LEN, num_proc=options.num_proc, cache_dir=options.cache)


def time_batches(next_batch: Callable[[int], Any]) -> float:
    """Return the seconds a batch takes on average, the first one left out."""
    next_batch(0)
    start = time.perf_counter()
    for number in range(1, BATCHES + 1):
        next_batch(number)
    return (time.perf_counter() - start) / BATCHES


def run_ours(options: argparse.Namespace) -> dict[str, float]:
    from mlm.config.data import MaskingConfig, TokenizerConfig
    from mlm.data.collate import MaskedRows, build_masking
    from mlm.data.corpus import prepare_corpus
    from mlm.data.sampler import TrainingSampler

    start = time.perf_counter()
    corpus = prepare_corpus(corpus_config(options), TokenizerConfig(path=options.tokenizer))
    seconds = time.perf_counter() - start
    rows = MaskedRows(corpus.train, build_masking(MaskingConfig(), 0.15, corpus.tokenizer), 0)
    batches = iter(TrainingSampler(len(corpus.train), 0, BATCH, BATCH))
    batch_s = time_batches(lambda number: rows[next(batches)])
    return {"seconds": seconds, "tokens": corpus.store.manifest["num_tokens"], "batch_s": batch_s}


def run_theirs(options: argparse.Namespace, processes: int | None) -> dict[str, float]:
    import datasets
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    datasets.disable_progress_bars()
    names = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{options.tokenizer}/tokenizer.json", **names)
    tokenizer("first use")

    def tokenize(examples: dict[str, list[str]]) -> Any:
        return tokenizer(examples["text"], return_special_tokens_mask=True)

    def group(examples: dict[str, list[list[int]]]) -> dict[str, list[list[int]]]:
        joined = {key: list(chain.from_iterable(lists)) for key, lists in examples.items()}
        total = len(joined["input_ids"]) // SEQ_LEN * SEQ_LEN
        return {
            key: [ids[at : at + SEQ_LEN] for at in range(0, total, SEQ_LEN)] for key, ids in joined.items()
        }

    start = time.perf_counter()
    text = datasets.load_dataset("text", data_files=options.text, split="train", cache_dir=options.cache)
    tokenized = text.map(tokenize, batched=True, num_proc=processes, remove_columns=["text"])
    blocks = tokenized.map(group, batched=True, num_proc=processes)
    seconds = time.perf_counter() - start
    collate = DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.15)
    order = list(range(len(blocks)))

    def batch(number: int) -> Any:
        chosen = [order[(number * BATCH + place) * 7919 % len(order)] for place in range(BATCH)]
        return collate([blocks[place] for place in chosen])

    return {"seconds": seconds, "batch_s": time_batches(batch)}


def run_open(options: argparse.Namespace) -> dict[str, float]:
    """Open a prepared corpus, and take the first batch at the start and far into the run."""
    from mlm.config.data import MaskingConfig, TokenizerConfig
    from mlm.data.collate import MaskedRows, build_masking
    from mlm.data.corpus import prepare_corpus
    from mlm.data.sampler import TrainingSampler

    start = time.perf_counter()
    corpus = prepare_corpus(corpus_config(options), TokenizerConfig(path=options.tokenizer))
    result = {"open_s": time.perf_counter() - start, "tokens": corpus.store.manifest["num_tokens"]}
    rows = MaskedRows(corpus.train, build_masking(MaskingConfig(), 0.15, corpus.tokenizer), 0)
    for name, consumed in (("warm", 0), ("row_0", 0), ("row_10_million", FAR_ROW)):
        times = []
        for seed in range(20):
            start = time.perf_counter()
            _ = rows[
                next(iter(TrainingSampler(len(corpus.train), seed, BATCH, BATCH, rows_consumed=consumed)))
            ]
            times.append(time.perf_counter() - start)
        result[f"first_batch_at_{name}_s"] = statistics.median(times)
    return result


def run_step(options: argparse.Namespace) -> dict[str, float]:
    """Take some steps of the default model, as training does on a CPU, and time both halves of each."""
    import torch

    from mlm.config.commands import PretrainConfig
    from mlm.config.data import TokenizerConfig
    from mlm.data.collate import MaskedRows, build_masking
    from mlm.data.corpus import prepare_corpus
    from mlm.data.sampler import TrainingSampler
    from mlm.model.heads import MaskedLM
    from mlm.model.loss import summed_cross_entropy
    from mlm.optim import build_optimizer

    torch.set_num_threads(options.num_proc)
    config = PretrainConfig()
    corpus = prepare_corpus(corpus_config(options), TokenizerConfig(path=options.tokenizer))
    model = MaskedLM(config.model.resolve(corpus.tokenizer.get_vocab_size(), SEQ_LEN))
    optimizer = build_optimizer(model, config.optimizer)
    rows = MaskedRows(
        corpus.train, build_masking(config.masking, config.masking.mask_rate, corpus.tokenizer), 0
    )
    size = config.trainer.global_batch_size
    batches = iter(TrainingSampler(len(corpus.train), 0, size, size))
    halves = []
    for _ in range(STEPS):
        start = time.perf_counter()
        batch = rows[next(batches)]
        drawn = time.perf_counter()
        logits = model(batch["input_ids"], batch["attention_mask"], batch["masked_positions"])
        (summed_cross_entropy(logits, batch["labels"]) / batch["num_masked"]).backward()
        optimizer.step()
        optimizer.zero_grad()
        halves.append((drawn - start, time.perf_counter() - drawn))
    batch_s, step_s = (statistics.median(half) for half in zip(*halves[2:], strict=True))
    return {"batch_s": batch_s, "step_s": step_s, "batch_share": batch_s / (batch_s + step_s)}


def in_process(what: str, options: argparse.Namespace, **changes: Any) -> dict[str, float]:
    """Run one side in a process of its own, with an empty cache unless one is given."""
    values = {**vars(options), **changes}
    with tempfile.TemporaryDirectory(dir=options.work) as cache:
        values["cache"] = values["cache"] or cache
        names = ("text", "tokenizer", "cache", "num_proc")
        flags = [word for name in names for word in (f"--{name}", str(values[name]))]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_DATASETS_CACHE": cache,
            "HF_HUB_OFFLINE": "1",
        }
        environment |= {"PYTHONPATH": str(ROOT)}
        if what == "theirs":
            environment["TOKENIZERS_PARALLELISM"] = "false"
        command = [sys.executable, __file__, "--run", what, *flags]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def write_inputs(options: argparse.Namespace) -> None:
    """Learn the vocabulary from the text; without a text of the user's, generate one first."""
    from mlm.config.data import TokenizerConfig
    from mlm.data.vocabulary import train_tokenizer

    if options.text is None:
        options.text = f"{options.work}/text.txt"
        write_text(Path(options.text), options.megabytes, words_a_new_one=50)
    options.tokenizer = options.work
    with open(options.text, encoding="utf-8") as file:
        tokenizer = train_tokenizer(file, TokenizerConfig(max_bytes=20 * 2**20))
    tokenizer.save(f"{options.work}/tokenizer.json")


def write_big_text(options: argparse.Namespace) -> str:
    """Write BIG_TOKENS tokens of short words, 50 a document."""
    import numpy as np

    words = np.array(["the", "of", "to", "and", "is", "in", "a", "for", "that", "be"])
    draw = np.random.default_rng(0)
    path = f"{options.work}/big.txt"
    with open(path, "w") as file:
        for _ in range(BIG_TOKENS // 10**6):
            lines = words[draw.integers(0, len(words), (20_000, 50))]
            file.write("\n".join(map(" ".join, lines.tolist())) + "\n")
    return path


def machine() -> dict[str, Any]:
    from importlib.metadata import version

    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = ("datasets", "tokenizers", "transformers", "numpy", "pyarrow")
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def compare(options: argparse.Namespace) -> dict[str, Any]:
    variants = {what: in_process(what, options)["seconds"] for what in ("theirs", "theirs_threads")}
    best = min(variants, key=lambda name: variants[name])
    print(f"other side: {variants}, {best} is taken", flush=True)
    rounds = []
    for number in range(options.rounds):
        ours, theirs = in_process("ours", options), in_process(best, options)
        rounds.append((ours, theirs))
        print(f"round {number}: ours {ours['seconds']:.1f} s, theirs {theirs['seconds']:.1f} s", flush=True)
    tokens = rounds[0][0]["tokens"]
    result: dict[str, Any] = {"tokens": tokens, "megabytes": Path(options.text).stat().st_size / 1e6}
    for place, name in enumerate(("ours", "theirs")):
        seconds = statistics.median(pair[place]["seconds"] for pair in rounds)
        batch_s = statistics.median(pair[place]["batch_s"] for pair in rounds)
        result[f"{name}_tokens_per_second"] = round(tokens / seconds)
        result[f"{name}_batch_tokens_per_second"] = round(BATCH * SEQ_LEN / batch_s)
    result["ratio_of_medians"] = result["ours_tokens_per_second"] / result["theirs_tokens_per_second"]
    result["ratio_each_round"] = [theirs["seconds"] / ours["seconds"] for ours, theirs in rounds]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=30, help="size of a generated text")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--num_proc", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument(
        "--skip_comparison",
        action="store_true",
        help="leave run_mlm.py out",
    )
    parser.add_argument("--skip_big", action="store_true", help="leave that store out")
    parser.add_argument(
        "--run", choices=("ours", "theirs", "theirs_threads", "open", "step"), help=argparse.SUPPRESS
    )
    parser.add_argument("--text", default=None, help="a text of your own, a document a line")
    for name in ("tokenizer", "cache"):
        parser.add_argument(f"--{name}", default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run = {
            "ours": run_ours,
            "open": run_open,
            "step": run_step,
            "theirs": lambda options: run_theirs(options, options.num_proc),
            "theirs_threads": lambda options: run_theirs(options, None),
        }[options.run]
        print(json.dumps(run(options)))
        return
    with tempfile.TemporaryDirectory() as options.work:
        write_inputs(options)
        result = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        result |= {"machine": machine(), "num_proc": options.num_proc}
        result["step"] = in_process("step", options)
        if not options.skip_comparison:
            result |= compare(options)
        if not options.skip_big:
            big, cache = write_big_text(options), f"{options.work}/cache"
            in_process("open", options, text=big, cache=cache)
            result["open"] = in_process("open", options, text=big, cache=cache)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
