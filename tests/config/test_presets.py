"""The shipped recipes: all of them are read, and what they would cost is told."""

import pytest

from mlm.config.commands import PlanConfig, PretrainConfig
from mlm.config.files import shipped_names
from mlm.plan import print_plan
from mlm.startup.command import parse_config

PARAMETERS = {
    "bert-small": 28_795_194,
    "bert-base": 109_514_298,
    "modern-base": 149_655_232,
}
"""As published, with the published vocabulary of 30,522 or 50,368; rows are padded to a multiple of 64."""


@pytest.mark.parametrize("name", shipped_names("pretrain"))
def test_every_recipe_is_read_and_planned(name, capsys, monkeypatch):
    monkeypatch.delenv("MLM_RUN_NAME", raising=False)
    words = ["--config", name]
    if name == "adapt":  # goes on with a model that is named with it
        words += ["--tokenizer.vocab_size", "30522"]
    config = parse_config(PlanConfig, words, prog="plan")
    print_plan(config)
    assert "FLOPs" in capsys.readouterr().out
    monkeypatch.delenv("MLM_RUN_NAME", raising=False)
    if name == "adapt":
        words += ["--init", "OWNER/NAME"]
    assert parse_config(PretrainConfig, [*words, "--name", "x"], prog="train.py").name == "x"


@pytest.mark.parametrize("name", PARAMETERS)
def test_sizes_are_the_published_ones(name, capsys, monkeypatch):
    monkeypatch.delenv("MLM_RUN_NAME", raising=False)
    print_plan(parse_config(PlanConfig, ["--config", name], prog="plan"))
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters"))
    found = int(line.split()[1].replace(",", ""))
    assert found == pytest.approx(PARAMETERS[name], rel=1e-3)


@pytest.mark.parametrize("name", ["bert-small", "bert-base", "modern-small", "modern-base"])
@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_gpu_recipes_fit_any_usual_number_of_devices(name, devices):
    config = parse_config(
        PretrainConfig, ["--config", name, "--name", "x", "--trainer.devices", str(devices)], prog="train.py"
    )
    assert config.trainer.accumulation(devices) >= 1
