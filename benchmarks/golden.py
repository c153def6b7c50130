"""Record what must not change in a refactoring, and compare two recordings.

`python benchmarks/golden.py --output before.json` trains, prepares, fine-tunes and refuses on small seeded
inputs, in float32 on one thread, and saves vocabularies, token stores, row tables, orders, masks, losses,
weights, and the answer and exit code of some sixty bad command lines. After the change, `--output after.json
--compare before.json` prints what differs and exits with 1 if any of it is not marked `may_differ` (the
fine-tuned figures are); `--texts-may-differ` also accepts another wording of a refusal, but not another exit
code or a second line. Everything goes through commands and the files they leave, except `counted_draws`,
which calls two classes. The last bits of losses depend on the machine and its libraries: record both sides on
the same one. `--checkout FOLDER` runs the code of another checkout. It takes 2.5 minutes of processor time,
two commands at a time.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def words_of(text: str) -> list[str]:
    return text.split()


WORDS = words_of(
    "the a of and harbour boat keeper lamp gull tide market letter neighbour evening winter light stone "
    "counting waiting remembered answers belongs quietly unlikely Étienne Zürich naïve 港 湾 42 1,000 don't"
)
SMALL = words_of(
    "--data.seq_len 32 --logging.wandb disabled --trainer.precision 32-true --trainer.accelerator cpu "
    "--trainer.global_batch_size 8 --trainer.val_every 4 --trainer.save_every 6 --trainer.max_steps 12 "
    "--model.hidden_size 32 --model.num_hidden_layers 2 --model.num_attention_heads 2 "
    "--model.intermediate_size 48"
)
NUMBER = re.compile(r"\d[\d,.]*%?")
SMALL_TUNING = words_of(
    "--trainer.precision 32-true --trainer.accelerator cpu --trainer.batch_size 8 --logging.wandb disabled"
)
WORDPIECE = ["--tokenizer.vocab_size", "260"]
EXACT_COLUMNS = (
    *("step", "tokens", "train/loss", "val/loss", "val/perplexity", "val/masked_accuracy"),
    *("optim/lr", "optim/grad_norm", "optim/skipped", "masking/rate", "masking/mask_token"),
    *("masking/random_token", "masking/unchanged"),
)
"""Columns of metrics.csv that no clock decides."""


def sentences(draw: random.Random) -> str:
    found = []
    for _ in range(draw.randint(1, 5)):
        words = draw.choices(WORDS, weights=range(len(WORDS), 0, -1), k=draw.randint(3, 12))
        found.append(" ".join(words).capitalize() + draw.choice([".", ".", "?", "!"]))
    return " ".join(found)


def write_inputs(folder: Path) -> None:
    """Write the texts, the labelled files, and the files with mistakes."""
    draw = random.Random(16)
    documents = [sentences(draw) for _ in range(260)]
    (folder / "text.txt").write_text("\n\n".join(documents + documents[:5]), encoding="utf-8")
    rows = [json.dumps({"text": sentences(draw), "id": number}) for number in range(60)]
    (folder / "more.jsonl").write_text("\n".join(rows), encoding="utf-8")
    (folder / "held_out.txt").write_text("\n\n".join(sentences(draw) for _ in range(30)), encoding="utf-8")
    labelled = [(sentences(draw), draw.choice(["no", "yes", "maybe"])) for _ in range(90)]
    for name, part in (("train.csv", labelled[:60]), ("valid.csv", labelled[60:])):
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows([("text", "label"), *part])
    several = [
        json.dumps(
            {"text": sentences(draw), "label": draw.sample(["sea", "town", "sky"], draw.randint(0, 3))}
        )
        for _ in range(60)
    ]
    (folder / "several.jsonl").write_text("\n".join(several), encoding="utf-8")
    for name, content in MISTAKES.items():
        (folder / name).write_bytes(content.encode("latin-1"))


MISTAKES = {
    "unknown.yaml": "seed: 1\nmodel:\n  hiden_size: 64\n",
    "twice.yaml": "seed: 1\nname: x\nseed: 2\n",
    "broken.yaml": "seed: 1\ndata: [1\n",
    "list.yaml": "- 1\n- 2\n",
    "type.yaml": "# rates\noptimizer:\n  lr: fast\n",
    "null.yaml": "optimizer:\n  lr:\n",
    "range.yaml": "seed: 1\ndata:\n  seq_len: 3\n",
    "part.yaml": "# rates\nmask_rate: 1.5\n",
    "whole.yaml": "masking: part.yaml\n",
    "source.yaml": "data:\n  sources: [{path: text.txt, colum: y}]\n",
    "self.yaml": "data:\n  sources: &a [*a]\n",
    "recipe.yaml": "recipes:\n  - {task: cola, lr: [1e-4]}\n  - {task: cola, lr: [1e-5]}\n",
    "empty.txt": "\n \n",
    "latin.txt": "a caf\xe9 by the harbour\n",
    "bad.jsonl": '{"text": "a"}\n{"text": \n',
    "columns.csv": "title,body\na,b\nc,d\n",
    "bad_label.csv": "text,label\na boat,yes\na lamp,perhaps\n",
    "broken.csv": 'text,label\na boat,yes\n"a lamp,no\n',
    "fields.csv": "text,label\na boat,yes\na lamp,no,what\n",
    "numbers.csv": "text,label\na boat,1.5\na lamp,two\na gull,3\n",
    "one_class.csv": "text,label\na boat,yes\na lamp,yes\na gull,yes\n",
    "tokenizer.json": '{"model": 3}',
}
"""Files that a user might give, in latin-1."""

REFUSALS = {
    "train.py": """
        --model.hiden_size 3
        --optimizer.lr fast
        --optimizer.lr nan
        --optimizer.betas 0.9
        --trainer.max_steps 0
        --trainer.max_time soon
        --trainer.global_batch_size 7 --trainer.micro_batch_size 2
        --trainer.strategy fsdp2
        --masking.mask_rate 15
        --data.packing sideways
        --data.sources nowhere.txt
        --data.sources hub:name
        --data.seq_len 1024 --model.max_position_embeddings 512
        --model.hidden_size 250 --model.num_attention_heads 4
        --schedule.warmup_steps 200 --trainer.max_steps 20
        --tokenizer.path nowhere
        --init nowhere
        --branch nowhere
        --config nowhere
        --config adapt
        --config unknown.yaml
        --config twice.yaml
        --config broken.yaml
        --config list.yaml
        --config type.yaml
        --config null.yaml
        --config range.yaml
        --config whole.yaml
        --config source.yaml
        --config self.yaml
        --resume --name nothing
        --resume maybe
        --name a/b
        --seed
        stray
        --data.sources empty.txt --logging.wandb disabled
    """,
    "mlm": """
        nothing
        predict
        plan --init x/y
        prepare --shard 3/2
        prepare --data.sources bad.jsonl
        prepare --data.sources latin.txt
        prepare --data.sources columns.csv
        tokenizer inspect --path tokenizer.json
    """,
    "finetune.py": """
        --model nowhere
        --model scratch --task colla
        --task cola --data.train train.csv
        --data.train train.csv --head.class_weights yes=0
        --trainer.early_stopping 2
        --resume
        --config recipe.yaml
    """,
}
"""Command lines with a mistake, of each program."""

REFUSALS_OF_A_MODEL = {
    "finetune.py": """
        --model MODEL --data.train train.csv --data.validation bad_label.csv --logging.wandb disabled
        --model MODEL --data.train broken.csv --logging.wandb disabled
        --model MODEL --data.train fields.csv --logging.wandb disabled
        --model MODEL --data.train numbers.csv --data.label_type regression --logging.wandb disabled
        --model MODEL --data.train one_class.csv --logging.wandb disabled
        --model MODEL --data.train train.csv --data.label_column stars --logging.wandb disabled
    """,
    "mlm": """
        predict --model MODEL --input train.csv --output labels.csv
        predict --model MODEL --input train.csv --output nowhere/labels.csv
        evaluate --model MODEL --input train.csv --data.sources text.txt
        fill-mask --model MODEL hello
        embed --model MODEL --input train.csv --output train.csv
    """,
}


@dataclass(frozen=True)
class Sandbox:
    """A folder of inputs, and the code that is run on them."""

    folder: Path
    checkout: Path

    def run(self, program: str, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a program as a user does, in the folder."""
        start = {"mlm": ["-m", "mlm"], "-c": ["-c"]}.get(program, [str(self.checkout / program)])
        dropped = ("WANDB_MODE", "MLM_RUN_NAME", "MLM_DEBUG", "GLIBC_TUNABLES")
        env = {name: value for name, value in os.environ.items() if name not in dropped}
        env |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "HF_HUB_OFFLINE", "NO_COLOR"), "1")
        env |= {"MLM_CACHE": "cache", "PYTHONPATH": str(self.checkout), "MPLBACKEND": "Agg", "COLUMNS": "110"}
        return subprocess.run(
            [sys.executable, *start, *words], cwd=self.folder, env=env, capture_output=True, text=True
        )

    def finish(self, program: str, *words: str) -> str:
        """Run a program that has to succeed, and return what it prints."""
        done = self.run(program, list(words))
        if done.returncode:
            raise RuntimeError(f"{program} {' '.join(words)}: exit {done.returncode}\n{done.stderr[-3000:]}")
        return self.shown(done.stdout)

    def shown(self, text: str) -> str:
        """Return a text without the places of this recording."""
        return text.replace(str(self.folder), "FOLDER").replace(str(self.checkout), "CHECKOUT")


