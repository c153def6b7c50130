"""Names of the hub: which words are one, and what is said when there is no such model or no network."""

from __future__ import annotations

import json
import os

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file

from mlm.__main__ import main
from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.hub import load_masked_lm, save_pretrained
from mlm.hub.download import _download, model_folder, pinned_name, resolve_model
from mlm.model import MaskedLM
from mlm.startup.checks import check_model_folder, is_hub_name


@pytest.mark.parametrize(
    "name", ["google-bert/bert-base-uncased", "a/b", "FacebookAI/xlm-roberta_base.v1", "a/b@refs/pr/1"]
)
def test_owner_and_name_are_a_hub_name(name):
    assert is_hub_name(name)


@pytest.mark.parametrize(
    "name", ["bert", "a/b/c", "/a/b", "./a", "../b", "a/", "a/..", "a b/c", "a/b\n", "", "a/b@", "a@b"]
)
def test_nothing_else_is(name):
    assert not is_hub_name(name)


def test_path_that_begins_with_a_folder_here_is_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert is_hub_name("runs/first")
    (tmp_path / "runs").mkdir()
    assert not is_hub_name("runs/first")
    assert model_folder("runs/first").parts == ("runs", "first")


def test_unreachable_hub_is_one_line_within_seconds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        InputError, match="nobody/nothing is not a folder here, and the hub cannot be"
    ) as caught:
        load_masked_lm("nobody/nothing")
    assert "\n" not in str(caught.value)


def test_command_ends_with_one_line_and_status_2(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(["fill-mask", "--model", "nobody/nothing", "a [MASK]"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith(
        "mlm fill-mask: error: nobody/nothing is not a folder here, and"
    )


def sizes() -> ModelConfig:
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
    return ModelConfig(vocab_size=128, max_position_embeddings=32, **shape)


@pytest.fixture
def commits(tmp_path, monkeypatch, tokenizer):
    """A cache as huggingface_hub makes it: owner/tiny with the branch main and the tag v1, each a commit."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    _download.cache_clear()
    repository, found = tmp_path / "hub" / "models--owner--tiny", {}
    (repository / "refs").mkdir(parents=True)
    for seed, name in enumerate(("main", "v1")):
        torch.manual_seed(seed)
        found[name] = f"{seed:040x}"
        folder = repository / "snapshots" / found[name]
        save_pretrained(folder, MaskedLM(sizes()), tokenizer, 32, "")
        (repository / "refs" / name).write_text(found[name])
    yield found
    _download.cache_clear()


@pytest.mark.parametrize("pickled", [False, True])
def test_model_in_the_cache_of_the_hub_is_read_without_network(pickled, commits, tmp_path):
    folder = tmp_path / "hub" / "models--owner--tiny" / "snapshots" / commits["main"]
    model = load_masked_lm(folder)
    if pickled:
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    check_model_folder("model", "owner/tiny")
    ids = torch.arange(10)[None]
    assert torch.equal(load_masked_lm("owner/tiny")(ids)[..., :120], model(ids)[..., :120])
    assert main(["fill-mask", "--model", "owner/tiny", "the [MASK] waits"]) == 0


def test_name_is_resolved_to_a_folder_and_its_commit(commits, tmp_path):
    for name, commit in (("owner/tiny", commits["main"]), ("owner/tiny@v1", commits["v1"])):
        assert resolve_model(name) == (model_folder(name), commit)
        assert model_folder(name).name == commit
        assert pinned_name(name) == f"owner/tiny@{commit}"
    assert resolve_model(f"owner/tiny@{commits['v1']}")[1] == commits["v1"]
    assert pinned_name(tmp_path) is None
    assert resolve_model(tmp_path) == (tmp_path, None)


def test_one_process_keeps_to_the_commit_it_resolved_first(commits, tmp_path):
    assert resolve_model("owner/tiny")[1] == commits["main"]
    (tmp_path / "hub" / "models--owner--tiny" / "refs" / "main").write_text(commits["v1"])
    assert resolve_model("owner/tiny")[1] == commits["main"]


def test_failed_request_changes_no_setting_for_later_ones(commits):
    settings = [huggingface_hub.constants.HF_HUB_OFFLINE, dict(os.environ)]
    for name in ("owner/other", "owner/tiny@v2"):
        with pytest.raises(InputError, match=f"{name} is not a folder here"):
            resolve_model(name)
    assert [huggingface_hub.constants.HF_HUB_OFFLINE, dict(os.environ)] == settings
    assert resolve_model("owner/tiny")[1] == commits["main"]


@pytest.mark.network
def test_tiny_model_of_the_hub_is_read(tmp_path):
    assert load_masked_lm("prajjwal1/bert-tiny").config.hidden_size == 128


def test_a_run_records_the_commit_it_started_from(commits, tmp_path):
    rows = [f"the {word} waits {number},{word}" for number in range(20) for word in ("lamp", "boat")]
    (tmp_path / "train.csv").write_text("text,label\n" + "\n".join(rows))
    words = ["--data.train", "train.csv", "--trainer.max_epochs", "1", "--logging.wandb", "disabled"]
    assert main(["finetune", "--model", "owner/tiny@v1", "--name", "one", *words]) == 0
    pinned = f"owner/tiny@{commits['v1']}"
    summary = json.loads((tmp_path / "runs/one/summary.json").read_text())
    assert (summary["init"], summary["started_from"]) == ("owner/tiny@v1", pinned)
    card = (tmp_path / "runs/one/model/README.md").read_text()
    assert "base_model: owner/tiny\n" in card
    assert f"| started from | {pinned} |" in card
    (path,) = (tmp_path / "runs/one/checkpoints").glob("*.ckpt")
    assert torch.load(path, weights_only=True)["identity"]["started_from"] == pinned
    (tmp_path / "hub/models--owner--tiny/refs/v1").write_text(commits["main"])
    _download.cache_clear()
    with pytest.raises(SystemExit):
        main(["finetune", "--resume", "--name", "one", "--trainer.max_epochs", "2"])
