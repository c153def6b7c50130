"""From words and YAML to a configuration, and back: defaults <- files <- flags, every mistake one line.

1. `read_words` splits the command line and reads its files into one flat table: dotted key -> text and place,
   so that later steps need not know where a value came from, and every message can say it
2. `build_config` passes the texts to the dataclasses: pydantic reads types and ranges (`schema.py`), their
   `__post_init__` checks what must fit together

Whether named files exist is checked by `mlm.startup`, which also finds runs to resume.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, get_origin

import yaml

from mlm.config.errors import InputError, WrongType
from mlm.config.files import Tree, find_config, load_yaml, mapping_items, parse_yaml, read_tree
from mlm.config.schema import TRUTHS, default_of, nearest, options, walk

C = TypeVar("C")

FLAG = "--"
"""Place of a value from the command line."""


class Given(NamedTuple):
    """A value that the user gave for a key, as text, and the place for messages: `my.yaml:3: `, or FLAG."""

    value: Tree
    place: str = FLAG


class CommandLine(NamedTuple):
    """The `--config` files of a command line, the keys in them, and the keys given as flags, which win."""

    files: list[Path]
    given: dict[str, Given]
    flags: dict[str, Given]


@dataclass(frozen=True)
class Keys:
    """All dotted keys of a configuration."""

    types: dict[str, Any]
    """Annotation of each key."""
    groups: list[str]
    """Keys that hold other keys."""
    aliases: dict[str, str]
    """Other spellings of keys."""
    kind: str
    """Sub-folder of the shipped files that `--config` searches first."""
    positional: str | None
    """The key that takes the words given without a flag; None: there is none."""

    @classmethod
    def of(cls, config: Any) -> Keys:
        """Collect the keys of a dataclass and of the dataclasses in it."""
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", config.__name__.removesuffix("Config")).lower()
        kind = getattr(config, "shipped_kind", kind)
        keys = cls({}, [], {}, kind, getattr(config, "positional", None))
        for key, _, annotation in walk(config):
            if is_dataclass(annotation):
                keys.groups.append(key)
                for alias, name in getattr(annotation, "aliases", {}).items():
                    keys.aliases[f"{key}.{alias}"] = f"{key}.{name}"
            else:
                keys.types[key] = annotation
        return keys


def read_words(cls: type, words: Sequence[str]) -> CommandLine:
    """Return the content of a command line without the program, for the dataclass of a command."""
    keys = Keys.of(cls)
    files, flags = _read_flags(list(words), keys)
    known = Keys.of(getattr(cls, "files_of", cls))
    given: dict[str, Given] = {}
    for path in files:
        given |= {key: one for key, one in read_file(path, known).items() if key in keys.types}
    return CommandLine(files, given, flags)


def _read_flags(rest: list[str], keys: Keys) -> tuple[list[Path], dict[str, Given]]:
    """Split a command line into the files of `--config` and the keys given as flags."""
    files: list[Path] = []
    groups: dict[str, Given] = {}
    single: dict[str, Given] = {}
    spelling: dict[str, str] = {}
    texts: list[Tree] = []
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            if keys.positional is None:
                raise InputError(f"unexpected argument {word!r}: every option starts with --")
            texts.append(word)
            single[keys.positional] = Given(texts)
            continue
        flag, equals, value = word.partition("=")
        written = "config" if flag == "-c" else flag.removeprefix("--")
        key = keys.aliases.get(written, written)
        if key not in ("config", *keys.types, *keys.groups):
            _refuse_key(key, keys, "--", "")
        if not equals:
            value = _take_value(flag, rest, keys.types.get(key), keys.positional)
        if key == "config":
            files.append(find_config(value, keys.kind))
        elif key in keys.groups:
            if value.startswith("{"):  # --model '{hidden_size: 64}', else --model FILE_OR_NAME
                node = parse_yaml(value, f"--{key}")
                groups |= _read_mapping(node, keys, f"{key}.", f"--{key}", Path())
            else:
                groups |= read_file(find_config(value, key), keys, key)
        else:
            first = spelling.setdefault(key, flag)
            if first != flag and single[key].value != value:
                raise InputError(f"{first} {single[key].value} and {flag} {value} are one setting; keep one")
            single[key] = Given(value)
    return files, groups | single


def _is_flag(word: str) -> bool:
    return word.startswith("--") or word.partition("=")[0] == "-c"


def _take_value(flag: str, rest: list[str], annotation: Any, positional: str | None) -> str:
    """Take from `rest` the value of a flag: none for a bare switch, several words for a list."""
    following = rest[0] if rest and not _is_flag(rest[0]) else None
    is_switch = bool in options(annotation)
    if is_switch and (following is None or (positional and following.lower() not in TRUTHS)):
        return "true"
    if following is None:
        found = f", found {rest[0]}" if rest else ""
        raise InputError(f"{flag}: a value is missing{found}")
    value = rest.pop(0)
    # The shell turns an unquoted glob into several words: all of them belong to the list.
    is_list = any(get_origin(option) in (list, tuple) for option in options(annotation))
    while is_list and positional is None and rest and not _is_flag(rest[0]):
        value += "," + rest.pop(0)
    return value


def read_file(path: Path, keys: Keys, group: str = "") -> dict[str, Given]:
    """Read the keys that a YAML file gives; with `group`, it holds the keys of that group.

    Raise InputError, with file and line, for an unknown key or one that occurs twice.
    """
    return _read_mapping(load_yaml(path), keys, group and f"{group}.", str(path), path.parent)


def _read_mapping(
    node: yaml.Node | None, keys: Keys, prefix: str, source: str, folder: Path
) -> dict[str, Given]:
    """Flatten a mapping; a text where a group is expected names the file that holds the group."""
    own: dict[str, Given] = {}
    included: dict[str, Given] = {}
    for name, value, place in mapping_items(node, source):
        key = keys.aliases.get(f"{prefix}{name}", f"{prefix}{name}")
        if key in keys.types:
            tree = read_tree(value, source)
            # null for another spelling means that the key itself has the value
            new = {} if tree is None and key != f"{prefix}{name}" else {key: Given(tree, place)}
        elif key not in keys.groups:
            _refuse_key(key, keys, "", place)
        elif isinstance(text := read_tree(value, source), str):
            try:
                included |= read_file(find_config(text, key, folder), keys, key)
            except InputError as error:
                raise InputError(f"{place}{key}: {error}") from None
            continue
        else:
            new = _read_mapping(value, keys, f"{key}.", source, folder)
        for twice in own.keys() & new.keys():
            raise InputError(f"{new[twice].place}{twice} is given twice in this file; keep one")
        own |= new
    # The file's own keys win over what it includes, whatever their order.
    return included | own


def _refuse_key(key: str, keys: Keys, dashes: str, place: str) -> NoReturn:
    known = [*keys.types, *keys.aliases, *keys.groups, *(["config", "help"] if dashes else [])]
    fix = nearest(key, known, dashes) or "; --help lists all keys"
    raise InputError(f"{place}unknown key {dashes}{key}{fix}")


def build_config(cls: type[C], given: dict[str, Given], flags: dict[str, Given] | None = None) -> C:
    """Return the configuration with these values or texts by dotted key; every other key has its default.

    `flags` are from the command line and win. InputError names file and line, or flag, of the first mistake.
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
    """Return the content of a YAML file as a dataclass, such as the shape of a model."""
    return build_config(cls, read_file(path, Keys.of(cls)))


