"""Peak memory and speed of preparing a large text: `python benchmarks/prepare_memory.py --megabytes 2000`.

The text is generated from the documentation of the Python installation: its documents with their words in
another order, and one word in a hundred a new one, so that the number of words grows as in real text.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from mlm.data.python_docs import read_python_docs

ROOT = Path(__file__).parent.parent


def write_text(path: Path, megabytes: int, words_a_new_one: int = 100) -> None:
    """Write about so much text, a document a line; one word in so many was never seen before."""
    draw = random.Random(0)
    documents = [" ".join(document.split()) for document in read_python_docs()]
    left = megabytes * 10**6
    with path.open("w", encoding="utf-8") as file:
        while left > 0:
            for document in documents:
                words = document.split()
                draw.shuffle(words)
                for place in range(0, len(words), words_a_new_one):
                    words[place] = f"{words[place]}{draw.randrange(10**7)}"
                line = " ".join(words) + "\n"
                left -= len(line.encode())
                file.write(line)
                if left <= 0:
                    break


def watch_memory(process: subprocess.Popen[bytes], peaks: list[int]) -> None:
    """Follow the memory of a process and of those it started, together, until it ends (Linux)."""
    while process.poll() is None:
        total = 0
        for status in Path("/proc").glob("[0-9]*/status"):
            try:
                text = status.read_text()
                group = int(Path(status.parent, "stat").read_text().rpartition(")")[2].split()[2])
            except (OSError, IndexError):
                continue
            found = re.search(r"RssAnon:\s+(\d+)", text)
            if group == process.pid and found:
                total += int(found[1]) * 1024
        peaks.append(total)
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=300)
    parser.add_argument("--num_proc", type=int, default=os.cpu_count())
    parser.add_argument("--folder", default=None, help="where to work; default: a temporary folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as work:
        text = Path(work, "text.txt")
        write_text(text, options.megabytes)
        size = text.stat().st_size
        command = [
            sys.executable,
            "-m",
            "mlm",
            "prepare",
            "--data.sources",
            str(text),
            "--data.document",
            "line",
        ]
        command += ["--data.cache_dir", f"{work}/cache", "--data.num_proc", str(options.num_proc)]
        start = time.monotonic()
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        peaks: list[int] = [0]
        watcher = threading.Thread(target=watch_memory, args=(process, peaks))
        watcher.start()
        process.wait()
        watcher.join()
        seconds = time.monotonic() - start
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    result = {
        "megabytes": size / 1e6,
        "num_proc": options.num_proc,
        "seconds": round(seconds, 1),
        "megabytes_per_second": round(size / 1e6 / seconds, 1),
        "peak_rss_of_largest_process_mb": round(largest / 1e6),
        "peak_private_memory_of_all_mb": round(max(peaks) / 1e6),
        "exit_status": process.returncode,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
