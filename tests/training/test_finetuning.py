"""Fine-tuning runs against a plain torch loop over the stock class, and what they leave behind."""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from mlm.__main__ import main
from mlm.config.commands import PredictConfig
from mlm.config.errors import InputError
from mlm.config.finetune import (
    FinetuneConfig,
    FinetuneOptimizerConfig,
    FinetuneScheduleConfig,
    FinetuneTrainerConfig,
    HeadConfig,
    LabelledConfig,
)
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.training import CardConfig, LoggingConfig
from mlm.data.examples import batches_by_length, encode_examples
from mlm.data.labelled import read_task
from mlm.data.python_docs import python_docs_digest
from mlm.evaluation.commands import predict
from mlm.evaluation.predictor import Predictor, predict_logits
from mlm.hub.pretrained import load_classifier, pretraining_tokens, read_classifier
from mlm.hub.saving import save_pretrained
from mlm.model.heads import MaskedLM
from mlm.model.loss import summed_label_loss
from mlm.optim import learning_rate_factor
from mlm.training import finetuning, run
from mlm.training.datamodule import FinetuneDataModule
from mlm.training.finetuning import FinetuneModule, build_model, finetune
from mlm.training.reporting import read_metrics

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
BALANCE = (45, 83)
"""Training examples of no and yes."""
CLASSIC = {
    "norm_position": "post",
    "position_embedding": "learned",
    "activation": "gelu",
    "type_vocab_size": 2,
    **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), True),
}


@pytest.fixture
def encoder(tmp_path, tokenizer):
    """Saves a random encoder."""

    def encoder(**switches):
        torch.manual_seed(0)
        config = ModelConfig(**SIZES, **switches).resolve(tokenizer.get_vocab_size(), 64)
        return str(save_pretrained(tmp_path / "encoder", MaskedLM(config), tokenizer, 64, "# tiny"))

    return encoder


