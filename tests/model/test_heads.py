"""The masked-LM head: masked positions only, tied, and the ids that no token has; the classifier."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig, Pooling
from mlm.model.heads import MaskedLM, SequenceClassifier, rule_out_unused_ids

CONFIG = ModelConfig(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24
)
POSITIONS = torch.tensor([[0, 4, 5], [2, 2, 7]])


def shaken(module: nn.Module) -> nn.Module:
    """Give every parameter, norms and biases too, a random value."""
    with torch.no_grad():
        for weight in module.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.3)
    return module


@pytest.fixture
def model() -> MaskedLM:
    torch.manual_seed(0)
    return MaskedLM(CONFIG)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))


def test_masked_positions_equal_selection_of_all(model, ids):
    every = model(ids)
    masked = model(ids, masked_positions=POSITIONS)
    assert every.shape == (2, 8, 64)
    assert masked.shape == (2, 3, 64)
    rows = torch.arange(2)[:, None]
    torch.testing.assert_close(masked, every[rows, POSITIONS])


def test_sparse_loss_and_gradients_equal_dense(model, ids):
    targets = torch.randint(64, (2, 3))
    sparse = F.cross_entropy(model(ids, masked_positions=POSITIONS).flatten(0, 1), targets.flatten())
    dense = F.cross_entropy(model(ids)[torch.arange(2)[:, None], POSITIONS].flatten(0, 1), targets.flatten())
    torch.testing.assert_close(sparse, dense)
    parameters = list(model.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(sparse, parameters), torch.autograd.grad(dense, parameters)
    )


def test_initial_loss_is_that_of_guessing(model, ids):
    loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    assert loss.item() == pytest.approx(math.log(64), rel=0.05)


def test_output_matrix_is_the_embedding_table(model, ids):
    assert sum(weight.shape == (64, 16) for weight in model.parameters()) == 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.encoder.embeddings.token.weight[63] += torch.randn(16)  # a token that the rows do not hold
    rows = ids.masked_fill(ids == 63, 0)
    changed = (model(rows) - twin(rows)).abs().amax((0, 1)) > 1e-6
    assert changed.nonzero().flatten().tolist() == [63]


HEADS = {
    "untied": replace(CONFIG, tie_word_embeddings=False),
    "no transform": replace(CONFIG, head_transform=False),
    "untied, no transform": replace(CONFIG, tie_word_embeddings=False, head_transform=False),
    "narrow tables": replace(CONFIG, embedding_size=8, head_bias=True),
    "narrow tables, untied": replace(CONFIG, embedding_size=8, tie_word_embeddings=False),
    "all": replace(CONFIG, type_vocab_size=2, attention_bias=True, norm_bias=True),
}


@pytest.mark.parametrize("activation", ["relu", "gelu", "geglu", "swiglu"])
def test_head_is_transform_and_output_matrix(activation, ids):
    model = shaken(MaskedLM(replace(HEADS["untied"], activation=activation)))
    function = {"relu": F.relu, "swiglu": F.silu}.get(activation, F.gelu)
    head = model.head
    transformed = F.layer_norm(function(model.encoder(ids) @ head.dense.weight.T), (16,), head.norm.weight)
    torch.testing.assert_close(model(ids), transformed @ head.output.weight.T + head.bias)


def test_head_without_transform_compares_the_encoder_output(ids):
    model = shaken(MaskedLM(HEADS["no transform"]))
    expected = model.encoder(ids) @ model.encoder.embeddings.token.weight.T + model.head.bias
    torch.testing.assert_close(model(ids), expected)


def test_untied_output_matrix_is_initialised_like_a_table_and_trained_apart(ids):
    model = MaskedLM(HEADS["untied"])
    output = model.head.output.weight
    assert output.std().item() == pytest.approx(0.02 * 0.88, rel=0.1)
    assert not torch.equal(output, model.encoder.embeddings.token.weight)
    assert not any(name == "head.output" for name, m in model.named_modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("name", HEADS)
def test_every_parameter_gets_a_gradient(name, ids):
    model = MaskedLM(HEADS[name])
    model(ids, masked_positions=POSITIONS).logsumexp(-1).sum().backward()
    assert all(weight.grad is not None for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ruled_out_ids_have_no_probability_and_no_gradient(model, ids, dtype):
    rule_out_unused_ids(model, 60)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        logits = model(ids)
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    assert logits.argmax(-1).max() < 60
    assert not logits.softmax(-1)[..., 60:].any()
    loss = F.cross_entropy(logits.float().flatten(0, 1), ids.flatten().clamp(max=59))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(60), rel=0.05)
    assert not model.head.bias.grad[60:].any()
    assert model.head.bias.grad[:60].any()


def test_ids_that_become_tokens_are_let_in_again(model):
    rule_out_unused_ids(model, 50)
    rule_out_unused_ids(model, 60)
    assert model.head.bias[:60].eq(0).all()
    assert model.head.bias[60:].eq(-1e4).all()


def test_model_learns_two_rows(ids):
    torch.manual_seed(0)
    model = MaskedLM(CONFIG)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = F.cross_entropy(model(ids, masked_positions=POSITIONS).flatten(0, 1), torch.arange(6) + 50)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 1.4  # two of the six slots are the same position, with two targets


def test_same_seed_same_model():
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        models.append(MaskedLM(CONFIG).state_dict())
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


@pytest.mark.parametrize("pooling", get_args(Pooling))
@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_classifier_does_not_see_padding(ids, pooling, norm_position):
    torch.manual_seed(0)
    changes = {"norm_position": norm_position, "pooling": pooling, "head_bias": True}
    config = replace(CONFIG, **changes, initializer_range=0.3)
    model = SequenceClassifier(config, ClassifierConfig(("a", "b", "c"), dropout=0.5)).eval()
    padded, mask = F.pad(ids, (0, 5), value=7), F.pad(torch.ones_like(ids), (0, 5))
    assert model(ids).shape == (2, 3)
    torch.testing.assert_close(model(padded, mask), model(ids), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(model(ids, torch.ones_like(ids)), model(ids))
    torch.testing.assert_close(model(ids)[1], model(ids[1:])[0])


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_every_parameter_of_a_classifier_gets_a_gradient(ids, norm_position):
    config = replace(CONFIG, norm_position=norm_position, norm_bias=True, head_bias=True)
    model = SequenceClassifier(config, ClassifierConfig(("a", "b")))
    F.cross_entropy(model(ids), torch.tensor([0, 1])).backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_dropout_of_a_classifier_is_before_its_last_layer(ids):
    model = SequenceClassifier(CONFIG, ClassifierConfig(("a", "b"), dropout=0.5)).train()
    assert not torch.equal(model(ids), model(ids))
    torch.testing.assert_close(model.eval()(ids), model(ids))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": ("a", "a")}, r"labels=\['a', 'a'\] must be distinct names"),
        ({"labels": ()}, r"labels=\[\] must be distinct names"),
        ({"labels": ("a", "b"), "label_type": "regression"}, "must be one for a score"),
        ({"labels": ("a",), "dropout": 1.0}, "classifier_dropout=1.0"),
    ],
)
def test_classifier_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(InputError, match=message):
        ClassifierConfig(**arguments)
