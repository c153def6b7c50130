"""Training of a vocabulary, with the same result in every process."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain

import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlm.config.data import TokenizerConfig
from mlm.config.errors import InputError
from mlm.files import format_bytes
from mlm.tokenizer.bert import wordpiece
from mlm.tokenizer.encoding import text_groups, text_pieces
from mlm.tokenizer.special import MASK, SPECIAL_TOKENS, UNK, bert_template

TOKENIZER_VERSION = 1
"""Changes whenever the same text would give another vocabulary."""
MIN_PAIR_COUNT = 2
"""Pieces are merged only if they occur together this often."""
MAX_ALPHABET = 1000
"""Most characters a WordPiece vocabulary holds; words with a rarer one become [UNK]."""
MAX_WORD_CHARACTERS = 200
"""Longest word that WordPiece cuts, a longer one becomes [UNK]; the time to cut one grows with its square."""
MAX_LONG_WORD_CHARACTERS = 2**23
"""Most characters of longer words that a vocabulary is learnt from; more would take much memory."""

log = logging.getLogger(__name__)


def train_tokenizer(documents: Iterable[str], config: TokenizerConfig, name: str = "the corpus") -> Tokenizer:
    """Train a vocabulary.

    It is smaller than `vocab_size` if the text has no more pieces to merge, but never larger.

    Args:
        documents: texts; drawn once, and only as far as `config.max_bytes` of UTF-8.
        config: kind, size, and whether case and accents are kept.
        name: the text's name in errors.

    Raises:
        InputError: the text is empty, or `vocab_size` is too small for this kind.
    """
    pieces = chain.from_iterable(map(text_pieces, _first_bytes(documents, config.max_bytes)))
    texts = list(_without_long_words(pieces))
    train = _train_wordpiece if config.type == "wordpiece" else _train_bpe
    tokenizer = train(texts, config, name)
    tokenizer.post_processor = bert_template(tokenizer)
    return tokenizer


def _first_bytes(documents: Iterable[str], max_bytes: int) -> Iterator[str]:
    left = max_bytes
    for document in documents:
        size = len(document.encode())
        yield document if size <= left else document[:left]
        left -= size
        if left <= 0:
            log.info("the vocabulary is learnt from %s of the text", format_bytes(max_bytes))
            return


def _without_long_words(texts: Iterable[str]) -> Iterator[str]:
    """Break words that are too long for the vocabulary; leave them out beyond MAX_LONG_WORD_CHARACTERS."""
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


def _train_wordpiece(texts: list[str], config: TokenizerConfig, name: str) -> Tokenizer:
    """Train WordPiece with a fixed numbering.

    Left to itself the trainer numbers the characters inside words (`##x`) in the order of a hash map, and
    ties between merges then fall differently in each process. Special tokens keep the order given.
    """
    tokenizer = _empty_wordpiece(config, {})
    alphabet = _alphabet(texts, tokenizer, (config.vocab_size - len(SPECIAL_TOKENS)) // 2)
    if not alphabet:
        raise InputError(f"{name}: has no text to learn a vocabulary from")
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
    return wordpiece(vocab, MAX_WORD_CHARACTERS, config.lowercase, strip_accents=config.lowercase)


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
    visible.sort(key=lambda pair: (-pair[0], pair[1]))
    kept = visible[: min(limit, MAX_ALPHABET)]
    if len(kept) < len(visible):
        text = "the vocabulary holds the %d most frequent of %d characters; words with another are unknown"
        log.info(text, len(kept), len(visible))
    return sorted(character for _, character in kept)


def _joins_words(character: str, tokenizer: Tokenizer) -> bool:
    """Return whether a character can occur inside a word; punctuation and Chinese characters cannot."""
    text = tokenizer.normalizer.normalize_str(f"a{character}")
    return len(tokenizer.pre_tokenizer.pre_tokenize_str(text)) == 1


def _train_bpe(texts: list[str], config: TokenizerConfig, name: str) -> Tokenizer:
    """Train byte-level BPE, in which every text can be written: nothing is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if config.vocab_size < smallest:
        raise InputError(f"tokenizer.vocab_size={config.vocab_size} must be at least {smallest} for type bpe")
    if not any(text.strip() for text in texts):
        raise InputError(f"{name}: has no text to learn a vocabulary from")
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    fold = [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
    tokenizer.normalizer = normalizers.Sequence(fold) if config.lowercase else normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # A mask replaces a word and the space before it, which would otherwise remain as a separate token.
    mask = AddedToken(MASK, lstrip=True, special=True)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=[*SPECIAL_TOKENS[:-1], mask],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
