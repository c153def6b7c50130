"""Which runs a configuration stands for: tasks, seeds, recipes and grids, and how a suite goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from mlm.config.errors import InputError
from mlm.config.files import config_folder
from mlm.config.finetune import GLUE_TASKS, FinetuneConfig, LabelledConfig, TaskRecipe
from mlm.config.help import format_help
from mlm.config.parse import Keys, dump_config, read_file
from mlm.startup.command import parse_config
from mlm.startup.suite import at_point, continues_by_itself, data_digests, is_suite, points, units

RECIPES = [path.stem for path in (config_folder() / "finetune").glob("*.yaml") if path.stem != "default"]


@pytest.fixture(autouse=True)
def _a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("glue").mkdir()


def parse(*words):
    os.environ.pop("MLM_RUN_NAME", None)
    return parse_config(FinetuneConfig, ["--model", "model", "--name", "x", *words], prog="finetune.py")


def refusal(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        parse(*words)
    assert stop.value.code == 2
    return capsys.readouterr().err


def test_one_task_and_seed_is_a_run_and_more_are_a_suite():
    single = parse("--task", "mrpc", "--seed", "5")
    assert not is_suite(single)
    (unit,) = units(single)
    assert (unit.task, unit.seed, unit.runs_dir, unit.name) == (["mrpc"], 5, "runs", "x")
    assert not is_suite(parse("--task", "mrpc", "--seeds", "7"))
    assert units(parse("--task", "mrpc", "--seeds", "7"))[0].seed == 7
    suite = parse("--task", "SST-2,mrpc", "--seeds", "1,2")
    assert is_suite(suite)
    places = [(*unit.task, unit.seed, unit.runs_dir, unit.name) for unit in units(suite)]
    assert places[0] == ("sst2", 1, "runs/x/sst2", "seed-1")
    assert [place[:2] for place in places] == [("sst2", 1), ("sst2", 2), ("mrpc", 1), ("mrpc", 2)]
    Path("a.csv").write_text("text,label\n")
    assert [unit.runs_dir for unit in units(parse("--data.train", "a.csv", "--seeds", "1,2"))] == [
        "runs/x/own-data"
    ] * 2


def test_all_are_all_ten_and_the_diagnostic_set_is_no_run():
    config = parse("--task", "all")
    assert tuple(config.task) == GLUE_TASKS
    assert [unit.task[0] for unit in units(config)] == [task for task in GLUE_TASKS if task != "ax"]
    assert units(parse("--task", "all", "--start_from_mnli"))[0].task == ["mnli"]


@pytest.mark.parametrize("name", RECIPES)
def test_every_shipped_recipe_can_be_run(name):
    config = parse("--config", name, "--task", "all")
    for unit in units(config):
        for point in points(unit):
            at_point(unit, point)
        assert points(unit)
    keys = Keys.of(FinetuneConfig)
    assert set(read_file(config_folder() / "finetune" / f"{name}.yaml", keys)) <= set(keys.types)


@pytest.mark.parametrize(
    ("name", "task", "settings", "seeds"),
    [
        ("glue", "mrpc", 1, 1),
        ("bert", "cola", 18, 1),
        ("roberta", "cola", 6, 5),
        ("mosaicbert", "rte", 1, 5),
        ("mosaicbert", "sst2", 1, 3),
        ("modernbert", "qnli", 48, 4),
        ("cramming", "cola", 1, 5),
    ],
)
def test_grids_are_as_large_as_published(name, task, settings, seeds):
    found = [unit for unit in units(parse("--config", name, "--task", "all")) if unit.task == [task]]
    assert len(found) == seeds
    assert len(points(found[0])) == settings


def test_values_of_a_recipe_reach_the_run():
    config = parse("--config", "mosaicbert", "--task", "all")
    runs = {unit.task[0]: at_point(unit, points(unit)[0]) for unit in units(config)}
    settings = {
        task: (run.optimizer.lr, run.optimizer.weight_decay, run.trainer.max_epochs, run.trainer.batch_size)
        for task, run in runs.items()
    }
    assert settings["mnli"] == (5e-5, 0.1, 3, 48)
    assert settings["rte"] == (1e-5, 1.0, 3, 16)
    assert settings["wnli"] == (None, 0.01, 3, 32)  # no entry: the defaults
    assert runs["mrpc"].schedule.warmup_fraction == 0.06
    assert parse("--config", "glue", "--task", "mrpc").optimizer.lr is None


def test_flags_win_over_recipes():
    words = ["--config", "mosaicbert", "--task", "rte,mnli", "--trainer.max_epochs", "1", "--seed", "3"]
    runs = [at_point(unit, points(unit)[0]) for unit in units(parse(*words))]
    assert [(run.seed, run.trainer.max_epochs) for run in runs] == [(3, 1), (3, 1)]
    grid = points(units(parse("--config", "bert", "--task", "cola", "--optimizer.lr", "1e-4"))[0])
    assert len(grid) == 6
    assert "optimizer.lr" not in grid[0]
    flat = points(
        units(parse("--config", "modernbert", "--task", "cola", "--optimizer.weight_decay", "0"))[0]
    )
    assert len(flat) == 12


def test_configuration_of_a_run_of_a_suite_is_read_back(tmp_path):
    for unit in units(parse("--config", "modernbert", "--task", "cola,mnli", "--seeds", "1,2")):
        (tmp_path / "unit.yaml").write_text(dump_config(unit))
        assert parse_config(FinetuneConfig, ["--config", str(tmp_path / "unit.yaml")], prog="x") == unit


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "mprc"], "task=mprc is not a task of GLUE; did you mean mrpc?"),
        (["--task", "ax"], "task=ax has nothing to train on: MNLI's model answers it; add mnli"),
        (["--task", "cola,cola"], "task=cola,cola names a task twice"),
        (["--task", "all,cola"], "task=all,cola names all tasks and one of them; keep all"),
        (
            ["--task", "cola", "--data.train", "a.csv"],
            "task=cola and data.train=a.csv are two tasks; give one",
        ),
        (["--glue_dir", "glue"], "glue_dir=glue is about GLUE; name its tasks with --task"),
        (["--task", "cola", "--glue_dir", "no"], "glue_dir=no is not a folder; looked in"),
        (["--task", "rte", "--start_from_mnli"], "start_from_mnli=true with task=rte needs mnli too; add it"),
        (["--task", "rte", "--seeds", "1,1"], "seeds=[1, 1] names one twice"),
        (
            ["--model_config", "bert-tiny"],
            "model_config=bert-tiny is about random weights; give --model scratch",
        ),
        (["--recipes", "{task: cola, lr: [1e-4], lrr: 3}"], "--recipes: unknown key lrr; did you mean lr?"),
        (["--recipes", "{task: glu}"], "recipes: task=glu is none of cola"),
        (["--recipes", "{task: all, step_decay: [1e-5]}"], "needs lr in the same entry"),
        (
            ["--recipes", "{task: all, seeds: [1, 1]}"],
            "recipes: task=all: seeds=[1, 1] names one twice",
        ),
        (["--recipes", "{task: all, seeds: [-1]}"], "recipes: task=all: seeds=[-1] must be at least 0"),
        (
            ["--recipes", "{task: rte, lr: [1]}, {task: cola}, {task: rte}"],
            "recipes: task=rte has two entries; make them one",
        ),
        (
            ["--recipes", "{task: all, lr: [0, 1e-3], step_decay: [1e-6]}"],
            "recipes: lr=[0.0, 0.001] must be above 0: step_decay is divided by it",
        ),
        (["--recipes", "{task: all, lr: [.nan]}"], "--recipes: lr: expected a number, got '.nan'"),
        (
            ["--task", "cola,rte", "--recipes", "{task: rte, lr: [1e-3, 0]}"],
            "recipes: task=rte: optimizer.lr=0.0 must be above 0",
        ),
        (
            ["--task", "cola", "--recipes", "{task: rte, batch_size: [8, 0]}"],
            "recipes: task=rte: trainer.batch_size=0 must be at least 1",
        ),
        (
            ["--task", "cola", "--submit"],
            "submit=true is for the server, which wants all tasks; add sst2, mrpc, stsb, qqp, mnli, qnli, "
            "rte, wnli, ax to --task",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(capsys, words, message):
    found = refusal(capsys, *words)
    assert message in found
    assert found.count("\n") == 1


def test_scratch_takes_shape_and_tokenizer_from_the_newest_run_or_as_told(capsys):
    wanting = (
        "=null: runs holds no finished pretraining run; run mlm pretrain first, or name a model folder with"
    )
    scratch = ["--model", "scratch"]
    assert f"model_config{wanting} --model_config" in refusal(capsys, *scratch)
    assert f"tokenizer{wanting} --tokenizer" in refusal(capsys, *scratch, "--model_config", "bert-tiny")
    folder = Path("runs/pre/model")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    Path("runs/pre/summary.json").write_text("{}")
    config = parse("--model", "scratch")
    assert (config.model_config, config.tokenizer) == (str(folder), str(folder))
    config = parse("--model", "scratch", "--model_config", "bert-tiny")
    assert (config.model_config, config.tokenizer) == ("bert-tiny", str(folder))
    config = parse("--model", "scratch", "--model_config", "model")
    assert config.tokenizer == "model"
    assert "no configuration file bert-huge" in refusal(
        capsys, "--model", "scratch", "--model_config", "bert-huge"
    )
    assert "tokenizer=none.json is neither file nor folder" in refusal(
        capsys, "--model", "scratch", "--tokenizer", "none.json"
    )


def test_suite_goes_on_with_the_same_options_only(capsys):
    words = ["--task", "cola,rte", "--seeds", "1"]
    config = parse(*words)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text(dump_config(config))
    assert parse(*words) == config
    assert parse("--task", "cola,rte,wnli", "--seeds", "1,2", "--logging.wandb", "disabled").seeds == [1, 2]
    assert refusal(capsys, *words, "--optimizer.lr", "1e-5") == (
        "finetune.py: error: optimizer.lr=1e-05, but runs/x was started with null; continue with that, "
        "or take another --name\n"
    )
    assert "recipes={'task': 'rte'" in refusal(capsys, *words, "--recipes", "{task: rte, lr: [1e-5]}")
    assert "selection=dev, but" in refusal(capsys, *words, "--selection", "dev")
    exists = "the run folder runs/x exists; take another --name, or use --resume\n"
    assert exists in refusal(capsys, "--task", "cola")


def started(*words):
    """Leave what `parse` of these words would be started as."""
    shutil.rmtree("runs", ignore_errors=True)
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text(dump_config(parse_new(*words)))


def parse_new(*words):
    Path("runs").rename("aside")
    config = parse(*words)
    Path("aside").rename("runs")
    return config


def test_suite_does_not_shrink(capsys):
    started("--task", "cola,rte", "--seeds", "1,2")
    assert refusal(capsys, "--task", "cola,wnli", "--seeds", "1,2") == (
        "finetune.py: error: task=cola,wnli leaves out rte, with which runs/x was started, and its table "
        "would lose it; add rte, or take another --name\n"
    )
    assert "seeds=2,3 leaves out 1, with which runs/x" in refusal(
        capsys, "--task", "cola,rte", "--seeds", "2,3"
    )
    assert "seeds=5 leaves out 1,2, with which" in refusal(capsys, "--task", "cola,rte", "--seed", "5")
    started("--task", "cola,rte", "--seed", "4")
    assert parse("--task", "rte,cola,mrpc", "--seeds", "3,4").seeds == [3, 4]


def test_grid_of_one_run_keeps_its_seed_and_becomes_no_suite(capsys):
    words = ["--config", "bert", "--task", "cola"]
    started(*words)
    parse(*words)
    assert "seeds=3 leaves out 0, with which runs/x was started" in refusal(capsys, *words, "--seed", "3")
    assert "runs/x is one run and no suite of several; take another --name" in refusal(
        capsys, *words, "--seeds", "0,1"
    )


def test_suite_goes_on_with_the_same_data_only(capsys):
    for name in ("a.csv", "b.csv", "glue/RTE/train.tsv", "glue/CoLA/train.tsv", "glue/CoLA/README.md"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(f"text,label\n{name},1\n")
    own = ["--data.train", "a.csv", "--data.test", "b.csv", "--seeds", "1,2"]
    keep(own)
    parse(*own, "--seeds", "1,2,3")
    os.utime("a.csv", (0, 0))  # its date is nothing
    parse(*own)
    Path("b.csv").write_text("text,label\nx.csv,1\n")
    assert refusal(capsys, *own, "--seeds", "1,2,3") == (
        "finetune.py: error: b.csv has changed since runs/x was started, which would mix runs on different "
        "data; restore it, or take another --name\n"
    )
    Path("runs/x/data.json").write_text("{")
    assert "runs/x/data.json is damaged; take another --name" in refusal(capsys, *own)
    glue = ["--glue_dir", "glue", "--seeds", "1,2"]
    keep([*glue, "--task", "cola"])
    Path("glue/RTE/train.tsv").write_text("")
    Path("glue/CoLA/README.md").write_text("")
    parse(*glue, "--task", "cola,rte")
    Path("glue/CoLA/train.tsv").unlink()
    assert "glue/CoLA/train.tsv is gone since runs/x was started" in refusal(capsys, *glue, "--task", "cola")


def keep(words):
    """Leave a suite that was started and stopped."""
    started(*words)
    Path("runs/x/data.json").write_text(json.dumps(data_digests(parse(*words))))


@pytest.mark.parametrize("content", ["[]", "name: [", "nonsense", "nme: x", ""])
def test_damaged_configuration_of_a_suite_is_one_line(capsys, content):
    Path("runs/x").mkdir(parents=True)
    Path("runs/x/config.yaml").write_text(content)
    found = refusal(capsys, "--task", "cola,rte")
    assert "runs/x/config.yaml" in found
    assert "take another --name" in found
    assert found.count("\n") == 1


def test_folder_without_a_configuration_yet_is_a_new_suite(capsys):
    words = ["--task", "cola,rte"]
    Path("runs/x").mkdir(parents=True)
    parse(*words)
    for name in (".lock", "config.new.yaml", ".config.new.yaml.123"):
        Path("runs/x", name).touch()
    parse(*words)
    assert "the run folder runs/x exists" in refusal(capsys, "--task", "cola")
    Path("runs/x/mine.txt").touch()
    assert "the run folder runs/x exists" in refusal(capsys, *words)


def test_mistake_in_a_recipe_is_found_by_file_and_line(capsys):
    Path("my.yaml").write_text("seed: 1\nrecipes:\n  - {task: rte, lr: [0]}\n")
    assert "my.yaml:2: recipes: task=rte: optimizer.lr=0.0 must" in refusal(capsys, "--config", "my.yaml")
    parse("--config", "my.yaml", "--optimizer.lr", "1e-4")  # a flag wins over the recipe
    Path("my.yaml").write_text("seed: 1\nrecipes:\n  - {task: rte, seeds: [2, 2]}\n")
    assert "my.yaml:2: recipes: task=rte: seeds=[2, 2] names" in refusal(capsys, "--config", "my.yaml")


def test_grid_of_a_single_run_goes_on_too():
    config = parse("--config", "bert", "--task", "cola")
    assert not is_suite(config)
    assert continues_by_itself(config)
    assert not continues_by_itself(parse("--task", "cola"))


def test_help_fits_two_screens(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = format_help(FinetuneConfig, "finetune.py")
    assert len(text.splitlines()) <= 140
    assert all(name in text for name in ("--task", "--recipes", "mosaicbert", "--data.max_train_examples"))


def test_names_of_tasks_in_other_spellings():
    assert FinetuneConfig(task=["CoLA", "STS-B", "SST-2"]).task == ["cola", "stsb", "sst2"]


def test_recipe_of_all_serves_own_data_too():
    recipe = TaskRecipe("all", lr=[1e-4, 2e-4])
    config = FinetuneConfig(name="x", data=LabelledConfig(train="a.csv"), recipes=[recipe])
    assert points(config) == [{"optimizer.lr": 1e-4}, {"optimizer.lr": 2e-4}]
    with pytest.raises(InputError, match="conflicts with weight_decay"):
        TaskRecipe("all", lr=[1e-4], step_decay=[1e-5], weight_decay=[0.1])
