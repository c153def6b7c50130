"""Our modules under a stock Lightning Trainer: it decides, and trains rightly."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from launching import as_torchrun_says, inherited
from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from run_files import column

from mlm import FinetuneDataModule, FinetuneModule, PretrainDataModule, PretrainModule, load_config
from mlm.config.errors import InputError
from mlm.training.pretraining import pretrain

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "accelerator": "cpu",
    "devices": 1,
}


def stock(tmp_path, **options):
    return Trainer(**{**QUIET, "enable_checkpointing": False, "default_root_dir": tmp_path, **options})


def parts(config):
    return PretrainModule(config), PretrainDataModule(config)


def same_weights(a, b, **tolerance):
    for name, tensor in a.state_dict().items():
        torch.testing.assert_close(b.state_dict()[name], tensor, **tolerance)


def test_a_fit_of_max_steps_is_our_own_run(tiny, tmp_path):
    config = tiny(model={"hidden_dropout": 0.1})
    pretrain(config)
    module, data = parts(replace(config, name="stock"))
    stock(tmp_path, max_steps=8, limit_val_batches=0).fit(module, datamodule=data)
    ours = torch.load(tmp_path / "runs/run/checkpoints/step-00000008.ckpt", weights_only=True)
    for name, tensor in ours["state_dict"].items():
        assert torch.equal(module.state_dict()[name], tensor), name
    assert module.progress.step == 8
    assert module.progress.tokens == column(config, "tokens")[-1]


def test_validate_before_fit_and_after_gives_the_losses_of_our_own_run(tiny, tmp_path):
    config = tiny()
    pretrain(config)
    module, data = parts(replace(config, name="stock"))
    (before,) = stock(tmp_path).validate(module, datamodule=data, verbose=False)
    stock(tmp_path, max_steps=8, limit_val_batches=0).fit(module, datamodule=data)
    (after,) = stock(tmp_path).validate(module, datamodule=data, verbose=False)
    assert [before["val/loss"], after["val/loss"]] == pytest.approx(
        [column(config, "val/loss")[0], column(config, "val/loss")[-1]], abs=1e-6
    )
    assert after["val/accuracy"] == pytest.approx(column(config, "val/masked_accuracy")[-1], abs=1e-6)
    assert not (tmp_path / "runs" / "stock").exists()


def test_accumulation_changes_nothing_but_memory(tiny, tmp_path):
    modules = []
    for passes in (1, 2):
        module, data = parts(tiny())
        trainer = stock(tmp_path, max_steps=6, accumulate_grad_batches=passes, limit_val_batches=0)
        trainer.fit(module, datamodule=data)
        assert trainer.global_step == module.progress.step == 6
        modules.append(module)
    same_weights(*modules, atol=1e-5, rtol=1e-4)


def test_an_epoch_is_one_pass_over_the_rows(tiny, tmp_path):
    config = tiny(trainer={"global_batch_size": 64})
    module, data = parts(config)
    seen = []
    original = module.summed_loss

    def note(batch):
        seen.append((batch["num_tokens"], len(batch["input_ids"])))
        return original(batch)

    module.summed_loss = note
    stock(tmp_path, max_epochs=2, limit_val_batches=0, accumulate_grad_batches=2).fit(module, datamodule=data)
    rows = data.num_rows
    assert rows % 64  # the last step of an epoch is smaller
    assert sum(size for _, size in seen) == module.progress.rows == 2 * rows
    steps = -(-rows // 64)
    assert (module.progress.step, len(seen)) == (2 * steps, 4 * steps)
    every = sum(count for count, _ in seen)
    assert every == module.progress.tokens == 2 * data.num_tokens(torch.arange(rows).numpy())


def test_the_schedule_follows_the_length_of_the_fit(tiny, tmp_path):
    module, data = parts(tiny(trainer={"max_steps": 500}))
    rates = []

    class Note(LearningRateMonitor):
        def on_train_start(self, trainer, module):
            pass

        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            pass

        def on_train_batch_end(self, trainer, module, *arguments):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    stock(tmp_path, max_steps=10, limit_val_batches=0, callbacks=[Note()]).fit(module, datamodule=data)
    peak = max(rates)
    assert peak == pytest.approx(5e-3)
    assert rates[-1] == pytest.approx(peak / 10, rel=0.2)  # linear: one step before 0


def test_a_checkpoint_continues_with_the_next_row_and_loads_by_itself(tiny, tmp_path):
    config = tiny(model={"hidden_dropout": 0.1})
    whole, data = parts(config)
    stock(tmp_path, max_steps=12, limit_val_batches=0).fit(whole, datamodule=data)
    first, data = parts(config)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=5, save_top_k=-1)
    trainer = stock(tmp_path, max_steps=12, limit_val_batches=0, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(first, datamodule=data)
    (middle,) = (tmp_path / "saved").glob("*step=5.ckpt")
    second, data = parts(config)
    stock(tmp_path, max_steps=12, limit_val_batches=0).fit(
        second, datamodule=data, ckpt_path=middle, weights_only=True
    )
    assert second.progress.step == 12
    same_weights(whole, second, atol=0, rtol=0)
    loaded = PretrainModule.load_from_checkpoint(middle, weights_only=True)
    assert loaded.config == replace(config, resume=False)
    (newest,) = (tmp_path / "saved").glob("*step=10.ckpt")
    assert not torch.equal(
        loaded.model.head.bias,
        PretrainModule.load_from_checkpoint(newest, weights_only=True).model.head.bias,
    )


def test_what_the_trainer_decides_otherwise_is_a_warning(tiny, tmp_path, caplog):
    module, data = parts(tiny(trainer={"max_steps": 8}))
    stock(tmp_path, max_steps=3, limit_val_batches=0, gradient_clip_val=0.5).fit(module, datamodule=data)
    (message,) = [record.getMessage() for record in caplog.records if "the Trainer decides" in record.message]
    assert "max_steps 3 (configured: 8)" in message
    assert "gradient_clip_val 0.5" in message


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_the_trainer_clips(tiny, tmp_path, algorithm):
    module, data = parts(tiny(optimizer={"clip_norm": 0.0}))
    norms = []

    def note(optimizer):
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        norms.append(
            max(float(g.abs().max()) for g in gradients)
            if algorithm == "value"
            else float(torch.nn.utils.get_total_norm(gradients))
        )

    module.optimizer_step = lambda e, b, optimizer, closure: (optimizer.step(closure), note(optimizer))
    options = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm}
    stock(tmp_path, max_steps=3, limit_val_batches=0, **options).fit(module, datamodule=data)
    assert norms
    assert max(norms) <= 1e-3 * 1.001


TWO = """
import sys
from lightning.pytorch import Trainer
from mlm import PretrainDataModule, PretrainModule, load_config
config = load_config("pretrain", "--config", sys.argv[1])
module, data = PretrainModule(config), PretrainDataModule(config)
quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "default_root_dir": sys.argv[2]}
trainer = Trainer(max_epochs=1, **dict.fromkeys(quiet, False), **options)
trainer.fit(module, datamodule=data)
if trainer.is_global_zero:
    import torch
    torch.save({"state": module.state_dict(), "rows": module.progress.rows,
                "loss": float(trainer.callback_metrics["val/loss"])}, sys.argv[2] + "/two.pt")
