import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import wandb
from run_files import assert_equal_weights, column, folder_of, metrics, weights
from torch import nn
from transformers import AutoModelForMaskedLM, AutoTokenizer

from mlm.config.commands import InspectConfig
from mlm.config.data import MaskingConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.config.training import LoggingConfig, ScheduleConfig
from mlm.data.corpus import prepare_corpus
from mlm.evaluation.batch_view import training_batch
from mlm.hub import load_pretrained
from mlm.masking import mask_rate_at
from mlm.model.heads import MaskedLM
from mlm.optim import learning_rate_factor
from mlm.tokenizer import load_tokenizer
from mlm.training.engine import UNPLANNED_STEPS, rescale_and_clip
from mlm.training.pretraining import pretrain
from mlm.training.run_folder import find_checkpoint

MUON = {"name": "muon", "lr": 5e-3}
DROPOUT = {"embedding_dropout": 0.1, "attention_dropout": 0.1, "hidden_dropout": 0.1}


def test_a_run_leaves_what_it_promises(tiny, capsys):
    config = tiny(logging=LoggingConfig(wandb="offline"))
    assert pretrain(config) == 0
    folder = folder_of(config)
    summary = json.loads((folder / "summary.json").read_text())
    expected = (
        "loss_first val_loss val_perplexity val_masked_accuracy unigram_entropy vocab_size num_parameters "
        "steps tokens elapsed_s tokens_per_second model_dir"
    )
    assert set(expected.split()) <= set(summary)
    assert summary["steps"] == 8
    assert summary["loss_first"] == pytest.approx(math.log(summary["vocab_size"]), rel=0.05)
    assert summary["val_perplexity"] == pytest.approx(math.exp(summary["val_loss"]))
    assert summary["num_parameters"] == sum(tensor.numel() for tensor in weights(config).values())
    for name in (
        "config.yaml",
        "model/config.json",
        "model/tokenizer.json",
        "model/README.md",
        "plots/loss.png",
    ):
        assert (folder / name).stat().st_size > 0, name
    (tracked,) = folder.glob("wandb/offline-run-*/*.wandb")
    wandb.teardown()  # its process writes on after a run has finished
    assert b'"num_documents":300' in tracked.read_bytes()  # of each source, in the configuration of the run
    assert [source["num_documents"] for source in summary["sources"]] == [300]
    rows = metrics(config)
    assert [int(row["step"]) for row in rows] == list(range(9))
    assert [int(row["step"]) for row in rows if row["val/loss"]] == [0, 4, 8]
    assert all(row["train/loss"] and row["optim/lr"] and row["optim/grad_norm"] for row in rows[1:])
    assert int(rows[-1]["tokens"]) == summary["tokens"]
    checkpoint = find_checkpoint(folder / "checkpoints").content
    assert summary["token_store"] == checkpoint["identity"]["corpus"]
    assert summary["tokenizer_digest"] == checkpoint["identity"]["tokenizer"]
    (tracked,) = folder.glob("wandb/offline-run-*/*.wandb")
    for fact in ("token_store", "tokenizer_digest", "git_commit"):
        assert (summary[fact] or "").encode() in tracked.read_bytes()
    out = capsys.readouterr().out
    for part in ("fill-mask", "evaluate", "--resume", str(folder / "model"), "word counts alone"):
        assert part in out
    model = folder / "model"
    assert f"\n# {config.name}\n" in (model / "README.md").read_text()
    assert not any(
        str(folder.parent).encode() in file.read_bytes() for file in model.rglob("*") if file.is_file()
    )


@pytest.mark.parametrize("optimizer", [None, MUON])
def test_the_same_seed_gives_the_same_run_and_another_seed_another(tiny, optimizer):
    configs = [tiny(name=name, optimizer=optimizer, model=DROPOUT) for name in ("a", "b")]
    configs.append(replace(tiny(name="c", optimizer=optimizer, model=DROPOUT), seed=1))
    for config in configs:
        pretrain(config)
    assert column(configs[0], "train/loss") == column(configs[1], "train/loss")
    assert_equal_weights(weights(configs[0]), weights(configs[1]))
    assert column(configs[0], "train/loss") != column(configs[2], "train/loss")


