"""The check after writing: every reader of a model folder must compute the logits of the model in memory."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.config.errors import InputError
from mlm.model import MaskedLM, SequenceClassifier

MAX_DIFFERENCE = 1e-4
"""Largest accepted difference of a float32 logit between a model and a reader of its folder."""

CheckRows = Mapping[str, Tensor]
"""Arguments of a model's forward pass: `input_ids` (B, S), `attention_mask` (B, S) of 0 and 1, and perhaps
`token_type_ids` (B, S)."""

NEXT = "checkpoints of the run are kept; try another version of transformers, and report this"
"""Remedy if a reader differs."""

log = logging.getLogger(__name__)


def random_row(num_tokens: int, length: int, pad: int) -> CheckRows:
    """Return one row of random tokens without padding, for use when no sample text is available."""
    ids = torch.randint(num_tokens - 1, (1, length), generator=torch.Generator().manual_seed(0))
    ids += ids >= pad
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@torch.no_grad()
def check_written(
    folder: Path,
    model: MaskedLM | SequenceClassifier,
    copy: MaskedLM | SequenceClassifier,
    stock_class: str | None,
    rows: CheckRows,
    num_tokens: int,
) -> str:
    """Compare `model`, in float32 on the CPU, with `copy` and, if it is installed, with transformers.

    Args:
        folder: the model folder just written.
        model: the model that was written, on any device, in any mode; not changed.
        copy: the model that our own reader read from the folder.
        stock_class: the class of transformers that can read it; None: there is none.
        rows: input of both; padding is not compared.
        num_tokens: higher ids only pad the tables and are not compared.

    Returns:
        A sentence with the largest differences.

    Raises:
        InputError: a logit of the model is not finite, or a reader differs by more than MAX_DIFFERENCE or
            does not know a weight.
    """
    expected = _real(_reference(model)(**rows), rows, num_tokens)
    if not expected.isfinite().all():
        raise InputError(
            "the model computes logits that are not finite, so it is not saved; try a lower optimizer.lr or "
            "optimizer.weight_decay"
        )
    readers: dict[str, Callable[..., Tensor]] = {"mlm": copy.eval()}
    if stock_class is not None:
        readers |= _stock_reader(folder, stock_class)
    found = []
    for name, reader in readers.items():
        difference = (_real(reader(**rows), rows, num_tokens) - expected).abs().max().item()
        if not difference <= MAX_DIFFERENCE:  # also if it is NaN
            raise InputError(f"read back by {name}, a logit differs by {difference:.1e}: not saved; {NEXT}")
        found.append(f"{difference:.1e} by {name}")
    return f"largest difference of a logit {' and '.join(found)}"


def _reference(model: MaskedLM | SequenceClassifier) -> MaskedLM | SequenceClassifier:
    """Return a plain twin of a model that may be compiled, on another device or in another precision."""
    head = () if isinstance(model, MaskedLM) else (model.classifier_config,)
    with torch.device("meta"):
        twin = type(model)(model.config, *head)
    twin.to_empty(device="cpu")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def _real(logits: Tensor, rows: CheckRows, num_tokens: int) -> Tensor:
    """Return the logits to compare: (N, V) of all tokens but padding, or those of the texts, (B, C)."""
    return logits[rows["attention_mask"] > 0][:, :num_tokens] if logits.dim() == 3 else logits


def _stock_reader(folder: Path, stock_class: str) -> dict[str, Callable[..., Tensor]]:
    """Return a function that computes logits with transformers, by its name; logged and empty without it."""
    if importlib.util.find_spec("transformers") is None:
        log.info("the saved model is read back and compared; with transformers installed, by its classes too")
        return {}
    import transformers

    kind: Any = getattr(transformers, stock_class, None)
    if kind is None:
        log.warning("transformers %s has no %s: not compared with it", transformers.__version__, stock_class)
        return {}
    with _quiet(transformers.utils.logging):
        theirs, info = kind.from_pretrained(folder, output_loading_info=True)
    if odd := {fault: names for fault, names in info.items() if names}:
        raise InputError(f"transformers cannot read it ({odd}), so it is not saved; {NEXT}")
    theirs.eval()
    return {f"{stock_class} of transformers {transformers.__version__}": lambda **rows: theirs(**rows).logits}


@contextmanager
def _quiet(logging_of_transformers: Any) -> Iterator[None]:
    """Silence its messages and progress bars about loading."""
    verbosity = logging_of_transformers.get_verbosity()
    had_bar = logging_of_transformers.is_progress_bar_enabled()
    logging_of_transformers.set_verbosity_error()
    logging_of_transformers.disable_progress_bar()
    try:
        yield
    finally:
        logging_of_transformers.set_verbosity(verbosity)
        if had_bar:
            logging_of_transformers.enable_progress_bar()
