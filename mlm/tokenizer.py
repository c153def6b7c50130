"""The vocabulary: load one, and cut text into its pieces.

- text that spells a special token never becomes one: see `encode_documents`
- words of any length and documents of any length are safe in memory
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass
from itertools import chain, islice
from pathlib import Path
from string import punctuation
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.processors import TemplateProcessing

from mlm.config.errors import InputError

PAD, UNK, CLS, SEP, MASK = SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Names of the special tokens of a trained vocabulary, in the order of their ids."""
OTHER_NAMES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
"""Names of the same tokens in vocabularies of the RoBERTa family."""
BERT_WORD_CHARACTERS = 100
"""Longest word that BERT's own WordPiece cuts; a longer one becomes [UNK]."""
PIECE_CHARACTERS = 2**15
"""Documents are encoded in pieces of about this length: threads share one document, and memory is bounded."""
GROUP_CHARACTERS, GROUP_TEXTS = 2**21, 2**13
"""Pieces are encoded in groups of about this length, and of at most so many."""
_SINGLE_SPACE = re.compile(r"(?<=\S)[ \n](?=\S)")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SpecialTokens:
    """Ids of the special tokens."""

    pad: int
    unk: int
    cls: int
    sep: int
    mask: int

    @property
    def ids(self) -> tuple[int, int, int, int, int]:
        """All of them: never masked, never drawn as a replacement."""
        return astuple(self)

    @classmethod
    def from_tokenizer(cls, tokenizer: Tokenizer) -> SpecialTokens:
        """Look the ids up by name; InputError: one is missing."""
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        # A vocabulary with both spellings got one of them later, from added words: the lower ids win.
        if whole := [names for names in (SPECIAL_TOKENS, OTHER_NAMES) if vocab.keys() >= {*names}]:
            return cls(*min([vocab[name] for name in names] for names in whole))
        ids = []
        for names in zip(SPECIAL_TOKENS, OTHER_NAMES, strict=True):
            found = [vocab[name] for name in names if name in vocab]
            if not found:
                raise InputError(f"the tokenizer has no {names[0]} (or {names[1]}), which masked LMs need")
            ids.append(min(found))
        return cls(*ids)


def bert_template(tokenizer: Tokenizer) -> TemplateProcessing:
    """Return the post-processor that makes `[CLS] text [SEP]` and `[CLS] first [SEP] second [SEP]`."""
    return TemplateProcessing(
        single=f"{CLS} $A {SEP}",
        pair=f"{CLS} $A {SEP} $B:1 {SEP}:1",
        special_tokens=[(name, tokenizer.token_to_id(name)) for name in (CLS, SEP)],
    )


def num_ids(tokenizer: Tokenizer) -> int:
    """Return the rows that an embedding table needs: one more than the highest id, as ids may have gaps."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1


def starts_word(tokenizer: Tokenizer) -> npt.NDArray[np.bool_]:
    """Return for each id whether a word begins with it, (tokenizer size,) bool.

    WordPiece: all but `##x`. Byte-level BPE: tokens that begin with white space or ASCII punctuation; the
    first token of a text has neither, but follows a special token, which counts as a word. Added words and
    special tokens always begin a word. InputError: the vocabulary is of another kind.
    """
    model, vocab = tokenizer.model, tokenizer.get_vocab(with_added_tokens=True)
    if isinstance(model, models.WordLevel):
        begins = dict.fromkeys(vocab, True)
    elif isinstance(model, models.WordPiece):
        begins = {token: not token.startswith(model.continuing_subword_prefix) for token in vocab}
    elif isinstance(model, models.BPE) and _is_byte_level(tokenizer):
        # Byte-level vocabularies write every byte as a visible character, white space too.
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        first = (*chain(*(part for part, _ in splitter.pre_tokenize_str(" \t\n\r"))), *punctuation)
        begins = {token: token.startswith(first) for token in vocab}
    else:
        kind = type(model).__name__
        reason = f"whole-word masking needs a WordPiece, WordLevel or byte-level BPE vocabulary, not {kind}"
        raise InputError(f"{reason}; use masking.strategy=token or span")
    added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    starts = np.zeros(max(vocab.values()) + 1, np.bool_)
    for token, id_ in vocab.items():
        starts[id_] = begins[token] or token in added
    return starts


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """Return whether the vocabulary spells bytes, the space before a word among them."""
    splitter: dict[str, Any] = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    return any(step.get("type") == "ByteLevel" for step in splitter.get("pretokenizers", [splitter]))


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


def extra_special_tokens(tokenizer: Tokenizer) -> dict[str, int]:
    """Return the special tokens beyond the five, with their ids: marks such as <ent> of a vocabulary."""
    added, five = tokenizer.get_added_tokens_decoder().items(), {*SPECIAL_TOKENS, *OTHER_NAMES}
    return {token.content: id_ for id_, token in added if token.special and token.content not in five}


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy without padding, truncation and recognition of the five special tokens in a text.

    Further special tokens are recognised, as by every other reader of the file: a text has them on purpose.
    """
    content, extra = json.loads(tokenizer.to_str()), extra_special_tokens(tokenizer)
    for token in content["added_tokens"]:
        token["special"] = token["content"] not in extra and token["special"]
    plain = Tokenizer.from_str(json.dumps(content)) if extra else Tokenizer.from_str(tokenizer.to_str())
    plain.no_padding()
    plain.no_truncation()
    plain.encode_special_tokens = True  # lives in memory only: neither saved nor copied with the tokenizer
    return plain


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Return the token ids of each text: nothing is added, cut off or taken for a special token."""
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


def load_tokenizer(path: str | Path, add_tokens: str | None = None) -> Tokenizer:
    """Open a tokenizer.json, or the one in a model folder; of an older BERT its vocab.txt.

    Special tokens written in a text are recognised, as `fill-mask` needs it; `encode_documents` does not.
    `add_tokens` is a text file of words, one a line: each gets the next free id. InputError: a file is
    missing or damaged, or the vocabulary lacks a special token.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        names = ("tokenizer.json", "vocab.txt")
        file /= next((name for name in names if (file / name).is_file()), names[0])
    if not file.is_file():
        raise InputError(f"{file}: no such file; expected a tokenizer.json or a model folder that holds one")
    try:
        tokenizer = _read_vocab_txt(file) if file.name == "vocab.txt" else Tokenizer.from_file(str(file))
        _register_special_tokens(tokenizer)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    except Exception as error:  # the library raises nothing more exact
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{file}: is not a tokenizer.json of the tokenizers library: {reason}") from error
    if add_tokens is not None:
        _add_tokens(tokenizer, Path(add_tokens))
    return tokenizer


