import copy
import math

import pytest
import torch
from torch import nn

import mlm.optim as module
from mlm.config.training import OptimizerConfig
from mlm.cores import multiplies_bfloat16
from mlm.optim import (
    NEWTON_SCHULZ_COEFFICIENTS,
    Muon,
    build_optimizer,
    newton_schulz,
    param_groups,
    set_learning_rate,
    skip_step_if,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 8)
        self.fused = nn.Linear(8, 24)
        self.fused.blocks = (3, 1)
        self.norm = nn.LayerNorm(24)
        self.out = nn.Linear(24, 8)

    def loss(self, ids):
        return self.out(self.norm(self.fused(self.table(ids)))).pow(3).sum()


def train(model, optimizer, steps=4):
    for step in range(steps):
        optimizer.zero_grad()
        model.loss(torch.arange(11).roll(step)[:5]).backward()
        optimizer.step()


def test_adamw_equals_torch_with_decay_on_matrices_only():
    ours, theirs = Net(), Net()
    config = OptimizerConfig(name="adamw", lr=1e-2, weight_decay=0.1)
    optimizer = build_optimizer(ours, config)
    set_learning_rate(optimizer, 0.5)
    matrices = [p for p in theirs.parameters() if p.ndim == 2]
    rest = [p for p in theirs.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    train(ours, optimizer)
    train(theirs, torch.optim.AdamW(groups, lr=5e-3, betas=config.betas, eps=config.eps))
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("shape", [(16, 24), (24, 16), (16, 16)])
def test_muon_equals_torch_up_to_bfloat16(shape, monkeypatch):
    """With torch's coefficients, which are not ours."""
    monkeypatch.setattr(module, "NEWTON_SCHULZ_COEFFICIENTS", [(3.4445, -4.7750, 2.0315)] * 5)
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(shape))
    theirs = nn.Parameter(ours.detach().clone())
    start = ours.detach().clone()
    a = Muon([{"params": [ours], "lr": 1e-2}], momentum=0.9, weight_decay=0.1)
    b = torch.optim.Muon([theirs], lr=1e-2, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        ours.grad = torch.randn(shape)
        theirs.grad = ours.grad.clone()
        a.step()
        b.step()
    moved = (theirs - start).norm()
    assert (ours - theirs).norm() / moved < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (32, 32)])
def test_newton_schulz_keeps_the_singular_vectors_and_brings_the_values_near_one(shape, dtype):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(3, *shape), full_matrices=False)
    values = torch.logspace(-1.8, 0, 32)
    values = values / values.norm()
    assert values.min() > 0.005
    result = newton_schulz(((left * values) @ right).to(dtype)).float()
    inner = left.mT @ result @ right.mT
    found = inner.diagonal(dim1=1, dim2=2)
    assert found.min() > 0.45
    assert found[:, values > 0.01].min() > 0.65
    assert found.max() < 1.35
    assert (inner - torch.diag_embed(found)).abs().max() < 0.1


@pytest.mark.parametrize("shape", [(48, 32), (64, 256), (32, 32)])
@pytest.mark.parametrize("smallest", [1.0, 1e-2, 1e-4])
def test_newton_schulz_equals_its_steps_one_by_one(shape, smallest):
    torch.manual_seed(0)
    left, _, right = torch.linalg.svd(torch.randn(8, *shape, dtype=torch.float64), full_matrices=False)
    values = torch.logspace(0, math.log10(smallest), min(shape), dtype=torch.float64)
    matrices, values = (left * values) @ right, values / values.norm()
    plain = matrices.bfloat16() / matrices.bfloat16().norm(dim=(1, 2), keepdim=True)
    for a, b, c in NEWTON_SCHULZ_COEFFICIENTS:
        values = a * values + b * values**3 + c * values**5
        gram = plain @ plain.mT
        plain = a * plain + (b * gram + c * gram @ gram) @ plain
    exact = (left * values) @ right

    def error(result):
        return (result.double() - exact).norm() / exact.norm()

    half, single = matrices.bfloat16(), matrices.float()
    ours, transposed = newton_schulz(half), newton_schulz(half.mT).mT
    assert error(ours) < 2 * error(plain)
    assert error(ours) == pytest.approx(error(transposed).item(), rel=0.15)
    assert error(newton_schulz(single)) < 1e-3


