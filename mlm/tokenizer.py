"""The vocabulary: train one, load one, and cut text into its pieces.

- WordPiece as in Devlin et al. 2019 (arXiv:1810.04805) or byte-level BPE as in Radford et al. 2019; special
  tokens [PAD] [UNK] [CLS] [SEP] [MASK] have the ids 0 to 4
- the same documents give the same tokenizer.json, byte for byte, in every process
- text that spells a special token never becomes one: see `encode_documents`
- words of any length and documents of any length are safe in memory
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
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
    processors,
    trainers,
)

from mlm.config.data import TokenizerConfig
from mlm.config.errors import InputError
from mlm.vocab_txt import read_vocab_txt

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
"""Names of the special tokens of a trained vocabulary, in the order of their ids."""
OTHER_NAMES = ("<pad>", "<unk>", "<s>", "</s>", "<mask>")
"""What the same tokens are called in vocabularies of the RoBERTa family."""

TOKENIZER_VERSION = 1
"""Changes whenever the same text would give another vocabulary."""
MIN_PAIR_COUNT = 2
"""Pieces are merged only if they occur together this often."""
MAX_ALPHABET = 1000
"""Most characters a WordPiece vocabulary holds; words with a rarer one become [UNK]."""
MAX_WORD_CHARACTERS = 200
"""Longest word that WordPiece cuts, a longer one becomes [UNK]; the time to cut one grows with its square."""
MAX_LONG_WORD_CHARACTERS = 2**23
"""Most characters of longer words that a vocabulary is learnt from: each is counted as a word of its own."""
PIECE_CHARACTERS = 2**15
"""Documents are encoded in pieces of about this length: threads share one document, and memory is bounded."""
GROUP_CHARACTERS = 2**21
"""Pieces are worked on together up to about this length."""

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
        """Look the ids up by name.

        Raises:
            InputError: one is missing.
        """
        ids = []
        for name, other in zip(SPECIAL_TOKENS, OTHER_NAMES, strict=True):
            found = [tokenizer.token_to_id(token) for token in (name, other)]
            id_ = found[0] if found[0] is not None else found[1]
            if id_ is None:
                raise InputError(
                    f"the tokenizer has no {name} (or {other}); masked language modelling needs one"
                )
            ids.append(id_)
        return cls(*ids)


def train_tokenizer(
    documents: Iterable[str],
    config: TokenizerConfig,
    progress: Callable[[int], None] | None = None,
) -> Tokenizer:
    """Learn a vocabulary.

    It may come out smaller than asked for, when the text has no more to merge, but never larger.

    Args:
        documents: texts; drawn once, and only as far as `config.max_bytes` of UTF-8.
        config: kind, size, and whether case and accents are kept.
        progress: called with the number of bytes after each document.

    Raises:
        InputError: there is no text, or `vocab_size` is too small for this kind.
    """
    texts = list(_without_long_words(_cut(_first_bytes(documents, config.max_bytes, progress))))
    tokenizer = _train_wordpiece(texts, config) if config.type == "wordpiece" else _train_bpe(texts, config)
    special = SpecialTokens.from_tokenizer(tokenizer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", special.cls), ("[SEP]", special.sep)],
    )
    return tokenizer


def _first_bytes(
    documents: Iterable[str], max_bytes: int, progress: Callable[[int], None] | None
) -> Iterator[str]:
    left = max_bytes
    for document in documents:
        size = len(document.encode())
        yield document if size <= left else document[: max(left, 0)]
        left -= size
        if progress:
            progress(size)
        if left <= 0:
            log.info("the vocabulary is learnt from %s MB of the text", f"{max_bytes / 1e6:,.0f}")
            return


def _cut(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text_pieces(text)


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


_SINGLE_SPACE = re.compile(r"(?<=\S)[ \n](?=\S)")


def text_groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts up to about GROUP_CHARACTERS."""
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP_CHARACTERS:
            yield group
            group, size = [], 0
    if group:
        yield group


