import os
import pickle

import pytest
import torch

from mlm.training.checkpoint import NEEDED, AtomicCheckpointIO, checkpoint_path, find_checkpoint


def save(folder, step):
    AtomicCheckpointIO().save_checkpoint(
        {**{key: {} for key in NEEDED}, "global_step": step, "x": torch.ones(100)},
        checkpoint_path(folder, step),
    )


def test_the_newest_whole_checkpoint_is_found_by_its_step(tmp_path):
    for step in (90, 100, 20):
        save(tmp_path, step)
    os.utime(checkpoint_path(tmp_path, 20))
    assert find_checkpoint(tmp_path).path == checkpoint_path(tmp_path, 100)
    assert find_checkpoint(tmp_path).step == 100
    assert find_checkpoint(tmp_path / "none") is None


@pytest.mark.parametrize("content", [b"", b"junk", None])
def test_broken_files_are_skipped_with_a_warning(tmp_path, caplog, content):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint_path(tmp_path, 2)
    path.write_bytes(path.read_bytes()[:300] if content is None else content)
    assert find_checkpoint(tmp_path).path == checkpoint_path(tmp_path, 1)
    assert str(path) in caplog.text
    assert path.with_name(f"{path.name}.broken").exists()  # set aside, not lost


class Code:
    def __reduce__(self):
        return os.mkdir, (os.environ["MLM_TEST_MARK"],)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_not_run(tmp_path, monkeypatch, caplog, zipped):
    mark = tmp_path / "mark"
    monkeypatch.setenv("MLM_TEST_MARK", str(mark))
    path = checkpoint_path(tmp_path, 1)
    if zipped:
        torch.save({"x": Code()}, path)
    else:
        path.write_bytes(pickle.dumps({"x": Code()}))
    assert find_checkpoint(tmp_path) is None
    assert not mark.exists()


def test_a_failed_save_keeps_the_old_file_and_leaves_no_other(tmp_path):
    save(tmp_path, 1)
    before = checkpoint_path(tmp_path, 1).read_bytes()
    with pytest.raises(AttributeError):
        AtomicCheckpointIO().save_checkpoint({"x": lambda: 0}, checkpoint_path(tmp_path, 1))
    assert checkpoint_path(tmp_path, 1).read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_permissions_follow_the_umask(tmp_path):
    save(tmp_path, 1)
    umask = os.umask(0)
    os.umask(umask)
    assert checkpoint_path(tmp_path, 1).stat().st_mode & 0o777 == 0o666 & ~umask
