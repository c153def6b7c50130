"""Fine-tuning on a task of GLUE: ours against the Trainer of transformers doing the job of its run_glue.py.

    python benchmarks/finetune.py --model MODEL --task rte --glue_dir DIR
    python benchmarks/finetune.py --model MODEL --task mrpc,stsb,cola --seeds 1,2 --epochs 2

All sides train the same model on the same examples with the same batch size, epochs, learning rate, schedule,
AdamW and clipping; each round of a side is a process of its own, in turn. Tokenizing, loading and scoring are
not timed. transformers' Trainer needs `pip install -e '.[benchmarks]'`. Sides:

    ours      as `finetune.py` does it, every epoch scored (which is not timed)
    trainer   Trainer at the same precision, every example padded to --max_length, the default of run_glue.py
    dynamic   the same, padded to the longest of a batch (run_glue.py --pad_to_max_length false)
    default   Trainer in float32, padded to --max_length; only where --precision is another

Ratios count: figures alone belong to the machine.
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
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
SIDES = ("ours", "trainer", "dynamic", "default")
BETAS, EPS, WEIGHT_DECAY, WARMUP = (0.9, 0.999), 1e-8, 0.0, 0.06

Json = dict[str, Any]


def finetune_config(options: argparse.Namespace, seed: int, work: str) -> Any:
    """Return our configuration; the other side reads its data and numbers from it too."""
    from mlm.config import finetune
    from mlm.config.training import LoggingConfig

    return finetune.FinetuneConfig(
        name="run",
        runs_dir=work,
        model=options.model,
        task=[options.task],
        glue_dir=options.glue_dir,
        seed=seed,
        data=finetune.LabelledConfig(max_length=options.max_length, max_train_examples=options.max_examples),
        optimizer=finetune.FinetuneOptimizerConfig(
            lr=options.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY
        ),
        schedule=finetune.FinetuneScheduleConfig(warmup_fraction=WARMUP),
        trainer=finetune.FinetuneTrainerConfig(
            max_epochs=options.epochs, batch_size=options.batch_size, precision=options.precision
        ),
        logging=LoggingConfig(wandb="disabled"),
    )


def run_ours(options: argparse.Namespace, work: str) -> Json:
    from mlm.training.finetuning import finetune

    finetune(finetune_config(options, options.seed, work))
    summary: Json = json.loads(Path(work, "run", "summary.json").read_text())
    return {"examples_per_second": summary["train_examples_per_second"], "metrics": summary["metrics"]}


def run_trainer(options: argparse.Namespace, work: str, precision: str, dynamic: bool) -> Json:
    import numpy as np
    import torch
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainingArguments,
        default_data_collator,
        set_seed,
    )

    from mlm.data.tasks import choose_task
    from mlm.evaluation.metrics import task_metrics

    task = choose_task(finetune_config(options, options.seed, work))
    set_seed(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    is_number = task.label_type == "regression"
    model = AutoModelForSequenceClassification.from_pretrained(
        options.model, num_labels=len(task.labels), problem_type="regression" if is_number else None
    )

    def encode(examples: Any) -> list[Json]:
        encoded = tokenizer(
            examples.texts,
            examples.pairs,
            padding=False if dynamic else "max_length",
            max_length=options.max_length,
            truncation=True,
        )
        labels = examples.labels.astype(np.float32 if is_number else np.int64).tolist()
        columns = {**encoded, "labels": labels}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    arguments = TrainingArguments(
        output_dir=work,
        per_device_train_batch_size=options.batch_size,
        per_device_eval_batch_size=2 * options.batch_size,
        num_train_epochs=options.epochs,
        learning_rate=options.lr,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP,
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        adam_epsilon=EPS,
        max_grad_norm=1.0,
        bf16=precision == "bf16-mixed",
        seed=options.seed,
        use_cpu=not torch.cuda.is_available(),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    collate = DataCollatorWithPadding(tokenizer) if dynamic else default_data_collator
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=encode(task.train))
    seconds = trainer.train().metrics["train_runtime"]
    validation: Any = encode(task.validation)
    logits = np.asarray(trainer.predict(validation).predictions, np.float64)
    labels: Any = task.validation.labels
    scores = task_metrics(task.label_type, labels, logits)
    kept = {name: scores[name] for name in task.metrics or scores}
    return {"examples_per_second": len(task.train) * options.epochs / seconds, "metrics": kept}


def run_side(options: argparse.Namespace) -> Json:
    with tempfile.TemporaryDirectory() as work:
        if options.run == "ours":
            return run_ours(options, work)
        precision = "32-true" if options.run == "default" else options.precision
        return run_trainer(options, work, precision, dynamic=options.run == "dynamic")


def in_process(side: str, task: str, seed: int, options: argparse.Namespace) -> Json:
    """Run one side in a process of its own."""
    values = {**vars(options), "run": side, "task": task, "seed": seed}
    left_out = ("rounds", "seeds", "sides", "output")
    given = {name: value for name, value in values.items() if value is not None and name not in left_out}
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, __file__, *flags]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, text=True)
    result: Json = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(task: str, sides: Sequence[str], options: argparse.Namespace) -> Json:
    """Run all sides in turn, every round with the next of the seeds; medians of speed, all scores."""
    rounds: list[Json] = []
    for number in range(options.rounds):
        seed = options.seeds[number % len(options.seeds)]
        rounds.append({side: in_process(side, task, seed, options) for side in sides})
        shown = ", ".join(f"{side} {rounds[-1][side]['examples_per_second']:.1f}" for side in sides)
        print(f"{task}, round {number + 1}, seed {seed}: {shown} examples/s", flush=True)
    result: Json = {"rounds": rounds, "examples_per_second": {}, "scores": {}, "ratio_each_round": {}}
    for side in sides:
        speeds = [one[side]["examples_per_second"] for one in rounds]
        result["examples_per_second"][side] = statistics.median(speeds)
        result["scores"][side] = {
            name: statistics.mean(one[side]["metrics"][name] for one in rounds)
            for name in rounds[0][side]["metrics"]
        }
        if side != "ours":
            ours = [one["ours"]["examples_per_second"] for one in rounds]
            result["ratio_each_round"][side] = [a / b for a, b in zip(ours, speeds, strict=True)]
    result["ratio"] = {side: statistics.median(all_) for side, all_ in result["ratio_each_round"].items()}
    return result


def draw(tasks: Json, path: Path) -> None:
    """Draw the speed and the first score of every side, by task."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speeds, scores) = pyplot.subplots(1, 2, figsize=(9, 3.5))
    sides = list(next(iter(tasks.values()))["examples_per_second"])
    width = 0.8 / len(sides)
    for place, side in enumerate(sides):
        x = [number + place * width for number in range(len(tasks))]
        speeds.bar(x, [one["examples_per_second"][side] for one in tasks.values()], width, label=side)
        scores.bar(x, [next(iter(one["scores"][side].values())) for one in tasks.values()], width)
    names = {task: next(iter(one["scores"]["ours"])) for task, one in tasks.items()}
    middle = [number + 0.4 - width / 2 for number in range(len(tasks))]
    speeds.set_xticks(middle, list(tasks))
    scores.set_xticks(middle, [f"{task}\n{name.replace('_', ' ')}" for task, name in names.items()])
    speeds.set_ylabel("training examples/s")
    scores.set_ylabel("score on dev, mean of the rounds")
    speeds.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def machine() -> Json:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    packages = ("torch", "transformers", "lightning", "tokenizers")
    return {
        "cpu": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        **{name: version(name) for name in packages},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="model folder that both sides can read")
    parser.add_argument("--task", default="rte", help="task of GLUE; several: a,b")
    parser.add_argument("--glue_dir", default=None, help="folder of the official GLUE folders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seeds", default="1,2,3", help="one for each round, over and over")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--max_examples", type=int, default=None, help="train on so many examples only")
    parser.add_argument("--max_length", type=int, default=128)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=5e-5)
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--sides", default=",".join(SIDES), help="those to run, ours among them")
    parser.add_argument("--output", default=None, help="JSON file; a picture is put beside it")
    for name in ("run", "seed"):
        parser.add_argument(f"--{name}", type=int if name == "seed" else str, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_side(options)))
        return
    options.seeds = [int(seed) for seed in options.seeds.split(",")]
    sides = [side for side in options.sides.split(",") if side != "default" or options.precision != "32-true"]
    output = Path(options.output or RESULTS / f"finetune-{options.precision}.json")
    result: Json = {"machine": machine(), "options": {**vars(options), "model": Path(options.model).name}}
    for name in ("run", "seed", "output", "glue_dir", "sides"):
        result["options"].pop(name)
    result["tasks"] = {task: compare(task, sides, options) for task in options.task.split(",")}
    output.parent.mkdir(exist_ok=True)
    output.write_text(json.dumps(result, indent=1) + "\n")
    draw(result["tasks"], output.with_suffix(".png"))
    shown = {
        task: {name: one[name] for name in ("examples_per_second", "ratio", "scores")}
        for task, one in result["tasks"].items()
    }
    print(json.dumps(shown, indent=1))


if __name__ == "__main__":
    main()