Entries = dict[str, Any]
"""What is recorded, by name."""


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def tensors_digest(path: Path) -> str:
    """Return a hash of names, types, shapes and values of a safetensors file, without its metadata."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    sha = hashlib.sha256()
    for name, facts in sorted(header.items()):
        begin, end = (8 + size + offset for offset in facts["data_offsets"])
        sha.update(f"{name} {facts['dtype']} {facts['shape']}".encode() + content[begin:end])
    return sha.hexdigest()[:32]


def table(path: Path, columns: tuple[str, ...] | None) -> dict[str, list[str]]:
    """Return the columns of a metrics table as they are written; None: all but those of the clock."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    clock = ("elapsed_s", "throughput/")
    names = columns or tuple(name for name in rows[0] if not name.startswith(clock))
    return {name: [row[name] for row in rows] for name in names}


def model_entries(folder: Path, name: str) -> Entries:
    files = {path.name: digest(path.read_bytes()) for path in folder.iterdir() if path.suffix == ".json"}
    return {
        f"{name}.model.tensors": tensors_digest(folder / "model.safetensors"),
        f"{name}.model.config.json": json.loads((folder / "config.json").read_text()),
        f"{name}.model.files": files,
    }


def pretraining(box: Sandbox, name: str, *words: str) -> Entries:
    """Record a run: every step, the loss before and after, and the saved model."""
    box.finish("train.py", "--name", name, *words)
    folder = box.folder / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    exact = ("loss_first", "val_loss", "unigram_entropy", "tokens", "steps", "num_parameters", "vocab_size")
    entries = {
        f"{name}.steps.{key}": value for key, value in table(folder / "metrics.csv", EXACT_COLUMNS).items()
    }
    entries |= {f"{name}.summary.{key}": summary[key] for key in exact}
    return entries | model_entries(folder / "model", name)


