"""Train a vocabulary.

- WordPiece as in Devlin et al. 2019 (arXiv:1810.04805), byte-level BPE as in Radford et al. 2019, or words
- the same documents give the same tokenizer.json, byte for byte, in every process
- no character is lost: marks that are part of a letter stay, composed and decomposed text is one
"""

from __future__ import annotations

import logging
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import (
    AddedToken,
    Regex,
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
from mlm.files import format_bytes
from mlm.tokenizer import (
    MASK,
    SPECIAL_TOKENS,
    UNK,
    bert_template,
    num_ids,
    text_groups,
    text_pieces,
    wordpiece,
)

TOKENIZER_VERSION = 2
"""Changes whenever the same text would give another vocabulary."""
SEPARATORS = "[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]"
"""Control characters that separate words; BERT's own normaliser would delete them and join the words."""
ACCENTS = r"(?<=[\p{Latin}\p{Greek}])\p{Mn}+|(?<=\p{Cyrillic})[\x{300}\x{301}]+"
"""Marks that are no part of their letter; others (of й, ё, kana, Indic and Thai vowels) always stay."""
POINTS = r"(?<=[\p{Hebrew}\p{Arabic}])\p{Mn}+"
"""Vowel points and marks that most texts of these scripts leave out."""
SAMPLED_CHARACTERS, SHOWN_EXAMPLES = 2**20, 3
"""Text on which a normalisation is tried before training, and the examples of what it makes equal."""
MIN_PAIR_COUNT = 2
"""Pieces are merged only if they occur together this often."""
MAX_WORD_CHARACTERS = 200
"""Longest word that WordPiece cuts, a longer one becomes [UNK]; the time to cut one grows with its square."""
MAX_LONG_WORD_CHARACTERS = 2**23
"""Most characters of longer words that a vocabulary is learnt from; more would take much memory."""

log = logging.getLogger(__name__)


def train_tokenizer(documents: Iterable[str], config: TokenizerConfig, name: str = "the corpus") -> Tokenizer:
    """Train a vocabulary, smaller than `vocab_size` if the text has no more pieces to merge.

    The documents are drawn once, and only as far as `config.max_bytes` of UTF-8; `name` is for errors.
    InputError: the text is empty, or `vocab_size` is too small for this kind.
    """
    pieces = chain.from_iterable(map(text_pieces, _first_bytes(documents, config.max_bytes)))
    texts = list(_without_long_words(pieces))
    train = {"wordpiece": _train_wordpiece, "bpe": _train_bpe, "wordlevel": _train_wordlevel}[config.type]
    tokenizer = train(texts, config)
    if num_ids(tokenizer) == len(SPECIAL_TOKENS) or not any(text.strip() for text in texts):
        raise InputError(f"{name}: has no text to learn a vocabulary from")
    template: Any = bert_template(tokenizer)
    if config.type == "bpe":  # the offsets of a word leave out the space before it
        template = processors.Sequence([processors.ByteLevel(trim_offsets=True), template])
    tokenizer.post_processor = template
    _report_equal_words(texts, tokenizer, config)
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


def _normaliser(config: TokenizerConfig) -> Any:
    """Return the steps before a text is cut into words; composed characters stay composed."""
    steps: list[Any] = [normalizers.NFC()]
    if config.type != "bpe":
        steps.insert(0, normalizers.Replace(Regex(SEPARATORS), " "))
    if config.type == "wordpiece":
        steps.insert(1, normalizers.BertNormalizer(lowercase=False, strip_accents=False))
    if config.strip_accents:
        marks = f"{ACCENTS}|{POINTS}" if config.strip_accents == "all" else ACCENTS
        steps += [normalizers.NFD(), normalizers.Replace(Regex(marks), "")]
    if config.lowercase:
        steps.append(normalizers.Lowercase())
    if config.strip_accents:
        steps.append(normalizers.NFC())
    return normalizers.Sequence(steps)


def is_by_character(normalizer: dict[str, Any]) -> bool:
    """Return whether a normaliser, in plain values, treats the words between spaces one by one."""
    ours = ({"Regex": SEPARATORS}, {"Regex": ACCENTS}, {"Regex": f"{ACCENTS}|{POINTS}"})
    by_word = ("BertNormalizer", "NFC", "NFD", "Lowercase", "StripAccents")
    return all(
        step["type"] in by_word or (step["type"] == "Replace" and step["pattern"] in ours)
        for step in normalizer.get("normalizers", [normalizer])
    )


def _report_equal_words(texts: list[str], tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Log how many distinct words and documents of a sample become equal, with examples."""
    if tokenizer.normalizer is None or not (config.lowercase or config.strip_accents):
        return
    sample = next(text_groups(texts, SAMPLED_CHARACTERS), [])
    of_words = (word for text in sample for word in unicodedata.normalize("NFC", text).split())
    for kind, items in (("words", of_words), ("documents", iter(sample))):
        spellings: dict[str, list[str]] = defaultdict(list)
        for item in dict.fromkeys(items):
            spellings[tokenizer.normalizer.normalize_str(item)].append(item)
        merged = [found for found in spellings.values() if len(found) > 1]
        if merged:
            number, total = sum(map(len, merged)), sum(map(len, spellings.values()))
            pairs = sorted(merged, key=lambda found: -len(found))[:SHOWN_EXAMPLES]
            examples = "; ".join(" = ".join(word[:40] for word in found[:2]) for found in pairs)
            level = logging.INFO if kind == "words" else logging.WARNING
            text = "normalisation makes %s of %s distinct %s of a sample equal to others (%.1f %%): %s"
            share = 100 * number / total
            log.log(level, text, f"{number:,}", f"{total:,}", kind, share, examples)
            if level == logging.WARNING:
                log.warning("where case or accents carry meaning, set tokenizer.lowercase false")


def _train_wordpiece(texts: list[str], config: TokenizerConfig) -> Tokenizer:
    """Train WordPiece with a fixed numbering.

    Left to itself the trainer numbers the characters inside words (`##x`) in the order of a hash map, and
    ties between merges then fall differently in each process. Special tokens keep the order given.
    """
    tokenizer = wordpiece({}, MAX_WORD_CHARACTERS, _normaliser(config))
    alphabet = _alphabet(texts, tokenizer, (config.vocab_size - len(SPECIAL_TOKENS)) // 2, config)
    normalise, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    # Punctuation and Chinese characters are words by themselves, so they never follow a letter in one.
    inside = [f"##{character}" for character in alphabet if len(split(normalise(f"a{character}"))) == 1]
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=MIN_PAIR_COUNT,
        show_progress=False,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        special_tokens=[*SPECIAL_TOKENS, *inside],
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    trained = wordpiece(vocab, MAX_WORD_CHARACTERS, _normaliser(config))
    trained.add_special_tokens(list(SPECIAL_TOKENS))
    return trained


def _alphabet(texts: list[str], tokenizer: Tokenizer, limit: int, config: TokenizerConfig) -> list[str]:
    """Return the most frequent characters of the normalised texts, sorted."""
    # On composed text the normaliser looks at one character at a time, so each is normalised only once.
    counts: npt.NDArray[np.int64] = np.zeros(0x110000, np.int64)
    for group in text_groups(texts):
        joined = unicodedata.normalize("NFC", "\n".join(group))
        if config.strip_accents:  # which looks at the letter before a mark
            joined = tokenizer.normalizer.normalize_str(joined)
        codes = np.frombuffer(joined.encode("utf-32-le"), np.uint32)
        counts += np.bincount(codes, minlength=len(counts))
    normalised: Counter[str] = Counter()
    for code in np.flatnonzero(counts).tolist():
        for character in tokenizer.normalizer.normalize_str(chr(code)):
            normalised[character] += int(counts[code])
    visible = [(number, character) for character, number in normalised.items() if not character.isspace()]
    visible.sort(key=lambda pair: (-pair[0], pair[1]))
    kept = visible[:limit]
    if len(kept) < len(visible):
        log.info("the vocabulary holds the %d most frequent of %d characters", len(kept), len(visible))
    return sorted(character for _, character in kept)


def _train_bpe(texts: list[str], config: TokenizerConfig) -> Tokenizer:
    """Train byte-level BPE, in which every text can be written: nothing is unknown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    smallest = len(SPECIAL_TOKENS) + len(alphabet)
    if config.vocab_size < smallest:
        raise InputError(f"tokenizer.vocab_size={config.vocab_size} must be at least {smallest} for type bpe")
    tokenizer = Tokenizer(models.BPE(unk_token=UNK))
    tokenizer.normalizer = _normaliser(config)
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


def _train_wordlevel(texts: list[str], config: TokenizerConfig) -> Tokenizer:
    """Take the most frequent words between spaces; all others are unknown."""
    tokenizer = Tokenizer(models.WordLevel({}, unk_token=UNK))
    tokenizer.normalizer, tokenizer.pre_tokenizer = _normaliser(config), pre_tokenizers.WhitespaceSplit()
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenizer.normalizer.normalize_str(text).split())
    words = sorted(counts, key=lambda word: (-counts[word], word))[: config.vocab_size - len(SPECIAL_TOKENS)]
    vocab = {word: number for number, word in enumerate(dict.fromkeys([*SPECIAL_TOKENS, *words]))}
    tokenizer.model = models.WordLevel(vocab, unk_token=UNK)
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    return tokenizer
