"""From the command line to a configuration: defaults <- YAML files <- flags, every mistake in one line.

1. `keys.read_flags` splits the command line, `keys.read_file` reads YAML: what was given for a key, and where
2. `values.convert` turns the text of each key into the type of its field
3. the dataclasses are built, whose `__post_init__` checks ranges and what must fit together
4. `check_files` of the configuration looks whether the files it names are there

None of it imports torch. `save_config` writes what `--config` reads back, `help.py` writes `--help`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import yaml

from mlm.config.errors import InputError, require
from mlm.config.experiment import RUN_NAME, PretrainConfig, RunConfig, find_branch, run_to_resume
from mlm.config.files import parse_yaml
from mlm.config.help import format_help
from mlm.config.keys import Given, Keys, read_file, read_flags
from mlm.config.keys import _read_mapping as read_mapping
from mlm.config.launch import is_first_process, wait_for_first_process
from mlm.config.values import convert

C = TypeVar("C")


def parse_config(
    cls: type[C], argv: Sequence[str] | None = None, *, prog: str, positional: str | None = None
) -> C:
    """Return the configuration that a command line asks for; a mistake ends the program in one line.

    Args:
        cls: dataclass of the command.
        argv: the command line without the program; None: the one of this process.
        prog: name of the program in messages.
        positional: the key that takes the words given without a flag; None: there is none.

    Raises:
        SystemExit: 0 after `--help`, 2 after a mistake, whose line is on stderr.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if {"-h", "--help"} & set(words):
        print(format_help(cls, prog, Keys.of(cls), positional), end="")
        raise SystemExit(0)
    with one_line_errors(prog):
        return read_config(cls, words, positional)


def load_config(kind: str, *words: str) -> Any:
    """Return a configuration from the words of a command line, for use in Python.

    Args:
        kind: pretrain or finetune.
        words: such as `--trainer.max_steps=60`, or `--config` and `bert-mini`.

    Raises:
        InputError: `kind` or a word is wrong; the program is never ended.
    """
    from mlm.config.finetune import FinetuneConfig  # it imports this module

    kinds = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}
    require(kind in kinds, "kind", kind, f"is none of {', '.join(kinds)}")
    return read_config(kinds[kind], list(words))


def read_config(cls: type[C], words: list[str], positional: str | None = None) -> C:
    """Return the configuration that the words of a command line ask for; see `parse_config`.

    Raises:
        InputError: a mistake in a word or a file.
    """
    keys = Keys.of(cls)
    files, flags = read_flags(words, keys, positional)
    given: dict[str, Given] = {}
    known = Keys.of(getattr(cls, "files_of", cls))
    for path in files:
        given |= {key: one for key, one in read_file(path, known).items() if key in keys.types}
    if issubclass(cls, RunConfig):
        stored, settled = _resumed_keys(cls, given | flags, keys)
        stored = stored or _branched_keys(given | flags, keys)
        given, flags = stored | given, flags | settled
    given |= flags
    with _located(given):
        config: C = _build(cls, _typed_values(given, keys))
        if hasattr(config, "prefer_flags"):
            config.prefer_flags(set(flags))
        if isinstance(config, RunConfig):
            config.choose_name(files[-1].stem if files else config.default_stem)
        if hasattr(config, "check_files"):
            config.check_files()
    return config


@contextmanager
def _located(given: dict[str, Given]) -> Iterator[None]:
    """Put file and line before a mistake in the value of a key that stands in a file."""
    try:
        yield
    except InputError as error:
        key = re.match(r"[\w.]*", str(error))
        found = given.get(key[0]) if key else None
        if found is None or found.source == "flags":
            raise
        raise InputError(f"{found.where.removesuffix(key[0] if key else '')}{error}") from None


@contextmanager
def one_line_errors(prog: str) -> Iterator[None]:
    """Turn a user's mistake into one line on stderr and exit code 2, an interrupt into exit code 130."""
    try:
        yield
    except InputError as error:
        if not is_first_process():
            wait_for_first_process()
        text = re.sub(r"\s*\n\s*", " ", str(error))
        print(f"{prog}: error: {text}", file=sys.stderr)
        raise SystemExit(2) from None
    except RecursionError:
        print(f"{prog}: error: a YAML value contains itself, or is nested too deeply", file=sys.stderr)
        raise SystemExit(2) from None
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno is None:
            raise
        where = f"{error.filename}: " if error.filename else ""
        print(f"{prog}: error: {where}{error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        raise SystemExit(130) from None


def log_to_stderr() -> None:
    """Show what the package has to say while it works; of several processes the first one says it for all."""
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    logging.getLogger("mlm").setLevel(logging.INFO if is_first_process() else logging.ERROR)


def save_config(config: Any, path: str | Path) -> None:
    """Write a configuration as YAML, which `--config` reads back; the file is whole or not there at all."""
    path = Path(path)
    text = yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def read_group(cls: type[C], path: Path) -> C:
    """Return what a YAML file holds that is a group of its own, such as the shape of a model.

    Args:
        cls: its dataclass.
        path: the file.

    Raises:
        InputError: names file, line and key.
    """
    keys = Keys.of(cls)
    config: C = _build(cls, _typed_values(read_file(path, keys), keys))
    return config


def from_plain(cls: type[C], plain: Any) -> C:
    """Return the configuration that `to_plain` made plain; one that is a configuration already as it is.

    Raises:
        InputError: a key or a value is not one of `cls`.
    """
    if isinstance(plain, cls):
        return plain
    keys = Keys.of(cls)
    node = parse_yaml(yaml.safe_dump(plain, sort_keys=False, allow_unicode=True), "configuration")
    return _build(cls, _typed_values(read_mapping(node, keys, "", "configuration", Path()), keys))  # type: ignore[no-any-return]


def to_plain(config: Any) -> Any:
    """Return a configuration as nested dictionaries and lists of plain JSON types.

    An entry of a list of which only the first field is set becomes that field: sources are plain strings.
    """
    if is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_plain(getattr(config, field.name)) for field in fields(config)}
    if isinstance(config, list | tuple):
        return [_plain_entry(entry) if is_dataclass(entry) else to_plain(entry) for entry in config]
    return config


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration of plain types as one table from dotted key to value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat


def _resumed_keys(
    cls: type[RunConfig], given: dict[str, Given], keys: Keys
) -> tuple[dict[str, Given], dict[str, Given]]:
    """Return the keys of the run that is resumed, as it was configured, and which run it is.

    Without `resume` there are none; where `resume=auto` finds no such run, a new one is started.
    """
    values = {
        key: convert(given[key].value, keys.types[key], given[key].where)
        for key in ("resume", "name", "runs_dir")
        if key in given
    }
    if not values.get("resume"):
        return {}, {}
    runs_dir, name = (
        values.get("runs_dir", RunConfig.runs_dir),
        values.get("name") or os.environ.get(RUN_NAME),
    )
    if values["resume"] == "auto":
        if name is None:
            raise InputError(
                f"{given['resume'].where}: auto needs a --name: which run to start or go on with"
            )
        if not (Path(runs_dir).expanduser() / name).exists():
            return {}, {"resume": Given("false", "--resume", "flags")}
    folder = run_to_resume(Path(runs_dir).expanduser(), name, cls.own_group)
    stored = read_file(folder / "config.yaml", keys) if (folder / "config.yaml").exists() else {}
    if not stored and values["resume"] != "auto":
        raise InputError(
            f"--resume: {folder} is no run folder, because it has no config.yaml, or an empty one"
        )
    place = {"name": folder.name, "runs_dir": runs_dir, "resume": "true"}
    return stored, {key: Given(value, f"--{key}", "flags") for key, value in place.items()}


def _branched_keys(given: dict[str, Given], keys: Keys) -> dict[str, Given]:
    """Return the keys of the run that a new one branches off, as it was configured; nothing without `branch`.

    Length and schedule are taken over as a whole or, where the user gives any of it, not at all. The
    vocabulary is the one of the run, whatever text the new one reads.
    """
    branch = convert(given["branch"].value, str | None, "branch") if "branch" in given else None
    if branch is None:
        return {}
    runs_dir = str(given["runs_dir"].value) if "runs_dir" in given else RunConfig.runs_dir
    _, folder = find_branch(Path(runs_dir).expanduser(), branch)
    if not (folder / "config.yaml").exists():
        return {}
    stored = read_file(folder / "config.yaml", keys)
    bounds = {"trainer.max_steps", "trainer.max_tokens", "trainer.max_time"}
    schedule = {key for key in stored if key.startswith("schedule.")}
    left = {"name", "runs_dir", "resume", "branch"}
    for group in (bounds, schedule):
        left |= group if group & given.keys() else set()
    vocabulary = {}
    if convert(stored["init"].value, keys.types["init"], "init") is None:
        left |= {key for key in stored if key.startswith("tokenizer.")}
        vocabulary = {"tokenizer.path": Given(str(folder / "tokenizer"), "--branch", "flags")}
    return {key: value for key, value in stored.items() if key not in left} | vocabulary


def _typed_values(given: dict[str, Given], keys: Keys) -> dict[str, Any]:
    """Return the value of each given key as the type of its field."""
    for key in keys.required:
        if key not in given:
            raise InputError(f"--{key} is missing; --help says what it takes")
    return {key: convert(text, keys.types[key], where) for key, (text, where, _) in given.items()}


def _build(cls: Any, values: dict[str, Any], prefix: str = "") -> Any:
    """Build a dataclass and the groups in it from the values given; everything else keeps its default."""
    types = get_type_hints(cls)
    arguments = {}
    for field in fields(cls):
        key, annotation = f"{prefix}{field.name}", types[field.name]
        if is_dataclass(annotation):
            arguments[field.name] = _build(annotation, values, f"{key}.")
        elif key in values:
            arguments[field.name] = values[key]
    return cls(**arguments)


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _plain_entry(entry: Any) -> Any:
    first, *others = fields(entry)
    options = {field.name: getattr(entry, field.name) for field in others}
    changed = {
        field.name: to_plain(options[field.name])
        for field in others
        if options[field.name] != _default(field)
    }
    plain = to_plain(getattr(entry, first.name))
    return {first.name: plain, **changed} if changed else plain