def finetuning(box: Sandbox, name: str, *words: str) -> Entries:
    """Record a fine-tuning run, whose figures may differ: later a sum is divided in another place."""
    box.finish("finetune.py", "--model", "runs/default/model", "--name", name, *SMALL_TUNING, *words)
    folder = box.folder / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    exact = {
        key: summary.get(key) for key in ("labels", "label_type", "num_validation_examples", "max_length")
    }
    entries: Entries = {f"{name}.summary.{key}": value for key, value in exact.items()}
    entries[f"{name}.model.config.json"] = json.loads((folder / "model" / "config.json").read_text())
    figures = {
        "epochs": table(folder / "metrics.csv", None),
        "metrics": summary["metrics"],
        "tensors": tensors_digest(folder / "model" / "model.safetensors"),
    }
    return entries | {f"{name}.{key}": {"may_differ": True, "value": value} for key, value in figures.items()}


def batches(box: Sandbox, name: str, *words: str) -> Entries:
    """Record the first batch: the numbers of its description, and its rows with what is hidden in them."""
    shown = box.finish("mlm", "inspect", "--rows", "6", *WORDPIECE, "--data.seq_len", "32", *words)
    facts, *rows = shown.split("\n\nrow ")
    entries: Entries = {f"batch.{name}.counts": [NUMBER.findall(line) for line in facts.splitlines()[1:5]]}
    for row in rows:
        heading, _, text = row.partition("\n")
        numbers = NUMBER.findall(heading)
        entries[f"batch.{name}.row {numbers[0]}"] = {"numbers": numbers, "text": text.rstrip()}
    return entries


