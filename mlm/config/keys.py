"""The keys of a command, and the text that the user gave for them: as flags and in YAML files.

Both end in one flat table from dotted key to text and place: what follows need not know where a value came
from, and every message can say it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, get_origin, get_type_hints

import yaml

from mlm.config.errors import InputError
from mlm.config.files import Tree, find_config, load_yaml, mapping_items, parse_yaml, read_tree
from mlm.config.values import TRUTHS, nearest, options

FLAG = "--"
"""Place of a value from the command line."""


class Given(NamedTuple):
    """What the user gave for one key."""

    value: Tree
    """As text, or a list or mapping of text."""
    place: str = FLAG
    """Beginning of a message about it: `my.yaml:3: `, or FLAG."""


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

    @classmethod
    def of(cls, config: Any, prefix: str = "") -> Keys:
        """Collect the keys of a dataclass and of the dataclasses in it."""
        kind = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", config.__name__.removesuffix("Config")).lower()
        own = {f"{prefix}{alias}": f"{prefix}{key}" for alias, key in getattr(config, "aliases", {}).items()}
        keys = cls({}, [], own, getattr(config, "shipped_kind", kind))
        types = get_type_hints(config)
        for field in fields(config):
            name, annotation = f"{prefix}{field.name}", types[field.name]
            if is_dataclass(annotation):
                inner = cls.of(annotation, f"{name}.")
                keys.types.update(inner.types)
                keys.aliases.update(inner.aliases)
                keys.groups.extend([name, *inner.groups])
            else:
                keys.types[name] = annotation
        return keys


def read_flags(
    words: list[str], keys: Keys, positional: str | None = None
) -> tuple[list[Path], dict[str, Given]]:
    """Split a command line into the files of `--config` and the keys given as flags.

    Raises:
        InputError: an unknown flag, a missing value, a word without a flag, a missing `--config` file.
    """
    files: list[Path] = []
    groups: dict[str, Given] = {}
    single: dict[str, Given] = {}
    spelling: dict[str, str] = {}
    texts: list[Tree] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            if positional is None:
                raise InputError(f"unexpected argument {word!r}: every option starts with --")
            texts.append(word)
            continue
        flag, equals, value = word.partition("=")
        written = "config" if flag == "-c" else flag.removeprefix("--")
        key = keys.aliases.get(written, written)
        if key != "config" and key not in keys.types and key not in keys.groups:
            _refuse_key(key, keys, "--", "")
        if not equals:
            value = _take_value(flag, rest, keys.types.get(key), positional)
        if key == "config":
            files.append(find_config(value, keys.kind))
        elif key in keys.groups:
            groups |= _group_flag(key, value, keys)
        else:
            first = spelling.setdefault(key, flag)
            if first != flag and single[key].value != value:
                raise InputError(f"{first} {single[key].value} and {flag} {value} are one setting; keep one")
            single[key] = Given(value)
    if positional is not None and texts:
        single[positional] = Given(texts)
    return files, groups | single


def read_file(path: Path, keys: Keys, group: str = "") -> dict[str, Given]:
    """Read the keys that a YAML file gives.

    Args:
        path: the file.
        keys: the known keys.
        group: the group whose keys the file holds; empty: a file for the whole command.

    Raises:
        InputError: not YAML, an unknown key, or a key that occurs twice; names file and line.
    """
    return _read_mapping(load_yaml(path), keys, group and f"{group}.", str(path), path.parent)


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
    while get_origin(annotation) in (list, tuple) and positional is None and rest and not _is_flag(rest[0]):
        value += "," + rest.pop(0)
    return value


def _group_flag(group: str, value: str, keys: Keys) -> dict[str, Given]:
    """Read `--model FILE_OR_NAME` or `--model '{hidden_size: 64}'`."""
    if value.startswith("{"):
        return _read_mapping(parse_yaml(value, f"--{group}"), keys, f"{group}.", f"--{group}", Path())
    return read_file(find_config(value, group), keys, group)


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
