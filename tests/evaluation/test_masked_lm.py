import json
import math

import numpy as np
import pytest
import torch
from stores import build_store

from mlm.__main__ import main
from mlm.config.data import IGNORE_INDEX, MaskingConfig
from mlm.data.collate import Rows, build_masking
from mlm.data.packing import pack_documents
from mlm.evaluation.metrics import MaskedLMScores, frozen_batches, score_batches
from mlm.hub.pretrained import load_pretrained
from mlm.model.loss import summed_cross_entropy
from mlm.tokenizer import SpecialTokens

CPU = torch.device("cpu")


@pytest.fixture
def rows(tmp_path, documents, tokenizer):
    store = build_store(tmp_path / "store", documents[:80], tokenizer)
    table = pack_documents(store.documents, 32, "isolate")
    return Rows(store, table, SpecialTokens.from_tokenizer(tokenizer), 32, "isolate")


@pytest.fixture
def masking(tokenizer):
    return build_masking(MaskingConfig(), 0.15, tokenizer)


def test_scores_equal_a_sum_over_single_tokens(model_folder, rows, masking):
    model = load_pretrained(model_folder)
    loss = correct = count = 0
    with torch.no_grad():
        for batch in frozen_batches(rows, masking, 1):
            logits = model(batch["input_ids"], batch["attention_mask"])[0].double()  # every position
            for place, label in zip(batch["masked_positions"][0], batch["labels"][0], strict=True):
                if label != IGNORE_INDEX:
                    loss -= logits[place].log_softmax(-1)[label].item()
                    correct += int(logits[place].argmax() == label)
                    count += 1
    scores = score_batches(model, frozen_batches(rows, masking, 8), CPU)
    assert list(scores) == ["loss", "perplexity", "masked_accuracy", "num_masked"]
    assert scores["num_masked"] == count
    assert scores["loss"] == pytest.approx(loss / count, rel=1e-5)
    assert scores["masked_accuracy"] == pytest.approx(correct / count)
    assert scores["perplexity"] == pytest.approx(math.exp(loss / count), rel=1e-4)


@pytest.mark.parametrize(("batch_size", "world_size"), [(1, 1), (7, 1), (5, 2), (8, 3)])
def test_scores_depend_on_neither_batch_size_nor_ranks(model_folder, rows, masking, batch_size, world_size):
    model = load_pretrained(model_folder)
    whole = score_batches(model, frozen_batches(rows, masking, 1000), CPU)
    parts = [
        score_batches(model, frozen_batches(rows, masking, batch_size, rank, world_size), CPU)
        for rank in range(world_size)
    ]
    for name in ("loss", "masked_accuracy"):
        total = sum(part[name] * part["num_masked"] for part in parts)
        assert total / whole["num_masked"] == pytest.approx(whole[name], rel=1e-6)
    assert sum(part["num_masked"] for part in parts) == whole["num_masked"]


def test_the_sums_are_exact_in_float64_whatever_the_type_of_the_logits():
    """The loss of a batch is float32, as in training; many batches are added without a loss."""
    torch.manual_seed(0)
    scores, sums = MaskedLMScores(), np.zeros(3)
    for size in (3, 1, 7):
        logits, labels = torch.randn(2, size, 11).bfloat16(), torch.randint(11, (2, size))
        labels[0, 0] = IGNORE_INDEX
        scores.update(logits, labels)
        kept = labels != IGNORE_INDEX
        right = (logits.float().argmax(-1) == labels)[kept].sum()
        sums += [summed_cross_entropy(logits.float(), labels).item(), right.item(), kept.sum().item()]
    assert scores.compute() == {
        "loss": sums[0] / sums[2],
        "perplexity": math.exp(sums[0] / sums[2]),
        "masked_accuracy": sums[1] / sums[2],
        "num_masked": sums[2],
    }
    scores.reset()
    scores.update(torch.full((1, 5), 1.0).index_fill(1, torch.tensor([3]), 1e4), torch.tensor([0]))
    assert scores.compute()["perplexity"] == math.inf


def test_masks_are_frozen(rows, masking):
    for first, second in zip(frozen_batches(rows, masking, 8), frozen_batches(rows, masking, 8), strict=True):
        assert torch.equal(first["input_ids"], second["input_ids"])


def test_loss_of_a_batch_without_predictions_is_zero_and_finite():
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = summed_cross_entropy(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))
    scores = MaskedLMScores()
    scores.update(logits, torch.full((2, 3), IGNORE_INDEX))
    assert scores.compute()["loss"] == 0.0


def test_the_command_prints_and_writes_the_scores(model_folder, tmp_path, documents, capsys):
    text, output = tmp_path / "text.txt", tmp_path / "scores.json"
    text.write_text("\n".join(documents[:80]))
    command = [
        "evaluate",
        "--model",
        str(model_folder),
        "--data.sources",
        str(text),
        "--data.document",
        "line",
    ]
    assert main([*command, "--data.seq_len", "32", "--output", str(output)]) == 0
    printed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    facts = json.loads(output.read_text())
    assert set(printed) == set(facts)
    assert float(printed["loss"]) == pytest.approx(facts["loss"], abs=1e-4)
    assert facts["num_bytes"] == sum(len(document.encode()) for document in documents[:80])
    assert facts["nats_per_byte"] == pytest.approx(facts["loss"] * facts["num_tokens"] / facts["num_bytes"])
    assert np.isfinite(facts["perplexity"])


def test_rows_are_no_longer_than_the_model_reads(model_folder, tmp_path, documents, capsys):
    """The default row length is 128; this model reads 64."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(documents[:9]))
    printed = []
    for options in ([], ["--data.seq_len", "64"]):
        main(["evaluate", "--model", str(model_folder), "--data.sources", str(text), *options])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]


def test_text_of_which_no_token_is_known_is_refused(model_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("\u4e16\u754c \u4f60\u597d\n")
    with pytest.raises(SystemExit) as stop:
        main(["evaluate", "--model", str(model_folder), "--data.sources", str(text)])
    assert stop.value.code == 2
    assert "knows no token" in capsys.readouterr().err