def measured(box: Sandbox) -> Entries:
    """Record what the commands say of a trained model."""
    model = ("--model", "runs/default/model")
    box.finish("mlm", "evaluate", *model, "--data.sources", "held_out.txt", "--output", "figures.json")
    box.finish("mlm", "embed", *model, "--input", "held_out.txt", "--output", "vectors.npy")
    return {
        "evaluate.figures": json.loads((box.folder / "figures.json").read_text()),
        "embed.vectors": digest((box.folder / "vectors.npy").read_bytes()),
        "fill-mask.words": box.finish("mlm", "fill-mask", *model, "the [MASK] of the harbour"),
    }


def prepared(box: Sandbox) -> Entries:
    """Record every file of the cache: vocabularies, token stores and row tables, under the keys they have."""
    cache = box.folder / "cache"
    ignored = (".lock", "used", "digests.json")
    files = sorted(path for path in cache.rglob("*") if path.is_file() and not path.name.endswith(ignored))
    return {f"cache.{path.relative_to(cache)}": file_content(path) for path in files}


def file_content(path: Path) -> Any:
    """Return the values of a small JSON file, without its sentences for people; of others a hash."""
    if path.name not in ("manifest.json", "facts.json"):
        return digest(path.read_bytes())
    facts = json.loads(path.read_text())
    for source in facts.get("sources", []):
        source.pop("summary", None)
    return facts


