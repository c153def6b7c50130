"""From text to ids, with nothing added, cut off or taken for a special token."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice

from tokenizers import Tokenizer

PIECE_CHARACTERS = 2**15
"""Documents are encoded in pieces of about this length: threads share one document, and memory is bounded."""
GROUP_CHARACTERS = 2**21
"""Pieces are encoded in groups of about this length, and of at most GROUP_TEXTS."""
GROUP_TEXTS = 2**13
_SINGLE_SPACE = re.compile(r"(?<=\S)[ \n](?=\S)")


def text_pieces(text: str) -> Iterator[str]:
    """Cut a long text before a single space between words, where the cut changes no token."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        near, far = start + PIECE_CHARACTERS, start + 2 * PIECE_CHARACTERS
        gap = _SINGLE_SPACE.search(text, near, far)
        end = gap.start() if gap else min(far, len(text))  # a word of this length may as well be cut
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def text_groups(texts: Iterable[str], characters: int | None = None) -> Iterator[list[str]]:
    """Group texts up to about so many characters, GROUP_CHARACTERS by default."""
    group: list[str] = []
    room = limit = characters or GROUP_CHARACTERS
    for text in texts:
        group.append(text)
        room -= len(text)
        if room <= 0 or len(group) == GROUP_TEXTS:
            yield group
            group, room = [], limit
    if group:
        yield group


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy without padding, truncation and recognition of special tokens in a text."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_padding()
    plain.no_truncation()
    plain.encode_special_tokens = True  # lives in memory only: neither saved nor copied with the tokenizer
    return plain


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Return the token ids of each text: nothing is added, cut off or taken for a special token.

    Args:
        tokenizer: any; it is copied, so its own padding and truncation have no effect and do not change.
        texts: documents; "[MASK]" in one is three or more ordinary tokens.
    """
    return encode_plain(plain_tokenizer(tokenizer), texts)


def encode_plain(plain: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Do the work of `encode_documents` with the result of `plain_tokenizer`."""
    pieces = [list(text_pieces(text)) for text in texts]
    encoded = (
        encoding.ids
        for group in text_groups(chain.from_iterable(pieces))
        for encoding in plain.encode_batch_fast(group, add_special_tokens=False)
    )
    return [list(chain.from_iterable(islice(encoded, len(document)))) for document in pieces]
