"""Models on disk: folders that stock Hugging Face classes read, and that we read back.

- spelt like the family that can represent the model (`families.py`), else with a `model_type` of our own
- written beside the final place, read back, compared with the model in memory, then renamed
- nothing that is read can run code
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from mlm.config.errors import DiskError, InputError
from mlm.config.model import ClassifierConfig, ModelConfig, Pooling
from mlm.hub.download import model_folder
from mlm.hub.families import FAMILIES, OWN, architecture_of, family_of, missing_counterparts
from mlm.hub.family import TOKEN_IDS, Family, Json
from mlm.hub.parity import CheckRows, check_written, random_row
from mlm.hub.tokenizer_config import TOKENIZER_CONFIG, describe_tokenizer
from mlm.hub.weights import WEIGHTS, check_numbers, listed, read_tensors
from mlm.model import UNUSED_ID_BIAS, Encoder, MaskedLM, SequenceClassifier, init_weights
from mlm.plan import count_parameters
from mlm.tokenizer import SpecialTokens, num_ids

CONFIG = "config.json"
POSITIONS = "encoder.embeddings.position.weight"
log = logging.getLogger(__name__)


def load_pretrained(folder: str | Path) -> MaskedLM | SequenceClassifier:
    """Read a model folder with the head that its config.json names, by one of the next two functions."""
    folder = model_folder(folder)
    family, _, written = _read_config(folder)
    return load_classifier(folder) if _names_classifier(family, written) else load_masked_lm(folder)


def load_masked_lm(folder: str | Path, needs_head: bool = False) -> MaskedLM:
    """Read a model folder: one of ours, or one that transformers saved for a family of `FAMILIES`.

    OWNER/NAME is a model of the Hugging Face hub, unless something here begins with OWNER/.
    A masked-LM head that is not there is initialised, with a warning; heads of other tasks are left out.

    Args:
        folder: the model.
        needs_head: refuse a model without a whole masked-LM head.

    Returns:
        The model in float32, on the CPU, in evaluation mode: call `.train()` before training it.

    Raises:
        InputError: a file is missing, damaged, unsafe to open, or does not fit its config.json.
    """
    folder = model_folder(folder)
    model, missing = _masked_lm(folder)
    if missing and needs_head:
        raise InputError(f"{folder} was not trained to fill masks: it has no {listed(missing)}")
    if missing:
        log.warning("%s has no %s: initialised, to be trained before use", folder, listed(missing))
    return model


def holds_classifier(folder: str | Path) -> bool:
    """Tell whether a model folder says that its head is a classifier's."""
    family, _, written = _read_config(model_folder(folder))
    return _names_classifier(family, written)


def load_encoder(folder: str | Path) -> Encoder:
    """Read the encoder of any model folder and leave its head; otherwise as `load_masked_lm`."""
    return _masked_lm(model_folder(folder))[0].encoder


def _masked_lm(folder: Path) -> tuple[MaskedLM, list[str]]:
    """Return the model and the weights of its head that had to be drawn."""
    family, config, written = _read_config(folder)
    tensors = _without_narrow_transform(config, read_tensors(folder), _names_classifier(family, written))
    _check_size(config, tensors, folder)
    with torch.device("meta"):  # sizes only: no memory, no random numbers
        model = MaskedLM(config)
    missing = _fill(model, family, tensors, folder)
    return model.eval(), missing


