"""Runs that validate on texts of their own."""

import json
from dataclasses import replace

import pytest
from run_files import assert_equal_weights, column, folder_of, weights

from mlm.__main__ import main
from mlm.config.data import SourceConfig
from mlm.config.errors import InputError
from mlm.training.pretraining import pretrain


@pytest.fixture
def held(tmp_path, documents):
    path = tmp_path / "held.txt"
    path.write_text("\n".join(line[: len(line) // 2] for line in documents[:40]))
    return path


def test_the_loss_is_that_of_evaluate_and_a_resume_continues_bit_for_bit(tiny, held, tmp_path):
    config = tiny(data={"validation": [SourceConfig(str(held))]})
    pretrain(config)
    summary = json.loads((folder_of(config) / "summary.json").read_text())
    assert [source["path"] for source in summary["validation_sources"]] == [str(held)]
    figures = tmp_path / "figures.json"
    words = ["--data.sources", str(held), "--data.document", "line", "--data.seq_len", "32"]
    model = str(folder_of(config) / "model")
    main(["evaluate", "--model", model, *words, "--batch_size", "8", "--output", str(figures)])
    assert json.loads(figures.read_text())["loss"] == pytest.approx(summary["val_loss"], abs=1e-6)

    stopped = tiny(name="stopped", data={"validation": [SourceConfig(str(held))]}, trainer={"max_steps": 4})
    stopped.schedule = config.schedule = replace(config.schedule, name="constant")
    pretrain(stopped)
    pretrain(replace(stopped, resume=True, trainer=config.trainer))
    whole = replace(config, name="whole")
    pretrain(whole)
    assert column(stopped, "val/loss") == column(whole, "val/loss")
    assert_equal_weights(weights(stopped), weights(whole))

    held.write_text(held.read_text() + "\nthe lamp")
    longer = replace(config.trainer, max_steps=10)
    for validation in (config.data.validation, []):  # changed, and taken away
        data = replace(config.data, validation=validation)
        with pytest.raises(InputError, match=r"cannot resume .*: data.validation is .*, not "):
            pretrain(replace(whole, resume=True, trainer=longer, data=data))