def dump_config(config: Any) -> str:
    """Return a configuration as YAML, which `--config` reads back."""
    return str(yaml.safe_dump(to_plain(config), sort_keys=False, allow_unicode=True))


def from_plain(cls: type[C], plain: Any) -> C:
    """Return the configuration that `to_plain` made plain; one that is a configuration already as it is."""
    return plain if isinstance(plain, cls) else cls(**plain)


def to_plain(config: Any) -> Any:
    """Return a configuration as nested dictionaries and lists of plain JSON types.

    An entry of a list of which only the first field is set becomes that field: sources are plain strings.
    """
    if is_dataclass(config) and not isinstance(config, type):
        return {one.name: to_plain(getattr(config, one.name)) for one in fields(config)}
    if isinstance(config, list | tuple):
        return [_plain_entry(entry) if is_dataclass(entry) else to_plain(entry) for entry in config]
    return config


def _plain_entry(entry: Any) -> Any:
    first, *others = fields(entry)
    changed = [one for one in others if getattr(entry, one.name) != default_of(one)]
    plain = {one.name: to_plain(getattr(entry, one.name)) for one in (first, *changed)}
    return plain if changed else plain[first.name]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a nested configuration of plain types as one table from dotted key to value."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        key = f"{prefix}{name}"
        flat |= flatten(value, f"{key}.") if isinstance(value, dict) else {key: value}
    return flat
