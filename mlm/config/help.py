"""The `--help` text: a line for most keys, in brackets the values that the key takes and its default.

Keys, types and defaults come from the dataclasses, the help of a key from its attribute docstring.
"""

from __future__ import annotations

import ast
import inspect
import json
import shutil
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from itertools import pairwise
from typing import Any, get_type_hints

from mlm.config.files import shipped_names
from mlm.config.keys import Keys
from mlm.config.values import alternatives

RULES = """
Every key is a flag and can be a line of a YAML file. Flags override files, later ones override earlier ones;
--GROUP FILE reads a group from its own file. Lists: a,b. Numbers: 1e-4, 1_000. [values = default]
"""
SHORT = {"a whole number": "int", "a number": "float", "a list": "list", "a mapping": "mapping"}
HELP_COLUMN = 34
"""Column at which the help of a key begins."""
MAX_WIDTH = 120


def format_help(cls: type, prog: str, keys: Keys, positional: str | None = None) -> str:
    """Return the help text of a command.

    Args:
        cls: dataclass of the command.
        prog: name of the program in messages.
        keys: the keys of `cls`.
        positional: the key that is given without a flag.
    """
    words = f" {positional.upper()} ..." if positional else ""
    shipped = ", ".join(shipped_names(keys.kind))
    shipped = f" or the name of a shipped one ({shipped})" if shipped else ""
    options = [
        _option("-h, --help", "show this help message and exit"),
        _option("-c FILE, --config FILE", f"YAML file{shipped}; may be repeated"),
    ]
    head = [f"usage: {prog} [--config FILE] [--KEY VALUE ...]{words}", "", inspect.getdoc(cls) or "", RULES]
    return "\n".join([*head, "options:", *options, *_section(cls, "This command")]) + "\n"


def field_docs(cls: type) -> dict[str, str]:
    """Return the attribute docstrings of a dataclass, those of its bases included."""
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not is_dataclass(base):
            continue
        definition = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(definition, ast.ClassDef), "the source of a class defines one"
        for attribute, text in pairwise(definition.body):
            is_text = isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
            if is_text and isinstance(attribute, ast.AnnAssign) and isinstance(attribute.target, ast.Name):
                docs[attribute.target.id] = inspect.cleandoc(text.value.value)  # type: ignore[attr-defined]
    return docs


def _section(cls: Any, title: str, prefix: str = "") -> Iterator[str]:
    """Yield the lines of the keys of a group, then those of the groups in it."""
    types, docs, groups = get_type_hints(cls), field_docs(cls), []
    yield f"\n{title}:"
    for field in fields(cls):
        key, annotation = f"{prefix}{field.name}", types[field.name]
        if is_dataclass(annotation):
            groups.append((annotation, docs[field.name].rstrip("."), f"{key}."))
        else:
            yield _option(f"--{key}", docs[field.name], _values(annotation, field))
    for group in groups:
        yield from _section(*group)


def _values(annotation: Any, field: Field[Any]) -> str:
    kind = "|".join(SHORT.get(word, word) for word in alternatives(annotation)).replace("true|false", "bool")
    if field.default is field.default_factory is MISSING:
        return f"[{kind}, required]"
    default = field.default if field.default_factory is MISSING else field.default_factory()
    return f"[{kind} = {_shown(default)}]"


def _shown(default: Any) -> str:
    if isinstance(default, list | tuple):
        return ",".join(map(_shown, default)) or "[]"
    if is_dataclass(default) and not isinstance(default, type):
        return _shown(getattr(default, fields(default)[0].name))
    return default if isinstance(default, str) else json.dumps(default)


def _option(flag: str, text: str, values: str = "") -> str:
    """Return a flag with its help beside it, in as many lines as the terminal needs."""
    width = min(shutil.get_terminal_size((MAX_WIDTH, 50)).columns, MAX_WIDTH) - 2
    # A bracket stays on one line: no line breaks at its spaces.
    text = f"{text} {values}".strip().replace(values, values.replace(" ", "\xa0")) if values else text
    lines = textwrap.wrap(text, width - HELP_COLUMN, break_on_hyphens=False, break_long_words=False)
    first = f" {flag}"
    start = [first] if len(first) + 1 >= HELP_COLUMN else [f"{first:{HELP_COLUMN}}{lines.pop(0)}"]
    return "\n".join([*start, *(" " * HELP_COLUMN + line for line in lines)]).replace("\xa0", " ")
