"""Read model folders: ours, and those that transformers saved for a family of `FAMILIES`.

Reading never runs code from a folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig, Pooling
from mlm.files import shorten
from mlm.hub.download import model_folder
from mlm.hub.families import FAMILIES
from mlm.hub.family import Family, Json
from mlm.model import Encoder, MaskedLM, SequenceClassifier, init_weights
from mlm.plan import count_parameters

CONFIG, WEIGHTS, PICKLED = "config.json", "model.safetensors", "pytorch_model.bin"
TOKENIZER_CONFIG, SENTENCES = "tokenizer_config.json", "sentence_bert_config.json"
MODULES, POOLING = "modules.json", "1_Pooling"
"""How sentence-transformers makes a vector of a text: a list of modules, and the folder of one of them."""
TOKENS = "pretraining_tokens"
"""Entry in the metadata of our weights, see `pretraining_tokens`."""
UNTRAINED_POOLER = "untrained_pooler"
"""Entry that names a pooler which nobody has trained: it is there for tools that would draw their own."""
INDEX = ".index.json"
"""Suffix of the file that names the parts, if the weights are in several files."""
UNTRAINED = "%s has no %s: initialised randomly, train before use"
Model = TypeVar("Model", MaskedLM, SequenceClassifier)
log = logging.getLogger(__name__)


def load_pretrained(folder: str | Path) -> MaskedLM | SequenceClassifier:
    """Read a model folder with the head that its config.json names."""
    return load_classifier(folder) if holds_classifier(folder) else load_masked_lm(folder)


def load_masked_lm(folder: str | Path, needs_head: bool = False) -> MaskedLM:
    """Return the model of a folder or of the hub in float32, on the CPU, in evaluation mode.

    A missing masked-LM head is initialised randomly, with a warning; `needs_head` refuses such a model.
    InputError: a file is missing, damaged, unsafe to open, or does not fit its config.json.
    """
    folder = model_folder(folder)
    model, missing = _masked_lm(folder)
    if missing and needs_head:
        raise InputError(f"{folder} was not trained to fill masks: it has no {shorten(missing, 4)}")
    if missing:
        log.warning(UNTRAINED, folder, shorten(missing, 4))
    return model


def load_encoder(folder: str | Path) -> Encoder:
    """Read the encoder of any model folder, without its head; otherwise as `load_masked_lm`."""
    return _masked_lm(model_folder(folder))[0].encoder


def _masked_lm(folder: Path) -> tuple[MaskedLM, list[str]]:
    """Return the model and the names of the head's weights that were initialised randomly."""
    family, config, written = _read_config(folder)
    tensors = _read_weights(folder, family, config)
    if family.is_classifier(written) and config.output_width != config.hidden_size:
        tensors = _without(tensors, family.names_of("head.dense", "head.norm"))  # the wider pooler's
    return _build(lambda: MaskedLM(config), family, tensors, folder)


