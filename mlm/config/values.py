"""Text to values: what is typed as a flag or written in YAML, taken apart as the annotation asks.

- whole numbers take `1e6`, `1_000` and `10.0`
- `null` and `none` are None where a field may be
- lists take `a,b`, `[a,b]` and YAML lists; a comma inside braces, or of an existing file, does not split
- an entry that is a dataclass takes a mapping of its fields; plain text is its first field

Everything else (true and yes, `1e-4`) pydantic reads by itself.
"""

from __future__ import annotations

import os
import re
from dataclasses import fields, is_dataclass
from decimal import Decimal
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticCustomError

from mlm.config.errors import InputError
from mlm.config.files import Tree, parse_yaml, read_tree

NULLS = ("null", "none")
TRUTHS = ("true", "yes", "on", "1", "false", "no", "off", "0")


def options(annotation: Any) -> tuple[Any, ...]:
    """Return the types that an annotation allows, without constraints."""
    if get_origin(annotation) is Annotated:
        return options(annotation.__origin__)
    if get_origin(annotation) in (Union, UnionType):
        return tuple(one for option in get_args(annotation) for one in options(option))
    return (annotation,)


def from_text(value: Any, annotation: Any) -> Any:
    """Return `value` with texts taken apart as `annotation` asks for; pydantic reads and checks the rest.

    Raises:
        PydanticCustomError: a list or mapping is not YAML.
    """
    allowed = options(annotation)
    is_text = isinstance(value, str)
    if is_text and NoneType in allowed and value.lower() in NULLS:
        return None
    for option in allowed:
        origin, args = get_origin(option) or option, get_args(option)
        if origin is Literal and value in args:
            return value
        if origin in (list, tuple):
            return _entries(value, origin, args)
        if is_text and option is int:
            return _whole(value)
        if is_text and is_dataclass(option):
            return {fields(option)[0].name: value}
    return value


def _entries(value: Any, origin: Any, args: tuple[Any, ...]) -> Any:
    """Return the entries of a list or pair; a value that cannot be one stays as it is."""
    entries = _split(value) if isinstance(value, str) and not _is_path(value, args[0]) else value
    if isinstance(value, str | dict) and not isinstance(entries, list):
        entries = [value]
    if not isinstance(entries, list | tuple) or (origin is tuple and len(entries) != len(args)):
        return value
    types = args if origin is tuple else args * len(entries)
    return [from_text(entry, one) for entry, one in zip(entries, types, strict=True)]


def _split(text: str) -> list[Tree]:
    if re.fullmatch(r"\[[^\[\]]*\]", text):
        if re.search("[{\"']", text):
            entries = _yaml(text)
            assert isinstance(entries, list)
            return entries
        text = text[1:-1]
    parts = (part.strip() for part in re.findall(r"(?:\{[^}]*\}|[^,])+", text))
    return [_yaml(part) if part[0] == "{" else part for part in parts if part]


def _yaml(text: str) -> Tree:
    try:
        return read_tree(parse_yaml(text, ""), "")
    except InputError as error:
        raise PydanticCustomError("yaml", "{error}", {"error": str(error)}) from None


def _is_path(text: str, entry: Any) -> bool:
    """Return whether the text of a list of places is the path of one, commas and all."""
    is_place = is_dataclass(entry) and fields(entry)[0].name == "path"
    return is_place and os.path.exists(os.path.expanduser(text))


def _whole(text: str) -> int | str:
    """Return the whole number that a text such as 1e6 is, or the text."""
    try:
        number = Decimal(text)
    except ArithmeticError:
        return text
    # The bound keeps 1e999999999 from filling the memory with digits.
    is_whole = number.is_finite() and number.adjusted() <= 18 and number == number.to_integral_value()
    return int(number) if is_whole else text


def alternatives(annotation: Any) -> list[str]:
    """Return in words what a field takes, one entry for each choice."""
    words = {
        int: ["a whole number"],
        float: ["a number"],
        str: ["text"],
        bool: ["true", "false"],
        NoneType: ["null"],
        list: ["a list"],
    }
    found: list[str] = []
    for option in options(annotation):
        origin, args = get_origin(option) or option, get_args(option)
        if origin is Literal:
            found += args
        elif origin is tuple:
            found.append(f"{len(args)} numbers")
        else:
            found += words.get(origin, ["a mapping"])
    return found


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
