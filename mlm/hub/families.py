"""How each family of models spells our fields and our weights: one closed table a family, read in both directions.

- a field, a constant or a token id is written under a dotted path of config.json
- a module of ours stands for one of theirs, or for several whose weights are stacked into one of ours
- `fixed` holds what the family's class can only do one way: it decides which family a configuration belongs to
- to add a family, write its table and append it to FAMILIES

N stands for the number of a layer.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mlm.config.errors import InputError
from mlm.config.model import ModelConfig

Json = dict[str, Any]

TOKEN_IDS = {
    "pad_token_id": "pad",
    "cls_token_id": "cls",
    "sep_token_id": "sep",
    "mask_token_id": "mask",
    "bos_token_id": "cls",
    "eos_token_id": "sep",
}
"""Token ids in config.json, by their field in `SpecialTokens`; the last two are what ModernBERT adds."""


@dataclass(frozen=True)
class Family:
    """One family's spelling of everything."""

    model_type: str
    """What config.json calls it."""
    architecture: str
    """Its class with a masked-LM head."""
    fields: Sequence[tuple[str, str]]
    """Our field and its path; all are written in order, the first that is there is read."""
    assumed: Callable[[Json], Json]
    """What the class takes for paths that a given config.json leaves out."""
    fixed: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Our field and the values the class can represent; the first is read where `fields` does not name it."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Path and the value it must have; a list of one element stands for one a layer."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Path and the value written for older releases of the class, never read."""
    modules: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Our module and theirs; a module that is not named is spelt the same."""
    prefix: str = ""
    """What their encoder's names begin with in a model with a head, and do not in a bare one."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in older files, and what they are called now."""
    ignored: str = "$^"
    """Pattern of the beginning of names that a masked language model does not need."""
    inputs: Sequence[str] = ("input_ids", "attention_mask")
    """What the model takes from the tokenizer."""

    def unrepresented(self, config: ModelConfig) -> list[str]:
        """Return our fields whose value the class cannot represent."""
        return [name for name, allowed in self.fixed.items() if getattr(config, name) not in allowed]

    def write_config(self, config: ModelConfig) -> Json:
        """Return config.json for `config`, without token ids."""
        result: Json = {"model_type": self.model_type, "architectures": [self.architecture], "dtype": "float32"}
        for path, value in {**self.constants, **self.hints}.items():
            _set(result, path, _per_layer(value, config.num_hidden_layers))
        for ours, path in self.fields:
            _set(result, path, getattr(config, ours))
        return result

    def read_config(self, written: Json) -> ModelConfig:
        """Return our configuration for the content of a config.json.

        Raises:
            InputError: a field is missing, or has a value that `mlm` cannot compute.
        """
        written = {**self.assumed(written), **written}
        values = {ours: allowed[0] for ours, allowed in self.fixed.items()}
        for ours, path in reversed(self.fields):
            if (value := _get(written, path)) is not _ABSENT:
                values[ours] = value
        missing = [path for ours, path in self.fields if ours not in values]
        if missing:
            raise InputError(f"has no {', '.join(missing)}")
        config = ModelConfig(**values)
        for path, value in self.constants.items():
            expected = _per_layer(value, config.num_hidden_layers)
            found = _get(written, path)
            if found is not _ABSENT and found != expected:
                raise InputError(f"{path}={found} is not supported for {self.model_type}; supported: {expected}")
        for ours in self.unrepresented(config):
            raise InputError(f"{ours}={getattr(config, ours)} is not supported for {self.model_type}")
        return config

    def their_names(self, name: str) -> list[str]:
        """Return the names in the file of the weights that our weight `name` is stacked from."""
        module, _, leaf = name.rpartition(".")
        layer = re.search(r"\.layers\.(\d+)", module)
        general = module if layer is None else module.replace(layer[0], ".layers.N", 1)
        theirs = self.modules.get(general, (general,))
        return [part.replace(".N", f".{layer[1]}" if layer else ".N") + f".{leaf}" for part in theirs]

    def current_names(self, names: Sequence[str]) -> dict[str, str]:
        """Return, for each name in a file, what it is called in a model with a head today; ignored ones are left out."""
        bare = not any(name.startswith(self.prefix) for name in names)
        result = {}
        for name in names:
            current = self.prefix + name if bare else name
            for old, new in self.renamed.items():
                current = current.replace(old, new)
            if not re.match(self.ignored, current):
                result[name] = current
        return result


_ABSENT = object()


def _get(tree: Json, path: str) -> Any:
    for key in path.split("."):
        tree = tree.get(key, _ABSENT) if isinstance(tree, dict) else _ABSENT  # type: ignore[assignment]
    return tree


def _set(tree: Json, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _per_layer(value: Any, num_layers: int) -> Any:
    return value * num_layers if isinstance(value, list) else value


_SIZES = tuple(
    (name, name)
    for name in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
        "max_position_embeddings",
        "initializer_range",
    )
)


def _assumed_by_bert(written: Json) -> Json:
    return {
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "initializer_range": 0.02,
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "embedding_dropout": written.get("hidden_dropout_prob", 0.1),
    }


