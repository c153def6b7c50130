"""Imports point one way only, and what is light stays light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {
    "mlm.config": 0,
    "mlm.files": 1,
    "mlm.cores": 1,
    "mlm.counter": 1,
    "mlm.launch": 1,
    "mlm.plan": 2,
    "mlm.startup": 2,
    "mlm.tokenizer": 2,
    "mlm.masking": 2,
    "mlm.optim": 2,
    "mlm.model": 2,
    "mlm.data": 3,
    "mlm.hub": 3,
    "mlm.evaluation": 4,
    "mlm.training": 5,
    "mlm.__main__": 6,
}
"""A module imports from its own package and from lower layers, never from a neighbour or from above."""
FILES = sorted((ROOT / "mlm").rglob("*.py"))
MAX_FILE_LINES = 400
"""A file is read in one sitting."""
MAX_LINES = 17_074
"""Of all files. The goal is 12,500, so that one person can know the project: lower this with every deletion.
What adds a capability raises it by its own size and says so in CHANGELOG.md."""
ENGINE = (
    *("engine.py", "run.py", "callbacks.py", "run_folder.py", "datamodule.py"),
    *("pretraining.py", "machine.py", "sharding.py"),
)
"""Files of mlm/training that take the steps of a run, stop it and resume it."""
CORE = (
    *("counter.py", "masking.py", "model", "optim.py"),
    *("data/packing.py", "data/sampler.py", "data/collate.py"),
    *(f"training/{name}" for name in ENGINE),
)
"""What decides a result, below mlm/."""
MAX_CORE_LINES = 3_830
"""It can be read in an afternoon."""


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def package_of(module: str) -> str:
    return ".".join(module.split(".")[:2])


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_every_package_has_a_layer():
    assert {package_of(module_of(path)) for path in FILES} - {"mlm"} == set(LAYERS)


def test_every_package_is_installed():
    """The list is by hand, as the recipes of configs/ are a package of another name."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in FILES}
    assert sorted(listed) == sorted({".".join(folder.parts) for folder in folders} | {"mlm.configs"})


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_imports_point_down(path):
    mine = package_of(module_of(path))
    if mine == "mlm":
        return
    for name in imports_of(path):
        other = package_of(name)
        if other in LAYERS and other != mine:
            assert LAYERS[other] < LAYERS[mine], f"{mine} (layer {LAYERS[mine]}) imports {name}"


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_only_training_knows_lightning_and_wandb(path):
    used = {name.split(".")[0] for name in imports_of(path)}
    if package_of(module_of(path)) not in ("mlm.training",):
        assert not used & {"lightning", "wandb", "matplotlib"}
    if package_of(module_of(path)) in ("mlm.config", "mlm.plan"):
        assert not used & {"torch", "numpy", "tokenizers", "datasets"}
    # An oracle for the tests, and if it happens to be installed for what is saved; never needed.
    assert "transformers" not in used or path.name == "saving.py"


def num_lines(*paths: Path) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


@pytest.mark.parametrize("path", FILES, ids=module_of)
def test_no_file_grows_beyond_reading(path):
    assert num_lines(path) <= MAX_FILE_LINES


def test_the_core_stays_small():
    places = [ROOT / "mlm" / place for place in CORE]
    assert [str(place) for place in places if not place.exists()] == []
    core = {path for place in places for path in FILES if place in (path, *path.parents)}
    assert num_lines(*core) <= MAX_CORE_LINES


def test_the_whole_stays_light():
    assert num_lines(*FILES) <= MAX_LINES


def test_the_command_line_loads_without_torch():
    code = (
        "import sys, mlm, mlm.__main__, mlm.config.parse, mlm.plan, mlm.data.python_docs;"
        "print(sorted({'torch', 'numpy', 'lightning', 'datasets', 'wandb'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
