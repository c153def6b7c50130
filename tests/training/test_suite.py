"""Suites on a GLUE folder of a few sentences: files, continuing, grids, failures, devices."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mlm.config.errors import InputError
from mlm.config.finetune import (
    GLUE_TASKS,
    FinetuneConfig,
    FinetuneOptimizerConfig,
    FinetuneTrainerConfig,
    LabelledConfig,
    TaskRecipe,
)
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.parse import dump_config, read_group
from mlm.config.training import LoggingConfig
from mlm.data.examples import encode_examples
from mlm.data.glue import TASKS, read_glue
from mlm.evaluation.glue import answer
from mlm.evaluation.predictor import predict_logits
from mlm.hub.pretrained import load_classifier
from mlm.hub.saving import save_pretrained
from mlm.model.heads import MaskedLM
from mlm.startup.checks import check_run
from mlm.startup.suite import units
from mlm.training import run
from mlm.training.suite import finetune_all, run_on_devices, start_or_resume
from mlm.training.tracking import pretraining_run

KEYS = {
    "task",
    "seed",
    "metrics",
    "num_train_examples",
    "num_validation_examples",
    "elapsed_s",
    "train_examples_per_second",
    "model_dir",
}


@pytest.fixture
def tiny(tmp_path, tokenizer, glue_dir):
    """Builds a configuration whose runs take a fraction of a second; keywords replace parts of it."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    torch.manual_seed(0)
    shape = ModelConfig(**sizes).resolve(tokenizer.get_vocab_size(), 64)
    encoder = save_pretrained(tmp_path / "encoder", MaskedLM(shape), tokenizer, 64, "# tiny")

    def build(*task, name="suite", trainer=None, optimizer=None, data=None, **options):
        """Without a task the data are one's own."""
        fast = {"max_epochs": 1, "batch_size": 8, "precision": "32-true", "accelerator": "cpu"}
        return FinetuneConfig(
            name=name,
            runs_dir=str(tmp_path / "runs"),
            model=options.pop("model", str(encoder)),
            task=list(task),
            glue_dir=str(glue_dir) if task else None,
            data=LabelledConfig(**{"max_length": 32} | (data or {})),
            optimizer=FinetuneOptimizerConfig(**{"lr": 3e-3} | (optimizer or {})),
            trainer=FinetuneTrainerConfig(**fast | (trainer or {})),
            logging=options.pop("logging", LoggingConfig(wandb="disabled")),
            **options,
        )

    return build


def folder_of(config):
    return Path(config.runs_dir, config.name)


def read(path):
    return json.loads(path.read_text())


def without_times(summary):
    return {
        key: value for key, value in summary.items() if not key.endswith(("_s", "_second", "_dir", "init"))
    }


def test_all_tasks_leave_runs_table_picture_and_submission(tiny, glue_dir, capsys, caplog):
    config = tiny("all", submit=True)
    assert finetune_all(config) == 0
    folder = folder_of(config)
    for task in GLUE_TASKS:
        summary = read(folder / task / "seed-0" / "summary.json")
        assert set(summary) >= KEYS
        assert (summary["task"], summary["seed"]) == (task, 0)
        expected = {*TASKS[task].metrics, *(["accuracy_mismatched"] if task == "mnli" else [])}
        assert set(summary["metrics"]) == expected
        assert summary["num_validation_examples"] == (7 if task == "ax" else 12)
        assert (folder / task / "seed-0" / "plots" / "confusion.png").exists() == (task not in ("ax", "stsb"))
    report = read(folder / "glue.json")
    assert list(report["tasks"]) == [task for task in GLUE_TASKS if task != "ax"]
    assert all(facts["value"] is not None and not facts["missing"] for facts in report["averages"].values())
    out = capsys.readouterr().out
    assert (folder / "glue.md").read_text() in out
    assert "| mnli | accuracy_mismatched |" in out
    assert (folder / "plots" / "glue.png").stat().st_size > 10_000
    with zipfile.ZipFile(folder / "submission.zip") as archive:
        assert len(archive.namelist()) == 11
        ours = archive.read("AX.tsv").decode()
    assert ours == (folder / "ax" / "seed-0" / "AX.tsv").read_text()
    model = str(folder / "mnli" / "seed-0" / "model")
    expected = answer(model, "ax", "diagnostic", str(glue_dir), 32, 4)
    assert [line.split("\t")[1] for line in ours.splitlines()[1:]] == expected
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    told = "QQP/test.tsv has 5 of 390,965 rows of test; the server refuses that"
    assert any(text.endswith(told) for text in warnings)
    assert "QQP answers 5 of 390,965 rows of test" in warnings[-1]
    assert warnings[-1].startswith("the server will refuse it: ")


