"""The documents keep their promises: commands parse, links exist, figures name their command."""

import ast
import re
import shlex
from pathlib import Path

import pytest

from mlm.__main__ import COMMANDS, split_command
from mlm.config.errors import InputError
from mlm.config.parse import Keys, build_config, read_file, read_words

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "data/README.md")] + PAGES
BENCHMARKS = [ROOT / "benchmarks" / name for name in ("README.md", "DIARY.md")]
SCRIPTS = {f"{path.stem}.py": path.stem.replace("train", "pretrain") for path in ROOT.glob("*.py")}
PREFIX = r"(?:\w+=\S+ )*"
OURS = re.compile(rf"(?:^|\s\s){PREFIX}(?:python|torchrun|sbatch|mlm) .*")
"""A command at the start of a line or after a title in a column before it."""
MISTAKE = "hiden_size"
"""Part of the mistake that the pages show on purpose."""


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


def text_of(documents: list[Path]) -> str:
    return "\n".join(document.read_text() for document in documents)


each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)


def prose(document: Path) -> str:
    """Return a document without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", document.read_text(), flags=re.M | re.S)


def blocks(document: Path, language: str) -> list[str]:
    """Return the fenced blocks of a language; empty: those without one."""
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)


def commands(documents: list[Path]) -> list[str]:
    """Return all commands, with their continuation lines: lines of blocks and code within sentences."""
    found = []
    for document in documents:
        text = document.read_text().replace("\\\n", " ")
        fenced = "\n".join(re.findall(r"^```.*?^```", text, re.M | re.S))
        lines = re.split(r"\n| && ", fenced)
        lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose(document))]
        for line in lines:
            line = re.sub(r"\s+# .*", "", line.strip().removeprefix("$ "))
            if command := OURS.search(line):
                found.append(" ".join(command[0].split()))
    return sorted(set(found))


def parse(line: str) -> None:
    """Read a command with the parser: its keys, their values, and its `--config` files."""
    words = shlex.split(re.sub(f"^{PREFIX}", "", line))
    script = next((place for place, word in enumerate(words) if word in SCRIPTS), None)
    if words[0] == "sbatch":
        name, rest = "pretrain", words[2:]
    elif script is not None:
        name, rest = SCRIPTS[words[script]], words[script + 1 :]
    else:
        name, rest = split_command(words[1:])
    if rest in ([], ["--help"]) or name == "--help":
        return
    command = COMMANDS[name]
    given = read_words(command.config, rest)
    build_config(command.config, given.given, given.flags)


def of_our_parser(line: str) -> bool:
    """Return whether our parser must accept a command: not one of a benchmark, nor the mistake on purpose."""
    return " benchmarks/" not in line and MISTAKE not in line


@pytest.mark.parametrize("line", [line for line in commands(DOCUMENTS) if of_our_parser(line)])
def test_command_parses(line):
    parse(line)


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --model.hiden_size 3",
        "mlm plan --trainer.max_tokens many",
        "torchrun --nproc_per_node 8 train.py --config bert-bas",
    ],
)
def test_a_wrong_command_is_found(line):
    with pytest.raises(InputError):
        parse(line)


def test_all_kinds_of_commands_are_found():
    found = "\n".join(commands(DOCUMENTS))
    for part in ("sbatch configs/", "--rdzv-endpoint HOST:29500 train.py", "mlm plan", "python finetune.py"):
        assert part in found
    assert "python train.py --branch mine --data.seq_len 512" in found  # within a sentence


@pytest.mark.parametrize(
    "line", [line for line in commands(DOCUMENTS + BENCHMARKS) if " benchmarks/" in line]
)
def test_benchmark_command_has_only_options_that_exist(line):
    words = shlex.split(line)
    script = next(word for word in words if word.startswith("benchmarks/"))
    known = "".join((ROOT / path).read_text() for path in (script, "benchmarks/measuring.py"))
    for word in words[words.index(script) :]:
        assert not word.startswith("--") or f'"{word}"' in known, word


@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_options_named_in_a_sentence_exist(document):
    known = {"config", "help"}.union(*(keys.types.keys() | keys.groups for keys in all_keys()))
    scripts = "".join(path.read_text() for path in (ROOT / "benchmarks").glob("*.py"))
    groups = "data|tokenizer|masking|model|optimizer|schedule|trainer|logging|head"
    for code in re.findall(r"`([^`]+)`", prose(document)):
        named = re.findall(r"--([a-z][\w.]*)", code) + re.findall(rf"^(?:{groups})\.\w+$", code)
        for key in named:
            # torchrun and pytest have options of their own; those of benchmarks are in their scripts
            assert key in known or f'"--{key}"' in scripts or code.startswith(("torchrun", "pytest")), key


def all_keys() -> list[Keys]:
    return [Keys.of(command.config) for command in COMMANDS.values()]


@each_document
def test_yaml_has_only_keys_that_exist(document, tmp_path):
    cls = COMMANDS["pretrain"].config
    for block in blocks(document, "yaml"):
        path = tmp_path / "block.yaml"
        path.write_text(block)
        build_config(cls, read_file(path, Keys.of(cls)))


@each_document
def test_python_is_python(document):
    for block in blocks(document, "python"):
        ast.parse(block)


def test_the_script_for_stock_lightning_is_short():
    (script,) = blocks(ROOT / "docs" / "lightning.md", "python")
    assert len(script.splitlines()) <= 15


@pytest.mark.parametrize("document", [DOCUMENTS[0], BENCHMARKS[0], *PAGES], ids=name_of)
def test_every_table_of_figures_names_its_command(document):
    """A table of figures has a right-aligned column; its section has the command that measured it."""
    for section in re.split(r"^#+ ", document.read_text(), flags=re.M):
        if re.search(r"^\|.*--:", section, re.M):
            title = section.partition("\n")[0]
            assert re.search(rf"(?:^|`){PREFIX}(?:python|taskset) ", section, re.M), title


def test_hub_data_sets_are_spelt_as_they_must_be():
    from mlm.config.data import HubName

    for name in re.findall(r"sources (hub:[^\s`]+)", text_of(DOCUMENTS)):
        HubName.parse(name)


def test_the_mistake_in_the_pages_is_answered_as_shown(capsys):
    from mlm.config.commands import PretrainConfig
    from mlm.startup.command import parse_config

    shown = re.search(rf"\$ python train.py (.*{MISTAKE}.*)\n(train.py: error: .*)\n", text_of(DOCUMENTS))
    with pytest.raises(SystemExit) as stop:
        parse_config(PretrainConfig, shlex.split(shown[1]), prog="train.py")
    assert stop.value.code == 2
    assert capsys.readouterr().err == shown[2] + "\n"


@pytest.mark.parametrize("document", DOCUMENTS + BENCHMARKS, ids=name_of)
def test_links_and_named_files_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!http)([^)]+)\)", text):
        path, _, anchor = target.partition("#")
        page = document.parent / path if path else document
        assert page.exists(), target
        assert not anchor or anchor in anchors(page), target
    for target in re.findall(r"`((?:mlm|tests|configs|benchmarks)/[\w/]+\.\w+)`", text):
        assert (ROOT / target).exists(), target


def anchors(document: Path) -> set[str]:
    """Return the names that GitHub gives to the headings."""
    titles = re.findall(r"^#+ (.*)$", document.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def test_readme_leads_to_every_page():
    linked = re.findall(r"\]\((docs/\w+\.md)\)", (ROOT / "README.md").read_text())
    assert set(linked) == {f"docs/{page.name}" for page in PAGES}


def test_readme_begins_with_platforms_and_both_commands():
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:55])
    for text in (
        "Linux and macOS",
        "pip install -e . && python train.py",
        "pip install -e '.[test]' && pytest",
        ".png",
    ):
        assert text in first_screen


def test_pictures_are_small():
    for picture in (ROOT / "docs").glob("*.png"):
        assert picture.stat().st_size <= 100_000