def _without(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


def load_classifier(
    folder: str | Path, new: ClassifierConfig | None = None, pooling: Pooling | None = None
) -> SequenceClassifier:
    """Read a classifier, or put a new head on the encoder of any model folder.

    A `new` head starts from what the folder has: the pooler (ModernBERT: the transform of the masked-LM
    head), and the last layer if it has the same labels in any order; the rest is initialised randomly.
    `pooling` is that of a new head; None: as in config.json. Returns and raises as `load_masked_lm` does.
    """
    folder = model_folder(folder)
    family, config, written = _read_config(folder)
    own: ClassifierConfig | None = None
    with contextlib.suppress(*[InputError] if new else []):
        own = read_classifier(folder)
    head = new or own
    assert head, "one of the two exists"
    tensors = _read_weights(folder, family, config)
    if UNTRAINED_POOLER in _read_metadata(folder):
        tensors = _without(tensors, family.names_of("pooler.dense"))
    # the transform of a masked-LM head may be narrower than the pooler, and layers of another pooling differ
    is_narrow = not family.is_classifier(written) and config.output_width != config.hidden_size
    if is_narrow or pooling not in (None, config.pooling):
        tensors = _without(tensors, family.names_of("pooler.dense", "pooler.norm"))
        config = replace(config, pooling=pooling or config.pooling)
    order = own.order_of(head.labels) if own and own.label_type == head.label_type else None
    last = family.names_of("classifier") & tensors.keys()
    if order is None:
        tensors = _without(tensors, last)
    else:
        tensors |= {name: tensors[name][order] for name in last if len(tensors[name]) == len(order)}
    if order is None and own and len(own.labels) == len(head.labels) > 1 and own.labels[0] == "LABEL_0":
        log.warning("%s does not name its classes; its last layer is left out: give it id2label", folder)
    model, missing = _build(lambda: SequenceClassifier(config, head), family, tensors, folder)
    if missing and new is None:
        log.warning(UNTRAINED, folder, shorten(missing, 4))
    elif missing:
        log.info("new in the head: %s", shorten(missing, 4))
    return model


def holds_classifier(folder: str | Path) -> bool:
    """Return whether config.json of a model folder names a classifier."""
    family, _, written = _read_config(model_folder(folder))
    return family.is_classifier(written)


def read_classifier(folder: str | Path) -> ClassifierConfig:
    """Return the head that config.json describes; InputError: it names none, or one we cannot compute."""
    folder = model_folder(folder)
    family, _, written = _read_config(folder)
    if not family.is_classifier(written):
        found = ", ".join(map(str, written.get("architectures") or ["an encoder"]))
        raise InputError(f"{folder} holds no classifier but {found}; mlm finetune makes one of it")
    with _errors_of(folder / CONFIG):
        return family.read_classifier(written)


def read_shape(folder: str | Path) -> ModelConfig:
    """Return shape and switches of the encoder in a model folder, without reading its weights."""
    return _read_config(model_folder(folder))[1]


def longest_row(folder: str | Path, config: ModelConfig) -> int | None:
    """Return the model_max_length of a folder, at most the model's longest row; None: no bound."""
    bounds = (
        read_settings(folder, TOKENIZER_CONFIG).get("model_max_length"),
        read_settings(folder, SENTENCES).get("max_seq_length"),
        config.max_position_embeddings,
    )
    known = [int(bound) for bound in bounds if isinstance(bound, int | float) and 0 < bound < 1e9]
    return min(known, default=None)  # transformers writes 1e30 for no bound


def pretraining_tokens(folder: str | Path) -> int | None:
    """Return how many tokens `mlm` trained a folder's model on from random weights; None: not known."""
    tokens = _read_metadata(model_folder(folder)).get(TOKENS, "")
    return int(tokens) if tokens.isdecimal() else None


def _read_metadata(folder: Path) -> dict[str, str]:
    """Return the metadata of a folder's weights; empty if they are not a safetensors file."""
    path = folder / WEIGHTS
    if not path.is_file():
        return {}
    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except SafetensorError as error:
        raise InputError(f"{path} is damaged or incomplete: {error}") from None


def read_settings(folder: str | Path, name: str) -> Json:
    """Return a JSON file of a model folder, empty if there is none; InputError: it is damaged."""
    path = model_folder(folder) / name
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from None
    return written if isinstance(written, dict) else {}


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Name the file in errors about its content."""
    try:
        yield
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # not JSON, or of another form
        raise InputError(f"{path}: {error}") from None


def _read_config(folder: Path) -> tuple[Family, ModelConfig, Json]:
    """Return the family of a model folder, our configuration, and the content of its config.json."""
    path, nested = folder / CONFIG, folder / "model"
    if not path.is_file():
        advice = f"did you mean {nested}?" if (nested / CONFIG).is_file() else "`mlm pretrain` writes one"
        raise InputError(f"{path} does not exist: a model folder holds {CONFIG} and {WEIGHTS}; {advice}")
    families = {family.model_type: family for family in FAMILIES}
    with _errors_of(path):
        written = json.loads(path.read_text(encoding="utf-8"))
        model_type = written.get("model_type") if isinstance(written, dict) else None
        if not isinstance(model_type, str) or model_type not in families:
            raise InputError(f"model_type={model_type} is not supported, only {', '.join(families)}")
        if "quantization_config" in written:
            raise InputError("quantization_config: quantized weights are not supported")
        return families[model_type], families[model_type].read_config(written), written


def _read_weights(folder: Path, family: Family, config: ModelConfig) -> dict[str, Tensor]:
    """Return the weights of a folder by their current names in the family."""
    written = read_tensors(folder)
    parts = count_parameters(config)
    described, held = sum(parts.values()) - parts["head"], sum(tensor.numel() for tensor in written.values())
    if described > 2 * held:  # if less is missing, `_our_tensors` can name it
        place = f"{folder / CONFIG} describes an encoder of {described:,} parameters"
        raise InputError(f"{place}; the weights beside it are {held:,} numbers")
    names = family.current_names(written)
    if twice := sorted(name for name, times in Counter(names.values()).items() if times > 1):
        raise InputError(f"{folder} has an old and a new name for the same weights: {shorten(twice, 4)}")
    return {new: written[old] for old, new in names.items()}


def _build(
    make: Callable[[], Model], family: Family, tensors: dict[str, Tensor], folder: Path
) -> tuple[Model, list[str]]:
    """Return a model with these weights, and the names of those of its head that are initialised randomly."""
    with torch.device("meta"):  # sizes only: no memory, no random numbers
        model = make()
    state, missing = _our_tensors(family, model, tensors, folder)
    model.to_empty(device="cpu")
    for name, part in model.named_children():
        if missing and name != "encoder":
            init_weights(part, model.config.initializer_range)
    model.load_state_dict(state, strict=False)
    return model.eval(), missing


def _our_tensors(
    family: Family, model: MaskedLM | SequenceClassifier, tensors: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights of `model`, and the names of those of its head that are missing."""
    tensors = dict(tensors)
    if not model.config.tie_word_embeddings:  # if the two differ, the copy is in use
        copies = family.untied_copies.items()
        tensors |= {name: tensors.pop(copy) for name, copy in copies if copy in tensors}
    state: dict[str, Tensor] = {}
    of_head, missing, misshapen = (list[str]() for _ in range(3))
    for name, weight in model.state_dict().items():
        sources = family.their_names(name)
        shape = (weight.shape[0] // len(sources), *weight.shape[1:])
        found = {source: tensors.pop(source) for source in sources if source in tensors}
        absent = [source for source in sources if source not in found]
        (missing if name.startswith("encoder.") else of_head).extend(absent)
        shapes = {source: tuple(tensor.shape) for source, tensor in found.items() if tensor.shape != shape}
        misshapen += [f"{source} is {other}, by {CONFIG} {shape}" for source, other in shapes.items()]
        for source, tensor in found.items():
            _check_numbers(source, tensor, folder)
        if not absent and not shapes:
            state[name] = torch.cat(list(found.values()))
    unexpected = sorted(name for name in tensors if not re.match(family.ignored, name))
    faults = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    if any(faults.values()):
        text = "; ".join(f"{fault}: {shorten(names, 4)}" for fault, names in faults.items() if names)
        raise InputError(f"the weights in {folder} do not fit its {CONFIG}; {text}")
    return state, of_head


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a folder: from safetensors if it has any, else from pickles of tensors alone."""
    names = [f"{name}{index}" for name in (WEIGHTS, PICKLED) for index in ("", INDEX)]
    found = next((folder / name for name in names if (folder / name).exists()), None)
    if found is None:
        raise InputError(f"{folder} has neither {WEIGHTS} nor {PICKLED}, nor an {INDEX} of either")
    return _read_parts(found) if found.name.endswith(INDEX) else _read_file(found)


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        tensors = dict(torch.load(path, "cpu", weights_only=True))
        if not all(isinstance(name, str) and _is_plain(tensor) for name, tensor in tensors.items()):
            raise TypeError("not a table of tensors")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist, but the index beside it names it") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    except SafetensorError as error:
        raise InputError(f"{path} is damaged or incomplete: {error}") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, TypeError, ValueError):
        reason = "damaged, or holds objects that could run code"
        raise InputError(f"{path} was not opened: it is {reason}; use {WEIGHTS}") from None
    return tensors


def _is_plain(tensor: Any) -> bool:
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and tensor.device.type == "cpu"


def _read_parts(index: Path) -> dict[str, Tensor]:
    """Read the files that an index names: only from its folder, and each with exactly its tensors."""
    try:
        files: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        parts = sorted(set(files.values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise InputError(f"{index} is not an index of weights: {error!r}") from None
    suffix = Path(index.name.removesuffix(INDEX)).suffix
    for part in parts:
        if not isinstance(part, str) or re.fullmatch(rf"\w[\w.-]*{re.escape(suffix)}", part) is None:
            raise InputError(f"{index} names {part!r}, which is not a {suffix} file of its folder")
    tensors: dict[str, Tensor] = {}
    for part in parts:
        path = index.parent / part
        found = _read_file(path)
        if odd := sorted(found.keys() ^ {name for name, file in files.items() if file == part}):
            raise InputError(f"{path} does not hold the weights that {index.name} lists: {shorten(odd, 4)}")
        tensors |= found
    return tensors


def _check_numbers(name: str, tensor: Tensor, folder: Path) -> None:
    """Refuse integers, quantized values and numbers that are not finite."""
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} in {folder} is of type {kind}; only floats of 16 to 64 bits are weights")
    if not tensor.isfinite().all():
        raise InputError(f"{name} in {folder} holds numbers that are not finite: the model is broken")
