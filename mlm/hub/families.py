"""How each family of models spells our fields and our weights: one closed table, read in both directions.

- to add a family, write its table and append it to FAMILIES
- a field stands under a dotted path of config.json, by default under its own name
- a module of ours stands for one of theirs, or for several that are stacked into one
- N stands for the number of a layer
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig

Json = dict[str, Any]

TOKEN_IDS = {f"{name}_token_id": name for name in ("pad", "cls", "sep", "mask")}
TOKEN_IDS |= {"bos_token_id": "cls", "eos_token_id": "sep"}  # without these, ModernBERT's are out of range
"""Fields of config.json for token ids, and the fields of `SpecialTokens` they repeat."""

PROBLEM_TYPES: dict[Literal["classification", "regression"], str] = {
    "classification": "single_label_classification",
    "regression": "regression",
}
"""How config.json calls each `ClassifierConfig.label_type`."""


@dataclass(frozen=True)
class Family:
    """One family's spelling of everything."""

    model_type: str
    """What config.json calls it."""
    architecture: str
    """Its class with a masked-LM head."""
    classifier: str
    """Its class with a head for classes or a score."""
    assumed: Callable[[Json], Json]
    """What the class takes for the paths that a config.json leaves out."""
    fixed: Mapping[str, Sequence[Any]]
    """Our fields of which the class knows only these values; they decide which family a model belongs to."""
    unused: Sequence[str] = ()
    """Our fields that mean nothing to it."""
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Our fields that are spelt otherwise; the first path is read, all are written."""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Our fields whose values are spelt otherwise, ours to theirs."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """Paths and the only value that we compute there: itself, or a function of our configuration."""
    modules: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Our modules that are spelt otherwise."""
    prefix: str = ""
    """How the names of the encoder begin, except in a file without any head."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in older files, and what they are called now."""
    untied_copies: Mapping[str, str] = field(default_factory=dict)
    """Names that stand a second time, under another one, in a file with an output matrix of its own."""
    ignored: str = "(?!)"
    """Pattern of how the names begin that a model with another head does not need; by default none."""
    poolings: Sequence[str] = ("cls", "mean")
    """Values of `ClassifierConfig.pooling` that the classifier knows."""
    dropout_path: str | None = None
    """Where the dropout of a classifier stands that names none of its own; None: it has none then."""

    def unrepresented(self, config: ModelConfig) -> list[str]:
        """Return the fields, with their values, that the class cannot represent."""
        values = {name: getattr(config, name) for name in self.fixed}
        return [f"{name}={value}" for name, value in values.items() if value not in self.fixed[name]]

    def write_config(self, config: ModelConfig) -> Json:
        """Return config.json for `config`, without token ids."""
        result: Json = {"model_type": self.model_type, "architectures": [self.architecture]}
        for path, value in self._constants(config).items():
            _set(result, path, value)
        for name, paths in self._written().items():
            ours = getattr(config, name)
            for path in paths:
                _set(result, path, self.values[name][ours] if name in self.values else ours)
        return result

    def read_config(self, written: Json) -> ModelConfig:
        """Return our configuration for the content of a config.json.

        Raises:
            InputError: it asks for something that we cannot compute.
        """
        assumed = self.assumed(written)
        values = {name: allowed[0] for name, allowed in self.fixed.items()}
        for name, (path, *_) in self._written().items():
            values[name] = self._ours(name, path, _get(written, path, _get(assumed, path, _ABSENT)))
        config = ModelConfig(**values)
        faults = self.unrepresented(config)
        for path, value in self._constants(config).items():
            faults += _difference(path, _get(written, path, value), value)
        if faults:
            raise InputError(f"not supported: {', '.join(faults)}")
        return config

    def write_classifier(self, classifier: ClassifierConfig) -> Json:
        """Return what config.json says of the head of a classifier."""
        return {
            "architectures": [self.classifier],
            "problem_type": PROBLEM_TYPES[classifier.label_type],
            "id2label": {str(number): label for number, label in enumerate(classifier.labels)},
            "label2id": {label: number for number, label in enumerate(classifier.labels)},
            "classifier_dropout": classifier.dropout,
            "classifier_pooling": classifier.pooling,
        }

    def read_classifier(self, written: Json) -> ClassifierConfig:
        """Return the head that the content of a config.json asks for.

        Raises:
            InputError: it is of a kind that we cannot compute.
        """
        names = written.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
        labels = [names.get(str(number)) for number in range(len(names))]
        if None in labels:
            raise InputError(f"id2label has the ids {', '.join(names)}, not 0 to {len(names) - 1}")
        problem = (
            written.get("problem_type")
            or PROBLEM_TYPES["regression" if len(names) == 1 else "classification"]
        )
        types = {name: label_type for label_type, name in PROBLEM_TYPES.items()}
        if problem not in types:
            raise InputError(f"problem_type={problem} is not supported, only {', '.join(types)}")
        dropout = written.get("classifier_dropout")
        if dropout is None:
            dropout = written.get(self.dropout_path or "", 0.0)
        pooling = written.get("classifier_pooling", "cls")
        if pooling not in self.poolings:
            allowed = ", ".join(self.poolings)
            raise InputError(f"classifier_pooling={pooling} is not supported, only {allowed}")
        return ClassifierConfig(tuple(map(str, labels)), types[problem], pooling, dropout)

    def their_names(self, name: str) -> list[str]:
        """Return the names in the file of what our weight `name` is stacked from."""
        module, _, leaf = name.rpartition(".")
        number = "".join(re.findall(r"\.layers\.(\d+)", module))
        general = module.replace(f".layers.{number}", ".layers.N")
        theirs = self.modules.get(general, general)
        parts = [theirs] if isinstance(theirs, str) else theirs
        return [f"{part}.{leaf}".replace(".N.", f".{number}.") for part in parts]

    def current_names(self, names: Collection[str]) -> dict[str, str]:
        """Return what each name in a file is called today in a model with a head."""
        prefix = "" if any(name.startswith(self.prefix) for name in names) else self.prefix
        result = {}
        for name in names:
            current = prefix + name
            for old, new in self.renamed.items():
                current = current.replace(old, new)
            result[name] = current
        return result

    def is_needless(self, name: str) -> bool:
        """Tell whether a current name belongs to a head that another model of the family has."""
        return re.match(self.ignored, name) is not None

    def _constants(self, config: ModelConfig) -> Json:
        return {path: value(config) if callable(value) else value for path, value in self.constants.items()}

    def _ours(self, name: str, path: str, found: Any) -> Any:
        """Return our value for what was found under a path of config.json."""
        if found is _ABSENT:
            raise InputError(f"{path} is missing")
        if name not in self.values:
            return found
        ours = {theirs: value for value, theirs in self.values[name].items()}
        if found not in ours:
            raise InputError(f"not supported: {path}={found} (only {', '.join(ours)})")
        return ours[found]

    def _written(self) -> dict[str, Sequence[str]]:
        """Our fields that stand in config.json, with their paths."""
        left_out = {*self.unused, *(name for name, allowed in self.fixed.items() if len(allowed) == 1)}
        return {name: self.paths.get(name, (name,)) for name in asdict(ModelConfig()) if name not in left_out}


