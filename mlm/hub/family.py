"""The form of the tables in `families.py`, and how such a table is read in both directions.

- a field stands under a dotted path of config.json, by default under its own name
- a module of ours stands for one of theirs, or for several that are stacked into one
- N stands for the number of a layer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, LabelType, ModelConfig, Pooling

Json = dict[str, Any]

TOKEN_IDS = {f"{name}_token_id": name for name in ("pad", "cls", "sep", "mask")}
TOKEN_IDS |= {"bos_token_id": "cls", "eos_token_id": "sep"}  # without these, ModernBERT's are out of range
"""Fields of config.json for token ids, and the fields of `SpecialTokens` they repeat."""

PROBLEM_TYPES: dict[LabelType, str] = {
    "classification": "single_label_classification",
    "regression": "regression",
    "multilabel": "multi_label_classification",
}
"""How config.json calls each `ClassifierConfig.label_type`."""


MAX_LAYERS = 1000
"""A file that asks for more is damaged, or meant to fill the memory."""


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
    derived: Callable[[Json], Json] = lambda _: {}
    """Our fields, of the unused ones, that follow from several of theirs."""
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
    poolings: Sequence[str] = get_args(Pooling)
    """Values of `ModelConfig.pooling` that the classifier knows."""
    positions_follow_padding: bool = False
    """Whether the first token takes the row after the padding id in the table of positions."""
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
        config = ModelConfig(**values | self.derived(written))
        if config.vocab_size is None:
            raise InputError("vocab_size is null")
        assert config.position_rows >= 0, "it raises if there is a table of unknown size"
        if config.num_hidden_layers > MAX_LAYERS:
            raise InputError(f"num_hidden_layers={config.num_hidden_layers} is more than {MAX_LAYERS}")
        faults = self.unrepresented(config)
        for path, value in self._constants(config).items():
            faults += _difference(path, _get(written, path, value), value)
        if faults:
            raise InputError(f"not supported: {', '.join(faults)}")
        return config

    def write_classifier(self, classifier: ClassifierConfig) -> Json:
        """Return what config.json says of the head of a classifier."""
        known = classifier.text_pairs is not None  # ours alone: other readers pass over it
        return {
            "architectures": [self.classifier],
            "problem_type": PROBLEM_TYPES[classifier.label_type],
            "id2label": {str(number): label for number, label in enumerate(classifier.labels)},
            "label2id": {label: number for number, label in enumerate(classifier.labels)},
            "classifier_dropout": classifier.dropout,
            **({"text_pairs": classifier.text_pairs} if known else {}),
        }

    def read_classifier(self, written: Json) -> ClassifierConfig:
        """Return the head that the content of a config.json asks for.

        Raises:
            InputError: it is of a kind that we cannot compute.
        """
        number = whole_number(written, "num_labels", 2)
        names = written.get("id2label") or {str(label): f"LABEL_{label}" for label in range(number)}
        if not isinstance(names, dict):
            raise InputError(f"id2label={names!r} must be a table of labels by their ids")
        labels = [names.get(str(number)) for number in range(len(names))]
        if None in labels:
            raise InputError(f"id2label has the ids {', '.join(names)}, not 0 to {len(names) - 1}")
        problem = (
            written.get("problem_type")
            or PROBLEM_TYPES["regression" if len(names) == 1 else "classification"]
        )
        types = {name: label_type for label_type, name in PROBLEM_TYPES.items()}
        if str(problem) not in types:
            raise InputError(f"problem_type={problem} is not supported, only {', '.join(types)}")
        dropout = written.get("classifier_dropout")
        if dropout is None:
            dropout = written.get(self.dropout_path or "", 0.0)
        _check_kind("classifier_dropout", dropout, float)
        pairs = written.get("text_pairs")
        return ClassifierConfig(
            tuple(map(str, labels)), types[problem], dropout, pairs if isinstance(pairs, bool) else None
        )

    def with_classes(self, tensors: dict[str, Tensor], order: list[int] | None) -> dict[str, Tensor]:
        """Return the weights of a file with the classes of its last layer in this order; None: without it."""
        last = {theirs for leaf in ("weight", "bias") for theirs in self.their_names(f"classifier.{leaf}")}
        if order is None:
            return {name: one for name, one in tensors.items() if name not in last}
        there = [name for name in last & tensors.keys() if len(tensors[name]) == len(order)]
        return tensors | {name: tensors[name][order] for name in there}

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
        _check_kind(path, found, _HINTS[name])
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
_HINTS = get_type_hints(ModelConfig)
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "null"}


def _check_kind(path: str, found: Any, hint: Any) -> None:
    """Check that a value of config.json is of the kind that our field has."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind if kind in _KINDS else str for kind in types]  # else one of some words
    if type(found) not in kinds and not (type(found) is int and float in kinds):
        raise InputError(f"{path}={found!r} must be {' or '.join(_KINDS[kind] for kind in kinds)}")


def whole_number(written: Json, path: str, default: int) -> int:
    """Return a number that counts or numbers something.

    Raises:
        InputError: it is none.
    """
    found = written.get(path, default)
    if type(found) is not int or found < 0:
        raise InputError(f"{path}={found!r} must be a whole number from 0 on")
    return found


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
        if len(found) != len(expected):
            return [f"{path} of {len(found)} entries (only {len(expected)})"]
        pairs = zip(found, expected, strict=True)
        places = (_difference(f"{path}[{index}]", *pair) for index, pair in enumerate(pairs))
        return next(filter(None, places), [])
    return [] if found in (None, expected) else [f"{path}={found} (only {expected})"]