def write(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return str(path)


@pytest.fixture
def data(tmp_path):
    """Texts whose class is one of their words."""
    draw = np.random.default_rng(0)
    words = ["harbour", "boat", "keeper", "lamp", "neighbour", "gull"]
    rows = []
    for number in range(160):
        text = " ".join(draw.choice(words, size=int(draw.integers(1, 12))))
        has = "|".join(word for word in ("boat", "lamp", "gull") if word in text)
        rows.append([f"the {text} waits", "yes" if "lamp" in text else "no", number % 7, has])
    columns = ["text", "label", "stars", "words"]
    train = write(tmp_path / "train.csv", [columns, *rows[:128]])
    validation = write(tmp_path / "validation.csv", [columns, *rows[128:]])
    return {"train": train, "validation": validation}


@pytest.fixture
def tiny(tmp_path, encoder, data):
    """Builds a configuration of a second; keywords replace parts of it."""

    def build(name="run", model=None, files=None, trainer=None, optimizer=None, head=None, **options):
        fast = {"max_epochs": 2, "batch_size": 16, "precision": "32-true", "accelerator": "cpu"}
        return FinetuneConfig(
            name=name,
            runs_dir=str(tmp_path / "runs"),
            model=model or encoder(),
            data=LabelledConfig(**data | (files or {})),
            head=HeadConfig(**head or {}),
            optimizer=FinetuneOptimizerConfig(**{"lr": 3e-3} | (optimizer or {})),
            trainer=FinetuneTrainerConfig(**fast | (trainer or {})),
            logging=options.pop("logging", LoggingConfig(wandb="disabled")),
            **options,
        )

    return build


def folder_of(config):
    return Path(config.runs_dir) / config.name


def summary_of(config):
    return json.loads((folder_of(config) / "summary.json").read_text())


def metrics_of(config):
    """The rows of the table at the ends of epochs."""
    with (folder_of(config) / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row["epoch"]]


def weights_of(config):
    return load_file(folder_of(config) / "model" / "model.safetensors")


def same_weights(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_learns_and_leaves_what_it_promises(tiny, capsys):
    config = tiny(trainer={"max_epochs": 6}, logging=LoggingConfig(wandb="offline"))
    assert finetune(config) == 0
    folder, summary = folder_of(config), summary_of(config)
    expected = "task seed metrics num_train_examples num_validation_examples elapsed_s model_dir"
    assert {*expected.split(), "train_examples_per_second"} <= set(summary)
    assert (summary["task"], summary["seed"]) == ("train", 0)
    assert (summary["num_train_examples"], summary["num_validation_examples"]) == (128, 32)
    assert list(summary["metrics"]) == ["accuracy", "f1", "matthews_correlation", "f1_macro", "roc_auc"]
    assert summary["metrics"]["accuracy"] > 0.9
    assert (summary["epoch"], summary["selection"]) == (6, "last epoch")
    assert sum(summary["predicted_counts"].values()) == 32
    assert list(folder.glob("wandb/offline-run-*/*.wandb"))
    assert (folder / "config.yaml").exists()
    rows = metrics_of(config)
    assert [(int(row["epoch"]), int(row["step"])) for row in rows] == [(n, 8 * n) for n in range(1, 7)]
    assert float(rows[-1]["val/accuracy"]) == pytest.approx(summary["metrics"]["accuracy"], abs=1e-6)
    assert float(rows[-1]["train/loss"]) < float(rows[0]["train/loss"])
    out = capsys.readouterr().out
    commands = ("mlm predict --model", "mlm evaluate --model")
    for part in (*commands, summary["model_dir"], "accuracy", "f1 of yes", "examples/s"):
        assert part in out


@pytest.mark.parametrize("switches", [{}, CLASSIC], ids=["modern", "classic"])
def test_saved_model_is_a_stock_class_with_the_scores_of_the_run(tiny, encoder, switches):
    config = tiny(model=encoder(**switches))
    finetune(config)
    folder = folder_of(config) / "model"
    stock, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForSequenceClassification, AutoTokenizer)
    )
    assert stock.config.id2label == {0: "no", 1: "yes"}
    assert stock.config.problem_type == "single_label_classification"
    task = read_task(config.data)
    inputs = tokenizer(task.validation.texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = stock(**inputs).logits.argmax(-1).numpy()
    accuracy = (predicted == task.validation.labels).mean()
    assert summary_of(config)["metrics"]["accuracy"] == pytest.approx(accuracy)
    assert "text-classification" in (folder / "README.md").read_text()
    assert not any(config.runs_dir.encode() in file.read_bytes() for file in folder.iterdir())


def stated_loss(logits, labels, head):
    """Torch's losses with the weights that the configurations below come to."""
    if labels.ndim == 2:
        weights = torch.tensor([1.0, 0.5, 1.0])
        return torch.nn.BCEWithLogitsLoss(pos_weight=weights)(logits, labels)
    weights = torch.tensor([1.0, 3.0])
    if head["class_weights"] == "balanced":
        weights = torch.tensor([128 / (2 * count) for count in BALANCE])
    smoothing = head.get("label_smoothing", 0.0)
    return torch.nn.CrossEntropyLoss(weight=weights, label_smoothing=smoothing)(logits, labels)


@pytest.mark.parametrize("switches", [{}, CLASSIC], ids=["modern", "classic"])
@pytest.mark.parametrize(
    ("label_type", "head"),
    [
        ("classification", {}),
        ("classification", {"class_weights": ["yes=3"], "label_smoothing": 0.2}),
        ("classification", {"class_weights": "balanced"}),
        ("regression", {}),
        ("multilabel", {}),
        ("multilabel", {"class_weights": ["gull=0.5"]}),
    ],
)
def test_weights_are_those_of_a_plain_loop_over_the_stock_class(
    tiny, encoder, tokenizer, tmp_path, switches, label_type, head
):
    """Without dropout: same batches, AdamW, warm-up and decay, clipping."""
    columns = {"classification": "label", "regression": "stars", "multilabel": "words"}
    files = {"label_type": label_type, "label_column": columns[label_type]}
    config = tiny(model=encoder(**switches), files=files, head={"dropout": 0.0, **head})
    task = read_task(config.data)
    start = build_model(config, task, tokenizer)
    save_pretrained(tmp_path / "start", start, tokenizer, 64, "")
    finetune(config)

    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "start").train()
    matrices = [one for one in stock.parameters() if one.ndim > 1]
    rest = [one for one in stock.parameters() if one.ndim == 1]
    settings = config.optimizer
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
    if label_type == "classification":
        assert tuple(np.bincount(task.train.labels)) == BALANCE
    encoded = encode_examples(tokenizer, task.train, 64)
    batches = [
        rows for epoch in range(2) for rows in batches_by_length(encoded.lengths, 16, config.seed, epoch)
    ]
    for step, rows in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * learning_rate_factor(config.schedule, step, len(batches))
        batch = encoded[rows]
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
        optimizer.zero_grad()
        output = stock(**inputs)
        loss = output.loss if not head else stated_loss(output.logits, batch["labels"], head)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(stock.parameters(), settings.clip_norm)
        optimizer.step()
    found = weights_of(config)
    for name, tensor in stock.state_dict().items():
        if name in found:
            torch.testing.assert_close(found[name], tensor, atol=2e-4, rtol=2e-3)


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tiny):
    configs = [tiny(name=name, seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    for config in configs:
        finetune(config)
    first, second, other = map(weights_of, configs)
    assert same_weights(first, second)
    assert not same_weights(first, other)
    shown = [[(row["train/loss"], row["val/loss"]) for row in metrics_of(config)] for config in configs[:2]]
    assert shown[0] == shown[1]


def test_numbers_are_fitted(tiny):
    files = {"label_column": "stars", "label_type": "regression"}
    config = tiny(files=files)
    finetune(config)
    summary = summary_of(config)
    assert list(summary["metrics"]) == ["pearson", "spearman", "mae", "rmse"]
    written = json.loads((folder_of(config) / "model" / "config.json").read_text())
    assert (written["problem_type"], written["id2label"]) == ("regression", {"0": "stars"})
    assert weights_of(config)["classifier.weight"].shape == (1, 32)


def test_several_labels_are_learnt(tiny, data, capsys):
    files = {"label_column": "words", "label_type": "multilabel", "test": data["validation"]}
    config = tiny(files=files, trainer={"max_epochs": 12, "keep": "best"}, optimizer={"lr": 1e-2})
    finetune(config)
    summary = summary_of(config)
    assert list(summary["metrics"]) == ["f1_micro", "f1_macro", "subset_accuracy", "roc_auc"]
    assert summary["metrics"]["f1_micro"] > 0.9
    assert summary["selection"] == "best epoch by f1_micro on the very examples reported: optimistic"
    assert summary["test_metrics"] == pytest.approx(summary["metrics"])
    assert summary["labels"] == ["boat", "gull", "lamp"]
    labels = read_task(config.data).validation.labels
    assert list(summary["examples_counts"].values()) == labels.sum(0).tolist()
    assert "predicted  right" in capsys.readouterr().out
    stock = AutoModelForSequenceClassification.from_pretrained(folder_of(config) / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder_of(config) / "model")
    texts = read_task(config.data).validation.texts
    with torch.no_grad():
        said = (stock(**tokenizer(texts, padding=True, return_tensors="pt")).logits > 0).numpy()
    assert summary["metrics"]["subset_accuracy"] == pytest.approx((said == labels).all(1).mean())
    with Path(summary["test_predictions"]).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["label"] for row in rows] == [
        "|".join(name for name, has in zip(summary["labels"], row, strict=True) if has) for row in said
    ]


def test_labels_that_differ_in_capitals_only_are_different_classes(tiny, tmp_path):
    labels = ["Yes", "yes", "no", "NO"]
    rows = [[f"the lamp {number} waits", labels[number % 4]] for number in range(48)]
    train = write(tmp_path / "capitals.csv", [["text", "label"], *rows])
    config = tiny(files={"train": train, "validation": train})
    assert finetune(config) == 0
    stock = AutoModelForSequenceClassification.from_pretrained(folder_of(config) / "model")
    assert stock.config.id2label == dict(enumerate(sorted(labels)))
    again = load_classifier(folder_of(config) / "model", ClassifierConfig(("yes", "no", "Yes", "NO")))
    order = [stock.config.label2id[label] for label in again.classifier_config.labels]
    assert torch.equal(again.classifier.weight, stock.state_dict()["classifier.weight"][order])
    assert np.shape(summary_of(config)["confusion"]) == (4, 4)


def test_many_classes_have_counts_and_no_confusion_matrix(tiny, tmp_path):
    rows = [[f"the lamp {number} waits", f"class {number % 24}"] for number in range(48)]
    train = write(tmp_path / "many.csv", [["text", "label"], *rows])
    config = tiny(files={"train": train, "validation": train}, trainer={"max_epochs": 1})
    assert finetune(config) == 0
    summary = summary_of(config)
    assert summary["examples_counts"] == {f"class {number}": 2 for number in range(24)}
    assert "confusion" not in summary
    assert not (folder_of(config) / "plots" / "confusion.png").exists()


def test_frozen_encoder_stays_as_it_was(tiny, encoder):
    config = tiny(trainer={"freeze": "encoder"}, optimizer={"name": "muon", "layer_decay": 0.5})
    finetune(config)
    before, after = load_file(Path(config.model) / "model.safetensors"), weights_of(config)
    kept = [name for name in after if name.startswith(("model.embeddings", "model.layers", "model.final"))]
    assert kept
    assert all(torch.equal(after[name], before[name]) for name in kept)
    assert not torch.equal(after["head.dense.weight"], before["head.dense.weight"])


def test_run_stops_early_and_keeps_the_best_epoch(tiny, capsys):
    config = tiny(trainer={"max_epochs": 9, "keep": "best", "early_stopping": 2}, optimizer={"lr": 1e-9})
    finetune(config)
    summary = summary_of(config)
    assert (summary["epoch"], summary["num_epochs"], len(metrics_of(config))) == (1, 3, 3)
    chosen = "best epoch by accuracy on the very examples reported: optimistic"
    assert summary["selection"] == f"{chosen}, stopped early after 3 of 9 epochs"
    assert "3 epochs in" in capsys.readouterr().out
    longer = tiny(name="longer", trainer={"max_epochs": 3, "keep": "best", "early_stopping": 3})
    finetune(longer)
    assert summary_of(longer)["num_epochs"] == 3


def test_best_epoch_is_the_earliest_of_the_highest_scores(tiny, tokenizer):
    config = tiny(trainer={"max_epochs": 5, "keep": "best"}, optimizer={"lr": 2e-2})
    finetune(config)
    scores = [float(row["val/accuracy"]) for row in metrics_of(config)]
    summary = summary_of(config)
    assert summary["epoch"] == 1 + int(np.argmax(scores))
    assert summary["metrics"]["accuracy"] == pytest.approx(max(scores), abs=1e-6)
    assert summary["selection"] == "best epoch by accuracy on the very examples reported: optimistic"
    model, task = load_classifier(folder_of(config) / "model"), read_task(config.data)
    logits = predict_logits(model, encode_examples(tokenizer, task.validation, 64), 32)
    assert (logits.argmax(1) == task.validation.labels).mean() == pytest.approx(
        summary["metrics"]["accuracy"]
    )


def test_test_file_is_scored_if_it_has_labels_and_predicted_anyway(tiny, data, tmp_path):
    scored = tiny(name="scored", files={"test": data["validation"]})
    finetune(scored)
    summary = summary_of(scored)
    assert summary["test_metrics"] == pytest.approx(summary["metrics"])
    unlabelled = write(tmp_path / "test.csv", [["text"], ["the lamp"], [""]])
    plain = tiny(name="plain", files={"test": unlabelled})
    finetune(plain)
    summary = summary_of(plain)
    assert "test_metrics" not in summary
    with Path(summary["test_predictions"]).open() as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == ["1", "2"]
    assert {row["label"] for row in rows} <= {"yes", "no"}


def test_without_a_validation_file_a_part_is_held_out(tiny):
    config = tiny(files={"validation": None, "validation_fraction": 0.25})
    finetune(config)
    summary = summary_of(config)
    assert summary["num_train_examples"] + summary["num_validation_examples"] == 128
    assert 10 < summary["num_validation_examples"] < 55
    assert summary["validation_examples"].startswith("25% of ")


def test_pairs_and_a_bound_on_the_length(tiny, encoder, tmp_path, caplog, capsys):
    rows = [["a", "b", "same"], *(["the lamp", "the lamp " * (n % 20), n % 2] for n in range(40))]
    path = write(tmp_path / "pairs.csv", rows)
    columns = {"text_column": "a", "text_pair_column": "b", "label_column": "same"}
    files = {"train": path, "validation": path, "max_length": 16, **columns}
    config = tiny(model=encoder(**CLASSIC), files=files)
    finetune(config)
    summary = summary_of(config)
    assert summary["max_length"] == 16
    assert 0.3 < summary["truncated_fraction"] < 0.9
    assert f"16 tokens; {summary['truncated_fraction']:.1%} of the texts are cut" in capsys.readouterr().out
    assert "of the examples are cut to 16 tokens" in caplog.text
    settings = json.loads((folder_of(config) / "model" / "tokenizer_config.json").read_text())
    assert settings["model_max_length"] == 16
    head = read_classifier(folder_of(config) / "model")
    assert head.text_pairs is True
    with pytest.raises(InputError, match="was trained on pairs"):  # the file is what tells it
        predict(PredictConfig(summary["model_dir"], str(path), str(tmp_path / "said.csv"), text_column="a"))
    assert not (tmp_path / "said.csv").exists()


def test_fine_tuned_model_can_be_fine_tuned_on(tiny):
    first = tiny(name="first", trainer={"max_epochs": 6})
    finetune(first)
    second = tiny(name="second", model=str(folder_of(first) / "model"), optimizer={"lr": 1e-9})
    finetune(second)
    assert summary_of(second)["metrics"] == pytest.approx(summary_of(first)["metrics"])


def test_task_without_files_is_made_of_the_documentation(tiny):
    texts = [
        {"package": package, "text": f"{package} {number} {'the lamp ' * 6}."}
        for package in ("harbour", "boat", "keeper", "lamp", "neighbour", "gull")
        for number in range(12)
    ]
    path = Path(os.environ["MLM_CACHE"]) / f"python-docs-{python_docs_digest()[:16]}.jsonl"
    path.write_text("\n".join(map(json.dumps, texts)))
    config = tiny(files={"train": None, "validation": None})
    finetune(config)
    summary = summary_of(config)
    assert summary["task"] == "python-docs"
    assert list(summary["metrics"]) == ["accuracy", "matthews_correlation", "f1_macro", "roc_auc"]
    assert summary["labels"] == ["boat", "gull", "harbour", "keeper", "lamp", "neighbour"]


def test_classes_without_a_training_example_are_told(tiny, caplog):
    finetune(tiny(files={"max_train_examples": 1}, trainer={"max_epochs": 1}))
    assert "classes without a training example, which cannot be learnt: " in caplog.text
    caplog.clear()
    finetune(tiny(name="whole", trainer={"max_epochs": 1}))
    assert "without a training example" not in caplog.text


def test_one_class_predicted_is_a_warning(tiny, caplog):
    config = tiny(optimizer={"lr": 1e-9}, trainer={"max_epochs": 1})
    finetune(config)
    counts = summary_of(config)["predicted_counts"]
    assert sorted(counts.values()) == [0, 32]
    assert f"only one class is predicted: {max(counts, key=counts.get)}" in caplog.text
    assert summary_of(config)["metrics"]["matthews_correlation"] == 0.0
    assert summary_of(config)["failed"] == "only one class is predicted"


def test_validation_examples_of_one_class_score_0_and_are_told(tiny, tmp_path, caplog):
    path = write(tmp_path / "all-no.csv", [["text", "label"], *[["the boat waits", "no"]] * 5])
    config = tiny(files={"validation": path}, trainer={"max_epochs": 1})
    finetune(config)
    assert summary_of(config)["metrics"]["matthews_correlation"] == 0.0
    assert "all validation examples are of one class, no: correlations are 0" in caplog.text
    assert summary_of(config)["failed"] is None


def test_loss_that_is_not_finite_ends_the_run(tiny):
    config = tiny(optimizer={"lr": 1e30, "clip_norm": 0.0})
    with pytest.raises(
        InputError, match=r"the loss is not finite in epoch 1: optimizer.lr=1e\+30 is too high"
    ):
        finetune(config)
    assert (folder_of(config) / "metrics.csv").exists()
    assert not (folder_of(config) / "model").exists()


def test_mistake_in_the_labels_is_told_before_training_and_leaves_no_folder(tiny, tmp_path):
    path = write(tmp_path / "bad.csv", [["text", "label"], ["the lamp", "maybe"]])
    config = tiny(files={"validation": path})
    with pytest.raises(InputError, match=r"bad.csv, row 1 \(line 2\): label maybe is not among"):
        finetune(config)
    assert not folder_of(config).exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schedule": FinetuneScheduleConfig(warmup_steps=17)},
            "the warm-up of 17 steps is longer than the run of 16: .*; shorten schedule.warmup_steps",
        ),
        (
            {"files": {"max_length": 65}},
            "data.max_length=65 is longer than the model's max_position_embeddings=64",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused(tiny, change, message):
    with pytest.raises(InputError, match=message):
        finetune(tiny(**change))


@pytest.fixture
def stop_at(monkeypatch):
    """Makes runs get SIGTERM after a step, as a scheduler would send it."""

    def stop_at(step):
        class Signaller(run.GracefulStop):
            def on_step_end(self, trainer, module):
                if module.progress.step == step:
                    os.kill(os.getpid(), signal.SIGTERM)
                super().on_step_end(trainer, module)

        monkeypatch.setattr(run, "GracefulStop", Signaller)

    return stop_at


@pytest.mark.parametrize("step", [3, 8, 11, 16])
@pytest.mark.parametrize("keep", ["last", "best"])
def test_a_stopped_run_resumes_to_the_bit(tiny, encoder, stop_at, monkeypatch, step, keep):
    """With dropout and accumulation; steps 8 and 16 are the ends of the two epochs."""
    settings = {"keep": keep, "micro_batch_size": 8}
    model = encoder(hidden_dropout=0.1)
    whole, config = (tiny(name=name, model=model, trainer=settings) for name in ("whole", "stopped"))
    assert finetune(whole) == 0
    with monkeypatch.context():
        stop_at(step)
        assert finetune(config) == 128 + signal.SIGTERM
    monkeypatch.undo()
    assert not (folder_of(config) / "summary.json").exists()
    assert finetune(replace(config, resume=True)) == 0
    assert same_weights(weights_of(whole), weights_of(config))
    for name in ("metrics", "epoch", "val_loss", "num_epochs"):
        assert summary_of(config)[name] == summary_of(whole)[name]
    tables = [read_metrics(folder_of(one) / "metrics.csv") for one in (whole, config)]
    for before, after in zip(*tables, strict=True):
        for name in before.keys() - {"elapsed_s", "throughput/tokens_per_second", "throughput/wait_share"}:
            assert before[name] == after[name], name


def test_a_finished_run_has_nothing_to_resume(tiny, caplog):
    config = tiny()
    finetune(config)
    before = summary_of(config)
    with caplog.at_level("INFO"):
        assert finetune(replace(config, resume=True)) == 0
    assert "nothing to do" in caplog.text
    assert summary_of(config) == before


def test_a_run_resumed_with_more_epochs_goes_on(tiny):
    config = tiny(trainer={"max_epochs": 1})
    finetune(config)
    assert finetune(replace(config, resume=True, trainer=replace(config.trainer, max_epochs=3))) == 0
    assert [int(row["epoch"]) for row in metrics_of(config)] == [1, 2, 3]
    assert summary_of(config)["num_epochs"] == 3


def test_resuming_on_other_examples_is_refused(tiny, stop_at, monkeypatch, data):
    config = tiny()
    stop_at(3)
    finetune(config)
    monkeypatch.undo()
    other = {**data, "train": data["validation"]}
    with pytest.raises(InputError, match=r"cannot resume from this checkpoint: .*examples is .*, not "):
        finetune(replace(config, resume=True, data=LabelledConfig(**other)))


@pytest.mark.parametrize("label_type", ["classification", "regression", "multilabel"])
def test_accumulated_passes_give_the_run_of_whole_batches(tiny, encoder, label_type):
    columns = {"classification": "label", "regression": "stars", "multilabel": "words"}
    files = {"label_type": label_type, "label_column": columns[label_type]}
    head = {"dropout": 0.0} | ({"class_weights": "balanced"} if label_type == "classification" else {})
    runs = [
        tiny(
            name=f"micro-{size}", model=encoder(), files=files, head=head, trainer={"micro_batch_size": size}
        )
        for size in (16, 4)
    ]
    for config in runs:
        finetune(config)
    whole, parts = map(weights_of, runs)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], atol=1e-5, rtol=1e-4)


