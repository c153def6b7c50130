"""No private name of another package is used: the next version of it may not have the name."""

import ast
import importlib
import inspect
import textwrap
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = [*sorted((ROOT / "mlm").rglob("*.py")), ROOT / "train.py", ROOT / "finetune.py"]

DOCUMENTED = {
    *("_exit",),  # os
    *("_replace", "_asdict", "_make", "_fields", "_field_defaults"),  # named tuples
    *("_fields_", "_pack_", "_missing_", "_ignore_"),  # ctypes, enum
}
"""Names that the Python manual describes, whoever has them."""

EXCEPTIONS: dict[tuple[str, str], str] = {
    ("mlm/training/machine.py", "_broadcast_sigterm_tensor"): (
        "Lightning asks all ranks in each batch whether one received SIGTERM, and waits for the GPU's "
        "answer; our own question covers it, and there is no public switch."
    ),
    ("mlm/training/engine.py", "_foreach_mul_"): (
        "torch has no public function that multiplies many tensors in one kernel; a loop would launch one "
        "for each gradient."
    ),
}
"""(file, name): the reason why it is used all the same, and what would be done without it."""
MAX_EXCEPTIONS = 3

LOOKUPS = {"getattr", "setattr", "hasattr", "delattr", "attrgetter", "methodcaller", "import_module"}
"""Functions that take a name as text."""


def is_private(name: str) -> bool:
    dunder = name.startswith("__") and name.endswith("__")
    return name.startswith("_") and name != "_" and not dunder and name not in DOCUMENTED


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def definitions_of(tree: ast.AST) -> set[str]:
    """Return the private names that a file defines: functions, classes, variables, and attributes of self."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            found.add(node.attr)
    return set(filter(is_private, found))


def foreign_names(tree: ast.AST) -> set[str]:
    """Return the names that stand for modules, classes and functions of other packages."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.asname or alias.name) for alias in node.names]
        else:
            continue
        found |= {name for module, name in names if module.split(".")[0] != "mlm"}
    return found