@pytest.mark.parametrize(
    ("fast", "dtype"),
    [({"avx512_bf16": True}, torch.bfloat16), ({"amx_tile": True}, torch.bfloat16), ({}, torch.float32)],
)
def test_muon_multiplies_in_the_type_that_the_hardware_has(fast, dtype, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True} | fast)
    multiplies_bfloat16.cache_clear()
    weight = nn.Parameter(torch.randn(8, 8))
    weight.grad = torch.randn(8, 8)
    seen = []
    monkeypatch.setattr(module, "newton_schulz", lambda x: seen.append(x.dtype) or newton_schulz(x))
    try:
        Muon([{"params": [weight], "lr": 0.1}], 0.9, 0.0).step()
    finally:
        multiplies_bfloat16.cache_clear()
    assert seen == [dtype]


def in_blocks(weight, down, across):
    return [piece for part in weight.chunk(down, 0) for piece in part.chunk(across, 1)]


@pytest.mark.parametrize("blocks", [(3, 1), (1, 2), (3, 2)])
def test_matrices_of_one_weight_are_treated_one_by_one(blocks):
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(24, 8))
    parts = [nn.Parameter(part.clone()) for part in in_blocks(whole.detach(), *blocks)]
    whole.grad = torch.randn(24, 8)
    for part, piece in zip(parts, in_blocks(whole.grad, *blocks), strict=True):
        part.grad = piece.clone()
    Muon([{"params": [whole], "blocks": blocks, "lr": 0.1}], 0.9, 0.0).step()
    Muon([{"params": parts, "lr": 0.1}], 0.9, 0.0).step()
    for ours, part in zip(in_blocks(whole.detach(), *blocks), parts, strict=True):
        torch.testing.assert_close(ours, part.detach())


def test_muon_takes_the_hidden_matrices_and_every_parameter_is_in_one_group():
    model = Net()
    muon, adamw = param_groups(model, OptimizerConfig(name="muon"))
    found = {group["blocks"]: [id(p) for p in group["params"]] for group in muon}
    assert found == {(3, 1): [id(model.fused.weight)], (1, 1): [id(model.out.weight)]}
    grouped = [id(p) for group in muon + adamw for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())
    assert {id(p) for group in adamw if group["weight_decay"] for p in group["params"]} == {
        id(model.table.weight)
    }


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_saved_state_continues_bit_for_bit(name, tmp_path):
    config = OptimizerConfig(name=name, lr=1e-2)
    model = Net()
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 1.0)
    train(model, optimizer)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    restored = build_optimizer(other, config)
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    train(model, optimizer)
    train(other, restored)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_muon_lr_is_its_own_when_given():
    optimizer = build_optimizer(Net(), OptimizerConfig(name="muon", lr=1e-3, muon_lr=2e-2))
    set_learning_rate(optimizer, 0.5)
    assert sorted({group["lr"] for group in optimizer.param_groups}) == pytest.approx([5e-4, 1e-2])


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_skipped_step_leaves_no_trace(name):
    """Whether it is the first or a later one; a twin that never had it ends with the same bits."""
    runs = []
    for bad_steps in ((), (0, 2)):
        model = Net()
        optimizer = build_optimizer(model, OptimizerConfig(name=name, lr=1e-2, weight_decay=0.1))
        set_learning_rate(optimizer, 1.0)
        for step in range(3):
            if step in bad_steps:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, float("nan"))
                skip_step_if(optimizer, torch.tensor(True))
                optimizer.step()
            skip_step_if(optimizer, torch.tensor(False))
            train(model, optimizer, steps=1)
        state = [tensor for entry in optimizer.state.values() for tensor in entry.values()]
        runs.append([*model.parameters(), *state])
    assert len(runs[0]) == len(runs[1])
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_scaled_gradients_are_unscaled_before_they_are_clipped(name):
    """Half precision: Lightning leaves that to optimizers that say they do it, as a fused AdamW does."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    optimizer = build_optimizer(Net(), OptimizerConfig(name=name))
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    plugin.clip_gradients(optimizer, 1.0)  # raises for an optimizer that unscales by itself
    assert not getattr(optimizer, "_step_supports_amp_scaling", False)


def test_one_optimizer_alone_keeps_the_checkpoint_format_of_torch():
    model, config = Net(), OptimizerConfig(name="adamw", lr=1e-2)
    optimizer = build_optimizer(model, config)
    set_learning_rate(optimizer, 1.0)
    train(model, optimizer)
    plain = torch.optim.AdamW(model.parameters(), fused=True)
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    assert optimizer.state_dict()["state"].keys() == set(range(len(list(model.parameters()))))


def test_closure_is_evaluated_once_with_gradients():
    model, calls = Net(), []
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))

    def closure():
        calls.append(torch.is_grad_enabled())
        loss = model.loss(torch.arange(5))
        loss.backward()
        return loss

    with torch.no_grad():
        assert optimizer.step(closure) > -math.inf
    assert calls == [True]