def counted_draws() -> Entries:
    """Record orders and masks that need no text; runs in a process of the checkout."""
    import numpy as np

    from mlm.config.data import MaskingConfig
    from mlm.data.sampler import TrainingSampler
    from mlm.masking import Masking

    sampler = TrainingSampler(37, 3, 8, 4, rank=1, world_size=2, rows_consumed=64)
    drawn = [next(iterator) for iterator in [iter(sampler)] for _ in range(12)]
    found: Entries = {"order.rows": [[batch.passes.tolist(), batch.rows.tolist()] for batch in drawn]}
    ids = np.random.default_rng(5).integers(5, 200, (16, 64))
    ids[:, 0], ids[:, -1] = 2, 3
    ids[3, 40:] = 0
    special, begins = np.arange(200) < 5, np.arange(200) % 3 > 0
    for strategy in ("token", "whole_word", "span"):
        masking = Masking(MaskingConfig(strategy), 0.2, 4, special, begins)
        tokens = masking(ids, 7, np.arange(16) // 8, np.arange(16), 0.15)
        found[f"masks.{strategy}.first"] = [array[0].tolist() for array in tokens]
        found[f"masks.{strategy}.all"] = digest(b"".join(array.astype("<i8").tobytes() for array in tokens))
    return found


def direct(box: Sandbox) -> Entries:
    """Run `counted_draws` with the code of the checkout."""
    code = f"import json, sys; sys.path.append({str(Path(__file__).parent)!r}); import golden; "
    found: Entries = json.loads(box.finish("-c", f"{code}print(json.dumps(golden.counted_draws()))"))
    return found


def command_lines(lines: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Yield program and words of each command line with a mistake."""
    for program, block in lines.items():
        for line in filter(None, map(str.strip, block.splitlines())):
            yield program, line.replace("MODEL", "runs/default/model").split()


def refusal(box: Sandbox, program: str, words: list[str]) -> Entries:
    """Record how a mistake is answered: the exit code, and the text after what was logged before it."""
    done = box.run(program, words)
    lines = box.shown(done.stderr).splitlines()
    first = next((number for number, line in enumerate(lines) if ": error: " in line), 0)
    answer = {"exit": done.returncode, "lines": len(lines) - first, "text": "\n".join(lines[first:])[-2000:]}
    return {f"refusal.{program} {' '.join(words)}": answer}


def record(box: Sandbox, jobs: int) -> Entries:
    """Run everything, `jobs` commands at a time, and return the entries."""
    write_inputs(box.folder)
    text = ("--data.sources", "text.txt")
    mix = ("--data.sources", "[{path: text.txt, weight: 2}, {path: more.jsonl, weight: 1}]")
    dropout = ("--config", "bert-mini", "--trainer.micro_batch_size", "2", "--masking.final_mask_rate", "0.3")
    first = [
        (pretraining, "default", *text, *WORDPIECE, *SMALL),
        (
            pretraining,
            "bert-mini",
            *dropout,
            *text,
            "--tokenizer.type",
            "bpe",
            "--tokenizer.vocab_size",
            "300",
            *SMALL,
        ),
        (batches, "token-isolate-mix", *mix),
        (batches, "span-concat", *text, "--data.packing", "concat", "--masking.strategy", "span"),
        (batches, "whole_word-none", *text, "--data.packing", "none", "--masking.strategy", "whole_word"),
        (direct,),
        *((refusal, *line) for line in command_lines(REFUSALS)),
    ]
    rates = ("--optimizer.layer_decay", "0.9", "--trainer.max_epochs", "2")
    second = [
        (finetuning, "classes", "--data.train", "train.csv", "--data.validation", "valid.csv"),
        (finetuning, "labels", "--data.train", "several.jsonl", "--data.label_type", "multilabel", *rates),
        (measured,),
        *((refusal, *line) for line in command_lines(REFUSALS_OF_A_MODEL)),
    ]
    entries: Entries = {}
    for stage in (first, second):
        with ThreadPoolExecutor(jobs) as pool:
            for found in pool.map(lambda job: job[0](box, *job[1:]), stage):
                entries |= found
        entries |= prepared(box)
    return entries


def differences(before: Any, after: Any, place: str = "") -> Iterator[str]:
    """Yield a line for each place where two recorded values differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            missing = "(nothing)"
            yield from differences(before.get(key, missing), after.get(key, missing), f"{place}[{key}]")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, f"{place}[{number}]")
    elif before != after:
        yield f"{place}\n  before: {before}\n  after:  {after}"


def may_differ(name: str, place: str, entry: Any, texts: bool) -> bool:
    """Tell whether a difference is accepted: of a marked entry, or of the wording of a refusal."""
    marked = isinstance(entry, dict) and entry.get("may_differ", False)
    return bool(marked) or (texts and name.startswith("refusal.") and place.startswith("[text]"))


def compare(before: Entries, after: Entries, texts_may_differ: bool = False) -> tuple[list[str], list[str]]:
    """Return the differences that break a promise, and those that may be."""
    broken: list[str] = []
    accepted: list[str] = []
    for name in sorted(before.keys() | after.keys()):
        entry = before.get(name)
        for line in differences(entry, after.get(name)):
            allowed = may_differ(name, line, entry, texts_may_differ)
            (accepted if allowed else broken).append(f"{name}{line}")
    return broken, accepted


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON file to save the recording in")
    parser.add_argument("--compare", type=Path, help="JSON file of an earlier recording")
    parser.add_argument("--after", type=Path, help="compare this recording, and record nothing")
    parser.add_argument("--texts-may-differ", action="store_true", help="accept another wording of a refusal")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="whose code to run; default: this one")
    parser.add_argument("--jobs", type=int, default=2, help="commands at a time")
    options = parser.parse_args()
    if options.after:
        entries: Entries = json.loads(options.after.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            entries = record(Sandbox(Path(folder).resolve(), options.checkout.resolve()), options.jobs)
    content = json.dumps(entries, indent=1, sort_keys=True, ensure_ascii=False)
    if options.output:
        options.output.write_text(content + "\n", encoding="utf-8")
    if not options.compare:
        print(content if not options.output else f"{options.output}: {len(entries)} entries")
        return 0
    broken, accepted = compare(json.loads(options.compare.read_text()), entries, options.texts_may_differ)
    print("\n".join([f"may differ: {line}" for line in accepted] + broken))
    print(f"{len(entries)} entries, {len(broken)} differences, and {len(accepted)} that may be")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
