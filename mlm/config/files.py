"""Configuration files: where they lie, and YAML read as a tree of text.

- a file is named by its path, or a shipped one by its stem (`bert-mini`), from any folder
- YAML's own guesses are never asked (to it `1e-4` is a string, `no` is false and `0010` is 8): every scalar
  stays the text that was written, and `values.py` reads that text as the type of its field
- a key that stands twice in a mapping is an error, as is what does not parse; both name file and line
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import yaml

from mlm.config.errors import InputError, require

Tree: TypeAlias = "str | list[Tree] | dict[str, Tree] | None"
"""What a piece of YAML says, every scalar as the text that was written; None: null or nothing."""


def config_folder() -> Path:
    """Return the folder of the shipped files: inside an installed package, beside it in a checkout."""
    package = Path(__file__).resolve().parent.parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def shipped_names(kind: str) -> list[str]:
    """Return the stems of the shipped files in the sub-folder `kind`."""
    return sorted(path.stem for path in (config_folder() / kind).glob("*.yaml"))


def check_output(key: str, path: str, *inputs: str) -> None:
    """Check, before any work, that a file can be written, and that nothing is lost by it.

    Args:
        key: the option, for messages.
        path: the file; of a link, what it points to counts.
        inputs: files that are read, and folders in which files are.

    Raises:
        InputError: a folder, a device, a pipe or an input has that name, or nothing can be written there.
    """
    file = Path(os.path.realpath(path))
    try:
        require(file.parent.is_dir(), key, path, f"cannot be written: there is no folder {file.parent}")
        require(not file.is_dir(), key, path, "is a folder; name a file")
        is_there = file.exists()
        require(not is_there or file.is_file(), key, path, "is a device or a pipe; name a file")
        for name in filter(os.path.exists, inputs if is_there else ()):
            is_input = os.path.samefile(name, file) or Path(os.path.realpath(name)) in file.parents
            require(not is_input, key, path, f"is what is read ({name}), which would be lost; name another")
        trial = file.with_name(f".{file.name}.{os.getpid()}")
        trial.touch()
        trial.unlink()
    except OSError as error:
        raise InputError(f"{key}={path} cannot be written: {error.strerror}; name another place") from None


def find_config(name: str, kind: str, relative_to: Path | None = None) -> Path:
    """Return the file that `name` means.

    Args:
        name: a path, or the stem of a shipped file.
        kind: sub-folder of the shipped files that is searched first (`pretrain`, `model`, ...).
        relative_to: folder that a relative path starts from; None: the working directory.

    Raises:
        InputError: there is no such file; lists the shipped ones.
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
    """Return the node tree of a file; None when it holds nothing.

    Raises:
        InputError: not UTF-8 or not YAML; names file and line or byte.
    """
    try:
        return parse_yaml(path.read_text(encoding="utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None


def parse_yaml(text: str, where: str) -> yaml.Node | None:
    """Return the node tree of a text; None when it holds nothing.

    Raises:
        InputError: the text is not YAML; names `where` and the line.
    """
    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = where if mark is None else _place(where, mark.line)
        hint = "; quote a text that starts with *" if "alias" in f"{error.context} {error.problem}" else ""
        raise InputError(f"{place}: not valid YAML: {error.problem}{hint}") from None
    except yaml.YAMLError as error:
        raise InputError(f"{where}: not valid YAML: {error}") from None


def mapping_items(node: yaml.Node | None, where: str) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield key, value and place of each entry of a mapping; nothing for null or an empty text.

    Raises:
        InputError: the node is no mapping, or a key stands in it twice; names `where` and the line.
    """
    if node is None or _is_null(node):
        return
    if not isinstance(node, yaml.MappingNode):
        raise InputError(f"{_place(where, node.start_mark.line)}: expected lines of the form key: value")
    places: dict[str, str] = {}
    for key_node, value in node.value:
        key, place = str(key_node.value), _place(where, key_node.start_mark.line)
        if key in places:
            raise InputError(f"{place}: {key} stands twice (first in {places[key]}); keep one")
        places[key] = place
        yield key, value, place


def read_tree(node: yaml.Node | None, where: str) -> Tree:
    """Return what a node says, every scalar as the text that was written.

    Raises:
        InputError: a key stands twice in a mapping; names `where` and the line.
    """
    if node is None or _is_null(node):
        return None
    if isinstance(node, yaml.MappingNode):
        return {key: read_tree(value, where) for key, value, _ in mapping_items(node, where)}
    if isinstance(node, yaml.SequenceNode):
        return [read_tree(value, where) for value in node.value]
    return str(node.value)


def _is_null(node: yaml.Node) -> bool:
    plain = isinstance(node, yaml.ScalarNode) and node.style is None
    return plain and node.value in ("", "~", "null", "Null", "NULL")


def _place(where: str, line: int) -> str:
    """Add the line (counted from 0) to the name of a file, but not to the name of a flag."""
    return where if where.startswith("-") else f"{where}:{line + 1}"