def test_a_non_finite_step_is_skipped_and_training_continues(tiny, caplog, monkeypatch):
    config = tiny()
    step = iter(range(1, 100))
    original = finetuning.summed_label_loss

    def spoil(*arguments):
        loss, divisor = original(*arguments)
        return loss * (math.nan if next(step) == 3 else 1.0), divisor

    monkeypatch.setattr(finetuning, "summed_label_loss", spoil)
    assert finetune(config) == 0
    assert "step 3 skipped" in caplog.text
    assert all(math.isfinite(float(row["train/loss"])) for row in metrics_of(config))
    assert all(tensor.isfinite().all() for tensor in weights_of(config).values())


@pytest.mark.parametrize("bound", [{"max_steps": 11}, {"max_time": "1h", "max_steps": 11}])
def test_another_bound_than_epochs_ends_the_run_with_a_validation(tiny, bound):
    config = tiny(trainer={"max_epochs": 3, **bound})
    assert finetune(config) == 0
    assert [int(row["step"]) for row in metrics_of(config)] == [8, 11]
    assert summary_of(config)["epoch"] == 2


def test_steps_take_the_batches_of_epoch_after_epoch(tiny):
    data = FinetuneDataModule(tiny())
    data.setup("fit")
    assert data.steps_per_epoch == 8
    lengths = data.parts.train.lengths
    expected = [rows for epoch in range(3) for rows in batches_by_length(lengths, 16, 0, epoch)]
    for step in [*range(24), 3]:  # in order, and back as a resumed run
        assert data.step_rows(step, 16 * step).tolist() == expected[step].tolist()


