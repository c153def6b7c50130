"""Read and write model folders that the stock Hugging Face classes read too.

- written as the first family that can represent the model (`families.py`), else with a `model_type` of ours
- written beside the final place, read back, compared with the model in memory, then renamed
- reading never runs code from a folder
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save
from tokenizers import Tokenizer
from torch import Tensor

from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig, Pooling
from mlm.files import recover, replacing
from mlm.hub.download import model_folder
from mlm.hub.families import FAMILIES, OWN, architecture_of, family_of, missing_counterparts
from mlm.hub.family import TOKEN_IDS, Family, Json
from mlm.hub.parity import CheckRows, check_written, random_row
from mlm.hub.tokenizer_config import TOKENIZER_CONFIG, describe_tokenizer
from mlm.hub.weights import WEIGHTS, check_numbers, read_tensors, shorten_names
from mlm.model import UNUSED_ID_BIAS, Encoder, MaskedLM, SequenceClassifier, init_weights
from mlm.plan import count_parameters
from mlm.tokenizer import SpecialTokens, num_ids

CONFIG, TOKENIZER, CARD = "config.json", "tokenizer.json", "README.md"
FILES = {CONFIG, WEIGHTS, TOKENIZER, TOKENIZER_CONFIG, CARD}
"""All files of a folder that we write."""
POSITIONS = "encoder.embeddings.position.weight"
Model = TypeVar("Model", MaskedLM, SequenceClassifier)
log = logging.getLogger(__name__)


def load_pretrained(folder: str | Path) -> MaskedLM | SequenceClassifier:
    """Read a model folder with the head that its config.json names."""
    return load_classifier(folder) if holds_classifier(folder) else load_masked_lm(folder)


def load_masked_lm(folder: str | Path, needs_head: bool = False) -> MaskedLM:
    """Read a model folder: one of ours, or one that transformers saved for a family of `FAMILIES`.

    A missing masked-LM head is initialised randomly, with a warning; heads of other tasks are left out.

    Args:
        folder: the model, or its name on the hub, see `resolve_model`.
        needs_head: refuse a model without a complete masked-LM head.

    Returns:
        The model in float32, on the CPU, in evaluation mode: call `.train()` before training it.

    Raises:
        InputError: a file is missing, damaged, unsafe to open, or does not fit its config.json.
    """
    folder = model_folder(folder)
    model, missing = _masked_lm(folder)
    if missing and needs_head:
        raise InputError(f"{folder} was not trained to fill masks: it has no {shorten_names(missing)}")
    _warn_of_missing(folder, missing)
    return model


def load_encoder(folder: str | Path) -> Encoder:
    """Read the encoder of any model folder, without its head; otherwise as `load_masked_lm`."""
    return _masked_lm(model_folder(folder))[0].encoder


def _masked_lm(folder: Path) -> tuple[MaskedLM, list[str]]:
    """Return the model and the names of the head's weights that were initialised randomly."""
    family, config, written = _read_config(folder)
    tensors = _read_weights(folder, family, config)
    if family.is_classifier(written) and config.output_width != config.hidden_size:
        tensors = family.without(tensors, "head.dense", "head.norm")  # of the pooler, which is wider
    return _build(lambda: MaskedLM(config), family, tensors, folder)