def _register_special_tokens(tokenizer: Tokenizer) -> None:
    """Make special tokens that are only in the vocabulary recognised in a text, as transformers does."""
    ids = SpecialTokens.from_tokenizer(tokenizer).ids
    known = tokenizer.get_added_tokens_decoder()
    names = [str(tokenizer.id_to_token(number)) for number in ids if number not in known]
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in names])


def _add_tokens(tokenizer: Tokenizer, file: Path) -> None:
    try:
        lines = [line.strip() for line in file.read_text(encoding="utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"tokenizer.add_tokens={file} cannot be read as UTF-8 text: {error}") from None
    if special := {*SPECIAL_TOKENS, *OTHER_NAMES}.intersection(lines):
        raise InputError(f"tokenizer.add_tokens={file}: {min(special)} is a special token; leave it out")
    # A word is added as the tokenizer normalises it, once, and only if it is not a token already.
    normalise = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    words = [word for word in dict.fromkeys(normalise(line).strip() for line in lines) if word]
    unknown = SpecialTokens.from_tokenizer(tokenizer).unk
    pieces = encode_documents(tokenizer, [f" {word}" for word in words])
    new = [word for word, ids in zip(words, pieces, strict=True) if len(ids) != 1 or ids[0] == unknown]
    strip = _is_byte_level(tokenizer)  # its pieces include the space before them, so these words do too
    tokenizer.add_tokens([AddedToken(word, single_word=True, lstrip=strip) for word in new])


def added_pieces(before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the ids of the tokens that only `after` has, each with its pieces in `before`."""
    known = before.get_vocab()
    added = {token: id_ for token, id_ in after.get_vocab().items() if token not in known}
    return dict(zip(added.values(), encode_documents(before, added), strict=True))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of the tokenizer.json of a tokenizer."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=20).hexdigest()


def wordpiece(vocab: dict[str, int], longest_word: int, normaliser: Any) -> Tokenizer:
    """Return a WordPiece tokenizer with BERT's splitter and decoder."""
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token=UNK, max_input_chars_per_word=longest_word))
    tokenizer.normalizer = normaliser
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _read_vocab_txt(file: Path) -> Tokenizer:
    """Return the tokenizer of a vocab.txt, one token a line, and the tokenizer_config.json beside it."""
    described = file.with_name("tokenizer_config.json")
    switches = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}  # as BERT's
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        settings = json.loads(described.read_text(encoding="utf-8")) if described.exists() else {}
        switches = {name: settings.get(name, default) for name, default in switches.items()}
        if odd := {name: value for name, value in switches.items() if value not in (True, False, None)}:
            raise ValueError(f"{odd} must be true or false")
    except (ValueError, AttributeError) as error:  # of encoding, or of JSON
        raise InputError(f"it or {described.name} is damaged: {error}") from None
    tokens = lines[:-1] if lines[-1] == "" else lines
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if missing := [token for token in SPECIAL_TOKENS if token not in vocab]:
        raise InputError(f"has no {', '.join(missing)}: it is not a vocabulary of BERT")
    lowercase, accents, chinese = switches.values()
    flags: dict[str, Any] = {
        "lowercase": bool(lowercase),
        "strip_accents": accents,
        "handle_chinese_chars": bool(chinese),
    }
    tokenizer = wordpiece(vocab, BERT_WORD_CHARACTERS, normalizers.BertNormalizer(**flags))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.post_processor = bert_template(tokenizer)
    return tokenizer
