"""Runs that validate on texts of their own."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from launching import ALONE, flags, launch
from run_files import assert_equal_weights, column, folder_of, metrics, weights

from mlm.__main__ import main
from mlm.config.data import SourceConfig, source_names
from mlm.config.errors import InputError
from mlm.data.collate import MaskedRows, build_masking
from mlm.data.sampler import RowBatch
from mlm.evaluation.metrics import VALIDATION_SEED, MaskedLMScores
from mlm.hub.pretrained import load_masked_lm
from mlm.training.pretraining import prepare, pretrain


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


@pytest.fixture
def two(tmp_path, documents):
    """Two sources of the same name, the second of other words: short documents, several a row."""
    paths = [tmp_path / name / "part.txt" for name in ("a", "b")]
    for path, lines in zip(
        paths, (documents[:80], [line[::-1][:30] for line in documents[:150]]), strict=True
    ):
        path.parent.mkdir()
        path.write_text("\n".join(lines))
    return [SourceConfig(str(path)) for path in paths]


def losses_by_hand(folder, config):
    """Return summed losses and numbers of masked tokens by source, each row and token by itself."""
    corpus, model = prepare(replace(config, resume=True))
    model.load_state_dict(load_masked_lm(folder / "model").state_dict())
    masking = build_masking(config.masking, config.masking.validation_mask_rate, corpus.tokenizer)
    rows = corpus.validation
    first = [rows.store.sources[0]["num_tokens"], rows.store.sources[1]["num_tokens"]]
    owner = np.repeat([0, 1], first)
    sums = np.zeros((2, 2))
    for number in range(len(rows)):
        batch = MaskedRows(rows, masking, VALIDATION_SEED)[RowBatch(np.zeros(1, int), np.array([number]))]
        at = []  # the source of each place of the row
        for piece in range(rows.table.offsets[number], rows.table.offsets[number + 1]):
            start, length = rows.table.pieces.starts[piece], rows.table.pieces.lengths[piece]
            begins = [-1] if not at or rows.packing != "concat" else []
            at += [*begins, *owner[start : start + length].tolist(), -1]
        inputs = [batch[name] for name in ("input_ids", "attention_mask", "masked_positions")]
        with torch.no_grad():
            logits = model.eval()(*inputs)[0].log_softmax(-1)
        for slot, label in enumerate(batch["labels"][0].tolist()):
            if label != -100:
                source = at[int(batch["masked_positions"][0, slot])]
                sums[:, source] += [-float(logits[slot, label]), 1]
    return sums


@pytest.mark.parametrize(("packing", "own"), [("isolate", False), ("concat", True), ("none", False)])
def test_the_loss_of_each_source_is_that_of_its_tokens(tiny, two, text, packing, own):
    data = {"validation": two} if own else {"sources": two, "validation_fraction": 0.3}
    config = tiny(data={**data, "packing": packing}, trainer={"max_steps": 2})
    pretrain(config)
    folder = folder_of(config)
    summary = json.loads((folder / "summary.json").read_text())
    found = summary["val_loss_by_source"]
    sums, numbers = losses_by_hand(folder, config)
    assert (numbers > 0).all()
    assert found == pytest.approx(dict(zip(("part", "part-2"), sums / numbers, strict=True)), abs=1e-5)
    assert summary["val_loss"] == pytest.approx(sums.sum() / numbers.sum(), abs=1e-5)
    for name, loss in found.items():
        assert column(config, f"val/loss/{name}")[-1] == pytest.approx(loss, abs=1e-6)


def test_one_source_has_no_loss_of_its_own_and_several_change_no_bit_of_the_total(tiny, text, two):
    one = tiny(name="one", trainer={"max_steps": 2})
    pretrain(one)
    assert not [name for name in metrics(one)[0] if name.startswith("val/loss/")]
    assert "val_loss_by_source" not in json.loads((folder_of(one) / "summary.json").read_text())
    scores, plain = MaskedLMScores(sources=["a", "b"]), MaskedLMScores()
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        logits = torch.randn(4, 5, 11, generator=generator)
        labels = torch.randint(-1, 11, (4, 5), generator=generator).masked_fill_(torch.eye(4, 5).bool(), -100)
        labels[labels < 0] = -100
        scores.update(logits, labels, torch.randint(2, (4, 5), generator=generator))
        plain.update(logits, labels)
    assert plain.compute().items() <= scores.compute().items()


def test_names_of_a_resumed_run_may_change(tiny, two, tmp_path):
    config = tiny(data={"sources": two}, trainer={"max_steps": 4})
    pretrain(config)
    moved = []
    for source, name in zip(two, ("new.txt", "newer.txt"), strict=True):
        shutil.copy(source.path, tmp_path / name)
        moved.append(SourceConfig(str(tmp_path / name)))
    longer = replace(config.trainer, max_steps=8)
    pretrain(replace(config, resume=True, data=replace(config.data, sources=moved), trainer=longer))
    assert [len(column(config, f"val/loss/{name}")) for name in ("part", "part-2", "new", "newer")] == [
        2,
        2,
        1,
        1,
    ]


@pytest.mark.slow
def test_two_processes_report_what_one_does(tiny, two, tmp_path):
    runs = []
    for devices in (1, 2):
        name = f"on-{devices}"
        config = tiny(name=name, data={"sources": two}, trainer={"max_steps": 2, "devices": devices})
        launch([*ALONE, *flags(config)]) if devices == 2 else pretrain(config)
        runs.append([column(config, f"val/loss/{part}") for part in ("part", "part-2")])
    np.testing.assert_allclose(runs[0], runs[1], atol=1e-5)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x.txt", "b/x.jsonl.gz", "x"], ["x", "x-2", "x-3"]),
        (
            ["hub:OWNER/Some-Set@config:train[:1%]", "hub:o/t", "python-docs"],
            ["Some-Set", "t", "python-docs"],
        ),
        (["more/*.txt", "https://example.org/c.csv?a=1#b", "*", "./"], ["more", "c", "source", "source-2"]),
        (["x-2", "x", "x"], ["x-2", "x", "x-3"]),
    ],
)
def test_names_of_sources_are_short_and_unique(paths, names):
    assert source_names([SourceConfig(path) for path in paths]) == names
