"""Text to typed values: one set of rules for what is typed as a flag and what stands in YAML.

The annotation of a field decides what a text means:

- whole numbers take `1e6`, `1_000` and `10.0`; numbers take whatever Python's float takes
- true and false are also yes and no, on and off, 1 and 0
- `null` and `none` are None where a field may be
- lists take `a,b`, `[a,b]` and YAML lists; a comma inside braces, or of a file there is, does not split
- an entry that is a dataclass takes a mapping of its fields; plain text is its first field
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from decimal import Decimal
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from mlm.config.errors import InputError
from mlm.config.files import Tree, parse_yaml, read_tree

TRUTHS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
NULLS = ("null", "none")


def convert(value: Tree, annotation: Any, where: str) -> Any:
    """Return `value` as the type that `annotation` asks for.

    Args:
        value: text, null, or a YAML list or mapping of such.
        annotation: type of the field: scalars, Literal, unions, lists, pairs, dataclasses.
        where: what the message calls the place, such as `--optimizer.lr` or `my.yaml:3: optimizer.lr`.

    Raises:
        InputError: the value is of another type.
    """
    try:
        return _convert(value, annotation, where)
    except InputError:
        raise
    except (ValueError, ArithmeticError):
        shown = {list: "a list", dict: "a mapping", NoneType: "null"}.get(type(value), repr(value))
        raise InputError(f"{where}: expected {describe(annotation)}, got {shown}") from None


def alternatives(annotation: Any) -> list[str]:
    """Return in words what a field takes, one entry for each choice."""
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if origin is Literal:
        return list(args)
    if origin in (Union, UnionType):
        return [word for option in args for word in alternatives(option)]
    if origin is tuple:
        return [f"{len(args)} numbers"]
    words = {
        int: ["a whole number"],
        float: ["a number"],
        str: ["text"],
        bool: ["true", "false"],
        NoneType: ["null"],
    }
    return words.get(origin, ["a list" if origin is list else "a mapping"])


def describe(annotation: Any) -> str:
    """Return in words what a field takes, such as `adamw or muon`."""
    *first, last = alternatives(annotation)
    return f"{', '.join(first)} or {last}" if first else last


def nearest(name: str, names: list[str], dashes: str = "") -> str:
    """Return the end of a message that says which of `names` was probably meant, or nothing."""
    wanted = name.replace("-", "_")
    same_end = [known for known in names if known.rpartition(".")[2] == wanted.rpartition(".")[2]]
    by_end = {known.rpartition(".")[2]: known for known in names}
    close = get_close_matches(wanted, names, 1) or [
        by_end[end] for end in get_close_matches(wanted, by_end, 1)
    ]
    meant = " or ".join(f"{dashes}{known}" for known in same_end or close)
    return f"; did you mean {meant}?" if meant else ""


def _convert(value: Tree, annotation: Any, where: str) -> Any:
    origin, args = get_origin(annotation) or annotation, get_args(annotation)
    if origin in (Union, UnionType):
        return _one_of(value, args, where)
    if origin in (list, tuple):
        entries = [value] if _is_path(value, *args) else _split(value, where)
        if origin is tuple and len(entries) != len(args):
            raise ValueError
        types = args if origin is tuple else args * len(entries)
        read = convert if origin is list else _convert  # of a list the entry is named, of a pair the whole
        return origin(read(entry, type_, where) for entry, type_ in zip(entries, types, strict=True))
    if is_dataclass(origin):
        return _entry(value, origin, where)
    if not isinstance(value, str):
        raise ValueError
    if origin is Literal:
        return args[args.index(value)]
    readers: dict[Any, Callable[[str], Any]] = {int: _whole, float: float, bool: _truth, str: str}
    return readers[origin](value)


def _one_of(value: Tree, options: tuple[Any, ...], where: str) -> Any:
    if NoneType in options and (value is None or (isinstance(value, str) and value.lower() in NULLS)):
        return None
    for option in options:
        if option is NoneType:
            continue
        try:
            return _convert(value, option, where)
        except InputError:
            raise
        except (ValueError, ArithmeticError):
            continue
    raise ValueError


def _split(value: Tree, where: str) -> list[Tree]:
    if value is None:
        raise ValueError
    if not isinstance(value, str):
        return value if isinstance(value, list) else [value]
    if re.fullmatch(r"\[[^\[\]]*\]", value):
        if re.search("[{\"']", value):
            entries = read_tree(parse_yaml(value, where), where)
            assert isinstance(entries, list)
            return entries
        value = value[1:-1]
    parts = (part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,])+", value))
    return [read_tree(parse_yaml(part, where), where) if part[0] == "{" else part for part in parts if part]


def _is_path(value: Tree, entry: Any, *others: Any) -> bool:
    """Tell whether the text of a list of places is the path of one, commas and all."""
    is_place = is_dataclass(entry) and fields(entry)[0].name == "path"
    return is_place and isinstance(value, str) and os.path.exists(os.path.expanduser(value))


def _entry(value: Tree, cls: Any, where: str) -> Any:
    types = get_type_hints(cls)
    required = [one.name for one in fields(cls) if one.default is one.default_factory is MISSING]
    if isinstance(value, str):
        value = {next(iter(types)): value}
    if isinstance(value, list) or value is None:
        shown = "null" if value is None else "a list"
        raise InputError(f"{where}: an entry is text or a mapping of {', '.join(types)}, not {shown}")
    if not isinstance(value, dict):
        raise ValueError
    for name in value:
        if name not in types:
            fix = nearest(name, list(types)) or f"; there are {', '.join(types)}"
            raise InputError(f"{where}: unknown key {name}{fix}")
    for name in required:
        if name not in value:
            raise InputError(f"{where}: an entry needs the key {name}")
    return cls(**{name: convert(entry, types[name], f"{where}: {name}") for name, entry in value.items()})


def _whole(text: str) -> int:
    number = Decimal(text)
    # The bound keeps 1e999999999 from filling the memory with digits.
    if not number.is_finite() or number.adjusted() > 18 or number != number.to_integral_value():
        raise ValueError
    return int(number)


def _truth(text: str) -> bool:
    if text.lower() not in TRUTHS:
        raise ValueError
    return TRUTHS[text.lower()]
