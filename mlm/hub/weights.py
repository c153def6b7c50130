"""Read the weights of a model folder from any of the usual files, without running code in them."""

from __future__ import annotations

import json
import pickle
import re
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from mlm.config.errors import InputError
from mlm.files import shorten

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
"""Suffix of the file that names the parts, if the weights are in several files."""
shorten_names = partial(shorten, most=4)
"""Join the first names of weights for a message."""


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all weights of a folder: from safetensors if it has any, else from pickles.

    Raises:
        InputError: there are none, or a file is damaged or holds anything but tensors.
    """
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


def _is_plain(tensor: object) -> bool:
    is_dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_quantized
    return is_dense and tensor.device.type == "cpu"  # type: ignore[attr-defined]


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
            raise InputError(
                f"{path} does not hold the weights that {index.name} lists: {shorten_names(odd)}"
            )
        tensors |= found
    return tensors


def check_numbers(name: str, tensor: Tensor, folder: Path) -> None:
    """Check that a tensor holds weights.

    Raises:
        InputError: it holds integers or quantized values, or some that are not finite.
    """
    if tensor.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise InputError(f"{name} in {folder} is of type {kind}; only floats of 16 to 64 bits are weights")
    if not tensor.isfinite().all():
        raise InputError(f"{name} in {folder} holds numbers that are not finite: the model is broken")
