"""What the benchmarks share: inputs for both sides, child processes, facts of the machine, results."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "lightning", "transformers", "accelerate", "datasets", "tokenizers", "numpy")
ALLOCATORS = {
    "default": "",
    "tuned": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
    ":glibc.malloc.top_pad=268435456:glibc.malloc.hugetlb=1",
}
"""Settings of the C library's allocator, of both sides; tuned: freed memory is kept, in large pages."""
UNTOUCHED = {"GLIBC_TUNABLES": "glibc.malloc.perturb=0"}
"""A setting that changes nothing, but with which `train.py` leaves the allocator as it is."""


@dataclass(frozen=True)
class Child:
    """A process that ended well."""

    seconds: float
    """From its start to its end."""
    cpu_s: float
    """Processor time, of all threads: contention distorts it less."""
    peak_bytes: int
    """Largest resident memory, of the process or of one that it waited for."""
    output: str
    """What it wrote to stdout."""

    def json(self) -> dict[str, Any]:
        """Return the last line of the output, read as JSON."""
        found: dict[str, Any] = json.loads(self.output.strip().splitlines()[-1])
        return found


def environment(threads: int, allocator: str) -> dict[str, str]:
    """Return the environment that both sides run in."""
    threading = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    offline = {"HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
    inherited_path = os.environ.get("PYTHONPATH")
    path = os.pathsep.join(filter(None, (str(ROOT), str(ROOT / "benchmarks"), inherited_path)))
    tunables = {"GLIBC_TUNABLES": ALLOCATORS[allocator]} if ALLOCATORS[allocator] else {}
    inherited = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    return {**inherited, **threading, **offline, **tunables, "PYTHONPATH": path}


def run_child(words: Sequence[object], env: dict[str, str]) -> Child:
    """Run a Python program of this repository to its end.

    Args:
        words: the program, relative to the repository, and its arguments.
        env: see `environment`.

    Raises:
        RuntimeError: it failed; has the end of what it said.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *map(str, words)], cwd=ROOT, env=env, stdout=out, stderr=err
        )
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        for file in (out, err):
            file.seek(0)
        if process.returncode:
            raise RuntimeError(f"{words}: status {process.returncode}: {err.read()[-3000:]}")
        return Child(seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, out.read())


def write_documents(path: Path) -> None:
    """Write the documentation of the Python installation, a document a line."""
    from mlm.data.python_docs import read_python_docs

    with path.open("w", encoding="utf-8") as file:
        for document in read_python_docs():
            file.write(" ".join(document.split()) + "\n")


def write_tokenizer(text: Path, folder: Path, vocab_size: int) -> None:
    """Learn a vocabulary for both sides."""
    from mlm.config.data import TokenizerConfig
    from mlm.data.vocabulary import train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    with text.open(encoding="utf-8") as lines:
        tokenizer = train_tokenizer(lines, TokenizerConfig(vocab_size=vocab_size))
    tokenizer.save(str(folder / "tokenizer.json"))


def machine_facts() -> dict[str, Any]:
    """Return what a figure depends on, and how busy the machine is at this moment."""
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    fields = dict(line.split(":", 1) for line in info.splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in fields.items()}
    flags = fields.get("flags", "").split()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "cpu": fields.get("model name", platform.processor()),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "bf16_units": [name for name in ("avx512_bf16", "amx_bf16") if name in flags],
        "load": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: found for name in PACKAGES if (found := _version(name))},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def gated_width(hidden: int) -> int:
    """Return the width at which three matrices have the parameters of BERT's two, to a multiple of 32."""
    return round(hidden * 8 / 3 / 32) * 32


def median(numbers: Sequence[float]) -> float:
    """Return the median, NaN of nothing."""
    return statistics.median(numbers) if numbers else float("nan")


def read_result(name: str) -> dict[str, Any]:
    """Return an earlier result, empty if there is none."""
    path = RESULTS / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def write_result(name: str, result: dict[str, Any]) -> Path:
    """Write a result as JSON and return its path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)
