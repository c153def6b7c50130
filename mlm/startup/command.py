"""From a command line to a configuration that is ready to run, and how a mistake ends the program."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from mlm.config.commands import PretrainConfig, RunConfig
from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig
from mlm.config.parse import build_config, locate, read_words
from mlm.config.schema import nearest
from mlm.launch import is_first_process, wait_for_first_process
from mlm.startup.checks import check_files, check_run
from mlm.startup.runs import choose_model, choose_name, with_stored_keys

C = TypeVar("C")

DEBUG = "MLM_DEBUG"
"""Environment variable that shows the traceback of an unexpected error in full."""
HELP = {"-h", "--help"}
KINDS: dict[str, type[RunConfig]] = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}


def parse_config(cls: type[C], argv: Sequence[str] | None = None, *, prog: str) -> C:
    """Return the configuration that a command line asks for; a mistake ends the program in one line.

    Args:
        cls: dataclass of the command.
        argv: the command line without the program; None: the one of this process.
        prog: name of the program in messages.

    Raises:
        SystemExit: 0 after `--help`, 2 after a mistake, whose line is on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the screen cannot show must not end the run
    with one_line_errors(prog):
        check_platform()
        if HELP & set(words):
            from mlm.config.help import format_help

            print(format_help(cls, prog), end="")
            raise SystemExit(0)
        return _configure(cls, words, is_run=True)


def check_platform() -> None:
    """Raise InputError on Windows, which has neither the file locks nor the signals that runs rely on."""
    if sys.platform == "win32":
        raise InputError("mlm runs on Linux and macOS; on Windows, use WSL")


def load_config(kind: str, *words: str) -> Any:
    """Return the configuration of a run from the words of its command line, without making a run folder.

    Args:
        kind: `pretrain` for a PretrainConfig, `finetune` for a FinetuneConfig.
        words: as after `python train.py`, such as `--trainer.max_steps=60`.

    Raises:
        InputError: a mistake in the words, the files of `--config` or the files that these name.
    """
    if kind not in KINDS:
        raise InputError(f"kind={kind} is neither pretrain nor finetune{nearest(kind, list(KINDS))}")
    if HELP & set(words):
        raise InputError(f"--help is for the command line; see `mlm {kind} --help`")
    return _configure(KINDS[kind], words, is_run=False)


def _configure(cls: type[C], words: Sequence[str], is_run: bool) -> C:
    line = read_words(cls, words)
    try:
        if issubclass(cls, RunConfig):
            line = with_stored_keys(cls, line)
        config = build_config(cls, line.given, line.flags)
        if isinstance(config, RunConfig) and is_run:
            choose_name(config, line.files[-1].stem if line.files else config.default_stem)
        if isinstance(config, FinetuneConfig):
            choose_model(config)
        check_files(config)
        if is_run:
            check_run(config)
    except InputError as error:
        raise locate(error, line.given | line.flags) from None
    return config


@contextmanager
def one_line_errors(prog: str, config: object = None) -> Iterator[None]:
    """End the program with one line on stderr: a user's mistake with exit code 2, an interrupt with 130.

    Any other error ends it with exit code 1. Its traceback goes to a file, in the run folder if there is one,
    or to stderr if the environment variable MLM_DEBUG is 1.

    Args:
        prog: name of the program in messages.
        config: of the command; one of a run names the run folder.
    """
    try:
        yield
    except InputError as error:
        if not is_first_process():
            wait_for_first_process()
        text = re.sub(r"\s*\n\s*", " ", str(error))
        print(f"{prog}: error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            raise
        path = _keep_traceback(error, config)
        text = " ".join(f"{type(error).__name__}: {error}".split())
        hint = f"(traceback: {path}; {DEBUG}=1 prints it)"
        print(f"{prog}: unexpected error: {text[:500]} {hint}", file=sys.stderr)
        raise SystemExit(1) from None


def _keep_traceback(error: Exception, config: object) -> str:
    """Write the traceback of an error to a new file and return its path."""
    folder = Path(config.runs_dir, config.name) if isinstance(config, RunConfig) and config.name else None
    place = str(folder) if folder is not None and folder.is_dir() else None
    lines = traceback.format_exception(error)
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="error-", suffix=".txt", dir=place, delete=False, encoding="utf-8", errors="replace"
        ) as file:
            file.writelines(lines)
    except OSError:  # a full disk: the terminal is the only place left
        sys.stderr.writelines(lines)
        return "above"
    return file.name


def log_to_stderr() -> None:
    """Show the log of the package on stderr; of several processes only the first shows more than errors."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("mlm").setLevel(logging.INFO if is_first_process() else logging.ERROR)
