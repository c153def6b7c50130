from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

import pytest

import mlm
from mlm.config.errors import InputError
from mlm.data.cache import cache_folder, check_room, clean_cache, content_key, list_cache, locked, mark_used
from mlm.files import disk_errors, format_bytes, replacing

DAY_S = 86_400


def test_folder_is_the_option_the_variable_or_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLM_CACHE", "/from/variable")
    assert cache_folder("~/here") == Path.home() / "here"
    assert cache_folder(None) == Path("/from/variable")
    monkeypatch.delenv("MLM_CACHE")
    assert cache_folder(None) == Path(mlm.__file__).parents[1] / "data" / "cache"
    monkeypatch.setattr(mlm, "__file__", "/usr/lib/site-packages/mlm/__init__.py")
    assert cache_folder(None) == Path.home() / ".cache" / "mlm"


def test_key_follows_every_part() -> None:
    keys = {content_key(), content_key(1), content_key("1"), content_key([1]), content_key(1, None)}
    assert len(keys) == 5
    assert content_key("a", [1]) == content_key("a", [1])


def test_what_is_made_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with replacing(tmp_path / "a") as temporary:
        temporary.write_text("new")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a").read_text() == "new"
    for make in (Path.mkdir, Path.touch):
        with contextlib.suppress(KeyboardInterrupt), replacing(tmp_path / "b") as temporary:
            make(temporary)
            raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_link_stays_one_and_what_it_points_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link = tmp_path / "link"
    link.symlink_to(Path("there", "file"))
    for content in ("new", "newer"):
        with replacing(link) as temporary:
            temporary.write_text(content)
        assert link.is_symlink()
        assert (tmp_path / "there" / "file").read_text() == content
    assert [path.name for path in (tmp_path / "there").iterdir()] == ["file"]


def test_disk_errors_are_one_line_and_others_pass(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"
    message = r"file: cannot be written: No space left .* free there.*cache_dir"
    with pytest.raises(InputError, match=message), disk_errors(path):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with (
        pytest.raises(InputError, match=r"make room, or name another place$"),
        replacing(tmp_path / "a", "place"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ConnectionResetError), disk_errors(path):
        raise ConnectionResetError


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_forbidden_folder_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        pytest.raises(InputError, match="cannot be written: Permission denied"),
        locked(tmp_path / "a" / "b"),
    ):
        pass


def test_room_is_checked(tmp_path: Path) -> None:
    check_room(tmp_path / "not" / "there", 1)
    with pytest.raises(InputError, match=r"needs about 1\.0 TB more, but .* are free; make room, or"):
        check_room(tmp_path, 1e12)


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_456_789, "123.5 MB"), (5e15, "5000.0 TB")],
)
def test_format_bytes(size: float, words: str) -> None:
    assert format_bytes(size) == words


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache of one thing of each kind, used 0 to 4 days ago."""
    store = tmp_path / "stores" / "abc"
    for folder in (store, tmp_path / "stores" / "def.partial", tmp_path / "tokenizers" / "ghi"):
        folder.mkdir(parents=True)
    facts = '{"num_tokens": 1234, "sources": [{"path": "books"}, {"path": "hub:a/b"}]}'
    (store / "manifest.json").write_text(facts)
    (store / "shard-00000.arrow").write_bytes(b"x" * 5000)
    (tmp_path / "stores" / "def.partial" / "shard-00000.arrow").write_bytes(b"x" * 300)
    (tmp_path / "tokenizers" / "ghi" / "facts.json").write_text('{"sources": [{"path": "books"}]}')
    (tmp_path / "python-docs-1.jsonl").write_text("x" * 200)
    (tmp_path / "stores" / ".jkl.77").write_text("x")
    (tmp_path / "digests.json").write_text("{}")
    (tmp_path / "stores" / ".abc.lock").touch()
    for days, name in enumerate(
        ["stores/abc", "stores/def.partial", "tokenizers/ghi", "python-docs-1.jsonl"]
    ):
        age(tmp_path / name, days)
    age(tmp_path / "stores" / ".jkl.77", 4)
    return tmp_path


def age(path: Path, days: float) -> None:
    for file in [path, *path.rglob("*")]:
        os.utime(file, times=(time.time() - days * DAY_S - 60,) * 2)


def test_list_of_entries(cache: Path) -> None:
    entries = list_cache(cache)
    assert [(entry.kind, entry.path.name) for entry in entries] == [
        ("token store", "abc"),
        ("unfinished store", "def.partial"),
        ("text", "python-docs-1.jsonl"),
        ("vocabulary", "ghi"),
        ("leftover", ".jkl.77"),
    ]
    line = entries[0].line(time.time())
    assert "5.1 kB" in line
    assert "today" in line
    assert "1,234 tokens of books, hub:a/b" in line
    assert "1 day ago" in entries[1].line(time.time())
    assert list_cache(cache / "nowhere") == []


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"sources": [1]}'])
def test_damaged_entry_is_listed_and_cleaned(cache: Path, content: str) -> None:
    (cache / "stores" / "abc" / "manifest.json").write_text(content)
    assert "token store" in {entry.kind for entry in list_cache(cache)}
    assert "abc" in {entry.path.name for entry in clean_cache(cache, 0)}


def test_clean_removes_what_was_not_used_for_so_long(cache: Path) -> None:
    assert {entry.path.name for entry in clean_cache(cache, 3)} == {"python-docs-1.jsonl", ".jkl.77"}
    mark_used(cache / "tokenizers" / "ghi")
    assert {entry.path.name for entry in clean_cache(cache, 1)} == {"def.partial"}
    assert {entry.path.name for entry in clean_cache(cache, 0)} == {"abc", "ghi"}
    assert list_cache(cache) == []
    assert not list((cache / "stores").iterdir())


def test_clean_leaves_alone_a_store_whose_rows_are_being_made(cache: Path) -> None:
    with locked(cache / "stores" / "abc" / "rows-1"):
        assert "abc" not in {entry.path.name for entry in clean_cache(cache, 0)}
    assert (cache / "stores" / "abc" / "manifest.json").exists()
    assert {entry.path.name for entry in clean_cache(cache, 0)} == {"abc"}


def test_clean_leaves_alone_what_is_being_made(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with locked(cache / "stores" / "def", "-1-of-2"):
        assert "def.partial" not in {entry.path.name for entry in clean_cache(cache, 0)}
    assert "is being made by another process" in caplog.text
    assert (cache / "stores" / "def.partial").exists()