_ABSENT = object()


def _get(tree: Any, path: str, default: Any) -> Any:
    for key in path.split("."):
        if not isinstance(tree, dict) or key not in tree:
            return default
        tree = tree[key]
    return tree


def _set(tree: Json, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


def _difference(path: str, found: Any, expected: Any) -> list[str]:
    """Return in words where, first, something else than expected was found; null is as good as absent."""
    if isinstance(found, list) and isinstance(expected, list):
        pairs = zip_longest(found, expected)
        places = (_difference(f"{path}[{index}]", *pair) for index, pair in enumerate(pairs))
        return next(filter(None, places), [])
    return [] if found in (None, expected) else [f"{path}={found} (only {expected})"]


COMMON: dict[str, Sequence[Any]] = {
    "embedding_size": [None],
    "norm": ["layernorm"],
    "embedding_norm": [True],
    "final_norm": [None],
    "position_offset": [0],
    "attention": ["bidirectional"],
    "head_transform": [True],
    "pooling": ["cls", "mean", "cls_tanh"],
}
"""What both stock families fix alike."""


def _assumed_by_bert(written: Json) -> Json:
    one_dropout = written.get("hidden_dropout_prob", 0.1)  # the class has one for embeddings and layers
    return {
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.1,
        "embedding_dropout": one_dropout,
        "type_vocab_size": 2,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-12,
        "tie_word_embeddings": True,
        "position_embedding": "learned",
        "pooling": "cls_tanh",
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
    modules={
        "encoder.embeddings.token": "bert.embeddings.word_embeddings",
        "encoder.embeddings.position": "bert.embeddings.position_embeddings",
        "encoder.embeddings.token_type": "bert.embeddings.token_type_embeddings",
        "encoder.embeddings.norm": "bert.embeddings.LayerNorm",
        "encoder.layers.N.attention.query_key_value": [
            f"bert.encoder.layer.N.attention.self.{part}" for part in ("query", "key", "value")
        ],
        "encoder.layers.N.attention.output": "bert.encoder.layer.N.attention.output.dense",
        "encoder.layers.N.attention_norm": "bert.encoder.layer.N.attention.output.LayerNorm",
        "encoder.layers.N.feed_forward.up": "bert.encoder.layer.N.intermediate.dense",
        "encoder.layers.N.feed_forward.down": "bert.encoder.layer.N.output.dense",
        "encoder.layers.N.feed_forward_norm": "bert.encoder.layer.N.output.LayerNorm",
        "head": "cls.predictions",
        "head.dense": "cls.predictions.transform.dense",
        "head.norm": "cls.predictions.transform.LayerNorm",
        "head.output": "cls.predictions.decoder",
        "pooler.dense": "bert.pooler.dense",
    },
    prefix="bert.",
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
    untied_copies={"cls.predictions.bias": "cls.predictions.decoder.bias"},
    ignored=r"bert\.pooler|bert\.embeddings\.position_ids|cls\.(predictions|seq)|classifier|qa_",
    poolings=("cls",),
    dropout_path="hidden_dropout_prob",
)


def _assumed_by_modernbert(written: Json) -> Json:
    theta = written.get("global_rope_theta", 160000.0)  # this and the next are how transformers 4 wrote them
    local_theta = written.get("local_rope_theta", 10000.0)
    types = written.get("layer_types") or [FULL, LOCAL, LOCAL, FULL]
    return {
        "hidden_activation": "gelu",
        "attention_dropout": 0.0,
        "embedding_dropout": 0.0,
        "mlp_dropout": 0.0,
        **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), False),
        "initializer_range": 0.02,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "pooling": written.get("classifier_pooling", "cls"),
        "local_attention": 128,
        "global_attn_every_n_layers": types.index(FULL, 1) if FULL in types[1:] else len(types),
        "rope_parameters": {
            FULL: {"rope_theta": theta},
            LOCAL: {"rope_theta": theta if local_theta is None else local_theta},
        },
    }


