"""A process killed at any step of replacing a folder leaves the old one or the new one, complete."""

from __future__ import annotations

import itertools
import os
import sys

import pytest

from mlm import files
from mlm.config.errors import DiskError
from mlm.files import recover, remove, replacing

NAMES = ["first", "second"]
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def write_folder(path, content):
    with replacing(path) as temporary:
        temporary.mkdir()
        for name in NAMES:
            (temporary / name).write_text(content)


def killed_at(step, path):
    """Replace the folder in a child process that dies before its `step`-th step; return whether it died."""
    child = os.fork()
    if child == 0:
        count = itertools.count()
        sys.addaudithook(lambda event, _: os._exit(9) if event in STEPS and next(count) == step else None)
        write_folder(path, "new")
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


@pytest.mark.parametrize("can_swap", [True, False])
def test_kill_at_any_step_leaves_a_complete_folder(can_swap, tmp_path, monkeypatch):
    if not can_swap:
        monkeypatch.setattr(files, "_swap", lambda *_: False)
    path, found, was_missing = tmp_path / "model", [], False
    for step in itertools.count():
        remove(path)
        write_folder(path, "old")
        died = killed_at(step, path)
        was_missing |= not path.exists()
        recover(path)
        assert os.listdir(tmp_path) == ["model"]
        assert sorted(os.listdir(path)) == NAMES
        contents = {file.read_text() for file in path.iterdir()}
        assert len(contents) == 1
        found += contents
        if not died:
            break
    assert found == sorted(found, reverse=True)  # first always the old one, then always the new one
    assert {"old", "new"} == set(found)
    assert was_missing != can_swap


def test_leftovers_of_other_names_stay(tmp_path):
    for name in (".model.12", ".model.12.old", ".model.cache", ".models.12", "model"):
        (tmp_path / name).mkdir()
    recover(tmp_path / "model")
    assert sorted(os.listdir(tmp_path)) == [".model.cache", ".models.12", "model"]


def test_file_does_not_replace_a_folder(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(DiskError, match="Is a directory"), replacing(tmp_path / "model") as temporary:
        temporary.write_text("a file")
    assert (tmp_path / "model").is_dir()


def test_folder_behind_a_link_is_replaced(tmp_path):
    write_folder(tmp_path / "place", "old")
    (tmp_path / "link").symlink_to(tmp_path / "place")
    write_folder(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "place" / "first").read_text() == "new"