def root_of(node: ast.AST) -> str | None:
    """Return the name that a chain of attributes and calls begins with: torch, for torch.cpu.f().x."""
    while isinstance(node, ast.Attribute | ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


def imported(node: ast.Import | ast.ImportFrom) -> list[str]:
    """Return the parts of the names that an import of another package mentions."""
    if isinstance(node, ast.Import):
        return [part for alias in node.names for part in foreign_parts(alias.name)]
    names = foreign_parts(node.module or "")
    return [*names, *(alias.name for alias in node.names)] if names else []


def foreign_parts(module: str) -> list[str]:
    return [] if module.split(".")[0] in ("mlm", "__future__") else module.split(".")


def texts_looked_up(node: ast.Call) -> list[str]:
    """Return the names in the text arguments of getattr and its like."""
    function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if function not in LOOKUPS:
        return []
    texts = [each.value for each in node.args if isinstance(each, ast.Constant)]
    return [part for text in texts if isinstance(text, str) for part in text.split(".")]


def is_ours(node: ast.Attribute, ours: set[str], here: set[str], foreign: set[str]) -> bool:
    """Tell whether an attribute is the project's: any name for self, for another object those of its file."""
    through_super = isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super"
    if is_own(node.value) or through_super:
        return node.attr in ours
    return node.attr in here and root_of(node.value) not in foreign


def offences(text: str, ours: set[str]) -> list[tuple[int, str]]:
    """Return line and name of each private name of another package.

    Args:
        text: source code of a file.
        ours: the private names that any file of the project defines.
    """
    tree = ast.parse(text)
    here, foreign, found = definitions_of(tree), foreign_names(tree), []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = imported(node)
        elif isinstance(node, ast.Call):
            names = [name for name in texts_looked_up(node) if name not in here]
        elif isinstance(node, ast.Attribute) and not is_ours(node, ours, here, foreign):
            names = [node.attr]
        found += [(node.lineno, name) for name in names if is_private(name)]
    return sorted(set(found))


OURS = {name for path in FILES for name in definitions_of(ast.parse(path.read_text()))}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_another_package(path):
    place = str(path.relative_to(ROOT))
    found = [
        (line, name) for line, name in offences(path.read_text(), OURS) if (place, name) not in EXCEPTIONS
    ]
    assert not found, f"{place}: " + ", ".join(f"line {line}: {name}" for line, name in found)


def test_exceptions_are_few_have_reasons_and_are_needed():
    assert len(EXCEPTIONS) <= MAX_EXCEPTIONS
    for (place, name), reason in EXCEPTIONS.items():
        assert len(reason.split()) >= 8, f"{place}: {name}: say why, and what would be done without it"
        assert name in {used for _, used in offences((ROOT / place).read_text(), OURS)}, f"{place}: {name}"


GENERATED = {"_abc_impl", "_backward_cls", "_parameters", "_is_protocol", "_is_runtime_protocol"}
"""What Python itself, or the base class, puts into a class of ours."""


@cache
def private_names_of(kind: type) -> set[str]:
    """Return the private names that a class has or sets on itself, as far as its source can be read."""
    with suppress(OSError, TypeError, SyntaxError):  # not of a class in C
        return definitions_of(ast.parse(textwrap.dedent(inspect.getsource(kind)))) | set(vars(kind))
    return set(vars(kind))


def private_overrides(module) -> list[str]:
    """Return the private names of a module's classes that a base class of another package uses too."""
    found = []
    for name, kind in inspect.getmembers(module, inspect.isclass):
        if kind.__module__ != module.__name__:
            continue
        bases = [
            base for base in kind.__mro__[1:] if base.__module__.split(".")[0] not in ("mlm", "builtins")
        ]
        theirs = set().union(*map(private_names_of, bases))
        mine = set(filter(is_private, private_names_of(kind) - GENERATED))
        found += [f"{name}.{entry}" for entry in sorted(mine & theirs)]
    return found


def test_no_private_name_of_a_base_class_is_taken():
    found = []
    for path in FILES[:-2]:
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        if name != "mlm.__main__":
            found += [f"{name}: {each}" for each in private_overrides(importlib.import_module(name))]
    allowed = {f"{place.removesuffix('.py').replace('/', '.')}: {name}" for place, name in EXCEPTIONS}
    assert [each for each in found if f"{each.split(':')[0]}: {each.rpartition('.')[2]}" not in allowed] == []


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("from torch.utils._pytree import tree_map", "_pytree"),
        ("from lightning.pytorch import _Launcher", "_Launcher"),
        ("import torch._dynamo", "_dynamo"),
        ("import torch\ntorch._foreach_mul_([], 2)", "_foreach_mul_"),
        ("import torch\ntorch.cpu._is_supported()", "_is_supported"),
        ("import torch as t\nt.ours_and_theirs._mine", "_mine"),
        ("import codecs\ncodecs.lookup('x')._is_text", "_is_text"),
        ("def f(trainer):\n    trainer._connector.register()", "_connector"),
        ("def f(trainer):\n    trainer.strategy._launcher = 1", "_launcher"),
        ("def f(rest):\n    return getattr(rest, '_optimizer', rest)", "_optimizer"),
        ("from operator import attrgetter\nattrgetter('a._b')", "_b"),
        ("from importlib import import_module\nimport_module('torch._inductor')", "_inductor"),
        ("class A(B):\n    def f(self):\n        return super()._format()", "_format"),
        ("class A(B):\n    def f(self):\n        return self._inherited", "_inherited"),
        ("def f(trainer):\n    return trainer._mine", "_mine"),
        ("import torch\ntorch._near = _near = 1", "_near"),
    ],
)
def test_what_is_found(code, name):
    assert [found for _, found in offences(code, {"_mine"})] == [name]


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos._exit(1)",
        "def f(batch):\n    return batch._replace(rate=1), batch._asdict()",
        "class A:\n    def f(self):\n        return self._mine",
        "from mlm.data import _mine",
        "_near = 1\ndef f(other):\n    return other._near, getattr(other, '_near')",
        "from __future__ import annotations\nimport sys\nsys.modules[__name__].__file__",
        "for _ in ():\n    pass",
    ],
)
def test_what_is_not_found(code):
    assert offences(code, {"_mine"}) == []


def test_definitions():
    code = "_a = 1\ndef _f(): pass\nclass C:\n    _b: int = 2\n    def g(self):\n        self._c = x._d = 1"
    assert definitions_of(ast.parse(code)) == {"_a", "_f", "_b", "_c"}
