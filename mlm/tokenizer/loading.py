"""Tokenizers read from files, and words added to them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from mlm.config.errors import InputError
from mlm.tokenizer.bert import read_vocab_txt
from mlm.tokenizer.encoding import encode_documents
from mlm.tokenizer.special import OTHER_NAMES, SPECIAL_TOKENS, SpecialTokens
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
    tokenizer = read_vocab_txt(file) if file.name == "vocab.txt" else _read_json(file)
    try:
        SpecialTokens.from_tokenizer(tokenizer)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    if add_tokens is not None:
        _add_tokens(tokenizer, Path(add_tokens))
    return tokenizer


def _read_json(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more exact
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: is not a tokenizer.json of the tokenizers library: {reason}") from error


def _add_tokens(tokenizer: Tokenizer, file: Path) -> None:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"tokenizer.add_tokens={file} cannot be read as UTF-8 text: {error}") from None
    for word in map(str.strip, lines):
        if word in SPECIAL_TOKENS or word in OTHER_NAMES:
            raise InputError(
                f"tokenizer.add_tokens={file}: {word} is the name of a special token; leave it out"
            )
    # A word is added as the tokenizer normalises it, once, and only if it is not a token already.
    normalise = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    words = [word for word in dict.fromkeys(normalise(line).strip() for line in lines) if word]
    unknown = SpecialTokens.from_tokenizer(tokenizer).unk
    pieces = encode_documents(tokenizer, [f" {word}" for word in words])
    new = [word for word, ids in zip(words, pieces, strict=True) if len(ids) != 1 or ids[0] == unknown]
    strip = is_byte_level(tokenizer)  # byte-level pieces include the space before them, so these words do too
    tokenizer.add_tokens([AddedToken(word, single_word=True, lstrip=strip) for word in new])


def added_pieces(before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the ids of the tokens that only `after` has, each with its pieces in `before`."""
    known = before.get_vocab()
    added = {token: id_ for token, id_ in after.get_vocab().items() if token not in known}
    return dict(zip(added.values(), encode_documents(before, added), strict=True))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of the tokenizer.json of a tokenizer."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=20).hexdigest()
