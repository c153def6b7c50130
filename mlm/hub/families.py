"""One table for each family of models: its names of our fields and our weights.

To add a family, write its table, as `family.py` explains, and append it to FAMILIES.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mlm.config.model import ClassifierConfig, ModelConfig, Pooling
from mlm.hub.family import Family, Json, whole_number

COMMON: dict[str, Sequence[Any]] = {
    "embedding_size": [None],
    "norm": ["layernorm"],
    "embedding_norm": [True],
    "final_norm": [None],
    "position_offset": [0],
    "attention": ["bidirectional"],
    "head_transform": [True],
    "pooling": get_args(Pooling),
}
"""Values that all stock families fix, unless a table says otherwise."""


def _assumed_by_bert(written: Json) -> Json:
    return {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "embedding_dropout": written.get("hidden_dropout_prob", 0.1),  # one for embeddings and layers
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
        "position_embedding": "learned",
        "pooling": "cls_tanh",
    }


def _like_bert(prefix: str) -> dict[str, str | Sequence[str]]:
    """Return the names of the encoder's modules that several families share."""
    return {
        "encoder.embeddings.token": f"{prefix}.embeddings.word_embeddings",
        "encoder.embeddings.position": f"{prefix}.embeddings.position_embeddings",
        "encoder.embeddings.token_type": f"{prefix}.embeddings.token_type_embeddings",
        "encoder.embeddings.norm": f"{prefix}.embeddings.LayerNorm",
        "encoder.layers.N.attention.query_key_value": [
            f"{prefix}.encoder.layer.N.attention.self.{part}" for part in ("query", "key", "value")
        ],
        "encoder.layers.N.attention.output": f"{prefix}.encoder.layer.N.attention.output.dense",
        "encoder.layers.N.attention_norm": f"{prefix}.encoder.layer.N.attention.output.LayerNorm",
        "encoder.layers.N.feed_forward.up": f"{prefix}.encoder.layer.N.intermediate.dense",
        "encoder.layers.N.feed_forward.down": f"{prefix}.encoder.layer.N.output.dense",
        "encoder.layers.N.feed_forward_norm": f"{prefix}.encoder.layer.N.output.LayerNorm",
    }


BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    classifier="BertForSequenceClassification",
    assumed=_assumed_by_bert,
    fixed=COMMON
    | {
        "norm_position": ["post"],
        "position_embedding": ["learned", "sinusoidal"],  # a fixed table is saved as a learned one
        "global_attn_every_n_layers": [1],
        "activation": ["gelu", "relu"],
        "type_vocab_size": range(1, sys.maxsize),
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "head_bias"), (True,)),
    },
    unused=["rotary_theta", "local_rotary_theta", "local_attention", "first_attention_norm"],
    paths={
        "activation": ["hidden_act"],
        "norm_eps": ["layer_norm_eps"],
        "hidden_dropout": ["hidden_dropout_prob"],
        "attention_dropout": ["attention_probs_dropout_prob"],
    },
    values={"activation": {"gelu": "gelu", "relu": "relu"}},
    constants={"position_embedding_type": "absolute", "is_decoder": False},
    modules=_like_bert("bert")
    | {
        "head": "cls.predictions",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.output": "cls.predictions.decoder",
        "pooler.dense": "bert.pooler.dense",
    },
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    untied_copies={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    ignored=r"bert\.pooler|bert\.embeddings\.position_ids|cls\.(predictions|seq)|classifier|qa_",
    poolings=("cls_tanh",),
    pooler="bert.pooler.dense",
    dropout_path="hidden_dropout_prob",
)


def _positions_of_roberta(written: Json) -> Json:
    """Leave out the rows of the table for the ids up to that of padding, which no token takes."""
    offset = whole_number(written, "pad_token_id", 1) + 1
    return {
        "position_offset": offset,
        "max_position_embeddings": whole_number(written, "max_position_embeddings", 512) - offset,
    }


ROBERTA = replace(
    BERT,
    model_type="roberta",
    architecture="RobertaForMaskedLM",
    classifier="RobertaForSequenceClassification",
    fixed={**BERT.fixed, "position_offset": range(1, sys.maxsize)},
    unused=[*BERT.unused, "position_offset", "max_position_embeddings"],
    derived=_positions_of_roberta,
    constants={
        **BERT.constants,
        "max_position_embeddings": lambda config: config.position_rows,
        "pad_token_id": lambda config: config.position_offset - 1,
    },
    modules=_like_bert("roberta")
    | {
        "head": "lm_head",
        "head.dense": "lm_head.dense",
        "head.norm": "lm_head.layer_norm",
        "head.output": "lm_head.decoder",
        "pooler.dense": "classifier.dense",
        "classifier": "classifier.out_proj",
    },
    untied_copies={"lm_head.bias": "lm_head.decoder.bias"},
    pooler="roberta.pooler.dense",
    positions_follow_padding=True,
    ignored=r"roberta\.pooler|roberta\.embeddings\.position_ids|lm_head|classifier|qa_",
)