def load_classifier(
    folder: str | Path, new: ClassifierConfig | None = None, pooling: Pooling | None = None
) -> SequenceClassifier:
    """Read a classifier, or put a new one on the encoder of any model folder.

    Args:
        folder: as in `load_masked_lm`.
        new: the head to be trained. What the folder has of it is taken over: the pooler, or the transform of
            ModernBERT's masked-LM head, and the last layer if it has the same labels in any order; the rest
            is drawn from torch's generator. None: the head that config.json names.
        pooling: what stands for a text in the new head; None: as config.json has it.

    Returns:
        The model in float32, on the CPU, in evaluation mode.

    Raises:
        InputError: as in `load_masked_lm`, or the folder holds no classifier and none is given.
    """
    folder = model_folder(folder)
    family, config, written = _read_config(folder)
    is_classifier = _names_classifier(family, written)
    if new is None and not is_classifier:
        found = ", ".join(map(str, written.get("architectures") or ["an encoder"]))
        raise InputError(f"{folder} holds no classifier but {found}; mlm finetune makes one of it")
    try:
        own = read_classifier_config(folder)
    except InputError:
        if new is None:
            raise
        own = None
    head = new or own
    assert head, "one of the two is there"
    tensors = _without_narrow_transform(config, read_tensors(folder), not is_classifier)
    if pooling not in (None, config.pooling):  # other layers: those of the folder mean something else
        config = replace(config, pooling=pooling)
        poolers = {theirs for part in ("dense", "norm") for theirs in family.their_names(f"pooler.{part}.x")}
        poolers = {name.removesuffix("x") for name in poolers}
        tensors = {name: one for name, one in tensors.items() if not name.startswith(tuple(poolers))}
    order = own.order_of(head.labels) if own and own.label_type == head.label_type else None
    tensors = family.with_classes(tensors, order)
    if order is None:
        _tell_nameless(folder, own, head)
    _check_size(config, tensors, folder)
    with torch.device("meta"):
        model = SequenceClassifier(config, head)
    missing = _fill(model, family, tensors, folder)
    if missing and new is None:
        log.warning("%s has no %s: initialised, to be trained before use", folder, listed(missing))
    elif missing:
        log.info("new in the head: %s", listed(missing))
    return model.eval()


def _tell_nameless(folder: Path, own: ClassifierConfig | None, head: ClassifierConfig) -> None:
    """Warn where the classes of a model might be those wanted, but nothing says which is which."""
    if own and len(own.labels) == len(head.labels) > 1 and own.labels[0] == "LABEL_0":
        log.warning("%s does not name its classes; its last layer is left out: give it id2label", folder)


def _without_narrow_transform(
    config: ModelConfig, tensors: dict[str, Tensor], other_head: bool
) -> dict[str, Tensor]:
    """Leave out the first layer of another head where its width is that of the tables, not of the layers."""
    if not other_head or config.output_width == config.hidden_size:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if not name.startswith("head.")}


def _names_classifier(family: Family, written: Json) -> bool:
    named = written.get("architectures")
    return isinstance(named, list) and family.classifier in named


