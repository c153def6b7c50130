"""Cross-validation: a run for each fold, one table, and the held-out predictions of all."""

from __future__ import annotations

import csv
import json
import os
import signal
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from mlm.config.errors import InputError
from mlm.config.finetune import FinetuneConfig, FinetuneOptimizerConfig, FinetuneTrainerConfig, TaskRecipe
from mlm.config.labelled import LabelledConfig
from mlm.config.model import ModelConfig
from mlm.config.training import LoggingConfig
from mlm.evaluation.predictor import Predictor
from mlm.hub.saving import save_pretrained
from mlm.model.heads import MaskedLM
from mlm.startup.checks import check_run
from mlm.startup.suite import is_suite, units
from mlm.training import run
from mlm.training.suite import finetune_all

NUM_ROWS, NUM_TEXTS = 45, 40  # a few texts come twice


@pytest.fixture
def rows(documents):
    return [(documents[row % NUM_TEXTS], "ab"[row % NUM_TEXTS % 2]) for row in range(NUM_ROWS)]


@pytest.fixture
def build(tmp_path, tokenizer, rows):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    shape = ModelConfig(**sizes, initializer_range=0.3).resolve(tokenizer.get_vocab_size(), 64)
    encoder = save_pretrained(tmp_path / "encoder", MaskedLM(shape), tokenizer, 64, "# tiny")
    with (tmp_path / "own.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])

    def build(name="cv", recipes=(), seeds=(), lr=3e-3, **data):
        fast = {"max_epochs": 1, "batch_size": 8, "precision": "32-true", "accelerator": "cpu"}
        return FinetuneConfig(
            name=name,
            runs_dir=str(tmp_path / "runs"),
            model=str(encoder),
            seeds=list(seeds),
            recipes=list(recipes),
            data=LabelledConfig(**{"train": str(tmp_path / "own.csv"), "folds": 3} | data),
            optimizer=FinetuneOptimizerConfig(lr=lr),
            trainer=FinetuneTrainerConfig(**fast),
            logging=LoggingConfig(wandb="disabled"),
        )

    return build


def folder_of(config):
    return Path(config.runs_dir, config.name)


def read(path):
    return json.loads(path.read_text())


def test_table_and_predictions_are_those_of_the_models_on_what_they_had_not_seen(build, rows, capsys):
    config = build()
    assert finetune_all(config) == 0
    folder = folder_of(config)
    report = read(folder / "folds.json")
    facts = report["tasks"]["own.csv"]
    with (folder / "held_out.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["row"] for row in found] == [str(number) for number in range(1, NUM_ROWS + 1)]
    accuracies, seen = [], set()
    for number in (1, 2, 3):
        part = folder / "own-data" / f"fold-{number}"
        held_out = np.load(part / "held_out.npz")["rows"].tolist()
        texts = {rows[row][0] for row in held_out}
        assert not texts & seen  # equal texts are held out together
        seen |= texts
        predictions = Predictor(part / "model", device="cpu").predict([rows[row][0] for row in held_out])
        for row, one in zip(held_out, predictions, strict=True):
            assert float(found[row]["probability_a"]) == pytest.approx(one.probabilities["a"], abs=1e-5)
            assert found[row]["label"] == one.label
        labels = [rows[row][1] for row in held_out]
        accuracies.append(
            np.mean([one.label == label for one, label in zip(predictions, labels, strict=True)])
        )
        assert read(part / "summary.json")["metrics"]["accuracy"] == pytest.approx(accuracies[-1])
        assert facts["metrics"]["accuracy"]["by_fold"][str(number)] == pytest.approx(accuracies[-1])
    assert facts["folds"] == [1, 2, 3]
    assert facts["metrics"]["accuracy"]["mean"] == pytest.approx(statistics.fmean(accuracies))
    assert facts["metrics"]["accuracy"]["std"] == pytest.approx(statistics.stdev(accuracies))
    right = np.mean([row["label"] == label for row, (_, label) in zip(found, rows, strict=True)])
    assert report["pooled"]["metrics"]["accuracy"] == pytest.approx(right)
    assert report["pooled"]["num_examples"] == NUM_ROWS
    out = capsys.readouterr().out
    assert (folder / "folds.md").read_text() in out
    assert "| each fold |" in out
    assert f"All 45 held-out predictions together: accuracy {100 * right:.2f}" in out
    assert (
        f"--config {folder}/config.yaml --data.folds null --data.validation_fraction 0.01 --name cv-final"
        in out
    )
    assert (folder / "plots" / "folds.png").exists()


class Killed(run.Clock):
    """Sends SIGTERM in the second step of the second fold."""

    def on_step_end(self, trainer, module):
        super().on_step_end(trainer, module)
        if module.config.data.fold == 2 and module.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_stopped_folds_continue_and_end_as_without_a_stop(build, monkeypatch, caplog):
    whole, stopped = build("whole"), build("stopped")
    finetune_all(whole)
    with monkeypatch.context() as patch:
        patch.setattr(run, "Clock", Killed)
        assert finetune_all(stopped) == 128 + signal.SIGTERM
    first = folder_of(stopped) / "own-data" / "fold-1" / "summary.json"
    time = first.stat().st_mtime_ns
    check_run(stopped)
    assert finetune_all(stopped) == 0
    assert first.stat().st_mtime_ns == time
    for name in ("tasks", "pooled"):
        one, other = (read(folder_of(config) / "folds.json")[name] for config in (whole, stopped))
        assert {**one, "file": ""} == {**other, "file": ""}
    with pytest.raises(InputError, match=r"data.folds=4, but .*stopped was started with 3"):
        check_run(build("stopped", folds=4))


def test_data_that_change_between_folds_end_the_suite(build, monkeypatch, rows):
    config = build("changed", folds=2)
    (path,) = map(Path, config.data.train)
    before = path.read_bytes()

    class Changed(run.Clock):
        def on_train_start(self, *args):
            super().on_train_start(*args)
            path.write_bytes(before + b"one more row,a\n")

    monkeypatch.setattr(run, "Clock", Changed)
    with pytest.raises(InputError, match=r"own.csv has changed since .*changed was started"):
        finetune_all(config)
    assert not (folder_of(config) / "folds.md").exists()
    path.write_bytes(before)
    monkeypatch.undo()
    assert finetune_all(config) == 0
    assert read(folder_of(config) / "folds.json")["pooled"]["num_examples"] == NUM_ROWS


def test_failed_folds_are_named_and_grids_keep_their_held_out_predictions(build):
    config = build(folds=2, recipes=[TaskRecipe("all", lr=[1e-9, 3e-3], seeds=[7, 8])])
    assert len(units(config)) == 2  # one seed
    finetune_all(config)
    assert read(folder_of(config) / "folds.json")["pooled"]["num_examples"] == NUM_ROWS
    config = build("failed", folds=2, lr=1e30)
    with pytest.raises(InputError, match="every run failed: the loss is not finite"):
        finetune_all(config)
    report = read(folder_of(config) / "folds.json")
    assert "pooled" not in report
    assert set(report["tasks"]["own.csv"]["failed"]) == {"1", "2"}
    assert "fold 1, 2: the loss is not finite" in (folder_of(config) / "folds.md").read_text()


def test_one_fold_is_an_ordinary_run_and_may_have_several_seeds(build):
    config = build(fold=2)
    assert not is_suite(config)
    finetune_all(config)
    summary = read(folder_of(config) / "summary.json")
    assert summary["validation_examples"].startswith("fold 2 of 3 of ")
    config = build("seeds", fold=2, seeds=[1, 2])
    assert [unit.name for unit in units(config)] == ["seed-1", "seed-2"]
    finetune_all(config)
    assert read(folder_of(config) / "seeds.json")["tasks"]["own.csv"]["seeds"] == [1, 2]
    with pytest.raises(InputError, match=r"seeds=1,2 conflicts with data.folds=3, which has one seed"):
        build(seeds=[1, 2])


def test_too_many_folds_leave_nothing(build):
    config = build(folds=41)
    with pytest.raises(InputError, match=r"data.folds=41 is more than the 40 different texts of "):
        finetune_all(config)
    assert not Path(config.runs_dir).exists()