def _without_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Break words that are too long for the vocabulary, and leave them out once there were plenty."""
    left = MAX_LONG_WORD_CHARACTERS
    for text in texts:
        words = text.split()
        if max(map(len, words), default=0) <= MAX_WORD_CHARACTERS:
            yield text
            continue
        kept = []
        for word in words:
            if len(word) > MAX_WORD_CHARACTERS:
                word, left = word[:left], left - min(len(word), left)
            kept += [word[i : i + MAX_WORD_CHARACTERS] for i in range(0, len(word), MAX_WORD_CHARACTERS)]
        yield " ".join(kept)
    if not left:
        log.info("the vocabulary is learnt without most words of over %d characters", MAX_WORD_CHARACTERS)


def _train_wordpiece(texts: list[str], config: TokenizerConfig) -> Tokenizer:
    """Train WordPiece with a fixed numbering.

    Left to itself the trainer numbers the characters inside words (`##x`) in the order of a hash map, and
    ties between merges then fall differently in each process. Special tokens keep the order given.
    """
    tokenizer = _empty_wordpiece(config, {})
    alphabet = _alphabet(texts, tokenizer, (config.vocab_size - len(SPECIAL_TOKENS)) // 2)
    inside = [f"##{character}" for character in alphabet if _joins_words(character, tokenizer)]
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*SPECIAL_TOKENS, *inside],
    )
    tokenizer.train_from_iterator(texts, trainer)
    trained = _empty_wordpiece(config, tokenizer.get_vocab(with_added_tokens=False))
    trained.add_special_tokens(list(SPECIAL_TOKENS))
    return trained


def _empty_wordpiece(config: TokenizerConfig, vocab: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD_CHARACTERS)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=True,
        strip_accents=config.lowercase,
        lowercase=config.lowercase,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _alphabet(texts: list[str], tokenizer: Tokenizer, limit: int) -> list[str]:
    """Return the most frequent characters of the normalised texts, sorted.

    The normaliser looks at one character at a time, so it is enough to count the raw ones and normalise each
    once.
    """
    counts: npt.NDArray[np.int64] = np.zeros(0x110000, np.int64)
    for group in text_groups(texts):
        codes = np.frombuffer("".join(group).encode("utf-32-le"), np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    normalised: Counter[str] = Counter()
    for code in np.flatnonzero(counts).tolist():
        for character in tokenizer.normalizer.normalize_str(chr(code)):
            normalised[character] += int(counts[code])
    visible = [(number, character) for character, number in normalised.items() if not character.isspace()]
    if not visible:
        raise InputError("the corpus has no text to learn a vocabulary from")
    visible.sort(key=lambda pair: (-pair[0], pair[1]))
    kept = visible[: min(limit, MAX_ALPHABET)]
    if len(kept) < len(visible):
        text = "the vocabulary holds the %d most frequent of %d characters; words with another are unknown"
        log.info(text, len(kept), len(visible))
    return sorted(character for _, character in kept)


def _joins_words(character: str, tokenizer: Tokenizer) -> bool:
    """Tell whether a character can stand inside a word; punctuation and Chinese characters cannot."""
    text = tokenizer.normalizer.normalize_str(f"a{character}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1


def _train_bpe(texts: list[str], config: TokenizerConfig) -> Tokenizer:
    """Train byte-level BPE: every text can be written in it, nothing is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if config.vocab_size < smallest:
        raise InputError(f"tokenizer.vocab_size={config.vocab_size} must be at least {smallest} for type bpe")
    if not any(text.strip() for text in texts):
        raise InputError("the corpus has no text to learn a vocabulary from")
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    fold = [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    tokenizer.normalizer = normalizers.Sequence(fold) if config.lowercase else normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # A mask stands for a word with the space before it, which would otherwise remain as a token of its own.
    mask = AddedToken("[MASK]", lstrip=True, special=True)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=[*SPECIAL_TOKENS[:-1], mask],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


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


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy that pads nothing, cuts nothing off and takes no text for a special token."""
    plain = Tokenizer.from_str(tokenizer.to_str())
    plain.no_padding()
    plain.no_truncation()
    plain.encode_special_tokens = True  # lives in memory only: neither saved nor copied with the tokenizer
    return plain


def _add_tokens(tokenizer: Tokenizer, file: Path) -> None:
    try:
        lines = file.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"tokenizer.add_tokens={file} cannot be read as UTF-8 text: {error}") from None
    words = dict.fromkeys(word for word in map(str.strip, lines) if word)
    # Byte-level pieces carry the space before them, so a word of ours has to take it along.
    strip, known = _is_byte_level(tokenizer), tokenizer.get_vocab()
    tokenizer.add_tokens(
        [AddedToken(word, single_word=True, lstrip=strip) for word in words if word not in known]
    )


def encode_documents(tokenizer: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Return the token ids of each text: nothing is added, cut off or taken for a special token.

    Args:
        tokenizer: any; it is copied, so that its own padding and truncation neither count nor change.
        texts: documents; "[MASK]" in one is three or more ordinary tokens.
    """
    return encode_plain(plain_tokenizer(tokenizer), texts)


def encode_plain(plain: Tokenizer, texts: Iterable[str]) -> list[list[int]]:
    """Do the work of `encode_documents` with what `plain_tokenizer` returned."""
    pieces = [list(text_pieces(text)) for text in texts]
    encoded = (
        encoding.ids
        for group in text_groups(piece for document in pieces for piece in document)
        for encoding in plain.encode_batch_fast(group, add_special_tokens=False)
    )
    return [list(chain.from_iterable(islice(encoded, len(document)))) for document in pieces]


def added_pieces(before: Tokenizer, after: Tokenizer) -> dict[int, list[int]]:
    """Return the ids of the tokens that only `after` has, each with the pieces that `before` makes of it."""
    known = before.get_vocab()
    added = {token: id_ for token, id_ in after.get_vocab().items() if token not in known}
    return dict(zip(added.values(), encode_documents(before, added), strict=True))


def tokenizer_digest(tokenizer: Tokenizer) -> str:
    """Return a digest of everything a tokenizer.json holds."""
    return hashlib.blake2b(tokenizer.to_str().encode(), digest_size=20).hexdigest()


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
    elif isinstance(tokenizer.model, models.BPE) and _is_byte_level(tokenizer):
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


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    splitter: dict[str, Any] = json.loads(tokenizer.to_str())["pre_tokenizer"] or {}
    steps = splitter.get("pretokenizers", [splitter])
    return any(step.get("type") == "ByteLevel" for step in steps)
