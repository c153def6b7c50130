"""Which ids begin a word."""

from __future__ import annotations

import json
from itertools import chain
from string import punctuation
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models, pre_tokenizers

from mlm.config.errors import InputError


def starts_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return for each id whether a word begins with it, (tokenizer size,) bool.

    WordPiece: all but `##x`. Byte-level BPE: tokens that begin with white space or ASCII punctuation; the
    first token of a text has neither, but follows a special token, which counts as a word. Added words and
    special tokens always begin a word.

    Raises:
        InputError: the vocabulary is of another kind.
    """
    model, vocab = tokenizer.model, tokenizer.get_vocab(with_added_tokens=True)
    if isinstance(model, models.WordPiece):
        begins = {token: not token.startswith(model.continuing_subword_prefix) for token in vocab}
    elif isinstance(model, models.BPE) and is_byte_level(tokenizer):
        # Byte-level vocabularies write every byte as a visible character, white space too.
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        first = (*chain(*(part for part, _ in splitter.pre_tokenize_str(" \t\n\r"))), *punctuation)
        begins = {token: token.startswith(first) for token in vocab}
    else:
        raise InputError(
            f"whole-word masking needs a WordPiece or byte-level BPE vocabulary, not {type(model).__name__}; "
            "use masking.strategy=token or span"
        )
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    starts = np.zeros(max(vocab.values()) + 1, np.bool_)
    for token, id_ in vocab.items():
        starts[id_] = begins[token] or token in added
    return starts


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary spells bytes, the space before a word among them."""
    splitter: dict[str, Any] = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    return any(step.get("type") == "ByteLevel" for step in splitter.get("pretokenizers", [splitter]))
