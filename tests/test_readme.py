"""What the documents say can be done, can be done."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from mlm.__main__ import COMMANDS, split_command
from mlm.config.keys import Keys, read_flags

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md")]
SCRIPTS = {f"{path.stem}.py": path.stem.replace("train", "pretrain") for path in ROOT.glob("*.py")}


def commands() -> list[str]:
    """Every line of a document that runs one of our commands."""
    found = []
    for document in DOCUMENTS:
        for line in document.read_text().splitlines():
            line = re.sub(r"^(\$|pip .*&&)", "", line.strip()).split("#")[0].strip()
            if re.match(r"(python|torchrun|mlm) .*", line):
                found.append(line)
    return found


@pytest.mark.parametrize("line", commands())
def test_command_has_only_keys_that_exist(line):
    words = shlex.split(line)
    script = next((word for word in words if word in SCRIPTS), None)
    if script:
        name, rest = SCRIPTS[script], words[words.index(script) + 1 :]
    else:
        name, rest = split_command(words[1:])
    if "hiden_size" in line:  # the mistake that README shows
        return
    command = COMMANDS[name]
    module, _, config = command.config.partition(":")
    read_flags(rest, Keys.of(getattr(import_module(module), config)), command.positional)


def test_hub_data_sets_are_spelt_as_they_must_be():
    from mlm.config.data import HubName

    for document in DOCUMENTS:
        for name in re.findall(r"sources (hub:[^\s`]+)", document.read_text()):
            HubName.parse(name)


def test_the_mistake_in_the_readme_is_answered_as_shown(capsys):
    from mlm.config.experiment import PretrainConfig
    from mlm.startup.command import parse_config

    shown = re.search(r"\$ python train.py (.*)\n(train.py: error: .*)\n", (ROOT / "README.md").read_text())
    with pytest.raises(SystemExit) as stop:
        parse_config(PretrainConfig, shlex.split(shown[1]), prog="train.py")
    assert stop.value.code == 2
    assert capsys.readouterr().err == shown[2] + "\n"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    for target in re.findall(r"`((?:mlm|tests|configs|benchmarks)/[\w/]+\.\w+)`", text):
        assert (ROOT / target).exists(), target
