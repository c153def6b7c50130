"""A checkpoint is taken wherever a model folder is, and `mlm export` writes it as one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlm import Predictor
from mlm.__main__ import main

TINY = (
    *("--tokenizer.vocab_size", "120", "--model.num_hidden_layers", "1", "--model.hidden_size", "16"),
    *("--model.num_attention_heads", "2", "--model.intermediate_size", "24", "--data.seq_len", "32"),
    *("--trainer.max_steps", "4", "--trainer.save_every", "2", "--trainer.keep_every", "2"),
    *("--trainer.global_batch_size", "4", "--logging.wandb", "disabled", "--trainer.accelerator", "cpu"),
)


@pytest.fixture
def run(tmp_path, documents, monkeypatch):
    """A finished pretraining of four steps, with a checkpoint after two."""
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("\n".join(documents), encoding="utf-8")
    rows = [f"{text},{'ab'[number % 2]}" for number, text in enumerate(documents[:60])]
    Path("labels.csv").write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    assert main(["pretrain", "--data.sources", "notes.txt", "--name", "r", *TINY]) == 0
    return Path("runs/r")


def checkpoints(run):
    return sorted((run / "checkpoints").glob("step-*.ckpt"))


def test_export_of_the_last_checkpoint_is_the_folder_of_the_run(run):
    *_, last = checkpoints(run)
    assert main(["export", "--model", str(last), "--output", "out"]) == 0
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (Path("out"), run / "model"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    names = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "modules.json",
        "sentence_bert_config.json",
    )
    for name in names:
        assert Path("out", name).read_text() == (run / "model" / name).read_text(), name
    assert "Read back after writing" in Path("out/README.md").read_text()


def test_an_earlier_checkpoint_is_read_as_its_export(run):
    first, *_ = checkpoints(run)
    main(["export", "--model", str(first), "--output", "out"])
    weights = load_file("out/model.safetensors")
    last = load_file(run / "model/model.safetensors")
    assert any(not torch.equal(weights[name], last[name]) for name in weights)
    texts = ["the harbour waits for rain", "a lamp"]
    assert (Predictor(first).embed(texts) == Predictor("out").embed(texts)).all()
    assert main(["evaluate", "--model", str(first), "--data.sources", "notes.txt"]) == 0
    assert main(["fill-mask", "--model", str(first), "the [MASK] waits"]) == 0


def test_a_checkpoint_starts_other_runs(run):
    first, *_ = checkpoints(run)
    quick = ("--logging.wandb", "disabled", "--trainer.accelerator", "cpu")
    tune = ("--data.train", "labels.csv", "--trainer.max_epochs", "1", "--name", "f", *quick)
    assert main(["finetune", "--model", str(first), *tune]) == 0
    assert json.loads(Path("runs/f/summary.json").read_text())["lr"] == 3e-4  # after a short pretraining
    (tuned,) = checkpoints(Path("runs/f"))
    assert main(["predict", "--model", str(tuned), "--input", "labels.csv", "--output", "a.csv"]) == 0
    assert main(["predict", "--model", "runs/f/model", "--input", "labels.csv", "--output", "b.csv"]) == 0
    assert Path("a.csv").read_text() == Path("b.csv").read_text()
    on = ("--data.sources", "notes.txt", "--trainer.max_steps", "1", "--data.seq_len", "32", "--name", "i")
    assert main(["pretrain", "--init", str(first), *on, *quick]) == 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("runs/r/checkpoints", "is not a model folder"),
        ("cut.ckpt", "is not a complete checkpoint"),
        ("foreign.ckpt", "another program wrote it: its hyper_parameters have _class_path"),
        ("moved.ckpt", "tokenizer"),
    ],
)
def test_what_is_no_checkpoint_of_ours_is_one_line(run, name, message, capsys):
    *_, last = checkpoints(run)
    Path("cut.ckpt").write_bytes(last.read_bytes()[:1000])
    shutil.copy(last, "moved.ckpt")
    content = torch.load(last, weights_only=True)
    content["hyper_parameters"]["_class_path"] = "os.system"
    torch.save(content, "foreign.ckpt")
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["fill-mask", "--model", name, "the [MASK]"])
    assert end.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(SystemExit):
        main(["export", "--model", "runs/r/model", "--output", "out"])
    assert "is not a checkpoint; name a file such as" in capsys.readouterr().err
    assert not Path("out").exists()
