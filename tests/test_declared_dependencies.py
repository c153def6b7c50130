"""What is imported is what pyproject.toml declares."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

MODULES = {"pyyaml": "yaml", "scikit-learn": "sklearn", "huggingface-hub": "huggingface_hub"}
"""Packages whose module has another name."""
TOOLS = {"pytest", "ruff", "mypy", "accelerate"}
"""Packages that are run, or that another one imports: `Trainer` of transformers needs accelerate."""
CORPUS = {"jsonargparse"}
"""Packages that are only read: their documentation is part of the default corpus."""
HAVE_MODULES_BESIDE = {"fsspec": {"aiohttp"}}
"""Modules that come with an extra of a declared package: `fsspec[http]`."""


def module_of(requirement: str) -> str:
    """Return the module of a requirement such as `fsspec[http]>=2024`."""
    name = re.split(r"[^A-Za-z0-9._-]", requirement.strip())[0].lower().replace("_", "-")
    return MODULES.get(name, name.replace("-", "_"))


def modules_of(requirements: list[str]) -> set[str]:
    found = {module_of(requirement) for requirement in requirements}
    for requirement in requirements:
        if "[" in requirement:
            found |= HAVE_MODULES_BESIDE.get(module_of(requirement), set())
    return found


def is_third_party(name: str) -> bool:
    return name not in sys.stdlib_module_names and name not in ("mlm", "__future__")


def handles_absence(node: ast.AST) -> bool:
    """Tell whether a statement catches the absence of what is imported in it."""
    if isinstance(node, ast.Try):
        caught = [handler.type for handler in node.handlers if handler.type is not None]
    elif isinstance(node, ast.With):
        calls = [item.context_expr for item in node.items if isinstance(item.context_expr, ast.Call)]
        caught = [
            argument for call in calls if "suppress" in ast.unparse(call.func) for argument in call.args
        ]
    else:
        return False
    return any(
        name in ast.unparse(each) for each in caught for name in ("ImportError", "ModuleNotFoundError")
    )


def imports_of(text: str) -> tuple[set[str], set[str]]:
    """Return the third-party modules that a source needs, and those that it can do without."""
    tree = ast.parse(text)
    sought = set(re.findall(r"find_spec\(\"(\w+)", text))
    guarded = {id(inner) for node in ast.walk(tree) if handles_absence(node) for inner in ast.walk(node)}
    needed, optional = set(), set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module") and node.args:
            first = node.args[0]
            names = [first.value] if isinstance(first, ast.Constant) else []
        for name in filter(is_third_party, (name.split(".")[0] for name in names)):
            (optional if id(node) in guarded or name in sought else needed).add(name)
    return needed, optional - needed


def imports_below(*places: str) -> tuple[set[str], set[str]]:
    paths = [path for place in places for path in sorted(ROOT.glob(place))]
    pairs = [imports_of(path.read_text()) for path in paths]
    needed = set().union(*(pair[0] for pair in pairs))
    return needed, set().union(*(pair[1] for pair in pairs)) - needed


NEEDED, OPTIONAL = imports_below("mlm/**/*.py", "train.py", "finetune.py")


def test_every_imported_package_is_declared():
    assert sorted(NEEDED - modules_of(PROJECT["dependencies"])) == []


def test_no_declared_package_is_left_unused():
    assert sorted({module_of(each) for each in PROJECT["dependencies"]} - NEEDED - CORPUS) == []


def test_what_is_optional_is_in_an_extra():
    declared = {module for extra in EXTRAS.values() for module in modules_of(extra)}
    assert sorted(OPTIONAL - declared - modules_of(PROJECT["dependencies"])) == []


def test_extras_hold_nothing_that_is_unused():
    used = NEEDED | OPTIONAL | set().union(*imports_below("tests/**/*.py", "benchmarks/*.py")) | TOOLS
    assert {name: unused for name, extra in EXTRAS.items() if (unused := modules_of(extra) - used)} == {}


def test_every_dependency_has_a_lower_bound():
    assert [each for each in PROJECT["dependencies"] if not re.search(r"(>=|~=|==)\s*\d", each)] == []


@pytest.mark.parametrize(
    ("code", "needed", "optional"),
    [
        (
            "import numpy.typing as npt\nfrom torch.nn import Linear\nimport os, mlm.config",
            {"numpy", "torch"},
            set(),
        ),
        ("def f():\n    import yaml", {"yaml"}, set()),
        ("try:\n    import rensa\nexcept ImportError:\n    pass", set(), {"rensa"}),
        ("try:\n    import rensa\nexcept (ImportError, OSError):\n    pass", set(), {"rensa"}),
        ("try:\n    import rensa\nexcept ValueError:\n    pass", {"rensa"}, set()),
        ("with contextlib.suppress(ImportError):\n    import wandb.sdk", set(), {"wandb"}),
        ("import wandb\nwith suppress(ImportError):\n    import wandb.sdk", {"wandb"}, set()),
        ('if find_spec("transformers"):\n    import transformers', set(), {"transformers"}),
        ("import_module('tqdm.auto')", {"tqdm"}, set()),
        ("from __future__ import annotations", set(), set()),
    ],
)
def test_imports_are_found(code, needed, optional):
    assert imports_of(code) == (needed, optional)


@pytest.mark.parametrize(
    ("requirement", "module"),
    [
        ("torch~=2.13.0", "torch"),
        ("lightning>=2.6.6,<3", "lightning"),
        ("PyYAML>=6", "yaml"),
        ("fsspec[http]>=2024", "fsspec"),
        ("huggingface_hub", "huggingface_hub"),
        ("scikit-learn", "sklearn"),
    ],
)
def test_requirements_are_read(requirement, module):
    assert module_of(requirement) == module
