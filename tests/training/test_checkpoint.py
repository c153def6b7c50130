import os
import pickle
import shutil
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from run_files import folder_of

from mlm.__main__ import main
from mlm.config.errors import InputError
from mlm.hub.checkpoint import NEEDED
from mlm.training.pretraining import pretrain
from mlm.training.run_folder import AtomicCheckpointIO, checkpoint_path, find_checkpoint


def save(folder, step, **changes):
    content = {
        "state_dict": {"x": torch.ones(1000)},
        "optimizer_states": [{"state": {}, "param_groups": []}],
        "global_step": step,
        "progress": {"rows": 8},
        "identity": {"seed": 0},
        "pytorch-lightning_version": "2.6.6",
    }
    assert content.keys() == NEEDED.keys()
    AtomicCheckpointIO().save_checkpoint({**content, **changes}, checkpoint_path(folder, step))


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


@pytest.mark.parametrize(
    "changes",
    [
        {"global_step": "abc"},
        {"global_step": None},
        {"global_step": -5},
        {"global_step": 10**9},
        {"progress": None},
        {"progress": {}},
        {"identity": None},
        {"state_dict": {}},
        {"optimizer_states": []},
        {"optimizer_states": ["x"]},
        {"pytorch-lightning_version": None},
    ],
    ids=str,
)
def test_odd_content_is_no_checkpoint(tmp_path, caplog, changes):
    save(tmp_path, 1)
    save(tmp_path, 2, **changes)
    assert find_checkpoint(tmp_path).step == 1
    assert "step-00000002.ckpt" in caplog.text


def test_a_flipped_bit_is_noticed(tmp_path, caplog):
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = checkpoint_path(tmp_path, 2)
    content = bytearray(path.read_bytes())
    place = content.index(torch.ones(8).numpy().tobytes())
    content[place] ^= 0x40
    path.write_bytes(content)
    assert find_checkpoint(tmp_path).step == 1
    assert "damaged" in caplog.text


def test_copies_under_other_names_are_left_alone(tiny):
    config = tiny(trainer={"save_every": 2})
    pretrain(config)
    folder = folder_of(config) / "checkpoints"
    names = ["step-00000006-good.ckpt", "step-latest.ckpt", "step--5.ckpt", "step-00000008 (copy).ckpt"]
    for name in names:
        shutil.copy(checkpoint_path(folder, 8), folder / name)
    (folder / ".step-1.ckpt.abc").mkdir()
    longer = replace(config.trainer, max_steps=12)
    assert pretrain(replace(config, resume=True, trainer=longer)) == 0
    ours = {checkpoint_path(folder, step).name for step in (10, 12)}
    assert {path.name for path in folder.iterdir()} == {*ours, *names, ".step-1.ckpt.abc"}


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
    with pytest.raises(InputError, match=r"all checkpoints of .* are damaged"):
        find_checkpoint(tmp_path)
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


def plain(tree):
    """Tell whether a checkpoint holds nothing but plain containers, numbers, texts and tensors."""
    if type(tree) in (dict, OrderedDict):
        return all(map(plain, tree.keys())) and all(map(plain, tree.values()))
    if type(tree) in (list, tuple):
        return all(map(plain, tree))
    return type(tree) in (str, int, float, bool, type(None), torch.Tensor)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_checkpoints_of_a_run_hold_plain_types_only(tiny, name):
    config = tiny(optimizer={"name": name}, trainer={"max_steps": 2, "keep_best": 1, "val_every": 1})
    pretrain(config)
    (path, *_) = (folder_of(config) / "checkpoints").glob("*.ckpt")
    content = torch.load(path, weights_only=True)
    assert content["progress"]["best"]
    assert plain(content)


@pytest.mark.parametrize(
    "words",
    [
        "mlm evaluate --model {} --data.sources {text}",
        "mlm fill-mask --model {} [MASK]",
        "mlm embed --model {} --input {text} --output {tmp}/out.npy",
        "mlm finetune --model {} --data.train {table} --runs_dir {tmp}/runs --name other",
        "mlm pretrain --init {} --data.sources {text} --data.seq_len 32 --runs_dir {tmp}/runs --name other",
    ],
    ids=lambda words: words.split()[1],
)
def test_no_command_runs_code_in_pickled_weights(tiny, text, tmp_path, monkeypatch, capsys, words):
    mark = tmp_path / "mark"
    monkeypatch.setenv("MLM_TEST_MARK", str(mark))
    config = tiny(trainer={"max_steps": 1})
    pretrain(config)
    model = folder_of(config) / "model"
    (model / "model.safetensors").unlink()
    torch.save({"x": Code()}, model / "pytorch_model.bin")
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"text {n},{n % 2}\n" for n in range(200)))
    places = {"text": text, "tmp": tmp_path, "table": table}
    with pytest.raises(SystemExit, match="2"):
        main([word.format(model, **places) for word in words.split()[1:]])
    assert "could run code" in capsys.readouterr().err
    assert not mark.exists()


@pytest.mark.parametrize("foreign", [{"_class_path": "os.system"}, {"_instantiator": "x"}, {"lr": 0.1}])
def test_a_checkpoint_of_another_program_is_named(tmp_path, caplog, foreign):
    save(tmp_path, 1, hyper_parameters={"config": {}, **foreign})
    with pytest.raises(InputError, match="all checkpoints"):
        find_checkpoint(tmp_path)
    assert f"another program wrote it: its hyper_parameters have {next(iter(foreign))}" in caplog.text


def edit_weights(path, change):
    content = torch.load(path, weights_only=True)
    content["state_dict"] = {change(name): value for name, value in content["state_dict"].items()}
    torch.save(content, path)


def test_the_prefix_of_a_compiled_model_is_understood_and_other_names_are_refused(tiny):
    config = tiny(trainer={"max_steps": 4, "save_every": 2})
    pretrain(config)
    path = checkpoint_path(folder_of(config) / "checkpoints", 4)
    edit_weights(path, lambda name: name.replace("model.", "model._orig_mod.", 1))
    longer = replace(config, resume=True, trainer=replace(config.trainer, max_steps=6))
    pretrain(longer)
    edit_weights(checkpoint_path(folder_of(config) / "checkpoints", 6), lambda name: f"teacher.{name}")
    with pytest.raises(InputError, match=r"weights are those of another model; they differ in model\."):
        pretrain(replace(longer, trainer=replace(config.trainer, max_steps=8)))
