"""From a command line to a configuration that is ready to run, and how a mistake ends the program.

The keys of a run to resume or to branch off are read from its folder, as is the model to start from.
"""

from __future__ import annotations

import io
import locale
import logging
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import yaml

from mlm.config.commands import PretrainConfig, RunConfig
from mlm.config.errors import InputError, WrongType, require
from mlm.config.finetune import SCRATCH, FinetuneConfig
from mlm.config.parse import CommandLine, Given, Keys, build_config, locate, read_file, read_words
from mlm.config.schema import from_text, nearest
from mlm.launch import PARENT, command_for, is_first_process, launched, wait_for_first_process
from mlm.startup.checks import check_files, check_run, is_model

C = TypeVar("C")

PEER_S = 2.0
"""Seconds that an unexpected error of one of several processes waits, in case another was killed first."""
DEBUG = "MLM_DEBUG"
"""Environment variable that shows the traceback of an unexpected error in full."""
RUN_NAME = "MLM_RUN_NAME"
"""Environment variable that hands the name of the run to the other ranks."""
HELP = {"-h", "--help"}
KINDS: dict[str, type[RunConfig]] = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}


def parse_config(cls: type[C], argv: Sequence[str] | None = None, *, prog: str) -> C:
    """Return the configuration of a command line; None: that of this process, `prog`: its name in messages.

    Ends the program: SystemExit(0) after `--help`, SystemExit(2) after a mistake, with one line on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # what the screen cannot show must not end the run
    with one_line_errors(prog):
        check_platform()
        unread = [word for word in words if re.search("[\ud800-\udfff]", word)]
        known = not unread or locale.getencoding().lower() in ("utf-8", "utf8") or sys.flags.utf8_mode
        rule = f"is not {locale.getencoding()}, the encoding of this locale: set PYTHONUTF8=1"
        require(bool(known), "argument", ", ".join(unread), rule)
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
    """Return the PretrainConfig or FinetuneConfig of a command line, without making a run folder.

    Args:
        kind: `pretrain` or `finetune`.
        words: as after `python train.py`, such as `--trainer.max_steps=60`; InputError for a mistake in them.
    """
    if not isinstance(kind, str) or kind not in KINDS:
        raise InputError(f"kind={kind} is neither pretrain nor finetune{nearest(kind, list(KINDS))}")
    if odd := [word for word in words if not isinstance(word, str)]:
        raise InputError(f"words={odd[0]!r} is not a text such as --seed=1")
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


def choose_name(config: RunConfig, stem: str) -> None:
    """Set the name of the run, once for all ranks: as given, as handed over, or `stem` and UTC time."""
    if config.name is None and RUN_NAME in os.environ:
        config.name = replace(config, name=os.environ[RUN_NAME]).name
    if config.name is not None or config.resume:
        return
    launch = launched()
    number = launch.world_size if launch else int(os.environ.get("WORLD_SIZE", 1))
    rule = f"cannot be agreed on by several processes; give --name or ${RUN_NAME}"
    require(is_first_process() and number == 1, "name", "null", rule)
    first = f"{stem}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
    names = (first if number == 1 else f"{first}-{number}" for number in count(1))
    name = next(name for name in names if not Path(config.runs_dir, name).exists())
    config.name = replace(config, name=name).name


def with_stored_keys(cls: type[RunConfig], line: CommandLine) -> CommandLine:
    """Add the stored keys of the run that a command line resumes or branches off, below what it gives."""
    keys, given = Keys.of(cls), line.given | line.flags
    wanted = build_config(
        RunConfig, {key: given[key] for key in ("name", "runs_dir", "resume") if key in given}
    )
    runs_dir, name = Path(wanted.runs_dir), wanted.name or os.environ.get(RUN_NAME)
    if not wanted.resume:
        return line._replace(given=_branched_keys(given, keys, runs_dir) | line.given)
    if wanted.resume == "auto":
        if name is None:
            raise WrongType("resume: auto needs a --name: which run to start or to continue", "resume")
        if not (runs_dir / name).exists():
            return line._replace(flags=line.flags | {"resume": Given("false")})
    folder = _run_to_resume(cls, runs_dir, name)
    stored = read_file(folder / "config.yaml", keys) if (folder / "config.yaml").exists() else {}
    if not stored and wanted.resume != "auto":
        hint = "is not a run folder, because it has no config.yaml, or an empty one"
        raise InputError(f"--resume: {folder} {hint}")
    settled = {"name": Given(folder.name), "runs_dir": Given(wanted.runs_dir), "resume": Given("true")}
    return line._replace(given=stored | line.given, flags=line.flags | settled)


def _branched_keys(given: dict[str, Given], keys: Keys, runs_dir: Path) -> dict[str, Given]:
    """Return the keys of the run that a new one branches off, as it was configured; nothing without `branch`.

    Length and schedule are taken over as a whole or, where the user gives any of it, not at all. The
    vocabulary is the one of the run, whatever text the new one reads.
    """
    branch = from_text(given["branch"].value, str | None) if "branch" in given else None
    if branch is None:
        return {}
    _, folder = find_branch(runs_dir, str(branch))
    if not (folder / "config.yaml").exists():
        return {}
    stored = read_file(folder / "config.yaml", keys)
    bounds = {"trainer.max_steps", "trainer.max_tokens", "trainer.max_time"}
    schedule = {key for key in stored if key.startswith("schedule.")}
    left = {"name", "runs_dir", "resume", "branch"}
    for group in (bounds, schedule):
        left |= group if group & given.keys() else set()
    vocabulary = {}
    if from_text(stored["init"].value, str | None) is None:
        left |= {key for key in stored if key.startswith("tokenizer.")}
        vocabulary = {"tokenizer.path": Given(str(folder / "tokenizer"))}
    return {key: value for key, value in stored.items() if key not in left} | vocabulary


def _run_to_resume(cls: type[RunConfig], runs_dir: Path, name: str | None) -> Path:
    """Return the run folder to continue: the one named, else the newest of this command without a summary."""
    if name is not None:
        if not (runs_dir / name).is_dir():
            fix = nearest(name, _names(runs_dir)) or "; a new run needs no --resume"
            raise InputError(f"--resume: there is not a run folder {runs_dir / name}{fix}")
        return runs_dir / name
    found = _newest(
        runs_dir,
        "config.yaml",
        lambda folder, values: cls.own_group in values and not (folder / "summary.json").exists(),
    )
    if found is None:
        raise InputError(f"--resume: {runs_dir} holds no unfinished run; name one with --name")
    return found


def _names(runs_dir: Path) -> list[str]:
    return [path.name for path in runs_dir.glob("*/")]


def _newest(runs_dir: Path, file: str, fits: Callable[[Path, dict[str, Any]], bool]) -> Path | None:
    """Return the run folder that fits and whose `file`, YAML or JSON, changed last; damaged files do not."""
    found = []
    for path in runs_dir.glob(f"*/{file}"):
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, yaml.YAMLError):
            continue
        if isinstance(values, dict) and fits(path.parent, values):
            found.append(path)
    return max(found, key=lambda path: path.stat().st_mtime_ns).parent if found else None


def find_branch(runs_dir: Path, branch: str) -> tuple[Path, Path]:
    """Return the run folder or checkpoint file of a name, and the run folder it belongs to."""
    places = (Path(branch).expanduser(), runs_dir / branch)
    for path in places:
        if (path / "checkpoints").is_dir():
            return path, path
        if path.is_file():
            return path, path.absolute().parent.parent
    fix = nearest(branch, _names(runs_dir)) or f"; looked for {' and '.join(map(str, places))}"
    raise InputError(f"branch={branch} is neither a run nor a checkpoint{fix}", "branch")


def choose_model(config: FinetuneConfig) -> None:
    """Set the model to start from, or for random weights its shape and tokenizer, where none is named."""
    runs = config.runs_dir
    if config.model != SCRATCH:
        config.model = config.model or newest_pretrained_model(runs)
        return
    config.model_config = config.model_config or newest_pretrained_model(runs, "model_config")
    if config.tokenizer is None:
        shape = config.model_config
        config.tokenizer = shape if is_model(shape) else newest_pretrained_model(runs, "tokenizer")


def newest_pretrained_model(runs_dir: str, key: str = "model") -> str:
    """Return the model folder of the pretraining run that finished last; `key`: the option nobody gave."""
    found = _newest(
        Path(runs_dir),
        "summary.json",
        lambda folder, facts: "task" not in facts and (folder / "model" / "config.json").is_file(),
    )
    if found is None:
        raise InputError(
            f"{key}=null: {runs_dir} holds no finished pretraining run; run "
            f"{command_for('train.py')} first, or name a model folder with --{key}",
            key,
        )
    return str(found / "model")


@contextmanager
def one_line_errors(prog: str, config: object = None) -> Iterator[None]:
    """End the program with one line on stderr: a user's mistake with exit code 2, an interrupt with 130.

    Any other error ends it with exit code 1. Its traceback goes to a file, in the run folder of `config` if
    there is one, or to stderr if the environment variable MLM_DEBUG is 1.
    """
    try:
        yield
    except InputError as error:
        if not is_first_process():
            wait_for_first_process()
        text = re.sub(r"\s*\n\s*", " ", str(error))
        traceback.clear_frames(error.__traceback__)  # closes the progress bars that they hold
        print(f"{prog}: error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # the reader of our output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except KeyboardInterrupt as stop:
        traceback.clear_frames(stop.__traceback__)
        print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except Exception as error:
        if os.environ.get(DEBUG) == "1":
            raise
        if PARENT in os.environ:
            time.sleep(PEER_S)  # perhaps another process was killed, and the parent is about to end this one
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