def test_single_run_of_mnli_scores_both_sets_and_is_no_suite(tiny):
    config = tiny("mnli", seed=3)
    finetune_all(config)
    summary = read(folder_of(config) / "summary.json")
    assert list(summary["metrics"]) == ["accuracy", "accuracy_mismatched"]
    assert (summary["seed"], summary["selection"]) == (3, "last epoch")
    assert (folder_of(config) / "plots" / "epochs.png").exists()
    assert not (folder_of(config) / "glue.json").exists()


class Killed(run.Clock):
    """Sends the signal of a cluster that wants its machine back, in the first run of RTE."""

    in_last_step = False

    def on_step_end(self, trainer, module):
        super().on_step_end(trainer, module)
        last = module.progress.planned_steps if self.in_last_step else 2
        if module.config.task == ["rte"] and module.config.seed == 1 and module.progress.step == last:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("in_last_step", [False, True])
def test_stopped_suite_continues_and_ends_as_one_without_a_stop(tiny, monkeypatch, in_last_step):
    whole, stopped = (tiny("sst2", "rte", name=name, seeds=[1, 2]) for name in ("whole", "stopped"))
    finetune_all(whole)
    with monkeypatch.context() as patch:
        patch.setattr(run, "Clock", Killed)
        patch.setattr(Killed, "in_last_step", in_last_step)
        assert finetune_all(stopped) == 128 + signal.SIGTERM
    assert not (folder_of(stopped) / "rte" / "seed-1" / "summary.json").exists()
    finished = [folder_of(stopped) / "sst2" / f"seed-{seed}" / "summary.json" for seed in (1, 2)]
    times = [path.stat().st_mtime_ns for path in finished]
    assert not (folder_of(stopped) / "glue.json").exists()
    assert finetune_all(stopped) == 0
    assert [path.stat().st_mtime_ns for path in finished] == times
    one, other = (read(folder_of(config) / "glue.json")["tasks"] for config in (whole, stopped))
    assert one == other
    for task in ("sst2", "rte"):
        a, b = (folder_of(config) / task / "seed-2" for config in (whole, stopped))
        assert without_times(read(a / "summary.json")) == without_times(read(b / "summary.json"))
        weights = [load_file(folder / "model" / "model.safetensors") for folder in (a, b)]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_suite_grows_by_seeds_and_finished_runs_stay(tiny, caplog):
    first, config = (tiny("rte", "wnli", seeds=seeds) for seeds in ([1], [1, 2]))
    folder_of(config).mkdir(parents=True)
    for name in (".config.new.yaml.7", "config.new.yaml"):  # as a process leaves it that is killed at once
        (folder_of(config) / name).write_text("half a f")
    check_run(first)
    finetune_all(first)
    assert not [path.name for path in folder_of(config).iterdir() if "new" in path.name]
    before = (folder_of(config) / "rte" / "seed-1" / "summary.json").stat().st_mtime_ns
    check_run(config)
    with caplog.at_level("INFO"):
        finetune_all(config)
    assert "config-1.yaml: seeds: 1 -> 1,2\n" in caplog.text
    assert read(folder_of(config) / "glue.json")["tasks"]["rte"]["seeds"] == [1, 2]
    assert (folder_of(config) / "rte" / "seed-1" / "summary.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("selection", ["holdout", "dev"])
def test_grid_is_decided_by_the_selection(tiny, selection, capsys):
    recipes = [TaskRecipe("all", lr=[1e-9, 3e-3, 1e-9], max_epochs=[6])]
    data = {"validation_fraction": 0.3}
    config = tiny("rte", recipes=recipes, selection=selection, data=data)
    finetune_all(config)
    folder = folder_of(config)
    summary = read(folder / "summary.json")
    scores = [point["score"] for point in summary["grid"]]
    assert summary["grid_point"] == 1 + scores.index(max(scores))
    assert [(point["optimizer.lr"], point["trainer.max_epochs"]) for point in summary["grid"]] == [
        (1e-9, 6),
        (3e-3, 6),
        (1e-9, 6),
    ]
    assert (summary["num_train_examples"] < 24) == (selection == "holdout")
    assert summary["validation_examples"] == "12 of 277 rows of dev"
    assert summary["num_validation_examples"] == 12
    where = "a part held out of train" if selection == "holdout" else "the very examples reported: optimistic"
    assert summary["selection"] == f"best of 3 settings by accuracy on {where}"
    assert ("selection_metrics" in summary) == (selection == "holdout")
    assert [path.parent.name for path in folder.rglob("model")] == [config.name]
    assert summary["model_dir"] == str(folder / "model")
    assert "optimizer.lr 0.003, trainer.max_epochs 6: " in capsys.readouterr().out
    # Stopped after the first point, it continues with the second.
    first = folder / "point-1" / "summary.json"
    before, result = first.stat().st_mtime_ns, without_times(summary)
    for number in (2, 3):
        (folder / f"point-{number}" / "summary.json").unlink()
    (folder / "summary.json").unlink()
    finetune_all(config)
    assert first.stat().st_mtime_ns == before
    assert without_times(read(folder / "summary.json")) == result


def test_best_epoch_by_a_part_held_out_of_train(tiny):
    config = tiny("sst2", trainer={"keep": "best", "max_epochs": 2}, data={"validation_fraction": 0.3})
    finetune_all(config)
    summary = read(folder_of(config) / "summary.json")
    assert summary["selection"].startswith("best epoch by accuracy on 30% of train, chosen by a hash")
    assert summary["num_validation_examples"] == 12
    config = tiny("sst2", name="by-dev", trainer={"keep": "best"}, selection="dev")
    finetune_all(config)
    assert (
        read(folder_of(config) / "summary.json")["selection"]
        == "best epoch by accuracy on the very examples reported: optimistic"
    )


def test_small_tasks_start_from_the_model_of_mnli(tiny):
    config = tiny("rte", "sst2", "mnli", seeds=[1, 2], start_from_mnli=True)
    finetune_all(config)
    folder = folder_of(config)
    started = {
        (task, seed): read(folder / task / f"seed-{seed}" / "summary.json")["init"]
        for task in ("rte", "sst2")
        for seed in (1, 2)
    }
    assert started["rte", 2] == str(folder / "mnli" / "seed-2" / "model")
    assert started["sst2", 2] == config.model
    assert "RTE, MRPC and STS-B from the model tuned on MNLI" in (folder / "glue.md").read_text()


def test_runs_that_fail_are_shown_and_the_others_continue(tiny):
    recipes = [TaskRecipe("wnli", lr=[1e30]), TaskRecipe("sst2", lr=[1e-9])]
    config = tiny("wnli", "sst2", "stsb", recipes=recipes, optimizer={"clip_norm": 0.0})
    assert finetune_all(config) == 0
    tasks = read(folder_of(config) / "glue.json")["tasks"]
    assert "the loss is not finite in epoch 1" in tasks["wnli"]["failed"]["0"]
    assert tasks["wnli"]["metrics"] == {}
    assert tasks["sst2"]["failed"] == {"0": "only one class is predicted"}
    assert tasks["sst2"]["metrics"]["accuracy"]["n"] == 1
    assert (
        "| wnli | no score | - | - | - | 0 | seed 0: the loss is not finite"
        in (folder_of(config) / "glue.md").read_text()
    )
    before = (folder_of(config) / "wnli" / "seed-0" / "summary.json").stat().st_mtime_ns
    finetune_all(config)
    assert (folder_of(config) / "wnli" / "seed-0" / "summary.json").stat().st_mtime_ns == before


def test_grid_of_which_every_point_fails_is_one_failed_run(tiny):
    recipes = [TaskRecipe("all", lr=[1e30, 1e31])]
    config = tiny("rte", "wnli", recipes=recipes, optimizer={"clip_norm": 0.0})
    with pytest.raises(InputError, match="every run failed: the loss is not finite in epoch 1"):
        finetune_all(config)
    assert (folder_of(config) / "glue.md").exists()
    summary = read(folder_of(config) / "rte" / "seed-0" / "summary.json")
    assert (summary["metrics"], summary["model_dir"]) == ({}, None)
    assert [point["score"] for point in summary["grid"]] == [None, None]


def test_checkpoint_with_another_order_of_labels_is_matched_by_name(tiny, tmp_path, tokenizer, glue_dir):
    names = ("contradiction", "entailment", "neutral")
    torch.manual_seed(1)
    theirs = load_classifier(tmp_path / "encoder", ClassifierConfig(names))
    task = read_glue("mnli", str(glue_dir))
    encoded = encode_examples(tokenizer, task.validation, 32)
    with torch.no_grad():  # so that its answers differ
        theirs.classifier.bias -= torch.tensor(predict_logits(theirs, encoded, 8).mean(0))
    said = [names[best] for best in predict_logits(theirs, encoded, 8).argmax(1)]
    right = [task.labels[label] for label in task.validation.labels]
    expected = sum(map(str.__eq__, said, right)) / len(right)
    folder = save_pretrained(tmp_path / "theirs", theirs, tokenizer, 64, "")
    config = tiny("mnli", model=str(folder), optimizer={"lr": 1e-12})
    finetune_all(config)
    summary = read(folder_of(config) / "summary.json")
    assert summary["metrics"]["accuracy"] == pytest.approx(expected)
    assert list(summary["predicted_counts"].values()) == [said.count(name) for name in task.labels]


def test_random_weights_have_the_shape_and_tokenizer_asked_for(tiny, tmp_path):
    encoder = str(tmp_path / "encoder")
    same = tiny("wnli", name="same", model="scratch", model_config=encoder, tokenizer=encoder)
    finetune_all(same)
    written = read(folder_of(same) / "model" / "config.json")
    assert (written["hidden_size"], written["num_hidden_layers"]) == (32, 1)
    assert read(folder_of(same) / "summary.json")["init"] == "scratch"
    (tmp_path / "shape.yaml").write_text(
        "hidden_size: 16\nnum_hidden_layers: 1\nnum_attention_heads: 1\nintermediate_size: 16\n"
    )
    shape = str(tmp_path / "shape.yaml")
    other = tiny("wnli", name="other", model="scratch", model_config=shape, tokenizer=encoder, seeds=[1, 2])
    finetune_all(other)
    first, second = (
        load_file(folder_of(other) / "wnli" / f"seed-{seed}" / "model" / "model.safetensors")
        for seed in (1, 2)
    )
    table = "model.embeddings.tok_embeddings.weight"
    assert first[table].shape[1] == 16
    assert not torch.equal(first[table], second[table])


def test_fewer_training_examples_are_the_same_ones_for_every_seed(tiny):
    config = tiny("rte", seeds=[1, 2], data={"max_train_examples": 10})
    finetune_all(config)
    for seed in (1, 2):
        assert read(folder_of(config) / "rte" / f"seed-{seed}" / "summary.json")["num_train_examples"] == 10
    text = (folder_of(config) / "glue.md").read_text()
    assert "**Trained on 10 examples only (data.max_train_examples): rte.**" in text
    assert "**Not the official dev sets: rte 12 of 277 rows of dev.**" in text


def test_missing_files_are_errors_before_anything_is_trained(tiny, glue_dir):
    (glue_dir / "QQP" / "test.tsv").unlink()
    with pytest.raises(InputError, match=r"QQP has no test\.tsv"):
        finetune_all(tiny("all", submit=True))
    (glue_dir / "RTE" / "dev.tsv").unlink()
    with pytest.raises(InputError, match=r"RTE has no dev\.tsv"):
        finetune_all(tiny("sst2", "rte"))
    assert not folder_of(tiny("rte")).exists()


def test_several_seeds_of_own_data(tiny, tmp_path):
    rows = [f"the lamp {number},{number % 2}" for number in range(20)]
    (tmp_path / "own.csv").write_text("\n".join(["text,label", *rows]))
    config = tiny(seeds=[1, 2], data={"train": str(tmp_path / "own.csv")})
    finetune_all(config)
    folder = folder_of(config)
    report = read(folder / "seeds.json")
    assert report["tasks"]["own.csv"]["metrics"]["accuracy"]["n"] == 2
    assert report["averages"] == {}
    text = (folder / "seeds.md").read_text()
    assert text.startswith("# own.csv\n")
    assert not re.search("GLUE|average|dev set|every task", text)
    assert (folder / "plots" / "seeds.png").exists()
    assert not list(folder.rglob("glue.*"))


def test_seeds_share_the_tokenized_examples_and_another_suite_reads_its_files_again(tiny, tmp_path, caplog):
    path = tmp_path / "train.jsonl"
    rows = [{"text": f"the lamp {number} " * 6, "label": "yn"[number % 2]} for number in range(20)]
    path.write_text("\n".join(map(json.dumps, rows)))
    data = {"train": str(path), "max_length": 8, "validation_fraction": 0.3}
    finetune_all(tiny(name="several", data=data, seeds=[1, 2]))
    cut = [record for record in caplog.records if "of the examples are cut" in record.getMessage()]
    assert len(cut) == 2, "training and validation, once for both seeds"
    path.write_text("\n".join(map(json.dumps, rows[:16])))
    finetune_all(tiny(name="fewer", data=data, seeds=[1, 2]))
    report = read(folder_of(tiny(name="fewer")) / "own-data" / "seed-1" / "summary.json")
    assert report["num_train_examples"] + report["num_validation_examples"] == 16


def whole(record):
    """Return the content of a tracker's file, which a busy machine may write after the run has ended."""
    for _ in range(300):
        if record.stat().st_size > 100:
            break
        time.sleep(0.2)
    return record.read_bytes()


def test_runs_are_grouped_under_their_pretraining_run_and_tables_are_tracked(tiny, tmp_path, monkeypatch):
    pretrained = tmp_path / "runs" / "pre" / "model"
    pretrained.parent.mkdir(parents=True)
    (tmp_path / "encoder").rename(pretrained)
    (pretrained.parent / "summary.json").write_text('{"val_loss": 1.0}')
    offline = LoggingConfig(wandb="offline")
    config = tiny("rte", seeds=[1, 2], model=str(pretrained), logging=offline)
    finetune_all(config)
    folder = folder_of(config)
    assert pretraining_run(str(folder / "rte" / "seed-1" / "model")) == "pre"
    for place, table in ((folder, "glue"), (folder / "rte" / "seed-1", "confusion")):
        (run,) = place.glob("wandb/offline-run-*")
        media = [path.name for path in run.rglob("files/media/**/*") if path.is_file()]
        assert any(name.startswith(table) and name.endswith("table.json") for name in media)
        assert any(name.endswith(".png") for name in media)
        (record,) = run.glob("*.wandb")
        content = whole(record)
        assert b"pre" in content
        assert (b"suite/rte/seed-1" in content) == (table == "confusion")


@pytest.mark.slow
def test_runs_on_several_devices_end_as_one_after_another(tiny, caplog):
    """On a CPU the devices are made up, but the processes, their files and their exit are not."""
    alone, parallel = (tiny("sst2", "rte", name=name) for name in ("alone", "parallel"))
    finetune_all(alone)
    recipes = [TaskRecipe("wnli", lr=[1e30])]
    bad = tiny("wnli", name="bad", recipes=recipes, optimizer={"clip_norm": 0.0})
    wrong = tiny("wnli", name="wrong", model=bad.runs_dir)
    runs = [(run, f"title/{run.task[0]}") for run in (*units(parallel), *units(bad), *units(wrong))]
    assert run_on_devices(runs, ["0", "1"]) == 0
    for task in ("sst2", "rte"):
        one, other = (folder_of(config) / task / "seed-0" for config in (alone, parallel))
        assert without_times(read(one / "summary.json")) == without_times(read(other / "summary.json"))
        assert f"title/{task}: accuracy" in (other.parent / "seed-0.log").read_text()
    assert "the loss is not finite" in read(folder_of(bad) / "summary.json")["failed"]
    failed = read(folder_of(wrong) / "summary.json")["failed"]
    assert "tokenizer.json: no such file" in failed
    assert f"{folder_of(wrong)} failed: {failed}" in caplog.text


@pytest.mark.slow
def test_process_that_crashes_or_is_ended_stops_the_suite(tiny, caplog):
    good, broken = (tiny("rte", name=name) for name in ("good", "broken"))
    (folder_of(broken)).parent.mkdir(parents=True, exist_ok=True)
    folder_of(broken).write_text("a file where its folder belongs")
    assert run_on_devices([(broken, "broken"), (good, "good")], ["0"]) == 1
    assert f"{folder_of(broken)} ended with status 1; its output is {folder_of(broken)}.log" in caplog.text
    assert not folder_of(good).exists()


@pytest.mark.slow
def test_sigterm_ends_the_runs_on_all_devices(tiny):
    runs = [(run, run.task[0]) for run in units(tiny("sst2", "rte", trainer={"max_epochs": 100_000}))]
    pid = os.fork()
    if not pid:
        try:
            status = run_on_devices(runs, ["0", "1"])
        except SystemExit as error:
            status = error.code
        os._exit(status)
    started = [folder_of(run) / "metrics.csv" for run, _ in runs]
    deadline = time.monotonic() + 240
    while not all(path.exists() for path in started) and time.monotonic() < deadline:
        time.sleep(0.2)
    os.kill(pid, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    for one, _ in runs:
        assert f"stopped by signal {signal.SIGTERM:d}" in (folder_of(one).parent / "seed-0.log").read_text()
        assert not (folder_of(one) / "summary.json").exists()


def test_suite_whose_data_changed_does_not_continue(tiny, tmp_path):
    path = tmp_path / "own.csv"
    rows = [f"the lamp {number},{number % 2}" for number in range(20)]
    path.write_text("\n".join(["text,label", *rows]))
    for name, options in (
        ("seeds", {"seeds": [1, 2]}),
        ("grid", {"recipes": [TaskRecipe("all", lr=[1e-3, 2e-3])]}),
    ):
        config = tiny(name=name, data={"train": str(path)}, **options)
        finetune_all(config)
        check_run(config)
    path.write_text("\n".join(["text,label", *rows[1:]]))
    for name in ("seeds", "grid"):
        stored = read_group(FinetuneConfig, tmp_path / "runs" / name / "config.yaml")
        with pytest.raises(InputError, match=rf"own.csv has changed since .*{name} was started"):
            check_run(stored)


@pytest.mark.parametrize("content", ["{", "[]", '{"metrics": {}}', ""])
def test_run_with_a_damaged_summary_is_done_again(tiny, caplog, content):
    config = tiny("rte", "wnli")
    finetune_all(config)
    tables = read(folder_of(config) / "glue.json")["tasks"]
    summary = folder_of(config) / "rte" / "seed-0" / "summary.json"
    before = without_times(read(summary))
    summary.write_text(content)
    finetune_all(config)
    assert f"{summary} is damaged: the run is repeated" in caplog.text
    assert without_times(read(summary)) == before
    assert read(folder_of(config) / "glue.json")["tasks"] == tables


def test_grid_with_damaged_summaries_keeps_its_best_point(tiny, caplog):
    config = tiny("rte", "wnli", recipes=[TaskRecipe("rte", lr=[1e-9, 3e-3])], trainer={"max_epochs": 6})
    finetune_all(config)
    folder = folder_of(config) / "rte" / "seed-0"
    before = without_times(read(folder / "summary.json"))
    best = f"point-{before['grid_point']}"
    weights = (folder / "model" / "model.safetensors").read_bytes()
    for path in (folder / best / "summary.json", folder / "summary.json"):
        path.write_text("{")
    finetune_all(config)
    assert without_times(read(folder / "summary.json")) == before
    assert (folder / "model" / "model.safetensors").read_bytes() == weights
    assert [path.parent for path in folder.rglob("model")] == [folder]


@pytest.mark.parametrize("name", ["seed-1", "point-2"])
def test_name_of_a_single_run_does_not_make_it_a_part_of_a_suite(tiny, capsys, name):
    finetune_all(tiny("rte", name=name))
    assert f"{name}: task rte, 1 epoch in" in capsys.readouterr().out
    finetune_all(tiny("rte", name=f"{name}-grid", recipes=[TaskRecipe("rte", lr=[1e-9, 3e-3])]))
    assert f"{name}-grid: task rte, accuracy" in capsys.readouterr().out


def test_parts_of_a_suite_have_titles_and_no_summary_of_their_own(tiny, capsys, caplog):
    recipes = [TaskRecipe("rte", lr=[1e-9, 3e-3])]
    with caplog.at_level("INFO"):
        finetune_all(tiny("rte", "wnli", recipes=recipes))
    for title in ("suite/rte/seed-0/point-1", "suite/rte/seed-0/point-2", "suite/wnli/seed-0"):
        assert f"{title}: accuracy" in caplog.text
    assert ": task " not in capsys.readouterr().out


def test_unfinished_run_resumes_if_it_has_a_checkpoint(tiny):
    config = tiny("rte")
    (folder_of(config) / "checkpoints").mkdir(parents=True)
    (folder_of(config) / "metrics.csv").touch()
    assert not start_or_resume(config).resume
    assert not folder_of(config).exists()
    checkpoint = folder_of(config) / "checkpoints" / "step-00000002.ckpt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    assert start_or_resume(config).resume
    assert checkpoint.exists()


def test_runs_of_an_earlier_version_are_compared_with_the_official_sizes(tiny):
    config = tiny("rte", "mnli")
    finetune_all(config)
    for task in config.task:
        path = folder_of(config) / task / "seed-0" / "summary.json"
        summary = read(path)
        assert summary.pop("dev_sizes")
        path.write_text(json.dumps(summary))
    finetune_all(config)
    text = (folder_of(config) / "glue.md").read_text()
    odd = "mnli 12 of 9,815 rows of dev_matched; rte 12 of 277 rows of dev"
    assert f"**Not the official dev sets: {odd}.**" in text


def test_damaged_start_of_a_run_is_done_again(tiny):
    config = tiny("rte", "wnli")
    place = folder_of(config) / "rte" / "seed-0"
    place.mkdir(parents=True)
    (folder_of(config) / "config.yaml").write_text(dump_config(config))
    (place / "metrics.csv").write_text("half a l")
    assert finetune_all(config) == 0
    assert read(place / "summary.json")["epoch"] == 1