def _check_size(config: ModelConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    """Refuse a config.json that asks for far more than the weights hold, before anything is made of it."""
    parts = count_parameters(config)
    described, held = sum(parts.values()) - parts["head"], sum(tensor.numel() for tensor in tensors.values())
    if described > 2 * held:  # if it is less, what is missing can be named
        raise InputError(
            f"{folder / CONFIG} describes an encoder of {described:,} parameters; the weights beside it are "
            f"{held:,} numbers"
        )


def _fill(
    model: MaskedLM | SequenceClassifier, family: Family, tensors: dict[str, Tensor], folder: Path
) -> list[str]:
    """Give a model without memory the weights of a file; return those of its head that had to be drawn."""
    state, missing = _our_tensors(family, model, tensors, folder)
    model.to_empty(device="cpu")
    for name, part in model.named_children():
        if missing and name != "encoder":
            init_weights(part, model.config.initializer_range)
    model.load_state_dict(state, strict=False)
    return missing


def read_classifier_config(folder: str | Path) -> ClassifierConfig | None:
    """Return what the head of a model folder is for; None: it holds no classifier.

    Raises:
        InputError: it is of a kind that we cannot compute.
    """
    folder = model_folder(folder)
    family, _, written = _read_config(folder)
    if not _names_classifier(family, written):
        return None
    try:
        return family.read_classifier(written)
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{folder / CONFIG}: {error}") from None


def read_shape(folder: str | Path) -> ModelConfig:
    """Return the shape and switches of the encoder in a model folder, whose weights are not looked at."""
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
    """Write a model folder, whole or not at all; a model folder that is already there is replaced.

    Ids beyond the tokenizer, which only pad the tables, are ruled out by the output bias of a masked-LM head.

    Args:
        folder: where to; also what is returned.
        model: left as it is, whatever its device and mode.
        tokenizer: the one the model was trained with.
        model_max_length: longest row in tokens.
        card: content of README.md; how closely the model was read back is added.
        rows: real text to compare the logits for; None: one row of random tokens.
        start: the model folder that this one goes on from; the settings of its tokenizer are kept.

    Raises:
        InputError: the tokenizer is larger than the model's tables, the model's numbers are not finite,
            something else is in the place of the folder, the disk is full (DiskError), or what was written
            is not read back as it should be (`parity.py`).
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
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    for left in folder.parent.glob(f".{folder.name}.*.part"):  # by a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        token_ids = {path: getattr(special, token) for path, token in TOKEN_IDS.items()}
        head = family.write_classifier(classifier) if classifier else {}
        _write_json(part / CONFIG, family.write_config(config) | head | token_ids)
        save_file(
            _their_tensors(family, model, num_tokens, config.position_offset),
            part / WEIGHTS,
            metadata={"format": "pt"},
        )
        (part / WEIGHTS).chmod(
            (part / CONFIG).stat().st_mode
        )  # the library makes it readable by the owner only
        (part / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
        settings = describe_tokenizer(tokenizer, config, model_max_length, start)
        _write_json(part / TOKENIZER_CONFIG, settings)
        on = "real text" if rows else "random tokens"
        rows = rows or random_row(num_tokens, min(longest, 64), special.pad)
        stock = None if family is OWN else architecture_of(config, classifier)
        found = check_written(part, model, load_pretrained(part), stock, rows, num_tokens)
        check = f"Read back after writing, on {rows['input_ids'].shape[0]} rows of {on}: {found}."
        (part / "README.md").write_text(f"{card.rstrip()}\n\n{check}\n", encoding="utf-8")
        _put_in_place(part, folder)
    except (OSError, SafetensorError) as error:
        text = f"{folder}: the model cannot be saved: {getattr(error, 'strerror', None) or error}"
        raise DiskError(f"{text}; make room there") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _read_config(folder: Path) -> tuple[Family, ModelConfig, Json]:
    path, nested = folder / CONFIG, folder / "model"
    if not path.is_file():
        advice = f"did you mean {nested}?" if (nested / CONFIG).is_file() else "`mlm pretrain` writes one"
        raise InputError(f"{path} does not exist: a model folder holds {CONFIG} and {WEIGHTS}; {advice}")
    families = {family.model_type: family for family in FAMILIES}
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        model_type = written.get("model_type") if isinstance(written, dict) else None
        if not isinstance(model_type, str) or model_type not in families:
            raise InputError(f"model_type={model_type} is not supported, only {', '.join(families)}")
        if "quantization_config" in written:
            raise InputError("quantization_config: quantized weights are not supported")
        return families[model_type], families[model_type].read_config(written), written
    except RecursionError:
        raise InputError(f"{path} is nested too deeply") from None
    except (ValueError, TypeError, AttributeError, LookupError) as error:  # not JSON, or of another form
        raise InputError(f"{path}: {error}") from None


def _our_tensors(
    family: Family, model: MaskedLM | SequenceClassifier, written: dict[str, Tensor], folder: Path
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the weights of `model`, and the names of those of its head that are missing."""
    names = family.current_names(written)
    if twice := sorted(name for name, times in Counter(names.values()).items() if times > 1):
        raise InputError(f"the weights in {folder} have two of {listed(twice)}, by an old name and a new one")
    tensors = {new: written[old] for old, new in names.items()}
    if not model.config.tie_word_embeddings:  # where the two differ, the copy is the one in use
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
        if len(found) == len(sources) and not shapes:
            state[name] = torch.cat(list(found.values()))
    unexpected = sorted(name for name in tensors if not family.is_needless(name))
    faults = {"missing": missing, "unexpected": unexpected, "wrong shape": misshapen}
    if any(faults.values()):
        text = "; ".join(f"{fault}: {listed(names)}" for fault, names in faults.items() if names)
        raise InputError(f"the weights in {folder} do not fit its {CONFIG}; {text}")
    return state, of_head


def _their_tensors(
    family: Family, model: MaskedLM | SequenceClassifier, num_tokens: int, position_offset: int
) -> dict[str, Tensor]:
    """Return the weights as the family stores them, each with memory of its own."""
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


def _put_in_place(part: Path, folder: Path) -> None:
    """Rename `part` to `folder`; only a model folder gives way, nothing else that somebody put there."""
    old = part.with_suffix(".old")
    if folder.exists():
        there = set(os.listdir(folder)) if folder.is_dir() else {folder.name}
        if others := sorted(there - set(os.listdir(part))):
            raise InputError(f"{folder} is taken by something else ({listed(others)}); give a new one")
        folder.rename(old)
    part.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _write_json(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
