"""The form of the tables in `families.py`, and how such a table is read in both directions.

- a field of ours has a dotted path in config.json, by default its own name
- a module of ours is one of theirs, or several of theirs stacked
- N is the number of a layer
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, LabelType, ModelConfig, Pooling

Json = dict[str, Any]

PROBLEM_TYPES: dict[LabelType, str] = {
    "classification": "single_label_classification",
    "regression": "regression",
    "multilabel": "multi_label_classification",
}
"""The name in config.json of each `ClassifierConfig.label_type`."""
MAX_LAYERS = 1000
"""A file with more layers is damaged, or meant to fill the memory."""


@dataclass(frozen=True)
class Family:
    """Names and values of one family of models."""

    model_type: str
    """Its name in config.json."""
    architecture: str
    """Its class with a masked-LM head."""
    classifier: str
    """Its class with a head for classes or a score."""
    assumed: Callable[[Json], Json]
    """The class's defaults for paths missing in a config.json, which may depend on the others."""
    fixed: Mapping[str, Sequence[Any]]
    """The only values of our fields that the class supports; they decide which family a model belongs to."""
    unused: Sequence[str] = ()
    """Our fields that the class does not have."""
    derived: Callable[[Json], Json] = lambda _: {}
    """Unused fields of ours that are computed from several of theirs."""
    paths: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Our fields with another path; the first path is read, all are written."""
    values: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Our fields with other names of values, ours to theirs."""
    constants: Mapping[str, Any] = field(default_factory=dict)
    """The only supported value of other paths, or a function of our configuration that returns it."""
    modules: Mapping[str, str | Sequence[str]] = field(default_factory=dict)
    """Our modules with another name."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in older files, and their current form."""
    untied_copies: Mapping[str, str] = field(default_factory=dict)
    """Names of weights, and of their copies in a file with an output matrix of its own."""
    ignored: str = "(?!)"
    """Pattern of the beginning of names that a model with another head does not need; by default none."""
    poolings: Sequence[str] = get_args(Pooling)
    """Values of `ModelConfig.pooling` that the classifier supports."""
    pooler: str = ""
    """Layer above the encoder that the class without a head draws at random if the file lacks it."""
    positions_follow_padding: bool = False
    """Whether the first token takes the row after the padding id in the table of positions."""
    dropout_path: str = ""
    """Path of a classifier's dropout if it has no `classifier_dropout`; by default that is 0."""

    def unrepresented(self, config: ModelConfig, classifier: ClassifierConfig | None = None) -> list[str]:
        """Return the fields, with their values, that the class cannot represent."""
        values = {name: getattr(config, name) for name in self.fixed}
        faults = [f"{name}={value}" for name, value in values.items() if value not in self.fixed[name]]
        wrong_pooling = classifier is not None and config.pooling not in self.poolings
        return faults + [f"pooling={config.pooling}"] * wrong_pooling

    def write_config(self, config: ModelConfig, classifier: ClassifierConfig | None = None) -> Json:
        """Return config.json, without token ids."""
        result: Json = {"model_type": self.model_type, "architectures": [self.architecture]}
        for path, value in self._constants(config).items():
            _set(result, path, value)
        for name, paths in self._written().items():
            ours = getattr(config, name)
            for path in paths:
                _set(result, path, self.values[name][ours] if name in self.values else ours)
        if classifier:
            result |= {
                "architectures": [self.classifier],
                "problem_type": PROBLEM_TYPES[classifier.label_type],
                "id2label": {str(number): label for number, label in enumerate(classifier.labels)},
                "label2id": {label: number for number, label in enumerate(classifier.labels)},
                "classifier_dropout": classifier.dropout,
            }
            if classifier.text_pairs is not None:  # ours alone: other readers ignore it
                result["text_pairs"] = classifier.text_pairs
        return result

    def read_config(self, written: Json) -> ModelConfig:
        """Return our configuration for the content of a config.json; InputError: we cannot compute it."""
        assumed = self.assumed(written)
        values = {name: allowed[0] for name, allowed in self.fixed.items()}
        for name, (path, *_) in self._written().items():
            values[name] = self._ours(name, path, _get(written, path, _get(assumed, path, _ABSENT)))
        config = ModelConfig(**values | self.derived(written))
        if config.vocab_size is None:
            raise InputError("vocab_size is null")
        assert config.position_rows >= 0, "raises InputError for a table of unknown size"
        if config.num_hidden_layers > MAX_LAYERS:
            raise InputError(f"num_hidden_layers={config.num_hidden_layers} is more than {MAX_LAYERS}")
        faults = self.unrepresented(config)
        for path, value in self._constants(config).items():
            faults += _difference(path, _get(written, path, value), value)
        if faults:
            raise InputError(f"not supported: {', '.join(faults)}")
        return config

    def is_classifier(self, written: Json) -> bool:
        """Return whether the content of a config.json names the family's classifier."""
        named = written.get("architectures")
        return isinstance(named, list) and self.classifier in named

    def read_classifier(self, written: Json) -> ClassifierConfig:
        """Return the head that the content of a config.json describes; InputError: we cannot compute it."""
        number = whole_number(written, "num_labels", 2)
        names = written.get("id2label") or {str(label): f"LABEL_{label}" for label in range(number)}
        if not isinstance(names, dict):
            raise InputError(f"id2label={names!r} must be a table of labels by their ids")
        labels = [names.get(str(number)) for number in range(len(names))]
        if None in labels:
            raise InputError(f"id2label has the ids {', '.join(names)}, not 0 to {len(names) - 1}")
        assumed = PROBLEM_TYPES["regression" if len(names) == 1 else "classification"]
        problem = written.get("problem_type") or assumed
        types = {name: label_type for label_type, name in PROBLEM_TYPES.items()}
        if str(problem) not in types:
            raise InputError(f"problem_type={problem} is not supported, only {', '.join(types)}")
        dropout = written.get("classifier_dropout")
        if dropout is None:
            dropout = written.get(self.dropout_path, 0.0)
        _check_kind("classifier_dropout", dropout, float)
        pairs = written["text_pairs"] if isinstance(written.get("text_pairs"), bool) else None
        return ClassifierConfig(tuple(map(str, labels)), types[problem], dropout, pairs)

    def names_of(self, *modules: str) -> set[str]:
        """Return the names in a file of the weights of some modules of ours."""
        ours = [f"{module}.{leaf}" for module in modules for leaf in ("weight", "bias")]
        return {theirs for name in ours for theirs in self.their_names(name)}

    def their_names(self, name: str) -> list[str]:
        """Return the names in a file of the weights that our weight `name` is stacked from."""
        module, _, leaf = name.rpartition(".")
        number = "".join(re.findall(r"\.layers\.(\d+)", module))
        general = module.replace(f".layers.{number}", ".layers.N")
        theirs = self.modules.get(general, general)
        parts = [theirs] if isinstance(theirs, str) else theirs
        return [f"{part}.{leaf}".replace(".N.", f".{number}.") for part in parts]

    def current_names(self, names: Collection[str]) -> dict[str, str]:
        """Return the current name, in a model with a head, of each name in a file."""
        prefix = self.their_names("encoder.embeddings.token.weight")[0].partition(".")[0] + "."
        if any(name.startswith(prefix) for name in names):  # only in a file without any head none does
            prefix = ""
        result = {name: prefix + name for name in names}
        for old, new in self.renamed.items():
            result = {name: current.replace(old, new) for name, current in result.items()}
        return result

    def _constants(self, config: ModelConfig) -> Json:
        return {path: value(config) if callable(value) else value for path, value in self.constants.items()}

    def _ours(self, name: str, path: str, found: Any) -> Any:
        """Return our value for the one found at a path of config.json."""
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
        """Return our fields that are in config.json, with their paths."""
        left_out = {*self.unused, *(name for name, allowed in self.fixed.items() if len(allowed) == 1)}
        return {name: self.paths.get(name, (name,)) for name in asdict(ModelConfig()) if name not in left_out}


_ABSENT = object()
_HINTS = get_type_hints(ModelConfig)
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", NoneType: "null"}


def _check_kind(path: str, found: Any, hint: Any) -> None:
    """Check that a value of config.json has the type of our field."""
    types = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [kind if kind in _KINDS else str for kind in types]  # else a Literal
    if type(found) not in kinds and not (type(found) is int and float in kinds):
        raise InputError(f"{path}={found!r} must be {' or '.join(_KINDS[kind] for kind in kinds)}")


def whole_number(written: Json, path: str, default: int) -> int:
    """Return the whole number, from 0 on, at a path of config.json; InputError: it is something else."""
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
    """Return the first difference, as a message, or nothing; null counts as absent."""
    if isinstance(found, list) and isinstance(expected, list):
        if len(found) != len(expected):
            return [f"{path} of {len(found)} entries (only {len(expected)})"]
        places = [f"{path}[{index}]" for index in range(len(found))]
        return next(filter(None, map(_difference, places, found, expected)), [])
    return [] if found in (None, expected) else [f"{path}={found} (only {expected})"]