XLM_ROBERTA = replace(
    ROBERTA,
    model_type="xlm-roberta",
    architecture="XLMRobertaForMaskedLM",
    classifier="XLMRobertaForSequenceClassification",
)
"""The same classes under other names; such a model is written as RoBERTa."""


DISTILBERT = Family(
    model_type="distilbert",
    architecture="DistilBertForMaskedLM",
    classifier="DistilBertForSequenceClassification",
    assumed=lambda written: (
        _assumed_by_bert(written)
        | {
            **dict.fromkeys(("dropout", "attention_dropout"), 0.1),
            "activation": "gelu",
            "pooling": "cls_relu",
        }
        | {"embedding_dropout": written.get("dropout", 0.1)}
    ),
    fixed={**BERT.fixed, "norm_eps": [1e-12], "type_vocab_size": [0]},
    unused=BERT.unused,
    paths={
        "hidden_size": ["dim"],
        "num_hidden_layers": ["n_layers"],
        "num_attention_heads": ["n_heads"],
        "intermediate_size": ["hidden_dim"],
        "hidden_dropout": ["dropout"],
    },
    values=BERT.values,
    modules=_like_bert("distilbert")
    | {
        "encoder.layers.N.attention.query_key_value": [
            f"distilbert.transformer.layer.N.attention.{part}" for part in ("q_lin", "k_lin", "v_lin")
        ],
        "encoder.layers.N.attention.output": "distilbert.transformer.layer.N.attention.out_lin",
        "encoder.layers.N.attention_norm": "distilbert.transformer.layer.N.sa_layer_norm",
        "encoder.layers.N.feed_forward.up": "distilbert.transformer.layer.N.ffn.lin1",
        "encoder.layers.N.feed_forward.down": "distilbert.transformer.layer.N.ffn.lin2",
        "encoder.layers.N.feed_forward_norm": "distilbert.transformer.layer.N.output_layer_norm",
        "head": "vocab_projector",
        "head.dense": "vocab_transform",
        "head.norm": "vocab_layer_norm",
        "head.output": "vocab_projector",
        "pooler.dense": "pre_classifier",
    },
    poolings=("cls_relu",),
    dropout_path="seq_classif_dropout",
    ignored=r"vocab_|pre_classifier|classifier|qa_|distilbert\.embeddings\.position_ids",
)

ELECTRA = replace(
    BERT,
    model_type="electra",
    pooler="",
    architecture="ElectraForMaskedLM",
    classifier="ElectraForSequenceClassification",
    assumed=lambda written: _assumed_by_bert(written) | {"pooling": "cls_gelu"},
    fixed={name: allowed for name, allowed in BERT.fixed.items() if name != "embedding_size"}
    | {"activation": ["gelu"]},
    unused=[*BERT.unused, "embedding_size"],
    derived=lambda written: {"embedding_size": whole_number(written, "embedding_size", 128)},
    constants={
        **BERT.constants,
        "hidden_act": "gelu",
        "embedding_size": lambda config: config.embedding_width,
    },
    modules=_like_bert("electra")
    | {
        "encoder.embeddings.projection": "electra.embeddings_project",
        "head": "generator_lm_head",
        "head.dense": "generator_predictions.dense",
        "head.norm": "generator_predictions.LayerNorm",
        "head.output": "generator_lm_head",
        "pooler.dense": "classifier.dense",
        "classifier": "classifier.out_proj",
    },
    poolings=("cls_gelu",),
    ignored=r"discriminator_|generator_|electra\.embeddings\.position_ids|classifier|qa_|sequence_summary",
)
"""Published models are mostly discriminators: without a masked-LM head."""

FULL, LOCAL = "full_attention", "sliding_attention"
GATES = {"geglu": "gelu", "swiglu": "silu"}
"""Gated activations, and the class's name for the non-linearity of their gate."""