def load_classifier(
    folder: str | Path, new: ClassifierConfig | None = None, pooling: Pooling | None = None
) -> SequenceClassifier:
    """Read a classifier, or put a new head on the encoder of any model folder.

    Args:
        folder: as in `load_masked_lm`.
        new: the head to train. It starts from what the folder has: the pooler (ModernBERT: the transform of
            the masked-LM head), and the last layer if it has the same labels in any order; the rest is
            initialised randomly. None: the head that config.json names.
        pooling: pooling of the new head; None: as in config.json.

    Returns:
        The model in float32, on the CPU, in evaluation mode.

    Raises:
        InputError: as in `load_masked_lm`, or the folder holds no classifier and `new` is None.
    """
    folder = model_folder(folder)
    family, config, written = _read_config(folder)
    is_classifier = family.is_classifier(written)
    if new is None and not is_classifier:
        found = ", ".join(map(str, written.get("architectures") or ["an encoder"]))
        raise InputError(f"{folder} holds no classifier but {found}; mlm finetune makes one of it")
    own: ClassifierConfig | None = None
    with contextlib.suppress(*[InputError] if new else []):
        own = read_classifier_config(folder)
    head = new or own
    assert head, "one of the two exists"
    tensors = _read_weights(folder, family, config)
    # the transform of a masked-LM head may be narrower than the pooler, and layers of another pooling differ
    is_narrow = not is_classifier and config.output_width != config.hidden_size
    if is_narrow or pooling not in (None, config.pooling):
        tensors = family.without(tensors, "pooler.dense", "pooler.norm")
        config = replace(config, pooling=pooling or config.pooling)
    order = own.order_of(head.labels) if own and own.label_type == head.label_type else None
    tensors = family.with_classes(tensors, order)
    if order is None and own and len(own.labels) == len(head.labels) > 1 and own.labels[0] == "LABEL_0":
        log.warning("%s does not name its classes; its last layer is left out: give it id2label", folder)
    model, missing = _build(lambda: SequenceClassifier(config, head), family, tensors, folder)
    if new is None:
        _warn_of_missing(folder, missing)
    elif missing:
        log.info("new in the head: %s", shorten_names(missing))
    return model


def holds_classifier(folder: str | Path) -> bool:
    """Return whether config.json of a model folder names a classifier."""
    family, _, written = _read_config(model_folder(folder))
    return family.is_classifier(written)


def read_classifier_config(folder: str | Path) -> ClassifierConfig | None:
    """Return the head that config.json of a model folder describes; None: it names no classifier.

    Raises:
        InputError: the head is of a kind that we cannot compute.
    """
    folder = model_folder(folder)
    family, _, written = _read_config(folder)
    with _errors_of(folder / CONFIG):
        return family.read_classifier(written) if family.is_classifier(written) else None


def read_shape(folder: str | Path) -> ModelConfig:
    """Return shape and switches of the encoder in a model folder, without reading its weights."""
    return _read_config(model_folder(folder))[1]


