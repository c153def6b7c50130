"""The `--help` text: every key by section, its docstring, and in brackets what it takes and its default."""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

from mlm.config.files import shipped_names
from mlm.config.keys import Keys
from mlm.config.values import alternatives

RULES = """
Every key is a flag and a key of YAML files. Flags win over files, later ones over earlier ones; --GROUP FILE
reads a group from a file of its own. Lists: a,b. Numbers: 1e-4, 1_000. [what it takes = default]
"""
SHORT = {"a whole number": "int", "a number": "float", "a list": "list", "a mapping": "mapping"}
WIDEST, COLUMN, NARROW = 120, 34, 90
"""Columns of the text at most, of the keys, and below which a key has a line of its own."""


def format_help(cls: type, prog: str, positional: str | None = None) -> str:
    """Return the help text of a command, as wide as the terminal.

    Args:
        cls: dataclass of the command.
        prog: name of the program.
        positional: the key that is given without a flag.
    """
    width = min(shutil.get_terminal_size((WIDEST, 50)).columns, WIDEST)
    words = f" {positional.upper()} ..." if positional else ""
    shipped = ", ".join(shipped_names(Keys.of(cls).kind))
    shipped = f" or the name of a shipped one ({shipped})" if shipped else ""
    about, _, examples = (inspect.getdoc(cls) or "").partition("\n\n")
    lines = [
        f"usage: {prog} [--config FILE] [--KEY VALUE ...]{words}",
        "",
        *textwrap.wrap(" ".join(about.split()), width),
        *(["", examples] if examples else []),
        "",
        *textwrap.wrap(RULES.strip(), width),
        "",
        "This command:",
        *_entry("-h, --help", "Show this text.", width),
        *_entry("-c, --config FILE", f"YAML file{shipped}; may be repeated.", width),
    ]
    for title, keys in _sections(cls):
        lines += ["", f"{title}:"] if title else []
        for key, text in keys:
            lines += _entry(f"--{key}", text, width)
    return "\n".join(lines) + "\n"


def _sections(cls: Any, prefix: str = "") -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield title, keys and their texts: first those of `cls` itself, then of each group in it."""
    types, docs = get_type_hints(cls), field_docs(cls)
    groups = [one for one in fields(cls) if is_dataclass(types[one.name])]
    title = (inspect.getdoc(cls) or "").partition("\n")[0].rstrip(".") if prefix else ""
    yield (
        title,
        [
            (f"{prefix}{one.name}", f"{docs[one.name]} {_bracket(one, types[one.name])}")
            for one in fields(cls)
            if one not in groups
        ],
    )
    for group in groups:
        yield from _sections(types[group.name], f"{prefix}{group.name}.")


def field_docs(cls: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, read from its source."""
    docs = {}
    for base in reversed([one for one in cls.__mro__ if is_dataclass(one)]):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = following.value if isinstance(following, ast.Expr) else None
                if isinstance(text, ast.Constant):
                    docs[statement.target.id] = " ".join(str(text.value).split())
    return docs


def _bracket(field: Any, annotation: Any) -> str:
    kind = "|".join(SHORT.get(word, word) for word in alternatives(annotation)).replace("true|false", "bool")
    default = field.default if field.default_factory is MISSING else field.default_factory()
    text = f"[{kind}, required]" if default is MISSING else f"[{kind} = {_shown(default)}]"
    return text.replace(" ", "\xa0")  # a bracket stays on one line: its spaces are no places to break


def _entry(key: str, text: str, width: int) -> list[str]:
    """Return the lines of one key: beside it where the terminal is wide, else below it."""
    indent = COLUMN if width >= NARROW else 6
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False, break_long_words=False)
    lines = [line.replace("\xa0", " ") for line in lines]
    if indent == COLUMN and len(key) < COLUMN - 1:
        return [f" {key:{COLUMN - 1}}{lines[0]}", *(" " * COLUMN + line for line in lines[1:])]
    return [f" {key}", *(" " * indent + line for line in lines)]


def _shown(default: Any) -> str:
    if isinstance(default, list | tuple):
        return ",".join(map(_shown, default)) or "[]"
    if is_dataclass(default):
        return _shown(getattr(default, fields(default)[0].name))
    return default if isinstance(default, str) else json.dumps(default)
