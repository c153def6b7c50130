"""The `--help` text: every key by section, its docstring, and in brackets what it takes and its default."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from dataclasses import MISSING, is_dataclass
from itertools import pairwise
from typing import Any

from mlm.config.errors import in_words
from mlm.config.files import shipped_names
from mlm.config.parse import Keys, to_plain
from mlm.config.schema import alternatives, default_of, walk

RULES = """
Every key is a flag and a key of YAML files. Flags win over files, later ones over earlier ones; --GROUP FILE
reads a group from a file of its own. Lists: a,b. Numbers: 1e-4, 1_000. [what it takes = default]
"""
SHORT = {"a whole number": "int", "a number": "float", "a list": "list", "a mapping": "mapping"}
WIDEST, COLUMN, NARROW = 120, 34, 90
"""Columns of the text at most, of the keys, and below which a key has a line of its own."""


def format_help(cls: type, prog: str) -> str:
    """Return the help text of a command, as wide as the terminal; `prog`: name of the program."""
    width = min(shutil.get_terminal_size((WIDEST, 50)).columns, WIDEST)
    keys = Keys.of(cls)
    words = f" {keys.positional.upper()} ..." if keys.positional else ""
    shipped = ", ".join(shipped_names(keys.kind))
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
    for section in _sections(cls, width).values():
        lines += section
    return "\n".join(lines) + "\n"


def _sections(cls: Any, width: int) -> dict[str, list[str]]:
    """Return the lines of each group by its key, those of the command itself first."""
    sections: dict[str, list[str]] = {"": []}
    docs = {"": _field_docs(cls)}
    for key, field, annotation in walk(cls):
        if is_dataclass(annotation):
            title = (inspect.getdoc(annotation) or "").partition("\n")[0].rstrip(".")
            sections[key], docs[key] = ["", f"{title}:"], _field_docs(annotation)
            continue
        group, _, name = key.rpartition(".")
        kinds = "|".join(SHORT.get(word, word) for word in alternatives(annotation))
        default = default_of(field)
        shown = ", required" if default is MISSING else f" = {in_words(to_plain(default))}"
        # A bracket stays on one line: its spaces are not places to break.
        bracket = f"[{kinds.replace('true|false', 'bool')}{shown}]".replace(" ", "\xa0")
        sections[group] += _entry(f"--{key}", f"{docs[group][name]} {bracket}", width)
    return sections


def _field_docs(cls: Any) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, read from its source."""
    docs = {}
    bases: list[Any] = [one for one in reversed(cls.__mro__) if is_dataclass(one)]
    for base in bases:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                text = following.value if isinstance(following, ast.Expr) else None
                if isinstance(text, ast.Constant):
                    docs[statement.target.id] = " ".join(str(text.value).split())
    return docs


def _entry(key: str, text: str, width: int) -> list[str]:
    """Return the lines of one key: beside it where the terminal is wide, else below it."""
    indent = COLUMN if width >= NARROW else 6
    lines = textwrap.wrap(text, width - indent, break_on_hyphens=False, break_long_words=False)
    lines = [line.replace("\xa0", " ") for line in lines]
    if indent == COLUMN and len(key) < COLUMN - 1:
        return [f" {key:{COLUMN - 1}}{lines[0]}", *(" " * COLUMN + line for line in lines[1:])]
    return [f" {key}", *(" " * indent + line for line in lines)]