def test_one_length_in_training_folder_and_commands(tiny, encoder, tmp_path, capsys):
    """Encoders are trained on rows shorter than their table of positions; examples may be as long as it."""
    start = Path(encoder(**CLASSIC))
    settings = json.loads((start / "tokenizer_config.json").read_text()) | {"model_max_length": 24}
    (start / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [["text", "label"], *[[f"{'the lamp ' * 15}{word}", word] for word in ("boat", "gull") * 20]]
    path = write(tmp_path / "late.csv", rows)
    config = tiny(model=str(start), files={"train": path, "validation": path})
    finetune(config)
    folder = folder_of(config) / "model"
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 64
    predictor = Predictor(folder)
    assert predictor.max_length == 64
    assert predictor.encode(read_task(config.data).train).lengths.min() > 24
    accuracy = summary_of(config)["metrics"]["accuracy"]
    capsys.readouterr()
    assert main(["evaluate", "--model", str(folder), "--input", path]) == 0
    assert re.search(rf"accuracy +{accuracy:.4f}", capsys.readouterr().out)
    short = tiny(name="short", model=str(start), files={"train": path, "validation": path, "max_length": 16})
    finetune(short)
    assert Predictor(folder_of(short) / "model").max_length == 16


def test_card_has_licence_scores_and_how_to_cut_long_texts(tiny):
    card = CardConfig(license="apache-2.0", language="en,de", datasets=["owner/reviews"])
    config = tiny(card=card, files={"test": None})
    finetune(config)
    _, front, body = (folder_of(config) / "model" / "README.md").read_text().split("---\n", 2)
    facts = yaml.safe_load(front)
    assert (facts["license"], facts["language"]) == ("apache-2.0", ["en", "de"])
    assert facts["datasets"] == ["owner/reviews"]
    (index,) = facts["model-index"]
    assert index["name"] == "run"
    found = {one["type"]: one["value"] for one in index["results"][0]["metrics"]}
    assert found == pytest.approx(summary_of(config)["metrics"], abs=1e-6)
    assert "Upper and lower case are folded" in body
    assert "truncation=True" in body


def test_validation_is_scored_in_float32_whatever_the_precision(tiny, capsys):
    config = tiny(trainer={"precision": "bf16-mixed", "max_epochs": 1})
    config.data.test = config.data.validation
    finetune(config)
    summary = summary_of(config)
    assert summary["metrics"] == pytest.approx(summary["test_metrics"], abs=1e-6)
    data = FinetuneDataModule(config)
    data.setup("fit")
    predictor = Predictor(folder_of(config) / "model")
    part = data.parts.validation
    loss = summed_label_loss(torch.from_numpy(predictor.logits(part)), part.label_tensor())
    assert torch.div(*loss).item() == pytest.approx(summary["val_loss"], abs=1e-6)


@pytest.mark.parametrize(
    ("tokens", "trainer", "rate"),
    [(None, {}, 3e-4), (10, {}, 3e-4), (None, {"freeze": "encoder"}, 1e-3)],
)
def test_learning_rate_is_chosen_and_recorded(tiny, tmp_path, tokenizer, caplog, tokens, trainer, rate):
    torch.manual_seed(0)
    shape = ModelConfig(**SIZES).resolve(tokenizer.get_vocab_size(), 64)
    start = save_pretrained(tmp_path / "start", MaskedLM(shape), tokenizer, 64, "", tokens=tokens)
    assert pretraining_tokens(start) == tokens
    caplog.set_level("INFO", "mlm")
    config = tiny(model=str(start), optimizer={"lr": None}, trainer={"max_epochs": 1, **trainer})
    finetune(config)
    folder = Path(config.runs_dir, config.name)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["lr"] == rate
    assert f"learning rate {rate:g}: " in caplog.text
    assert "resuming" not in caplog.text
    assert yaml.safe_load((folder / "config.yaml").read_text())["optimizer"]["lr"] == rate
    assert not (folder / "config-1.yaml").exists()
    assert pretraining_tokens(folder / "model") == tokens  # kept for the next fine-tuning
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    again = FinetuneModule.load_from_checkpoint(checkpoint, weights_only=True)
    assert again.config.optimizer.lr == rate