def save_pretrained(
    folder: str | Path,
    model: MaskedLM | SequenceClassifier,
    tokenizer: Tokenizer,
    model_max_length: int,
    card: str,
    rows: CheckRows | None = None,
    start: str | Path | None = None,
) -> Path:
    """Write a model folder, completely or not at all; an existing model folder is replaced.

    The masked-LM head rules out ids beyond the tokenizer, which only pad the tables, by its output bias.

    Args:
        folder: the folder to write, which no other process may write at the same time.
        model: on any device, in any mode; not changed.
        tokenizer: the one the model was trained with.
        model_max_length: longest row in tokens.
        card: content of README.md; the result of the check is appended.
        rows: real text to compare the logits for; None: one row of random tokens.
        start: the model folder that training started from; the settings of its tokenizer are kept.

    Returns:
        `folder`.

    Raises:
        InputError: the tokenizer is larger than the model's tables, the logits are not finite, `folder` holds
            other files, the disk is full (DiskError), or a reader computes other logits (`parity.py`).
    """
    folder = Path(folder)
    longest = model.config.max_position_embeddings or model_max_length
    config = replace(model.config, max_position_embeddings=longest)
    classifier = model.classifier_config if isinstance(model, SequenceClassifier) else None
    family, special = family_of(config, classifier), SpecialTokens.from_tokenizer(tokenizer)
    num_tokens, size = num_ids(tokenizer), model.encoder.embeddings.token.num_embeddings
    if num_tokens > size:
        raise InputError(f"the tokenizer has {num_tokens} entries, more than the model's vocab_size={size}")
    if family.positions_follow_padding:
        config = replace(config, position_offset=special.pad + 1)
    if family is OWN:
        reason = missing_counterparts(config, classifier)
        log.warning("%s: only mlm reads this model, because %s", folder, reason)
    recover(folder)
    _check_place(folder)
    described = family.write_config(config) | (family.write_classifier(classifier) if classifier else {})
    described |= {path: getattr(special, token) for path, token in TOKEN_IDS.items()}
    settings = describe_tokenizer(tokenizer, config, model_max_length, start)
    with replacing(folder, "place") as part:
        part.mkdir(parents=True)
        _write_json(part / CONFIG, described)
        tensors = _their_tensors(family, model, num_tokens, config.position_offset)
        (part / WEIGHTS).write_bytes(save(tensors, metadata={"format": "pt"}))
        (part / TOKENIZER).write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        _write_json(part / TOKENIZER_CONFIG, settings)
        on = "real text" if rows else "random tokens"
        rows = rows or random_row(num_tokens, min(longest, 64), special.pad)
        stock = None if family is OWN else architecture_of(config, classifier)
        found = check_written(part, model, load_pretrained(part), stock, rows, num_tokens)
        check = f"Read back after writing, on {rows['input_ids'].shape[0]} rows of {on}: {found}."
        (part / CARD).write_text(f"{card.rstrip()}\n\n{check}\n", encoding="utf-8")
    return folder


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
    """Return the weights of a folder by their current names in the family.

    Raises:
        InputError: two have the same name, or config.json describes far more than the weights hold.
    """
    written = read_tensors(folder)
    parts = count_parameters(config)
    described, held = sum(parts.values()) - parts["head"], sum(tensor.numel() for tensor in written.values())
    if described > 2 * held:  # if less is missing, `_our_tensors` can name it
        raise InputError(
            f"{folder / CONFIG} describes an encoder of {described:,} parameters; the weights beside it are "
            f"{held:,} numbers"
        )
    names = family.current_names(written)
    if twice := sorted(name for name, times in Counter(names.values()).items() if times > 1):
        raise InputError(f"{folder} has an old and a new name for the same weights: {shorten_names(twice)}")
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
            check_numbers(source, tensor, folder)
        if not absent and not shapes:
            state[name] = torch.cat(list(found.values()))
    unexpected = sorted(name for name in tensors if not family.is_needless(name))
    faults = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    if any(faults.values()):
        text = "; ".join(f"{fault}: {shorten_names(names)}" for fault, names in faults.items() if names)
        raise InputError(f"the weights in {folder} do not fit its {CONFIG}; {text}")
    return state, of_head


def _their_tensors(
    family: Family, model: MaskedLM | SequenceClassifier, num_tokens: int, position_offset: int
) -> dict[str, Tensor]:
    """Return copies of the weights as the family stores them."""
    result = {}
    state, offset = model.state_dict(), model.config.position_offset
    if offset != position_offset:  # the rows before the first token's are never read
        table = state[POSITIONS]
        state[POSITIONS] = torch.cat([table.new_zeros(position_offset, table.shape[1]), table[offset:]])
    for name, weight in state.items():
        theirs = family.their_names(name)
        for part, block in zip(theirs, weight.chunk(len(theirs)), strict=True):
            result[part] = block.to("cpu", torch.float32, copy=True).contiguous()
    if isinstance(model, MaskedLM):
        result[family.their_names("head.bias")[0]][num_tokens:] = UNUSED_ID_BIAS
    if not model.config.tie_word_embeddings:
        copies = family.untied_copies.items()
        result |= {copy: result[name].clone() for name, copy in copies if name in result}
    return result


def _warn_of_missing(folder: Path, missing: list[str]) -> None:
    if missing:
        log.warning("%s has no %s: initialised randomly, train before use", folder, shorten_names(missing))


def _check_place(folder: Path) -> None:
    """Refuse to replace anything but a model folder."""
    if folder.exists():
        there = set(os.listdir(folder)) if folder.is_dir() else {folder.name}
        if others := sorted(there - FILES):
            raise InputError(f"{folder} is taken by something else ({shorten_names(others)}); give a new one")


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