@pytest.mark.parametrize("bound", [{"max_steps": 8}, {"max_steps": None, "max_tokens": 55_000}])
def test_a_mask_rate_that_moves_follows_the_step_whoever_draws_the_batch(tiny, bound):
    """Another number of loader processes, other passes, a stop at step 4: the same masks in every step."""
    masking = MaskingConfig(mask_rate=0.4, final_mask_rate=0.1, validation_mask_rate=0.2)
    rows = {"global_batch_size": 256, **bound}
    whole = tiny(name="whole", masking=masking, trainer=rows)
    pretrain(whole)
    steps = len(column(whole, "train/loss"))
    assert steps == (bound["max_steps"] or 7)
    assert column(whole, "masking/rate") == pytest.approx(np.linspace(0.4, 0.1, steps), abs=0.01)
    shares = [
        np.mean(column(whole, f"masking/{name}")) for name in ("mask_token", "random_token", "unchanged")
    ]
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.015)
    parts = tiny(
        name="parts", masking=masking, data={"num_workers": 2}, trainer=rows | {"micro_batch_size": 64}
    )
    stop_at(4, parts)
    assert pretrain(replace(parts, resume=True)) == 0
    for name in ("rate", "mask_token", "random_token", "unchanged"):
        assert column(parts, f"masking/{name}") == column(whole, f"masking/{name}")
    assert column(parts, "train/loss") == pytest.approx(column(whole, "train/loss"), abs=1e-4)
    config = InspectConfig(**{**vars(whole), "step": 5})
    _, batch = training_batch(config, prepare_corpus(config.data, config.tokenizer))  # what `inspect` shows
    assert batch["num_masked"] / batch["num_ordinary"] == pytest.approx(
        column(whole, "masking/rate")[5], rel=1e-6
    )
    constant = tiny(name="constant", masking=replace(masking, final_mask_rate=None), trainer=rows)
    pretrain(constant)  # validation is at a rate of its own: the same places before training
    assert column(constant, "val/loss")[0] == column(whole, "val/loss")[0]


def stop_at(step, config):
    """Run until SIGTERM arrives after a step, as a scheduler would send it."""
    from mlm.training import run

    class Signaller(run.GracefulStop):
        def on_step_end(self, trainer, module):
            if module.progress.step == step:
                os.kill(os.getpid(), signal.SIGTERM)
            super().on_step_end(trainer, module)

    original = run.GracefulStop
    run.GracefulStop = Signaller
    try:
        assert pretrain(config) == 128 + signal.SIGTERM
    finally:
        run.GracefulStop = original


def test_accumulated_passes_give_the_gradient_of_one_batch(tiny):
    runs = []
    for micro in (1, 2, 8):
        config = tiny(name=f"micro-{micro}", trainer={"micro_batch_size": micro, "max_steps": 4})
        pretrain(config)
        runs.append((column(config, "train/loss"), column(config, "optim/grad_norm"), weights(config)))
    for losses, norms, tensors in runs[1:]:
        assert losses == pytest.approx(runs[0][0], abs=1e-5)
        assert norms == pytest.approx(runs[0][1], rel=1e-4)
        assert_equal_weights(tensors, runs[0][2], atol=1e-4, rtol=1e-3)


CLOSED_FORMS = {  # the share of the peak in update number n + 1 of 8, after a warm-up of 3 where there is one
    "linear": lambda n: 1 - (n - 3) / 5,
    "cosine": lambda n: (1 + math.cos(math.pi * (n - 3) / 5)) / 2,
    "wsd": lambda n: 1 if n < 4 else 1 - math.sqrt((n - 4) / 4),
    "constant": lambda n: 1,
    "decay": lambda n: 1 - math.sqrt(n / 8),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_learning_rate_counts_optimizer_steps_not_passes(tiny, name):
    warmup = 0 if name == "decay" else 3
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, decay_fraction=0.5)
    config = tiny(schedule=schedule, trainer={"micro_batch_size": 2})
    pretrain(config)
    rises = [(n + 1) / 3 for n in range(warmup)]
    falls = [CLOSED_FORMS[name](n) for n in range(warmup, 8)]
    assert column(config, "optim/lr") == pytest.approx([5e-3 * factor for factor in rises + falls])


def test_a_warmup_longer_than_the_run_is_refused(tiny):
    trainer, schedule = {"max_steps": None, "max_tokens": 1000}, ScheduleConfig(warmup_steps=200)
    with pytest.raises(InputError, match=r"warm-up of 200 steps is longer than the run of \d: the peak"):
        pretrain(tiny(trainer=trainer, schedule=schedule))
    assert not folder_of(tiny()).exists()


