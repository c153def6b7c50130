"""Checkpoints of runs: opened without running code, and read as models or written as model folders."""

from __future__ import annotations

import functools
import logging
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

from mlm.config.commands import ExportConfig
from mlm.config.errors import InputError
from mlm.config.model import ClassifierConfig, ModelConfig
from mlm.config.parse import from_plain
from mlm.config.training import CardConfig
from mlm.files import shorten
from mlm.hub.download import model_folder
from mlm.hub.pretrained import longest_row
from mlm.hub.saving import Trained, model_card, save_pretrained
from mlm.model import MaskedLM, SequenceClassifier
from mlm.tokenizer import load_tokenizer, tokenizer_digest

NEEDED = {
    "state_dict": dict,
    "optimizer_states": list,
    "global_step": int,
    "progress": dict,
    "identity": dict,
    "pytorch-lightning_version": str,
}
"""Contents of a checkpoint and their types."""

DAMAGE = (
    *(RuntimeError, EOFError, LookupError, TypeError, ValueError),
    *(UnpicklingError, zipfile.BadZipFile, zlib.error),
)
"""Errors of opening a file that is not a complete checkpoint."""

UNBOUNDED_LENGTH = 512
"""model_max_length where neither the run nor its model bounds the length."""

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint file."""

    path: Path
    content: dict[str, Any]
    """Plain values and tensors, memory-mapped."""

    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        return int(self.content["global_step"])


class DamagedError(InputError):
    """A file that was read and is not a complete checkpoint."""


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint without running code that might be in the file; it must be complete."""
    try:
        with zipfile.ZipFile(path) as archive:  # torch does not check the checksums of files it maps
            if damaged := archive.testzip():
                raise ValueError(f"{damaged} is damaged")
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        _check_content(content)
        return Checkpoint(path, content)
    except FileNotFoundError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path} cannot be read: {reason}; resume again when it can be") from None
    except DAMAGE as error:
        reason = " ".join(str(error).split())[:120]
    raise DamagedError(f"{path} is not a complete checkpoint: {reason}")


def _check_content(content: Any) -> None:
    """Raise ValueError unless a checkpoint has all that a run continues with, each of its kind."""
    if not isinstance(content, dict):
        raise ValueError("it is not a table")
    if missing := [key for key in NEEDED if key not in content]:
        raise ValueError(f"it has no {', '.join(missing)}")
    for key, kind in NEEDED.items():
        value = content[key]
        if type(value) is not kind and not (kind is dict and isinstance(value, dict)):
            raise ValueError(f"its {key} is {str(value)[:40]!r}")
        if not value and kind is not int:
            raise ValueError(f"its {key} is empty")
    if content["global_step"] < 0 or "rows" not in content["progress"]:
        raise ValueError("its global_step or progress is not that of a run")
    if not all(isinstance(state, dict) and state for state in content["optimizer_states"]):
        raise ValueError("its optimizer_states are not those of an optimizer")
    if foreign := content.get("hyper_parameters", {}).keys() - {"config", "model"}:
        raise ValueError(f"another program wrote it: its hyper_parameters have {', '.join(sorted(foreign))}")


def checkpoint_model(content: dict[str, Any], path: Path) -> Trained:
    """Return the model of a checkpoint on the CPU; InputError: its weights are not of the shape it says."""
    shape = content["hyper_parameters"]["model"]
    model: Trained
    with torch.device("meta"):
        if "encoder" in shape:
            classifier = shape["classifier"] | {"labels": tuple(shape["classifier"]["labels"])}
            head = ClassifierConfig(**classifier)
            model = SequenceClassifier(from_plain(ModelConfig, shape["encoder"]), head)
        else:
            model = MaskedLM(from_plain(ModelConfig, shape))
    state = {
        name.replace("_orig_mod.", "").removeprefix("model."): tensor
        for name, tensor in content["state_dict"].items()
    }
    if different := sorted(state.keys() ^ model.state_dict().keys()):
        raise InputError(
            f"{path}: the weights are those of another model; they differ in {shorten(different)}"
        )
    model.to_empty(device="cpu").load_state_dict(state)
    return model.eval()


def write_checkpoint(path: Path, folder: Path, check: bool = True) -> None:
    """Write the model of a checkpoint as a model folder, with the tokenizer of its run.

    `check`: compare what readers compute from it, as `save_pretrained` does.
    """
    content = open_checkpoint(path).content
    config, identity = content["hyper_parameters"]["config"], content["identity"]
    model, is_pretrained = checkpoint_model(content, path), "masking" in config
    progress, tokens = content["progress"], None
    if is_pretrained:
        source = path.absolute().parent.parent / "tokenizer"
        tokens = None if config["init"] else progress.get("tokens")
        start = source if config["init"] else None
        length = (start and longest_row(start, model.config)) or config["data"]["seq_len"]
    else:
        source = start = Path(config["tokenizer"] if config["model"] == "scratch" else config["model"])
        length = config["data"]["max_length"] or model.config.max_position_embeddings
        length = length or longest_row(start, model.config) or UNBOUNDED_LENGTH
    tokenizer = load_tokenizer(model_folder(source))
    if tokenizer_digest(tokenizer) != identity["tokenizer"]:
        raise InputError(f"{path}: {source} is not the tokenizer of this run; put the original one there")
    facts = {"step": content["global_step"], "seed": config["seed"]}
    if progress.get("validated_at") == content["global_step"]:
        facts |= {f"val_{name}": value for name, value in progress["last"].items()}
    classifier = model.classifier_config if isinstance(model, SequenceClassifier) else None
    card = model_card(
        str(config["name"]),
        model.config,
        facts,
        classifier,
        identity.get("started_from"),
        CardConfig(**config["card"]),
        tokenizer=tokenizer,
    )
    save_pretrained(folder, model, tokenizer, length, card, start=start, tokens=tokens, check=check)


@functools.cache
def checkpoint_folder(path: Path) -> Path:
    """Return a model folder with the model of a checkpoint, removed when this process ends."""
    place = tempfile.TemporaryDirectory(prefix="mlm-")
    _PLACES.append(place)
    write_checkpoint(path, Path(place.name) / "model", check=False)
    return Path(place.name) / "model"


_PLACES: list[tempfile.TemporaryDirectory[str]] = []


def export(config: ExportConfig) -> None:
    """Write the model of a checkpoint as a model folder."""
    write_checkpoint(Path(config.model), Path(config.output))
    print(f"{config.output}: the model of {config.model}")