BERT = Family(
    model_type="bert",
    architecture="BertForMaskedLM",
    fields=(
        *_SIZES,
        ("norm_eps", "layer_norm_eps"),
        ("type_vocab_size", "type_vocab_size"),
        ("embedding_dropout", "embedding_dropout"),  # a path of ours: the class has one dropout for both
        ("hidden_dropout", "hidden_dropout_prob"),
        ("attention_dropout", "attention_probs_dropout_prob"),
    ),
    assumed=_assumed_by_bert,
    fixed={
        "norm_position": ("post",),
        "position_embedding": ("learned",),
        "activation": ("gelu",),
        "norm_bias": (True,),
        "attention_bias": (True,),
        "mlp_bias": (True,),
        "head_bias": (True,),
        "type_vocab_size": range(1, sys.maxsize),
    },
    constants={
        "hidden_act": "gelu",
        "position_embedding_type": "absolute",
        "is_decoder": False,
        "tie_word_embeddings": True,
    },
    modules={
        "encoder.embeddings.token": ("bert.embeddings.word_embeddings",),
        "encoder.embeddings.position": ("bert.embeddings.position_embeddings",),
        "encoder.embeddings.token_type": ("bert.embeddings.token_type_embeddings",),
        "encoder.embeddings.norm": ("bert.embeddings.LayerNorm",),
        "encoder.layers.N.attention.query_key_value": (
            "bert.encoder.layer.N.attention.self.query",
            "bert.encoder.layer.N.attention.self.key",
            "bert.encoder.layer.N.attention.self.value",
        ),
        "encoder.layers.N.attention.output": ("bert.encoder.layer.N.attention.output.dense",),
        "encoder.layers.N.attention_norm": ("bert.encoder.layer.N.attention.output.LayerNorm",),
        "encoder.layers.N.feed_forward.up": ("bert.encoder.layer.N.intermediate.dense",),
        "encoder.layers.N.feed_forward.down": ("bert.encoder.layer.N.output.dense",),
        "encoder.layers.N.feed_forward_norm": ("bert.encoder.layer.N.output.LayerNorm",),
        "head": ("cls.predictions",),
        "head.dense": ("cls.predictions.transform.dense",),
        "head.norm": ("cls.predictions.transform.LayerNorm",),
    },
    prefix="bert.",
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    ignored=r"bert\.pooler|bert\.embeddings\.position_ids|cls\.predictions\.decoder|cls\.seq_rel|classifier|qa_outputs",
    inputs=("input_ids", "token_type_ids", "attention_mask"),
)


def _assumed_by_modernbert(written: Json) -> Json:
    every = written.get("global_attn_every_n_layers", 3)
    return {
        "norm_eps": 1e-5,
        "initializer_range": 0.02,
        "rope_parameters": {"full_attention": {"rope_theta": written.get("global_rope_theta", 160000.0)}},
        "layer_types": [
            "sliding_attention" if layer % every else "full_attention"
            for layer in range(written.get("num_hidden_layers", 0))
        ],
    } | dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False)


MODERNBERT = Family(
    model_type="modernbert",
    architecture="ModernBertForMaskedLM",
    fields=(
        *_SIZES,
        ("norm_eps", "norm_eps"),
        ("norm_bias", "norm_bias"),
        ("rotary_theta", "rope_parameters.full_attention.rope_theta"),
        ("rotary_theta", "global_rope_theta"),  # up to transformers 4
        ("attention_bias", "attention_bias"),
        ("mlp_bias", "mlp_bias"),
        ("head_bias", "classifier_bias"),
        ("embedding_dropout", "embedding_dropout"),
        ("attention_dropout", "attention_dropout"),
        ("hidden_dropout", "mlp_dropout"),  # the class drops within the sublayer, not after it
    ),
    assumed=_assumed_by_modernbert,
    fixed={
        "norm_position": ("pre",),
        "position_embedding": ("rotary",),
        "activation": ("geglu",),
        "type_vocab_size": (0,),
        "first_attention_norm": (False,),
    },
    constants={
        "hidden_activation": "gelu",
        "classifier_activation": "gelu",
        "decoder_bias": True,
        "tie_word_embeddings": True,
        "layer_types": ["full_attention"],
        "rope_parameters.full_attention.rope_type": "default",
    },
    hints={"global_attn_every_n_layers": 1},
    modules={
        "encoder.embeddings.token": ("model.embeddings.tok_embeddings",),
        "encoder.embeddings.norm": ("model.embeddings.norm",),
        "encoder.layers.N.attention_norm": ("model.layers.N.attn_norm",),
        "encoder.layers.N.attention.query_key_value": ("model.layers.N.attn.Wqkv",),
        "encoder.layers.N.attention.output": ("model.layers.N.attn.Wo",),
        "encoder.layers.N.feed_forward_norm": ("model.layers.N.mlp_norm",),
        "encoder.layers.N.feed_forward.gate_up": ("model.layers.N.mlp.Wi",),
        "encoder.layers.N.feed_forward.down": ("model.layers.N.mlp.Wo",),
        "encoder.final_norm": ("model.final_norm",),
        "head": ("decoder",),
    },
    prefix="model.",
    ignored=r"decoder\.weight|classifier",
)

OWN = Family(
    model_type="mlm",
    architecture="MaskedLM",
    fields=tuple((entry.name, entry.name) for entry in fields(ModelConfig)),
    assumed=lambda written: asdict(ModelConfig()),
    inputs=("input_ids", "token_type_ids", "attention_mask"),
)

FAMILIES = (BERT, MODERNBERT, OWN)
"""In the order in which they are tried for a configuration; the last takes everything."""


def family_of(config: ModelConfig) -> Family:
    """Return the first family that can represent `config`."""
    return next(family for family in FAMILIES if not family.unrepresented(config))


def missing_counterparts(config: ModelConfig) -> str:
    """Return which fields keep `config` from being the stock family that is closest to it, as text."""
    closest = min(FAMILIES[:-1], key=lambda family: len(family.unrepresented(config)))
    named = ", ".join(f"model.{name}={getattr(config, name)}" for name in closest.unrepresented(config))
    return f"{named} has no counterpart in {closest.architecture}"