def _layer_types(config: ModelConfig) -> list[str]:
    return [LOCAL if config.is_local(layer) else FULL for layer in range(config.num_hidden_layers)]


FULL, LOCAL = "full_attention", "sliding_attention"
GATES = {"geglu": "gelu", "swiglu": "silu"}
"""Gated activations, and what the class calls the non-linearity of their gate."""


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
    },
    paths={
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
        "layer_types": _layer_types,
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
        "pooler.dense": "head.dense",  # a classifier goes on with the transform of the masked-LM head
        "pooler.norm": "head.norm",
    },
    prefix="model.",
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

FAMILIES = (BERT, MODERNBERT, OWN)
"""In the order in which they are tried for a model; the last takes everything."""


def family_of(config: ModelConfig, classifier: ClassifierConfig | None = None) -> Family:
    """Return the first family that can represent `config`, and the head of a classifier if there is one."""
    return next(family for family in FAMILIES if not _unrepresented(family, config, classifier))


def architecture_of(config: ModelConfig, classifier: ClassifierConfig | None = None) -> str:
    """Return the name of the class that reads a model of this configuration."""
    family = family_of(config, classifier)
    return family.classifier if classifier else family.architecture


def missing_counterparts(config: ModelConfig, classifier: ClassifierConfig | None = None) -> str:
    """Return in words what keeps `config` from being of the stock family that is closest to it."""
    closest = min(FAMILIES[:-1], key=lambda family: len(_unrepresented(family, config, classifier)))
    name = closest.classifier if classifier else closest.architecture
    return f"{name} has no counterpart for {', '.join(_unrepresented(closest, config, classifier))}"


def _unrepresented(family: Family, config: ModelConfig, classifier: ClassifierConfig | None) -> list[str]:
    faults = [f"model.{fault}" for fault in family.unrepresented(config)]
    if classifier and classifier.pooling not in family.poolings:
        faults.append(f"head.pooling={classifier.pooling}")
    return faults