def _assumed_by_modernbert(written: Json) -> Json:
    theta = written.get("global_rope_theta", 160000.0)  # this and the next are transformers 4's names
    local_theta = written.get("local_rope_theta", 10000.0)
    types = written.get("layer_types")
    types = [FULL, LOCAL, LOCAL, FULL] if types is None else list(types)
    return {
        "hidden_activation": "gelu",
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "classifier_pooling": "cls",
        "local_attention": 128,
        "global_attn_every_n_layers": types.index(FULL, 1) if FULL in types[1:] else len(types),
        "rope_parameters": {
            FULL: {"rope_theta": theta},
            LOCAL: {"rope_theta": theta if local_theta is None else local_theta},
        },
    }


MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    classifier="ModernBertForSequenceClassification",
    assumed=_assumed_by_modernbert,
    fixed=COMMON
    | {
        "norm_position": ["pre"],
        "position_embedding": ["rotary"],
        "activation": list(GATES),
        "type_vocab_size": [0],
        "first_attention_norm": [False],
        "pooling": ["cls", "mean"],  # the class supports no other
    },
    paths={
        "pooling": ["classifier_pooling"],
        "activation": ["hidden_activation"],
        "rotary_theta": [f"rope_parameters.{FULL}.rope_theta", "global_rope_theta"],
        "local_rotary_theta": [f"rope_parameters.{LOCAL}.rope_theta", "local_rope_theta"],
        "head_bias": ["classifier_bias"],
        "hidden_dropout": ["mlp_dropout"],  # the class drops within the feed-forward part, not after it
    },
    values={"activation": GATES},
    constants={
        "classifier_activation": lambda config: GATES[config.activation],
        "decoder_bias": True,
        "layer_types": lambda config: [
            LOCAL if config.is_local(layer) else FULL for layer in range(config.num_hidden_layers)
        ],
        f"rope_parameters.{FULL}.rope_type": "default",
        f"rope_parameters.{LOCAL}.rope_type": "default",
    },
    modules={
        "encoder.embeddings.token": "model.embeddings.tok_embeddings",
        "encoder.embeddings.norm": "model.embeddings.norm",
        "encoder.layers.N.attention_norm": "model.layers.N.attn_norm",
        "encoder.layers.N.attention.query_key_value": "model.layers.N.attn.Wqkv",
        "encoder.layers.N.attention.output": "model.layers.N.attn.Wo",
        "encoder.layers.N.feed_forward_norm": "model.layers.N.mlp_norm",
        "encoder.layers.N.feed_forward.gate_up": "model.layers.N.mlp.Wi",
        "encoder.layers.N.feed_forward.down": "model.layers.N.mlp.Wo",
        "encoder.final_norm": "model.final_norm",
        "head": "decoder",
        "head.output": "decoder",
        "pooler.dense": "head.dense",  # a classifier starts from the transform of the masked-LM head
        "pooler.norm": "head.norm",
    },
    ignored=r"decoder|classifier",
)

_HINTS = get_type_hints(ModelConfig)
OWN = Family(
    model_type="mlm",
    architecture="MaskedLM",
    classifier="SequenceClassifier",
    assumed=lambda _: asdict(ModelConfig()),
    fixed={name: get_args(hint) for name, hint in _HINTS.items() if get_origin(hint) is Literal},
    modules={"pooler.dense": "head.dense", "pooler.norm": "head.norm"},
    ignored=r"head\.|classifier",
)

FAMILIES = (BERT, ROBERTA, DISTILBERT, ELECTRA, MODERNBERT, XLM_ROBERTA, OWN)
"""In the order in which they are tried for a model; the last represents every model."""


def family_of(config: ModelConfig, classifier: ClassifierConfig | None = None) -> Family:
    """Return the first family that can represent a model, and its classifier if it has one."""
    return next(family for family in FAMILIES if not family.unrepresented(config, classifier))


def architecture_of(config: ModelConfig, classifier: ClassifierConfig | None = None) -> str:
    """Return the name of the class that reads a model of this configuration."""
    family = family_of(config, classifier)
    return family.classifier if classifier else family.architecture


def missing_counterparts(config: ModelConfig, classifier: ClassifierConfig | None = None) -> str:
    """Return the reason, as a message, why the closest stock family cannot represent a model."""
    closest = min(FAMILIES[:-1], key=lambda family: len(family.unrepresented(config, classifier)))
    faults = closest.unrepresented(config, classifier)
    name = closest.classifier if classifier else closest.architecture
    return f"{name} has no counterpart for {', '.join(f'model.{fault}' for fault in faults)}"
