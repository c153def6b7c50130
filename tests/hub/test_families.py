"""Both stock families against transformers, in both directions; then what no class represents."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertModel,
)

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig
from mlm.hub import architecture_of, load_pretrained, save_pretrained
from mlm.hub.families import BERT, FAMILIES, MODERNBERT, OWN
from mlm.model import MaskedLM

MODERN = ModelConfig(
    vocab_size=128,
    hidden_size=16,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=24,
    max_position_embeddings=32,
    rotary_theta=12345.0,
)
BIASES = {"norm_bias": True, "attention_bias": True, "mlp_bias": True, "head_bias": True}
CLASSIC = replace(
    MODERN,
    norm_position="post",
    position_embedding="learned",
    activation="gelu",
    type_vocab_size=2,
    rotary_theta=10000.0,
    norm_eps=1e-12,
    **BIASES,
)
OURS = {
    "modern": MODERN,
    "modern with biases and dropout": replace(
        MODERN, embedding_dropout=0.1, attention_dropout=0.2, hidden_dropout=0.3, norm_eps=1e-3, **BIASES
    ),
    "classic": CLASSIC,
    "classic with dropout": replace(
        CLASSIC, embedding_dropout=0.1, attention_dropout=0.2, hidden_dropout=0.3
    ),
    "pre-norm with learned positions": replace(CLASSIC, norm_position="pre", first_attention_norm=True),
    "classic without types": replace(CLASSIC, type_vocab_size=0),
}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
GLOBAL = {"layer_types": ["full_attention"] * 4}
THEIRS = {
    "bert": (BertForMaskedLM, BertConfig(**SIZES)),
    "bert, other numbers": (BertForMaskedLM, BertConfig(**SIZES, layer_norm_eps=1e-3, type_vocab_size=1)),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig(**SIZES, **GLOBAL)),
    "modernbert, other numbers": (
        ModernBertForMaskedLM,
        ModernBertConfig(
            **SIZES,
            **GLOBAL,
            norm_eps=1e-3,
            norm_bias=True,
            attention_bias=True,
            mlp_bias=True,
            classifier_bias=True,
            rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 777.0}},
        ),
    ),
}
IDS = torch.randint(5, 100, (2, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 20, [1] * 11 + [0] * 9])
REAL = MASK == 1


def shaken(model: nn.Module) -> nn.Module:
    """Give every parameter, norms and biases too, a random value."""
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.2)
    return model.eval()


def same_logits(ours: MaskedLM, theirs: nn.Module, **inputs: torch.Tensor) -> None:
    with torch.no_grad():
        found = ours(IDS, MASK, **inputs)[REAL]
        expected = theirs(input_ids=IDS, attention_mask=MASK, **inputs).logits[REAL]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OURS)
def test_stock_class_reads_ours(name, tmp_path, tokenizer):
    model = shaken(MaskedLM(OURS[name]))
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    again = load_pretrained(folder)
    assert again.config == model.config
    torch.testing.assert_close(again(IDS, MASK)[..., :120], model(IDS, MASK)[..., :120], atol=0, rtol=0)
    if architecture_of(model.config) == OWN.architecture:
        return
    stock = getattr(transformers, architecture_of(model.config))
    theirs, loading = stock.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    same_logits(again, theirs.eval())
    if model.config.type_vocab_size:
        same_logits(again, theirs, token_type_ids=torch.arange(20).expand(2, 20) // 10)
    assert type(AutoModelForMaskedLM.from_pretrained(folder)) is stock


@pytest.mark.parametrize("name", THEIRS)
def test_we_read_stock_class(name, tmp_path):
    kind, config = THEIRS[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    same_logits(ours, theirs)
    assert not ours.training
    weights = {weight.data_ptr() for weight in theirs.parameters()}
    assert sum(w.numel() for w in ours.parameters()) == sum(w.numel() for w in theirs.parameters())
    assert not weights & {weight.data_ptr() for weight in ours.parameters()}


@pytest.mark.parametrize("name", THEIRS)
def test_there_and_back_changes_no_weight(name, tmp_path, tokenizer):
    kind, config = THEIRS[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path / "theirs")
    save_pretrained(tmp_path / "ours", load_pretrained(tmp_path / "theirs"), tokenizer, 32, "")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    for key in before:
        rows = 120 if key in ("cls.predictions.bias", "decoder.bias") else None
        assert torch.equal(before[key][:rows], after[key][:rows]), key


def test_stock_class_trains_on_with_tied_weights(tmp_path, tokenizer):
    for config, kind in ((MODERN, ModernBertForMaskedLM), (CLASSIC, BertForMaskedLM)):
        folder = save_pretrained(tmp_path / kind.__name__, shaken(MaskedLM(config)), tokenizer, 32, "")
        theirs = kind.from_pretrained(folder)
        theirs(input_ids=IDS, labels=IDS).loss.backward()
        torch.optim.SGD(theirs.parameters(), lr=0.1).step()
        table, decoder = theirs.get_input_embeddings().weight, theirs.get_output_embeddings().weight
        assert table.data_ptr() == decoder.data_ptr()
        theirs.save_pretrained(folder)
        same_logits(load_pretrained(folder), theirs.eval())


BARE = {
    "bert": (BertModel, BertConfig(**SIZES)),
    "modernbert": (ModernBertModel, ModernBertConfig(**SIZES, **GLOBAL)),
}
CLASSIFIERS = {
    "bert": (BertForSequenceClassification, BertConfig(**SIZES)),
    "modernbert": (ModernBertForSequenceClassification, ModernBertConfig(**SIZES, **GLOBAL)),
}


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize("models", [BARE, CLASSIFIERS], ids=["bare", "classifier"])
def test_missing_head_is_initialised_and_named(models, name, tmp_path, caplog):
    kind, config = models[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    base = theirs if models is BARE else theirs.base_model
    with torch.no_grad():
        expected = base(input_ids=IDS, attention_mask=MASK).last_hidden_state[REAL]
        torch.testing.assert_close(ours.encoder(IDS, MASK)[REAL], expected, atol=1e-5, rtol=1e-5)
    head = {"bert": "cls.predictions.bias", "modernbert": "decoder.bias"}[name]
    assert "initialised" in caplog.text
    assert head in caplog.text
    assert ours.head.bias.eq(0).all()
    assert ours.head.dense.weight.std() > 0
    assert ours(IDS).isfinite().all()


def test_older_spelling_is_read(tmp_path):
    theirs = shaken(BertForMaskedLM(BertConfig(**SIZES)))
    theirs.save_pretrained(tmp_path)
    older = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    older |= {"bert.pooler.dense.weight": torch.ones(16, 16), "cls.seq_relationship.bias": torch.ones(2)}
    older |= {"cls.predictions.decoder.weight": torch.ones(128, 16)}
    save_file(older, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["layer_norm_eps"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    same_logits(load_pretrained(tmp_path), theirs)


def test_modernbert_config_of_transformers_4_is_read(tmp_path):
    config = ModernBertConfig(
        **SIZES, **GLOBAL, rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 777.0}}
    )
    theirs = shaken(ModernBertForMaskedLM(config))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    del written["rope_parameters"], written["layer_types"]
    path.write_text(json.dumps({**written, "global_rope_theta": 777.0, "global_attn_every_n_layers": 1}))
    same_logits(load_pretrained(tmp_path), theirs)
    path.write_text(json.dumps({**written, "global_rope_theta": 777.0}))
    with pytest.raises(InputError, match=r"layer_types=sliding_attention \(only full_attention\)"):
        load_pretrained(tmp_path)


UNSUPPORTED = {
    "hidden_act=relu": (BERT, {"hidden_act": "relu"}),
    "position_embedding_type=relative_key": (BERT, {"position_embedding_type": "relative_key"}),
    "is_decoder=True": (BERT, {"is_decoder": True}),
    "tie_word_embeddings=False": (BERT, {"tie_word_embeddings": False}),
    "type_vocab_size=0": (BERT, {"type_vocab_size": 0}),
    "layer_types=": (MODERNBERT, {"layer_types": ["full_attention"] + ["sliding_attention"] * 3}),
    "rope_type=yarn": (
        MODERNBERT,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}},
    ),
    "activation=swiglu": (OWN, {"activation": "swiglu"}),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_we_cannot_compute_is_refused(name):
    family, change = UNSUPPORTED[name]
    config = next(config for config in OURS.values() if not family.unrepresented(config))
    written = family.write_config(config)
    assert family.read_config(written) == config
    with pytest.raises(InputError, match=f"not supported.*{name}"):
        family.read_config({**written, **change})


def test_absent_size_is_named():
    written = BERT.write_config(CLASSIC)
    del written["num_attention_heads"]
    with pytest.raises(InputError, match="num_attention_heads"):
        BERT.read_config(written)


def test_own_format_is_announced_with_the_reason(tmp_path, tokenizer, caplog):
    config = OURS["pre-norm with learned positions"]
    save_pretrained(tmp_path / "model", MaskedLM(config), tokenizer, 32, "")
    assert "BertForMaskedLM has no counterpart for model.norm_position=pre" in caplog.text
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "mlm"


@pytest.mark.parametrize("name", OURS)
def test_each_model_belongs_to_one_stock_family(name):
    config = OURS[name]
    fitting = [family for family in FAMILIES if not family.unrepresented(config)]
    assert fitting[-1] is OWN
    assert len(fitting) <= 2
    expected = "ModernBertForMaskedLM" if name.startswith("modern") else "BertForMaskedLM"
    assert architecture_of(config) == (expected if len(fitting) == 2 else "MaskedLM")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_table_names_nothing_that_does_not_exist(family):
    ours = {name.rpartition(".")[0] for config in OURS.values() for name in MaskedLM(config).state_dict()}
    layers = {name.replace(".layers.1.", ".layers.N.") for name in ours}
    assert set(family.modules) <= layers
    fields = asdict(MODERN).keys()
    assert {*family.fixed, *family.paths, *family.unused} <= fields
