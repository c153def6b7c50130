"""Where words begin, told from the ids alone."""

from __future__ import annotations

import json
from string import punctuation
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers

from mlm.config.errors import InputError


def starts_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return for each id whether a word begins with it, (tokenizer size,) bool.

    WordPiece: all but `##x`. Byte-level BPE: what begins with white space or ASCII punctuation; the first
    token of a text has neither, but follows a special token, which is a word of its own.

    Raises:
        InputError: the vocabulary is of another kind and does not tell.
    """
    vocab = tokenizer.get_vocab(with_added_tokens=True)
    kind = type(tokenizer.model).__name__
    if isinstance(tokenizer.model, models.WordPiece):
        prefix = tokenizer.model.continuing_subword_prefix
        begins = {token: not token.startswith(prefix) for token in vocab}
    elif isinstance(tokenizer.model, models.BPE) and is_byte_level(tokenizer):
        first = tuple(_byte_level(" \t\n\r") + punctuation)
        begins = {token: token.startswith(first) for token in vocab}
    else:
        raise InputError(
            f"whole-word masking needs a WordPiece or byte-level BPE vocabulary, not {kind}; "
            "use masking.strategy=token or span"
        )
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    starts = np.zeros(max(vocab.values()) + 1, np.bool_)
    for token, id_ in vocab.items():
        starts[id_] = begins[token] or token in added
    return starts


def _byte_level(text: str) -> str:
    """Return ASCII text as byte-level vocabularies spell it: every byte is a visible character there."""
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return "".join(part for part, _ in splitter.pre_tokenize_str(text))


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Tell whether the vocabulary spells bytes, the space before a word among them."""
    splitter: dict[str, Any] = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter])
    return any(step.get("type") == "ByteLevel" for step in steps)
