"""What the benchmarks compute from their measurements; what they measure takes them minutes."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(FOLDER))

import golden  # noqa: E402
import gpu  # noqa: E402
import profile_step  # noqa: E402
import throughput  # noqa: E402
import time_to_loss  # noqa: E402

from mlm.config.commands import PretrainConfig  # noqa: E402
from mlm.config.parse import Keys  # noqa: E402


def test_gpu_needs_torch_alone():
    tree = ast.parse((FOLDER / "gpu.py").read_text())
    nodes = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {getattr(node, "module", None) or node.names[0].name for node in nodes}
    ours = {name for name in names if name.startswith("mlm")}
    packages = {"mlm.config", "mlm.model", "mlm.optim", "mlm.plan"}
    assert {".".join(name.split(".")[:2]) for name in ours} == packages
    others = {name.split(".")[0] for name in names - ours} - {"torch"}
    assert others <= sys.stdlib_module_names


@pytest.mark.parametrize("variant", ["padded", "masked", "varlen"])
def test_gpu_step_trains(monkeypatch, variant):
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = replace(gpu.SHAPES["5M"], vocab_size=32, max_position_embeddings=32, **sizes)
    draw = torch.Generator().manual_seed(0)
    mask = (gpu.padded_mask if variant == "padded" else gpu.packed_mask)(4, 32, draw)
    batch = gpu.make_batch(mask, 32, draw)
    run = gpu.our_run(config, [batch], variant)
    before = run.forward(batch)
    for number in range(10):
        run.step(number)
    assert run.forward(batch) < before


def test_gpu_batches_are_what_they_should_be():
    draw = torch.Generator().manual_seed(0)
    mask = gpu.packed_mask(8, 64, draw)
    assert (mask > 0).float().mean() > 0.9
    ids, _, places, labels = gpu.make_batch(mask, 100, draw)
    used = labels != gpu.IGNORE_INDEX
    assert (mask.gather(1, places)[used] > 0).all()
    assert (ids.gather(1, places) == 4).all()
    assert gpu.tokens_seen([torch.tensor([[1, 1, 1, 1, 2, 2, 0]])]) == round((16 + 4) / 6)


def test_steady_rate_leaves_out_the_first_steps_and_the_last():
    ends = [100.0, 101, 102, 103, 104, 106, 999]
    assert throughput.steady_rate(ends, [10.0 * step for step in range(1, 8)]) == pytest.approx(20 / 3)


def test_ratios_are_taken_within_rounds():
    def one(ours, theirs):
        rates = {"ours": ours, "theirs-fp32": theirs}
        return {name: {"tokens_per_second": rate, "peak_bytes": rate} for name, rate in rates.items()}

    found = throughput.ratios([one(40.0, 10.0), one(50.0, 10.0), one(20.0, 10.0)])
    assert found == {"ours / theirs-fp32": 4.0, "memory, ours / theirs-fp32": 4.0}


@pytest.mark.parametrize("setting", throughput.OURS)
def test_settings_are_options_of_train(setting):
    words = throughput.our_options(setting, throughput.CASES["small"])
    keys = Keys.of(PretrainConfig)
    for flag in (word.removeprefix("--") for word in words if word.startswith("--")):
        assert flag == "config" or flag in keys.types, flag


def test_everybody_is_scored_on_the_same_masks():
    rows = [[2, *range(10, 60), 3]] * 20
    inputs, labels = time_to_loss.mask_rows(rows, (0, 1, 2, 3, 4), 4, 100)
    assert (inputs, labels) == time_to_loss.mask_rows(rows, (0, 1, 2, 3, 4), 4, 100)
    flat = [
        pair for shown, wanted in zip(inputs, labels, strict=True) for pair in zip(shown, wanted, strict=True)
    ]
    predicted = [(shown, wanted) for shown, wanted in flat if wanted >= 0]
    assert 0.1 < len(predicted) / 1000 < 0.2
    assert 0.7 < sum(shown == 4 for shown, _ in predicted) / len(predicted) < 0.9
    assert all(wanted >= 10 for _, wanted in predicted)


def test_the_fastest_run_that_reached_the_goal_counts():
    def run(seconds, loss):
        return {"seconds": seconds, "single": loss}

    ours = {50: [run(10.0, 5.0), run(10.0, 5.0)], 100: [run(20.0, 4.0), run(20.0, 4.6)]}
    found = time_to_loss.speedups([run(200.0, 4.5), run(200.0, 4.5)], ours, "single")
    assert found == [10.0, None]


@pytest.mark.parametrize(
    ("name", "shapes", "group"),
    [
        ("aten::mm", [[4096, 256], [256, 768]], "matmul"),
        ("aten::bmm", [[128, 128, 64], [128, 64, 128]], "attention"),
        ("aten::_softmax", [[32, 4, 128, 128], [], []], "attention"),
        ("aten::mm", [[640, 256], [256, 8192]], "head"),
        ("aten::gelu", [[32, 128, 704]], "rest"),
    ],
)
def test_operations_find_their_group(name, shapes, group):
    sizes = {"vocabulary": 8192, "masked": 640, "heads": 128, "sequence": 128}
    assert profile_step.group_of(name, shapes, False, sizes) == group
    assert profile_step.group_of(name, shapes, True, sizes) == "optimizer"


def test_golden_tells_broken_promises_from_what_may_differ():
    refused = {"exit": 2, "lines": 1, "text": "train.py: error: a"}
    before = {
        "losses": ["1.5", "1.25"],
        "tuned": {"may_differ": True, "value": [0.5, 0.25]},
        "refusal.train.py x": refused,
        "gone": 1,
    }
    assert golden.compare(before, before) == ([], [])
    after = {
        "losses": ["1.5", "1.26"],
        "tuned": {"may_differ": True, "value": [0.5, 0.24]},
        "refusal.train.py x": {**refused, "text": "train.py: error: b"},
        "new": 1,
    }
    broken, accepted = golden.compare(before, after)
    assert [line.split("\n")[0] for line in broken] == [
        "gone",
        "losses[1]",
        "new",
        "refusal.train.py x[text]",
    ]
    assert [line.split("\n")[0] for line in accepted] == ["tuned[value][1]"]
    broken, accepted = golden.compare(before, after, texts_may_differ=True)
    assert [line.split("\n")[0] for line in broken] == ["gone", "losses[1]", "new"]
    after["refusal.train.py x"]["exit"] = 1
    broken, _ = golden.compare(before, after, texts_may_differ=True)
    assert "refusal.train.py x[exit]\n  before: 2\n  after:  1" in broken


def test_golden_knows_tensors_by_their_values_alone(tmp_path):
    from safetensors.torch import save_file

    tensors = {"b": torch.arange(4.0), "a": torch.ones(2, 3)}
    save_file(tensors, tmp_path / "one.safetensors")
    save_file(dict(reversed(tensors.items())), tmp_path / "two.safetensors", metadata={"format": "pt"})
    first = golden.tensors_digest(tmp_path / "one.safetensors")
    assert golden.tensors_digest(tmp_path / "two.safetensors") == first
    save_file({**tensors, "a": torch.zeros(2, 3)}, tmp_path / "two.safetensors")
    assert golden.tensors_digest(tmp_path / "two.safetensors") != first
