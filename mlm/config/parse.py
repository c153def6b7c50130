"""From words and YAML to a configuration, and back: defaults <- files <- flags, every mistake one line.

1. `keys.read_flags` splits the command line, `keys.read_file` reads YAML: what was given for a key, and where
2. `build_config` hands the texts to the dataclasses: pydantic reads types and ranges (`schema.py`,
   `values.py`), their `__post_init__` checks what must fit together

Whether named files exist is checked by `mlm.startup`, which also finds runs to resume. No torch here.
`dump_config` writes what `--config` reads back.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import yaml

from mlm.config.errors import InputError, WrongType
from mlm.config.keys import FLAG, Given, Keys, read_file, read_flags

C = TypeVar("C")


class CommandLine(NamedTuple):
    """What a command line gives."""

    files: list[Path]
    """Of `--config`."""
    given: dict[str, Given]
    """Keys in these files."""
    flags: dict[str, Given]
    """Keys given as flags, which win."""


def read_words(cls: type, words: Sequence[str], positional: str | None = None) -> CommandLine:
    """Return what the words of a command line give.

    Args:
        cls: dataclass of the command.
        words: the command line without the program.
        positional: the key that takes the words given without a flag; None: there is none.

    Raises:
        InputError: an unknown key, a missing value, or a file that cannot be read.
    """
    keys = Keys.of(cls)
    files, flags = read_flags(list(words), keys, positional)
    known = Keys.of(getattr(cls, "files_of", cls))
    given: dict[str, Given] = {}
    for path in files:
        given |= {key: one for key, one in read_file(path, known).items() if key in keys.types}
    return CommandLine(files, given, flags)


def build_config(cls: type[C], given: dict[str, Given], flags: dict[str, Given] | None = None) -> C:
    """Return the configuration with these values; every other key has its default.

    Args:
        cls: dataclass of the command.
        given: text or values by dotted key.
        flags: the same from the command line, which wins; a configuration may treat it apart.

    Raises:
        InputError: names file and line, or flag, of the first mistake.
    """
    flags, keys = flags or {}, Keys.of(cls)
    merged = given | flags
    nested: dict[str, Any] = {}
    # Groups without a given key are filled too: pydantic then builds one validator for all of them.
    values = dict.fromkeys(keys.groups) | {key: one.value for key, one in merged.items()}
    for key, value in values.items():
        *groups, name = key.split(".")
        inner = functools.reduce(lambda mapping, group: mapping[group], groups, nested)
        inner[name] = {} if key in keys.groups else value
    try:
        config = cls(**nested)
        if hasattr(config, "prefer_flags"):
            config.prefer_flags(set(flags))
    except InputError as error:
        raise locate(error, merged) from None
    return config


def locate(error: InputError, given: dict[str, Given]) -> InputError:
    """Return the same mistake with the file and line that gave its key, if a file did."""
    place = given[error.key].place if error.key in given else ""
    if place == FLAG and not isinstance(error, WrongType):
        place = ""
    return InputError(f"{place}{error}") if place else error


def read_group(cls: type[C], path: Path) -> C:
    """Return what a YAML file holds that is a group of its own, such as the shape of a model.

    Args:
        cls: its dataclass.
        path: the file.

    Raises:
        InputError: names file, line and key.
    """
    return build_config(cls, read_file(path, Keys.of(cls)))


def dump_config(config: Any) -> str:
    """Return a configuration as YAML, which `--config` reads back."""
    return str(yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True))


def from_plain(cls: type[C], plain: Any) -> C:
    """Return the configuration that `to_plain` made plain; one that is a configuration already as it is.

    Raises:
        InputError: a key or a value is not one of `cls`.
    """
    return plain if isinstance(plain, cls) else cls(**plain)


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


def _plain_entry(entry: Any) -> Any:
    first, *others = fields(entry)
    changed = {}
    for field in others:
        value = getattr(entry, field.name)
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if value != default:
            changed[field.name] = to_plain(value)
    plain = to_plain(getattr(entry, first.name))
    return {first.name: plain, **changed} if changed else plain
