"""Configuration files: where they are found, and YAML read as a tree of text.

- a file is named by its path, or a shipped one by its stem (`bert-mini`), from any folder
- YAML's own guesses are not used (to it `1e-4` is a string, `no` is false and `0010` is 8): every scalar
  stays the text that was written, and `schema.py` reads that text as the type of its field
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import yaml

from mlm.config.errors import InputError

Tree: TypeAlias = "str | list[Tree] | dict[str, Tree] | None"
"""A piece of YAML, every scalar as the text that was written; None: null or nothing."""


def config_folder() -> Path:
    """Return the folder of the shipped files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_names(kind: str) -> list[str]:
    """Return the stems of the shipped files in the sub-folder `kind`."""
    return sorted(path.stem for path in (config_folder() / kind).glob("*.yaml"))


def find_config(name: str, kind: str, relative_to: Path | None = None) -> Path:
    """Return the file of a path, or of the stem of a shipped file, of which those in `kind` come first.

    A relative path starts from `relative_to`, by default the working directory.
    """
    path = (relative_to or Path()) / Path(name).expanduser()
    if path.is_file():
        return path
    shipped = config_folder()
    for found in (shipped / kind / f"{name}.yaml", *sorted(shipped.glob("*/*.yaml"))):
        if found.stem == name and found.is_file():
            return found
    names = ", ".join(shipped_names(kind)) or "none"
    raise InputError(f"no configuration file {path} (looked in {Path.cwd()}); shipped {kind} files: {names}")


def load_yaml(path: Path) -> yaml.Node | None:
    """Return the node tree of a file, None if it is empty; InputError names file and line or byte."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, where: str) -> yaml.Node | None:
    """Return the node tree of a text; InputError names `where`, a file, a flag or nothing, and the line."""
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        marks = [mark for mark in (error.context_mark, error.problem_mark) if mark is not None]
        begin = min((mark.index for mark in marks), default=0)
        hint = "; quote a text that starts with *" if text[begin:].startswith("*") else ""
        place = _place(where, error.problem_mark.line if error.problem_mark else None)
        raise InputError(f"{place}not valid YAML: {error.problem}{hint}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{_place(where)}not valid YAML: {error}") from None
    except RecursionError:
        raise InputError(f"{_place(where)}YAML that is nested too deeply") from None


def mapping_items(node: yaml.Node | None, where: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield key, value and place (`my.yaml:3: `) of each entry of a mapping; nothing for null.

    Raise InputError if the node is not a mapping, or a key occurs twice.
    """
    if node is None or _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{_place(where, node.start_mark.line)}expected lines of the form key: value")
    places: dict[str, str] = {}
    for key_node, value in node.value:
        place = _place(where, key_node.start_mark.line)
        if not isinstance(key_node, yaml.ScalarNode):
            raise InputError(f"{place}a key must be a word, as in seed: 3")
        key = str(key_node.value)
        if key in places:
            first = f" (first in {places[key].removesuffix(': ')})" if where else ""
            raise InputError(f"{place}{key} is given twice{first}; keep one")
        places[key] = place
        yield key, value, place


def read_tree(node: yaml.Node | None, where: str) -> Tree:
    """Return the content of a node; raise InputError if a key occurs twice or a value contains itself."""
    try:
        return _tree(node, where)
    except RecursionError:
        raise InputError(f"{_place(where)}a YAML value contains itself, or is nested too deeply") from None


def _tree(node: yaml.Node | None, where: str) -> Tree:
    if node is None or _is_null(node):
        return None
    if isinstance(node, yaml.MappingNode):
        return {key: _tree(value, where) for key, value, _ in mapping_items(node, where)}
    if isinstance(node, yaml.SequenceNode):
        return [_tree(value, where) for value in node.value]
    return str(node.value)


def _is_null(node: yaml.Node) -> bool:
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return plain and node.value in ("", "~", "null", "Null", "NULL")


def _place(where: str, line: int | None = None) -> str:
    """Return the beginning of a message: `FILE:LINE: ` with the line counted from 0, or `--FLAG: `."""
    if not where:
        return ""
    return f"{where}: " if line is None or where.startswith("-") else f"{where}:{line + 1}: "
