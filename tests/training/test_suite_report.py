"""Settings in the report, and the pixels of its picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
from matplotlib import image

from mlm.config.files import config_folder
from mlm.config.finetune import FinetuneConfig, FinetuneOptimizerConfig, TaskRecipe
from mlm.config.parse import read_group
from mlm.evaluation.glue import AVERAGES, summarize
from mlm.startup.suite import units
from mlm.training.plots import plot_scores
from mlm.training.suite_report import recipe_of, settings_of, settings_of_task


def run(seed=1, failed=None, value=0.5, names=("accuracy",), **facts):
    counts = {"num_train_examples": 9, "num_validation_examples": 9, "selection": "last epoch"}
    return {"seed": seed, "failed": failed, "metrics": dict.fromkeys(names, value)} | counts | facts


@pytest.mark.parametrize("name", ["bert", "glue", "default"])
def test_recipe_is_named_only_where_nothing_of_it_was_changed(name):
    shipped = read_group(FinetuneConfig, config_folder() / "finetune" / f"{name}.yaml")
    config = replace(shipped, model="some", task=["rte"], seeds=[1, 2])
    assert recipe_of(config) == name
    assert recipe_of(replace(config, optimizer=replace(config.optimizer, lr=1.5e-5))) is None


def test_settings_are_those_of_the_task_and_the_chosen_point():
    recipes = [TaskRecipe("rte", lr=[1e-5, 2e-5], max_epochs=[7])]
    optimizer = FinetuneOptimizerConfig(lr=1e-4)
    config = FinetuneConfig(task=["rte", "wnli"], seeds=[1, 2], recipes=recipes, optimizer=optimizer)
    rte, _, wnli, _ = units(config)
    tried = [{"optimizer.lr": 1e-5, "trainer.max_epochs": 7}, {"optimizer.lr": 2e-5, "trainer.max_epochs": 7}]
    runs = [run(1, grid=tried, grid_point=2), run(2, grid=tried, grid_point=1)]
    found = settings_of_task(rte, runs)
    assert found["optimizer.lr"] == {"one of": [1e-5, 2e-5], "chosen by seed": [2e-5, 1e-5]}
    assert (found["trainer.max_epochs"], found["seeds"]) == (7, [1, 2])
    found = settings_of_task(wnli, [run(3)])
    assert (found["optimizer.lr"], found["trainer.max_epochs"], found["optimizer.name"]) == (1e-4, 3, "adamw")
    whole = settings_of(config, {"wnli": wnli}, {"wnli": [run(), run(2, num_encoder_parameters=7)]})
    assert whole["common"]["parameters of the encoder"] == 7
    assert whole["common"]["recipe"].startswith("no file of configs/finetune as it is")
    assert set(whole["common"]["versions"]) == {"mlm", "torch", "commit"}


def test_picture_of_all_tasks_has_the_width_of_a_page_and_marks_failed_runs(tmp_path):
    columns = " + ".join(columns for _, columns, _ in AVERAGES.values()).replace(",", " +").split(" + ")
    scores = dict.fromkeys(tuple(score.split()) for score in columns)
    names = {task: [name for other, name in scores if other == task] for task, _ in scores}
    pictures = {}
    for failed in (None, "only one class is predicted"):
        runs = {task: [run(names=names[task]), run(2, failed, names=names[task])] for task in names}
        report = summarize(runs)
        plot_scores(report["tasks"], report["averages"], tmp_path / "plots" / "x.png", "the model")
        pictures[failed] = image.imread(tmp_path / "plots" / "x.png")
    plain, hatched = pictures.values()
    assert plain.shape[1] == 1200
    dark = [float((picture[..., :3].sum(-1) < 0.1).mean()) for picture in (plain, hatched)]
    assert dark[1] > 1.2 * dark[0]


def test_picture_without_any_score_can_be_drawn(tmp_path):
    report = summarize({"rte": [run(failed="lost", names=())]})
    plot_scores(report["tasks"], report["averages"], tmp_path / "plots" / "x.png", "the model")
    assert (tmp_path / "plots" / "x.png").exists()
