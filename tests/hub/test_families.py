"""The stock families against transformers, in both directions; then what no class represents."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    BertModel,
    DistilBertConfig,
    DistilBertForMaskedLM,
    DistilBertForSequenceClassification,
    DistilBertModel,
    ElectraConfig,
    ElectraForMaskedLM,
    ElectraForPreTraining,
    ElectraForSequenceClassification,
    ElectraModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    ModernBertForSequenceClassification,
    ModernBertModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaForMaskedLM,
)

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.hub import load_classifier, load_masked_lm, load_pretrained, save_pretrained
from mlm.hub.families import (
    BERT,
    ELECTRA,
    FAMILIES,
    MODERNBERT,
    OWN,
    ROBERTA,
    XLM_ROBERTA,
    architecture_of,
)
from mlm.model import MaskedLM, SequenceClassifier
from mlm.model.attention import sinusoids
from mlm.plan import total_parameters

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
    pooling="cls_tanh",
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
    "modern with local attention": replace(
        MODERN, global_attn_every_n_layers=3, local_attention=6, local_rotary_theta=55.0, pooling="mean"
    ),
    "modern with swiglu, untied": replace(MODERN, activation="swiglu", tie_word_embeddings=False),
    "classic with relu": replace(CLASSIC, activation="relu"),
    "classic with fixed positions": replace(CLASSIC, position_embedding="sinusoidal"),
    "classic, untied": replace(CLASSIC, tie_word_embeddings=False),
    "roberta": replace(CLASSIC, position_offset=1),
    "roberta, untied": replace(CLASSIC, position_offset=1, tie_word_embeddings=False),
    "distilbert": replace(CLASSIC, type_vocab_size=0, pooling="cls_relu"),
    "distilbert, untied": replace(CLASSIC, type_vocab_size=0, tie_word_embeddings=False),
    "electra": replace(CLASSIC, embedding_size=8, pooling="cls_gelu"),
    "electra, untied": replace(CLASSIC, embedding_size=8, tie_word_embeddings=False),
    "pre-norm with learned positions": replace(CLASSIC, norm_position="pre", first_attention_norm=True),
}
COUNTERPART = {
    "modern": "ModernBertForMaskedLM",
    "classic": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "distilbert": "DistilBertForMaskedLM",
    "electra": "ElectraForMaskedLM",
}
NO_COUNTERPART = {
    "norm_position=pre": replace(CLASSIC, norm_position="pre"),
    "final_norm=True": replace(CLASSIC, final_norm=True),
    "position_embedding=none": replace(CLASSIC, position_embedding="none"),
    "global_attn_every_n_layers=2": replace(CLASSIC, global_attn_every_n_layers=2, local_attention=4),
    "attention=causal": replace(CLASSIC, attention="causal"),
    "embedding_size=8": replace(MODERN, embedding_size=8),
    "norm=rmsnorm": replace(MODERN, norm="rmsnorm"),
    "embedding_norm=False": replace(MODERN, embedding_norm=False),
    "activation=relu": replace(MODERN, activation="relu"),
    "first_attention_norm=True": replace(MODERN, first_attention_norm=True),
    "head_transform=False": replace(MODERN, head_transform=False),
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
THETAS = {
    "full_attention": {"rope_type": "default", "rope_theta": 777.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 55.0},
}
THEIRS = {
    "roberta": (RobertaForMaskedLM, RobertaConfig(**SIZES)),
    "roberta, untied": (RobertaForMaskedLM, RobertaConfig(**SIZES, tie_word_embeddings=False)),
    "distilbert": (DistilBertForMaskedLM, DistilBertConfig(**SIZES)),
    "electra": (ElectraForMaskedLM, ElectraConfig(**SIZES, embedding_size=8)),
    "electra, untied": (
        ElectraForMaskedLM,
        ElectraConfig(**SIZES, embedding_size=8, tie_word_embeddings=False),
    ),
    "bert": (BertForMaskedLM, BertConfig(**SIZES)),
    "bert with relu": (BertForMaskedLM, BertConfig(**SIZES, hidden_act="relu")),
    "bert, untied": (BertForMaskedLM, BertConfig(**SIZES, tie_word_embeddings=False)),
    "bert, other numbers": (BertForMaskedLM, BertConfig(**SIZES, layer_norm_eps=1e-3, type_vocab_size=1)),
    "modernbert": (ModernBertForMaskedLM, ModernBertConfig(**SIZES)),
    "modernbert with a narrow window": (
        ModernBertForMaskedLM,
        ModernBertConfig(**SIZES, local_attention=6, global_attn_every_n_layers=2, rope_parameters=THETAS),
    ),
    "modernbert with one global layer": (
        ModernBertForMaskedLM,
        ModernBertConfig(
            **SIZES, local_attention=5, layer_types=["full_attention"] + ["sliding_attention"] * 3
        ),
    ),
    "modernbert with swiglu, untied": (
        ModernBertForMaskedLM,
        ModernBertConfig(
            **SIZES,
            **GLOBAL,
            hidden_activation="silu",
            classifier_activation="silu",
            tie_word_embeddings=False,
        ),
    ),
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
            rope_parameters=THETAS,
        ),
    ),
}
OUTPUT_BIASES = ("cls.predictions.bias", "cls.predictions.decoder.bias", "decoder.bias")
OUTPUT_BIASES += ("lm_head.bias", "lm_head.decoder.bias", "vocab_projector.bias", "generator_lm_head.bias")
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
    written = json.loads((folder / "config.json").read_text())
    assert written["model_type"] == architecture_of(model.config).removesuffix("ForMaskedLM").lower()
    stock = getattr(transformers, architecture_of(model.config))
    theirs, loading = stock.from_pretrained(folder, output_loading_info=True)
    loading["unexpected_keys"] = [name for name in loading["unexpected_keys"] if ".pooler." not in name]
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
    used = dict(theirs.named_parameters())
    if not config.tie_word_embeddings:
        for name_in_use in ("cls.predictions.bias", "lm_head.bias"):
            used.pop(name_in_use, None)  # the decoder's is added instead
    assert sum(w.numel() for w in ours.parameters()) == sum(w.numel() for w in used.values())
    assert not weights & {weight.data_ptr() for weight in ours.parameters()}


@pytest.mark.parametrize("name", THEIRS)
def test_there_and_back_changes_no_weight(name, tmp_path, tokenizer):
    kind, config = THEIRS[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path / "theirs")
    save_pretrained(tmp_path / "ours", load_pretrained(tmp_path / "theirs"), tokenizer, 32, "")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    added = after.keys() - before.keys()
    assert after.keys() >= before.keys()
    assert all(".pooler.dense." in name for name in added)
    if "cls.predictions.decoder.bias" in before:
        before["cls.predictions.bias"] = before["cls.predictions.decoder.bias"]  # the one that is in use
    if "lm_head.decoder.bias" in before:
        before["lm_head.bias"] = before["lm_head.decoder.bias"]
    for key in before:
        rows = 120 if key in OUTPUT_BIASES else None
        assert torch.equal(before[key][:rows], after[key][:rows]), key


@pytest.mark.parametrize("name", ["bert", "roberta"])
def test_every_load_has_the_same_pooler_which_a_classifier_does_not_take(name, tmp_path, tokenizer):
    kind, config = THEIRS[name]
    kind(config).save_pretrained(tmp_path / "theirs")
    folder = save_pretrained(tmp_path / "ours", load_pretrained(tmp_path / "theirs"), tokenizer, 32, "")
    ids = torch.arange(5, 13)[None]
    first, second = (AutoModel.from_pretrained(folder).eval()(ids).pooler_output for _ in range(2))
    assert torch.equal(first, second)
    written = load_file(folder / "model.safetensors")[f"{name}.pooler.dense.weight"]
    assert not torch.equal(load_classifier(folder, ClassifierConfig(("a", "b"))).pooler.dense.weight, written)


@pytest.mark.parametrize(
    ("kind", "config"), [(RobertaForMaskedLM, RobertaConfig), (XLMRobertaForMaskedLM, XLMRobertaConfig)]
)
def test_first_position_follows_the_padding_id(kind, config, tmp_path, tokenizer):
    theirs = shaken(kind(config(**{**SIZES, "pad_token_id": 1, "type_vocab_size": 1})))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert (ours.config.position_offset, ours.config.max_position_embeddings) == (2, 30)
    same_logits(ours, theirs)
    for offset in (1, 2, 4):  # whatever ours is: the tokenizer's padding id is 0
        model = shaken(MaskedLM(replace(CLASSIC, position_offset=offset)))
        folder = save_pretrained(tmp_path / f"ours{offset}", model, tokenizer, 32, "")
        again, stock = load_pretrained(folder), RobertaForMaskedLM.from_pretrained(folder).eval()
        assert again.config == replace(model.config, position_offset=1)
        assert stock.config.pad_token_id == 0
        torch.testing.assert_close(again(IDS, MASK)[..., :120], model(IDS, MASK)[..., :120])
        same_logits(again, stock)


@pytest.mark.parametrize("width", [8, 16])
def test_discriminator_is_an_encoder_without_its_head(width, tmp_path, caplog):
    theirs = shaken(ElectraForPreTraining(ElectraConfig(**SIZES, embedding_size=width)))
    theirs.save_pretrained(tmp_path)
    ours = load_pretrained(tmp_path)
    assert ours.config.embedding_width == width
    with torch.no_grad():
        expected = theirs.electra(input_ids=IDS, attention_mask=MASK).last_hidden_state[REAL]
        torch.testing.assert_close(ours.encoder(IDS, MASK)[REAL], expected, atol=1e-5, rtol=1e-5)
    for name in ("generator_lm_head.bias", "generator_predictions.dense.weight", "initialised"):
        assert name in caplog.text


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
    "roberta": (RobertaModel, RobertaConfig(**SIZES)),
    "distilbert": (DistilBertModel, DistilBertConfig(**SIZES)),
    "electra": (ElectraModel, ElectraConfig(**SIZES, embedding_size=8)),
    "bert": (BertModel, BertConfig(**SIZES)),
    "modernbert": (ModernBertModel, ModernBertConfig(**SIZES, **GLOBAL)),
}
CLASSIFIERS = {
    "roberta": (RobertaForSequenceClassification, RobertaConfig(**SIZES)),
    "bert": (BertForSequenceClassification, BertConfig(**SIZES)),
    "modernbert": (ModernBertForSequenceClassification, ModernBertConfig(**SIZES, **GLOBAL)),
    "distilbert": (DistilBertForSequenceClassification, DistilBertConfig(**SIZES)),
    "electra": (ElectraForSequenceClassification, ElectraConfig(**SIZES, embedding_size=8)),
}


HEAD_BIAS = {
    "bert": "cls.predictions.bias",
    "modernbert": "decoder.bias",
    "roberta": "lm_head.bias",
    "distilbert": "vocab_projector.bias",
    "electra": "generator_lm_head.bias",
}


@pytest.mark.parametrize(
    ("models", "name"),
    [(BARE, name) for name in BARE] + [(CLASSIFIERS, name) for name in CLASSIFIERS],
    ids=[*BARE, *(f"{name} classifier" for name in CLASSIFIERS)],
)
def test_missing_head_is_initialised_and_named(models, name, tmp_path, caplog):
    kind, config = models[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path)
    ours = load_masked_lm(tmp_path)
    base = theirs if models is BARE else theirs.base_model
    with torch.no_grad():
        expected = base(input_ids=IDS, attention_mask=MASK).last_hidden_state[REAL]
        torch.testing.assert_close(ours.encoder(IDS, MASK)[REAL], expected, atol=1e-5, rtol=1e-5)
    assert "initialised" in caplog.text
    assert HEAD_BIAS[name] in caplog.text
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


def test_untied_bias_is_read_under_either_name(tmp_path):
    theirs = shaken(BertForMaskedLM(BertConfig(**SIZES, tie_word_embeddings=False)))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["cls.predictions.bias"] = tensors.pop("cls.predictions.decoder.bias")
    save_file(tensors, path)
    same_logits(load_pretrained(tmp_path), theirs)
    del tensors["cls.predictions.bias"], tensors["cls.predictions.decoder.weight"]
    save_file(tensors, path)
    again = load_pretrained(tmp_path)  # a head that is not whole is initialised
    assert again.head.output.weight.std() > 0
    assert again.head.bias.eq(0).all()


V4_THETAS = {"global_rope_theta": 777.0, "local_rope_theta": 55.0}
SAME_THETA = dict.fromkeys(THETAS, THETAS["full_attention"])


@pytest.mark.parametrize(
    ("changes", "older"),
    [
        ({"rope_parameters": THETAS}, V4_THETAS),  # local layers are the default
        ({"rope_parameters": THETAS, **GLOBAL}, {**V4_THETAS, "global_attn_every_n_layers": 1}),
        ({"rope_parameters": SAME_THETA}, {**V4_THETAS, "local_rope_theta": None}),
        ({}, {}),
    ],
)
def test_modernbert_config_of_transformers_4_is_read(changes, older, tmp_path):
    theirs = shaken(ModernBertForMaskedLM(ModernBertConfig(**SIZES, local_attention=6, **changes)))
    theirs.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    del written["rope_parameters"], written["layer_types"]
    path.write_text(json.dumps(written | older))
    same_logits(load_pretrained(tmp_path), theirs)


@pytest.mark.parametrize("family", [BERT, MODERNBERT, ROBERTA, ELECTRA], ids=lambda family: family.model_type)
def test_what_a_config_leaves_out_is_the_default_of_the_class(family):
    kinds = {"bert": BertConfig, "modernbert": ModernBertConfig, "roberta": RobertaConfig}
    config = kinds.get(family.model_type, ElectraConfig)(**SIZES)
    assert family.read_config(SIZES) == family.read_config(config.to_dict())


def test_published_modernbert_config_is_read():
    published = {
        "model_type": "modernbert",
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_hidden_layers": 22,
        "num_attention_heads": 12,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_attention": 128,
        "local_rope_theta": 10000.0,
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "classifier_pooling": "mean",
        "layer_norm_eps": 1e-05,
        "norm_eps": 1e-05,
        "position_embedding_type": "absolute",
        "reference_compile": None,
        "tie_word_embeddings": True,
    }
    config = MODERNBERT.read_config(published)
    assert total_parameters(config) == 149_655_232
    assert [config.is_local(layer) for layer in range(7)] == [False, True, True, False, True, True, False]
    assert (config.rotary_theta, config.local_rotary_theta, config.pooling) == (160000.0, 10000.0, "mean")


def test_fixed_positions_stay_fixed(tmp_path, tokenizer):
    model = MaskedLM(replace(CLASSIC, position_embedding="sinusoidal"))
    again = load_pretrained(save_pretrained(tmp_path / "model", model, tokenizer, 32, ""))
    assert not again.encoder.embeddings.position.weight.requires_grad
    assert torch.equal(again.encoder.embeddings.position.weight, sinusoids(32, 16))


UNSUPPORTED = {
    "hidden_act=gelu_new": (BERT, {"hidden_act": "gelu_new"}),
    "position_embedding_type=relative_key": (BERT, {"position_embedding_type": "relative_key"}),
    "is_decoder=True": (BERT, {"is_decoder": True}),
    "type_vocab_size=0": (BERT, {"type_vocab_size": 0}),
    "position_embedding=rotary": (BERT, {"position_embedding": "rotary"}),
    r"layer_types\[1\]=sliding_attention \(only full_attention\)": (
        MODERNBERT,
        {"layer_types": ["full_attention"] + ["sliding_attention"] * 3},
    ),
    r"layer_types of 4 entries \(only 3\)": (
        MODERNBERT,
        {"layer_types": ["full_attention"] * 4, "num_hidden_layers": 3},
    ),
    "classifier_activation=silu": (MODERNBERT, {"classifier_activation": "silu"}),
    "hidden_activation=relu": (MODERNBERT, {"hidden_activation": "relu"}),
    "decoder_bias=False": (MODERNBERT, {"decoder_bias": False}),
    "rope_type=yarn": (
        MODERNBERT,
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}},
    ),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_we_cannot_compute_is_refused(name):
    family, change = UNSUPPORTED[name]
    config = next(config for config in OURS.values() if not family.unrepresented(config))
    written = family.write_config(config)
    assert family.read_config(written) == config
    with pytest.raises(InputError, match=f"not supported.*{name}"):
        family.read_config({**written, **change})


def test_unknown_activation_of_our_own_family_is_refused():
    written = OWN.write_config(ModelConfig())
    known = "model.activation: expected relu, gelu, geglu or swiglu, got 'tanh'"
    with pytest.raises(InputError, match=known):
        OWN.read_config({**written, "activation": "tanh"})


def test_absent_size_is_named():
    written = BERT.write_config(CLASSIC)
    del written["num_attention_heads"]
    with pytest.raises(InputError, match="num_attention_heads"):
        BERT.read_config(written)


@pytest.mark.parametrize("name", NO_COUNTERPART)
def test_own_format_is_announced_with_the_field_and_read_back(name, tmp_path, tokenizer, caplog):
    model = shaken(MaskedLM(NO_COUNTERPART[name]))
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    closest = "ModernBertForMaskedLM" if model.config.position_embedding == "rotary" else "BertForMaskedLM"
    assert f"{closest} has no counterpart for model.{name}\n" in caplog.text
    written = json.loads((folder / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("mlm", ["MaskedLM"])
    again = load_pretrained(folder)
    assert again.config == model.config
    torch.testing.assert_close(again(IDS, MASK)[..., :120], model(IDS, MASK)[..., :120], atol=0, rtol=0)


@pytest.mark.parametrize("name", OURS)
def test_each_model_belongs_to_one_stock_family(name):
    config = OURS[name]
    fitting = [family.model_type for family in FAMILIES if not family.unrepresented(config)]
    assert fitting.pop() == OWN.model_type
    wider = {XLM_ROBERTA.model_type, ELECTRA.model_type}  # another name, and BERT with one more switch
    assert not set(fitting[1:]) - wider
    assert architecture_of(config) == COUNTERPART.get(re.split("[ ,]", name)[0], "MaskedLM")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_table_names_nothing_that_does_not_exist(family):
    models: list[nn.Module] = [MaskedLM(config) for config in OURS.values()]
    models += [SequenceClassifier(config, HEADS["a score"]) for config in OURS.values()]
    ours = {name.rpartition(".")[0] for model in models for name in model.state_dict()}
    layers = {name.replace(".layers.1.", ".layers.N.") for name in ours}
    assert set(family.modules) <= layers
    fields = asdict(MODERN).keys()
    assert {*family.fixed, *family.paths, *family.unused} <= fields


HEADS = {
    "three classes": ClassifierConfig(("busy", "calm", "noisy")),
    "a score": ClassifierConfig(("stars",), "regression", dropout=0.0),
    "any of three": ClassifierConfig(("busy", "calm", "noisy"), "multilabel"),
}
LABELS = {"id2label": {0: "busy", 1: "calm", 2: "noisy"}, "label2id": {"busy": 0, "calm": 1, "noisy": 2}}
THEIR_CLASSIFIERS = {
    **CLASSIFIERS,
    "roberta, three classes": (RobertaForSequenceClassification, RobertaConfig(**SIZES, **LABELS)),
    "bert, three classes": (
        BertForSequenceClassification,
        BertConfig(**SIZES, **LABELS, classifier_dropout=0.3, problem_type="single_label_classification"),
    ),
    "bert, a score": (BertForSequenceClassification, BertConfig(**SIZES, num_labels=1)),
    "bert, any of three": (
        BertForSequenceClassification,
        BertConfig(**SIZES, **LABELS, problem_type="multi_label_classification"),
    ),
    "modernbert, three classes, mean": (
        ModernBertForSequenceClassification,
        ModernBertConfig(
            **SIZES, **GLOBAL, **LABELS, classifier_pooling="mean", classifier_bias=True, norm_bias=True
        ),
    ),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", OURS)
def test_stock_class_reads_our_classifier(name, head, tmp_path, tokenizer):
    model = shaken(SequenceClassifier(OURS[name], HEADS[head]))
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    again = load_pretrained(folder)
    assert (again.config, again.classifier_config) == (model.config, model.classifier_config)
    torch.testing.assert_close(again(IDS, MASK), model(IDS, MASK), atol=0, rtol=0)
    architecture = architecture_of(model.config, HEADS[head])
    if architecture == OWN.classifier:
        return
    stock = getattr(transformers, architecture)
    theirs, loading = stock.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), loading
    assert theirs.config.id2label == dict(enumerate(HEADS[head].labels))
    assert theirs.config.num_labels == len(HEADS[head].labels)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=IDS, attention_mask=MASK).logits
    torch.testing.assert_close(model(IDS, MASK), expected, atol=1e-5, rtol=1e-5)
    if head == "a score":
        targets = torch.tensor([0.5, 2.0])
        loss = nn.functional.mse_loss(expected[:, 0], targets)
    elif head == "any of three":
        targets = torch.tensor([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])
        loss = nn.functional.binary_cross_entropy_with_logits(expected, targets)
    else:
        targets = torch.tensor([1, 2])
        loss = nn.functional.cross_entropy(expected, targets)
    stock_loss = theirs(input_ids=IDS, attention_mask=MASK, labels=targets).loss
    assert stock_loss.item() == pytest.approx(loss.item(), rel=1e-5)
    assert type(AutoModelForSequenceClassification.from_pretrained(folder)) is stock


@pytest.mark.parametrize("name", THEIR_CLASSIFIERS)
def test_we_read_stock_classifier_and_change_no_weight(name, tmp_path, tokenizer):
    kind, config = THEIR_CLASSIFIERS[name]
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_pretrained(tmp_path / "theirs")
    assert isinstance(ours, SequenceClassifier)
    assert ours.classifier_config.labels == tuple(theirs.config.id2label.values())
    assert (ours.classifier_config.label_type == "regression") == ("score" in name)
    assert (ours.classifier_config.label_type == "multilabel") == ("any" in name)
    types = (
        {"token_type_ids": torch.arange(20).expand(2, 20) // 10}
        if kind is BertForSequenceClassification
        else {}
    )
    with torch.no_grad():
        expected = theirs(input_ids=IDS, attention_mask=MASK, **types).logits
    torch.testing.assert_close(ours(IDS, MASK, **types), expected, atol=1e-5, rtol=1e-5)
    save_pretrained(tmp_path / "ours", ours, tokenizer, 32, "")
    before, after = (load_file(tmp_path / folder / "model.safetensors") for folder in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_dropout_of_a_classifier_is_the_stock_class_s(tmp_path):
    expected = {"bert": 0.1, "bert, three classes": 0.3, "modernbert": 0.0}
    for name, share in expected.items():
        kind, config = THEIR_CLASSIFIERS[name]
        kind(config).save_pretrained(tmp_path / name)
        assert load_classifier(tmp_path / name).dropout.p == share


@pytest.mark.parametrize(
    ("kind", "config", "kept"),
    [
        (BertModel, BertConfig(**SIZES), "pooler.dense.weight"),
        (BertForSequenceClassification, BertConfig(**SIZES), "bert.pooler.dense.weight"),
        (BertForMaskedLM, BertConfig(**SIZES), None),
        (ModernBertForMaskedLM, ModernBertConfig(**SIZES, **GLOBAL), "head.dense.weight"),
    ],
)
def test_new_classifier_takes_over_what_stock_classes_do(kind, config, kept, tmp_path, caplog):
    theirs = shaken(kind(config))
    theirs.save_pretrained(tmp_path)
    torch.manual_seed(3)
    with caplog.at_level("INFO"):
        ours = load_classifier(tmp_path, HEADS["three classes"])
    assert "classifier.weight" in caplog.text
    assert ours.classifier.weight.shape == (3, 16)
    assert ours.classifier.weight.std() < 0.04
    if kept is None:
        assert "bert.pooler.dense.weight" in caplog.text
        assert ours.pooler.dense.weight.std() < 0.04
    else:
        assert "dense" not in caplog.text
        assert torch.equal(ours.pooler.dense.weight, theirs.state_dict()[kept])
    torch.manual_seed(3)
    again = load_classifier(tmp_path, HEADS["three classes"])
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize("name", NO_COUNTERPART)
def test_heads_of_our_own_format_change_places(name, tmp_path, tokenizer, caplog):
    model = shaken(MaskedLM(NO_COUNTERPART[name]))
    save_pretrained(tmp_path / "masked", model, tokenizer, 32, "")
    classifier = load_classifier(tmp_path / "masked", HEADS["three classes"])
    folder = save_pretrained(tmp_path / "classifier", shaken(classifier), tokenizer, 32, "")
    again = load_pretrained(folder)
    torch.testing.assert_close(again(IDS, MASK), classifier(IDS, MASK), atol=0, rtol=0)
    masked = load_masked_lm(folder)
    torch.testing.assert_close(masked.encoder(IDS, MASK), classifier.encoder(IDS, MASK), atol=0, rtol=0)
    assert masked.head.bias.eq(0).all()
    if masked.config.head_transform:
        taken_over = torch.equal(masked.head.dense.weight, classifier.pooler.dense.weight)
        assert taken_over == (name != "embedding_size=8")


def test_last_layer_is_kept_only_for_the_same_labels(tmp_path, tokenizer):
    model = shaken(SequenceClassifier(MODERN, HEADS["three classes"]))
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    same = load_classifier(folder, replace(HEADS["three classes"], dropout=0.5))
    assert torch.equal(same.classifier.weight, model.classifier.weight)
    assert same.dropout.p == 0.5
    names = tuple(reversed(HEADS["three classes"].labels))
    swapped = load_classifier(folder, ClassifierConfig(names))
    assert torch.equal(swapped.classifier.bias, model.classifier.bias.flip(0))
    other = load_classifier(folder, ClassifierConfig(("yes", "no")))
    assert other.classifier.bias.eq(0).all()
    assert torch.equal(other.pooler.dense.weight, model.pooler.dense.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type=ranking is not supported"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label has the ids 1, 2, not 0 to 1"),
        ({"architectures": ["ModernBertForMaskedLM"]}, "holds no classifier but ModernBertForMaskedLM"),
    ],
)
def test_classifier_that_we_cannot_compute_is_refused(change, message, tmp_path, tokenizer):
    model = SequenceClassifier(MODERN, HEADS["three classes"])
    folder = save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=message):
        load_classifier(folder)
    assert load_classifier(folder, ClassifierConfig(("a", "b"))).classifier.out_features == 2


def test_reason_for_our_own_format_names_the_pooling(tmp_path, tokenizer, caplog):
    model = SequenceClassifier(replace(CLASSIC, pooling="mean"), HEADS["three classes"])
    save_pretrained(tmp_path / "model", model, tokenizer, 32, "")
    assert "BertForSequenceClassification has no counterpart for model.pooling=mean" in caplog.text


def test_new_head_pools_as_the_model_does_or_as_asked(tmp_path):
    config = ModernBertConfig(**SIZES, **GLOBAL, classifier_pooling="mean")
    ModernBertForMaskedLM(config).save_pretrained(tmp_path)
    assert load_classifier(tmp_path, HEADS["three classes"]).pooler.pooling == "mean"
    assert load_classifier(tmp_path, HEADS["three classes"], "cls").pooler.pooling == "cls"


def test_unknown_pooling_is_refused(tmp_path):
    config = ModernBertConfig(**SIZES, **GLOBAL)
    ModernBertForMaskedLM(config).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "classifier_pooling": "max"}))
    with pytest.raises(
        InputError,
        match=r"model.pooling: expected cls, mean, cls_tanh, cls_relu, cls_gelu or null, got 'max'",
    ):
        load_pretrained(tmp_path)