"""


@pytest.mark.slow
def test_two_processes_with_the_default_sampler_train_as_one(tiny, tmp_path):
    from mlm.config.parse import dump_config

    config = tiny(trainer={"global_batch_size": 64})
    alone, data = parts(config)
    trainer = stock(tmp_path, max_epochs=1)
    trainer.fit(alone, datamodule=data)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    (tmp_path / "two.py").write_text(TWO)
    runs = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "two.py"), str(tmp_path / "config.yaml"), str(tmp_path)],
            env=inherited() | environment | {"OMP_NUM_THREADS": "1"},
        )
        for environment in as_torchrun_says()
    ]
    try:
        assert [run.wait(120) for run in runs] == [0, 0]
    finally:
        for run in runs:
            run.kill()
    both = torch.load(tmp_path / "two.pt", weights_only=True)
    assert both["rows"] == alone.progress.rows == data.num_rows
    assert both["loss"] == pytest.approx(float(trainer.callback_metrics["val/loss"]), abs=1e-5)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(both["state"][name], tensor, atol=1e-5, rtol=1e-4)


def test_load_config_raises_and_never_exits(tmp_path, monkeypatch, text):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    config = load_config("pretrain", "--trainer.max_steps=60", f"--data.sources={text}")
    assert config.trainer.max_steps == 60
    PretrainModule(config), PretrainDataModule(config)
    assert not (tmp_path / "runs").exists()
    assert dict(os.environ) == before
    for words in (["--trainer.max_stepz=60"], ["--trainer.max_steps"], ["--seed=-1"], ["--config", "none"]):
        with pytest.raises(InputError):
            load_config("pretrain", *words)
    with pytest.raises(InputError, match="kind=train"):
        load_config("train")


def test_fine_tuning_under_a_stock_trainer(tmp_path, tiny):
    pretrain(tiny())
    table = tmp_path / "table.csv"
    table.write_text("text,label\n" + "".join(f"the keeper {n % 2} waits {n},{n % 2}\n" for n in range(100)))
    words = [f"--model={tmp_path}/runs/run/model", f"--data.train={table}", "--trainer.precision=32-true"]
    config = load_config("finetune", *words, f"--runs_dir={tmp_path}/runs")
    module, data = FinetuneModule(config), FinetuneDataModule(config)
    saver = ModelCheckpoint(dirpath=tmp_path / "saved", monitor="val/accuracy", mode="max")
    trainer = stock(tmp_path, max_epochs=2, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(module, datamodule=data)
    assert module.progress.rows == 2 * data.num_rows
    (scores,) = trainer.validate(module, datamodule=data, verbose=False)
    assert {"val/loss", "val/accuracy", "val/f1"} <= scores.keys()
    loaded = FinetuneModule.load_from_checkpoint(saver.best_model_path, weights_only=True)
    same_weights(loaded, FinetuneModule.load_from_checkpoint(saver.best_model_path, weights_only=True))


def test_the_script_of_the_documentation(tmp_path, text, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "lightning.md").read_text()
    script = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    assert len(script.strip().splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_texts").mkdir()
    (tmp_path / "my_texts" / "text.txt").write_text(text.read_text())
    seed_everything(0)
    small = ("hidden_size=32", "num_hidden_layers=2", "num_attention_heads=2", "intermediate_size=48")
    words = ["--tokenizer.vocab_size=120", "--data.seq_len=32", *(f"--model.{size}" for size in small)]
    source = '"--data.sources=my_texts/"'
    assert source in script
    script = script.replace(source, ", ".join([source, *map(repr, words)]))
    exec(compile(script, "docs/lightning.md", "exec"), {})
    assert list(tmp_path.glob("lightning_logs/version_0/metrics.csv")) or list(tmp_path.glob("**/*.ckpt"))