def run_script(arguments, environment):
    run = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = run.communicate(timeout=240)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)
        raise
    assert run.returncode == 0, output


def test_a_time_limit_fixes_the_steps_once_and_the_schedule_follows_them(tiny):
    """Asserts nothing about the clock: however fast the machine is, the plan it led to was kept to."""
    trainer = {"max_steps": None, "max_time": "3s", "val_every": 1000, "save_every": 1000}
    masking = MaskingConfig(mask_rate=0.5, final_mask_rate=0.1)
    config = tiny(trainer=trainer | {"global_batch_size": 32}, masking=masking)
    pretrain(config)
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["stopped_by"] == "trainer.max_time=3s"
    checkpoint = find_checkpoint(folder_of(config) / "checkpoints")
    progress = checkpoint.content["progress"]
    planned = progress["planned_steps"] or UNPLANNED_STEPS
    assert checkpoint.step == summary["steps"] <= planned
    factors = [learning_rate_factor(config.schedule, step, planned) for step in range(planned)]
    last = slice(summary["steps"] - 3, summary["steps"])
    assert column(config, "optim/lr")[last] == pytest.approx([5e-3 * factor for factor in factors[last]])
    facts = progress["mask_rate_steps"] or (0, None)
    assert column(config, "masking/rate") == pytest.approx(
        [mask_rate_at(masking, step, *facts) for step in range(summary["steps"])], abs=0.05
    )


def test_the_first_bound_wins_and_is_named(tiny):
    config = tiny(trainer={"max_steps": 100, "max_tokens": 1000})
    pretrain(config)
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert summary["stopped_by"] == "trainer.max_tokens=1000"
    assert 800 <= summary["tokens"] <= 1300
    assert summary["steps"] < 10


def test_a_model_folder_can_be_trained_on(tiny):
    first = tiny(name="first")
    pretrain(first)
    second = replace(tiny(name="second"), init=str(folder_of(first) / "model"))
    pretrain(second)
    ends = [json.loads((folder_of(c) / "summary.json").read_text()) for c in (first, second)]
    assert ends[1]["loss_first"] == pytest.approx(ends[0]["val_loss"], abs=1e-4)
    files = [(folder_of(config) / "model" / "tokenizer.json").read_bytes() for config in (first, second)]
    assert files[0] == files[1]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"model": {"hidden_size": 64}}, "model.hidden_size"),
        ({"data": {"max_documents": 250}}, "corpus"),
        ({"tokenizer": TokenizerConfig(vocab_size=119), "model": {"vocab_size": 128}}, "tokenizer"),
        ({"seed": 1}, "seed"),
        ({"optimizer": MUON}, "optimizer.name"),
        ({"data": {"packing": "concat"}}, "data.packing"),
        ({"data": {"validation_fraction": 0.5}}, "data.validation_fraction"),
    ],
)
def test_resuming_something_else_is_refused_by_name(tiny, change, name):
    config = tiny()
    pretrain(config)
    before = (folder_of(config) / "config.yaml").read_bytes()
    with pytest.raises(InputError, match=rf"cannot resume .*: (.*; )?{name} is .*, not "):
        pretrain(tiny(resume=True, trainer={"max_steps": 12}, **change))
    assert (folder_of(config) / "config.yaml").read_bytes() == before


def test_another_learning_rate_on_resume_is_used_and_told(tiny, caplog):
    config = tiny(schedule=ScheduleConfig(name="constant", warmup_steps=0))
    pretrain(config)
    longer = replace(config.trainer, max_steps=10)
    faster = replace(config.optimizer, lr=1e-6)
    before = weights(config)
    with caplog.at_level("INFO"):
        pretrain(replace(config, resume=True, trainer=longer, optimizer=faster))
    assert "optimizer.lr: 0.005 -> 1e-06" in caplog.text
    assert column(config, "optim/lr")[8:] == [1e-6, 1e-6]
    assert_equal_weights(weights(config), before, atol=1e-5, rtol=0)


def test_a_model_larger_than_the_memory_is_refused(tiny):
    with pytest.raises(InputError, match=r"hidden_size=10000000 .* GB"):
        pretrain(tiny(model={"hidden_size": 10_000_000, "intermediate_size": 10}))


def test_a_folder_without_a_checkpoint_starts_at_step_0_and_says_so(tiny, caplog):
    config = tiny(resume=True)
    folder_of(config).mkdir(parents=True)
    with caplog.at_level("INFO"):
        pretrain(config)
    assert "no checkpoint" in caplog.text
    assert len(metrics(config)) == 9


