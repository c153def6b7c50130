"""Scores of GLUE tasks by learning rate, for several starts: the rule of `optimizer.lr: null` is from them.

    python benchmarks/learning_rates.py --glue_dir DIR --starts minilm=FOLDER ours=runs/NAME/model scratch \\
        --tasks mrpc rte cola stsb --rates 2e-5 5e-5 1e-4 2e-4 3e-4 --seeds 1 2 --work runs/rates

Every cell is a run of `finetune.py`, scored on the official dev set. A run that is there already is not
repeated, so the grid may be stopped, continued and made larger. `--rates auto` measures the rule. Hours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from itertools import product
from pathlib import Path

from measuring import environment, run_child, table


def score(args: argparse.Namespace, start: str, task: str, rate: str, seed: int) -> float:
    """Return the first score of a task on dev, from a run or from that of an earlier call."""
    name, _, model = start.partition("=")
    words: list[object] = ["--runs_dir", args.work, "--name", f"{name}-{task}-{rate}-{seed}"]
    summary = Path(args.work, str(words[-1]), "summary.json")
    if not summary.exists():
        words += ["--model", model or name, "--task", task, "--glue_dir", args.glue_dir, "--seed", seed]
        words += [] if rate == "auto" else ["--optimizer.lr", rate]
        more = [
            word for option in args.options for word in (f"--{option.split('=')[0]}", option.split("=")[1])
        ]
        run_child(["finetune.py", *words, *more], environment(args.threads, "default"))
    metrics: dict[str, float] = json.loads(summary.read_text(encoding="utf-8"))["metrics"]
    print(f"{words[3]}: {json.dumps(metrics)}", flush=True)
    return next(iter(metrics.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--glue_dir", required=True, help="folder of the official GLUE folders")
    parser.add_argument("--starts", nargs="+", required=True, metavar="NAME=MODEL")
    parser.add_argument("--tasks", nargs="+", default=["mrpc", "rte", "cola", "stsb"])
    parser.add_argument("--rates", nargs="+", default=["2e-5", "5e-5", "1e-4", "2e-4", "3e-4"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--options", nargs="+", default=[], metavar="KEY=VALUE", help="for finetune.py")
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    cells: dict[tuple[str, str, str], list[float]] = {}
    for seed, start, task, rate in product(args.seeds, args.starts, args.tasks, args.rates):
        cells.setdefault((start, task, rate), []).append(score(args, start, task, rate, seed))
    rows = [
        [start.partition("=")[0], task]
        + [
            " ".join(
                f"{value:.3f}"
                for value in (statistics.mean(cells[start, task, rate]), *cells[start, task, rate])
            )
            for rate in args.rates
        ]
        for start, task in product(args.starts, args.tasks)
    ]
    print(table(["start", "task", *args.rates], rows))


if __name__ == "__main__":
    main()
