from __future__ import annotations

import os
from pathlib import Path

import pytest

from mlm.config import files
from mlm.config.errors import InputError
from mlm.config.files import config_folder, find_config, load_yaml, read_tree, shipped_names
from mlm.startup.checks import check_output


def read(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return read_tree(load_yaml(path), str(path))


def test_scalars_stay_text(tmp_path):
    text = "a: 1e-4\nb: no\nc: 0010\nd: 1:30\ne: 2001-01-01\nf: '1'\ng: !!python/name:os.system x\n"
    assert read(tmp_path / "x.yaml", text) == {
        "a": "1e-4",
        "b": "no",
        "c": "0010",
        "d": "1:30",
        "e": "2001-01-01",
        "f": "1",
        "g": "x",
    }


def test_null_lists_and_mappings(tmp_path):
    text = "a: null\nb: ~\nc:\nd: [1, {e: 2}]\nf: ''\n"
    assert read(tmp_path / "x.yaml", text) == {
        "a": None,
        "b": None,
        "c": None,
        "d": ["1", {"e": "2"}],
        "f": "",
    }


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n"])
def test_empty_file_says_nothing(tmp_path, text):
    assert read(tmp_path / "x.yaml", text) is None


def test_byte_order_mark_and_carriage_returns(tmp_path):
    assert read(tmp_path / "x.yaml", "\ufeffa: 1\r\nb: 2\r\n") == {"a": "1", "b": "2"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: [1\n", "x.yaml:3: not valid YAML"),
        ("a: 1\n\tb: 2\n", "x.yaml:2: not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: a is given twice .first in .*x.yaml:1."),
        ("a:\n  b: 1\n  b: 2\n", "x.yaml:3: b is given twice"),
        ("a: 1\nb: *.txt\n", "x.yaml:2: not valid YAML: .*quote a text that starts with"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: not valid YAML"),
        ("a: \x07\n", "x.yaml: not valid YAML"),
    ],
)
def test_broken_yaml_names_file_and_line(tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path / "x.yaml", text)


def test_other_encodings_name_the_byte(tmp_path):
    with pytest.raises(InputError, match=r"x.yaml: byte 3 is not UTF-8"):
        read(tmp_path / "x.yaml", "a: é\n", "latin-1")


def test_shipped_file_by_its_stem_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("bert-mini", "pretrain") == config_folder() / "pretrain" / "bert-mini.yaml"
    assert find_config("bert-mini", "model") == config_folder() / "model" / "bert-mini.yaml"
    assert find_config("default", "another-command").name == "default.yaml"
    assert {"default", "bert-mini"} <= set(shipped_names("pretrain"))


def test_path_wins_over_a_shipped_stem(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "default").write_text("")
    assert find_config("default", "pretrain").resolve() == tmp_path / "default"


def test_missing_file_lists_what_is_shipped(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("nope", "nope.yaml", "folder", "/nope.yaml", "../nope"):
        with pytest.raises(InputError, match=r"no configuration file .*shipped pretrain files: .*bert-mini"):
            find_config(name, "pretrain")


def test_installed_package_brings_its_own_files(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "__file__", str(tmp_path / "mlm" / "config" / "files.py"))
    (tmp_path / "configs").mkdir()
    assert config_folder() == tmp_path / "configs"
    (tmp_path / "mlm" / "configs").mkdir(parents=True)
    assert config_folder() == tmp_path / "mlm" / "configs"


def make_link(path):
    path.symlink_to(path.with_name("in.csv"))


@pytest.mark.parametrize(
    ("make", "name", "fault"),
    [
        (Path.mkdir, "out", "is a folder; name a file"),
        (os.mkfifo, "out", "is a device or a pipe; name a file"),
        (make_link, "out", "is an input .*, which would be lost; name another"),
        (Path.touch, "in.csv", "is an input .*, which would be lost; name another"),
        (Path.touch, "out/out", "cannot be written: there is no folder .*out"),
        (Path.touch, "no/out", "cannot be written: there is no folder .*no"),
        (Path.touch, "n" * 250, "cannot be written: File name too long"),
    ],
)
def test_output_that_would_lose_something_is_refused_before_any_work(tmp_path, make, name, fault):
    source = tmp_path / "in.csv"
    source.write_text("text\n")
    make(tmp_path / name.partition("/")[0]) if not name.startswith("no/") else None
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InputError, match=rf"^output=.*{name} {fault}"):
        check_output(str(tmp_path / name), str(source))
    assert sorted(tmp_path.iterdir()) == before
    assert source.read_text() == "text\n"


def test_output_may_not_lie_in_a_folder_that_is_read_if_it_is_there(tmp_path):
    check_output(str(tmp_path / "new"), str(tmp_path))
    (tmp_path / "there").write_text("")
    with pytest.raises(InputError, match="is an input"):
        check_output(str(tmp_path / "there"), str(tmp_path))
    check_output(str(tmp_path / "there"), str(tmp_path / "other"))


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a place where nobody may write")
def test_output_in_a_place_that_cannot_be_written_is_refused():
    with pytest.raises(InputError, match=r"^output=/proc/labels.csv cannot be written: .*; name another"):
        check_output("/proc/labels.csv")
