from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from mlm.config.commands import FillMaskConfig, PretrainConfig
from mlm.config.errors import InputError
from mlm.config.parse import Keys, read_file, read_words

PRETRAIN = Keys.of(PretrainConfig)


def flags(*words, cls=PretrainConfig):
    return {key: text.value for key, text in read_words(cls, words).flags.items()}


def from_file(path, text, keys=PRETRAIN):
    path.write_text(text)
    return {key: text.value for key, text in read_file(path, keys).items()}


def test_keys_of_nested_dataclasses():
    @dataclass
    class Inner:
        size: int = 1

    @dataclass
    class Outer:
        path: str
        inner: Inner = field(default_factory=Inner)

    # Annotations that are text can only be looked up at module level.
    Outer.__annotations__ = {"path": str, "inner": Inner}
    keys = Keys.of(Outer)
    assert (list(keys.types), keys.groups) == (["path", "inner.size"], ["inner"])


def test_kind_names_the_folder_of_shipped_files():
    assert PRETRAIN.kind == "pretrain"
    assert Keys.of(FillMaskConfig).kind == "fill-mask"


def test_both_ways_of_writing_a_flag():
    assert flags("--seed", "3", "--optimizer.lr=1e-3") == {"seed": "3", "optimizer.lr": "1e-3"}
    assert flags("--name=--odd=name") == {"name": "--odd=name"}
    assert flags("--seed", "-1") == {"seed": "-1"}
    assert flags("--seed", "1", "--seed", "2") == {"seed": "2"}


def test_bare_switch():
    assert flags("--resume") == {"resume": "true"}
    assert flags("--resume", "--seed", "1") == {"resume": "true", "seed": "1"}
    assert flags("--resume", "-c", "default") == {"resume": "true"}
    assert flags("--resume", "false") == {"resume": "false"}


def test_words_of_an_expanded_glob_make_a_list():
    assert flags("--data.sources", "a b.txt", "c.txt", "--seed", "1") == {
        "data.sources": "a b.txt,c.txt",
        "seed": "1",
    }


def test_words_without_a_flag():
    given = flags("a [MASK] b", "--model", "x", "- [MASK], c", "[MASK]", cls=FillMaskConfig)
    assert given == {"model": "x", "text": ["a [MASK] b", "- [MASK], c", "[MASK]"]}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model.hiden_size", "3"], "unknown key --model.hiden_size; did you mean --model.hidden_size?"),
        (["--lr=3"], "unknown key --lr; did you mean --optimizer.lr?"),
        (["--zzzzz"], "unknown key --zzzzz; --help lists all keys"),
        (["--seed"], "--seed: a value is missing"),
        (["--seed", "--resume"], "--seed: a value is missing, found --resume"),
        (["--config"], "--config: a value is missing"),
        (["--seed", "1", "stray"], "unexpected argument 'stray': every option starts with --"),
        (["-x"], "unexpected argument '-x': every option starts with --"),
        (
            ["--model", "{hiden_size: 3}"],
            "--model: unknown key model.hiden_size; did you mean model.hidden_size?",
        ),
    ],
)
def test_wrong_command_lines(words, message):
    with pytest.raises(InputError) as error:
        read_words(PretrainConfig, words)
    assert str(error.value) == message


def test_group_from_a_file_a_name_or_a_mapping(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text("hidden_size: 64\nnum_hidden_layers: 1\n")
    assert flags("--model", str(path)) == {"model.hidden_size": "64", "model.num_hidden_layers": "1"}
    assert flags("--model", "bert-mini")["model.norm_eps"] == "1e-12"
    assert flags("--model", "{hidden_size: 64}") == {"model.hidden_size": "64"}
    given = flags("--model.hidden_size", "32", "--model", str(path))
    assert given == {"model.hidden_size": "32", "model.num_hidden_layers": "1"}


def test_nested_and_dotted_keys_in_yaml(tmp_path):
    given = from_file(tmp_path / "x.yaml", "seed: 1\noptimizer:\n  lr: 1e-3\nmodel.hidden_size: 64\ndata:\n")
    assert given == {"seed": "1", "optimizer.lr": "1e-3", "model.hidden_size": "64"}


def test_include_is_relative_to_the_file_and_yields_to_it(tmp_path):
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "model.yaml").write_text("hidden_size: 64\nnum_hidden_layers: 1\n")
    (tmp_path / "sub").mkdir()
    text = "model.hidden_size: 32\nmodel: ../parts/model.yaml\n"
    assert from_file(tmp_path / "sub" / "x.yaml", text) == {
        "model.hidden_size": "32",
        "model.num_hidden_layers": "1",
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "seed: 1\nmodel:\n  hiden_size: 3\n",
            "x.yaml:3: unknown key model.hiden_size; did you mean model.hidden_size?",
        ),
        (
            "optimizer:\n  lr: 1\noptimizer.lr: 2\n",
            "x.yaml:3: optimizer.lr is given twice in this file; keep one",
        ),
        ("model: nope.yaml\n", "x.yaml:1: model: no configuration file"),
        ("model: [1, 2]\n", "x.yaml:1: expected lines of the form key: value"),
        ("- seed\n", "x.yaml:1: expected lines of the form key: value"),
        ("just text\n", "x.yaml:1: expected lines of the form key: value"),
        ("<<: {seed: 1}\n", "x.yaml:1: unknown key <<"),
        ("? [a, b]\n: 1\n", "x.yaml:1: a key must be a word"),
    ],
)
def test_wrong_files(tmp_path, text, message):
    with pytest.raises(InputError) as error:
        from_file(tmp_path / "x.yaml", text)
    assert message in str(error.value)
