"""Tokenizers that are there already, and words added to them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from mlm.config.errors import InputError
from mlm.tokenizer.encoding import encode_documents
from mlm.tokenizer.special import OTHER_NAMES, SPECIAL_TOKENS, SpecialTokens
from mlm.tokenizer.vocab_txt import read_vocab_txt
from mlm.tokenizer.words import is_byte_level


def load_tokenizer(path: str | Path, add_tokens: str | None = None) -> Tokenizer:
    """Open a tokenizer.json, or the one in a model folder; of an older BERT its vocab.txt.

    Special tokens written in a text are recognised, as `fill-mask` needs it; `encode_documents` does not.

    Args:
        path: the file or folder.
        add_tokens: text file of words, one a line: each gets the next free id.

    Raises:
        InputError: it is missing, damaged, or lacks a special token; or the words are not UTF-8.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        names = ("tokenizer.json", "vocab.txt")
        file /= next((name for name in names if (file / name).is_file()), names[0])
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a tokenizer.json or a model folder that holds one")
    try:
        is_list = file.name == "vocab.txt"
        tokenizer = read_vocab_txt(file.parent) if is_list else Tokenizer.from_file(str(file))
    except InputError:
        raise
    except Exception as error:  # the library raises nothing more exact
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: is not a tokenizer.json of the tokenizers library: {reason}") from error
    try:
        SpecialTokens.from_tokenizer(tokenizer)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    if add_tokens is not None:
        _add_tokens(tokenizer, Path(add_tokens))
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, file: Path) -> None:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"tokenizer.add_tokens={file} cannot be read as UTF-8 text: {error}") from None
    normalise = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    words = dict.fromkeys(normalise(line).strip() for line in lines)
    special = {*SPECIAL_TOKENS, *OTHER_NAMES}
    if taken := next((word for word in map(str.strip, lines) if word in special), None):
        raise InputError(f"tokenizer.add_tokens={file}: {taken} is the name of a special token; leave it out")
    # A word that is one token as it is gains nothing; two tokens for one word, as it is normalised, would
    # make it a matter of chance which of them is found.
    unknown = SpecialTokens.from_tokenizer(tokenizer).unk
    pieces = encode_documents(tokenizer, [f" {word}" for word in words])
    new = [
        word for word, ids in zip(words, pieces, strict=True) if word and (len(ids) != 1 or ids[0] == unknown)
    ]
    # Byte-level pieces carry the space before them, so a word of ours has to take it along.
    strip = is_byte_level(tokenizer)
    tokenizer.add_tokens([AddedToken(word, single_word=True, lstrip=strip) for word in new])


def added_pieces(before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the ids of the tokens that only `after` has, each with the pieces that `before` makes of it."""
    known = before.get_vocab()
    added = {token: id_ for token, id_ in after.get_vocab().items() if token not in known}
    return dict(zip(added.values(), encode_documents(before, added), strict=True))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of everything a tokenizer.json holds."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=20).hexdigest()