def test_a_run_stopped_after_its_last_step_is_finished_on_resume(tiny):
    config = tiny()
    pretrain(config)
    folder, before = folder_of(config), weights(config)
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").unlink()
    shutil.rmtree(folder / "model")
    assert pretrain(replace(config, resume=True)) == 0
    assert (folder / "summary.json").read_text() == summary
    assert_equal_weights(weights(config), before)


def test_loader_processes_change_nothing(tiny):
    runs = [tiny(name=str(workers), data={"num_workers": workers}) for workers in (0, 2)]
    for config in runs:
        pretrain(config)
    assert column(runs[0], "train/loss") == column(runs[1], "train/loss")
    for config in runs:
        shares = column(config, "throughput/wait_share")
        assert len(shares) == 8
        assert all(share >= 0 for share in shares)
    assert_equal_weights(weights(runs[0]), weights(runs[1]))


@pytest.mark.slow
def test_a_compiled_model_trains_the_same(tiny):
    runs = [tiny(name=str(flag), trainer={"compile": flag}) for flag in (False, True)]
    for config in runs:
        pretrain(config)
    assert column(runs[1], "train/loss") == pytest.approx(column(runs[0], "train/loss"), abs=1e-4)
    assert_equal_weights(weights(runs[1]), weights(runs[0]), atol=1e-4, rtol=1e-3)


def test_bfloat16_trains_close_to_float32(tiny):
    runs = [tiny(name=name, trainer={"precision": name}) for name in ("32-true", "bf16-mixed")]
    for config in runs:
        pretrain(config)
    assert column(runs[1], "train/loss") == pytest.approx(column(runs[0], "train/loss"), abs=0.05)
    assert all(tensor.dtype == torch.float32 for tensor in weights(runs[1]).values())


def test_text_without_documents_leaves_no_run_folder(tiny, tmp_path):
    path = tmp_path / "empty.txt"
    path.write_text("\n")
    config = tiny()
    config.data.sources[0].path = str(path)
    with pytest.raises(InputError, match="no documents"):
        pretrain(config)
    assert not folder_of(config).exists()


def test_gradient_of_sums_becomes_the_clipped_gradient_of_the_mean():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(4, 3), nn.Linear(4, 3)
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(5, 4)
    ours(x).pow(2).sum().backward()
    theirs(x).pow(2).sum().div(7).backward()
    norm = rescale_and_clip([p.grad for p in ours.parameters()], torch.tensor(1 / 7), clip_norm=0.5)
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5)
    assert norm == pytest.approx(expected.item())
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_every_parameter_gets_a_gradient(tiny):
    config = tiny().model.resolve(120, 32)
    model = MaskedLM(config)
    ids = torch.randint(5, 120, (2, 32))
    model(ids, torch.ones_like(ids), torch.tensor([[3, 4], [5, 6]])).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_words_added_to_the_vocabulary_of_a_model(tiny, tmp_path, documents):
    first = tiny(name="first")
    pretrain(first)
    words = tmp_path / "words.txt"
    words.write_text("lighthouse\nold keeper\nquokka\nthe\n")
    second = replace(tiny(name="second"), init=str(folder_of(first) / "model"))
    second = replace(second, tokenizer=TokenizerConfig(add_tokens=str(words)))
    pretrain(second)
    folder = folder_of(second) / "model"
    before, after = (load_tokenizer(folder_of(config) / "model") for config in (first, second))
    new = {"lighthouse", "old keeper", "quokka"} - set(before.get_vocab())
    assert after.get_vocab_size() == before.get_vocab_size() + len(new)
    text = "The lighthouse quokka waits for the lighthouses ."
    ids = after.encode(text).ids
    assert ids.count(after.token_to_id("quokka")) == 1
    assert AutoTokenizer.from_pretrained(folder)(text)["input_ids"] == ids
    theirs, ours = AutoModelForMaskedLM.from_pretrained(folder).eval(), load_pretrained(folder)
    with torch.no_grad():
        logits = ours(torch.tensor([ids]))
        torch.testing.assert_close(theirs(torch.tensor([ids])).logits, logits, atol=1e-4, rtol=1e-4)
    assert logits.argmax(-1).max() < after.get_vocab_size()
    pretrain(replace(second, resume=True, trainer=replace(second.trainer, max_steps=10)))
