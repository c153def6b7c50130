"""The vocabulary: train one, load one, and cut text into its pieces.

- WordPiece as in Devlin et al. 2019 (arXiv:1810.04805) or byte-level BPE as in Radford et al. 2019
- the same documents give the same tokenizer.json, byte for byte, in every process
- text that spells a special token never becomes one: see `encode_documents`
- words of any length and documents of any length are safe in memory
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import unicodedata
from collections import Counter, defaultdict
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
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers.processors import TemplateProcessing

from mlm.config.data import TokenizerConfig
from mlm.config.errors import InputError
from mlm.files import format_bytes

TOKENIZER_VERSION = 2
"""Changes whenever the same text would give another vocabulary."""
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
MIN_PAIR_COUNT = 2
"""Pieces are merged only if they occur together this often."""
SEPARATORS = "[\x0b\x0c\x1c-\x1f\x85\u2028\u2029]"
"""Control characters that separate words; BERT's own normaliser would delete them and join the words."""
ACCENTS = r"(?<=[\p{Latin}\p{Greek}])\p{Mn}+|(?<=\p{Cyrillic})[\x{300}\x{301}]+"
"""Marks that are no part of their letter; others (of й, ё, kana, Indic and Thai vowels) always stay."""
POINTS = r"(?<=[\p{Hebrew}\p{Arabic}])\p{Mn}+"
"""Vowel points and marks that most texts of these scripts leave out."""
SAMPLED_CHARACTERS, SHOWN_EXAMPLES = 2**20, 3
"""Text on which a normalisation is tried before training, and the examples of what it makes equal."""
MAX_WORD_CHARACTERS = 200
"""Longest word that WordPiece cuts, a longer one becomes [UNK]; the time to cut one grows with its square."""
MAX_LONG_WORD_CHARACTERS = 2**23
"""Most characters of longer words that a vocabulary is learnt from; more would take much memory."""
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


def _bert_template(tokenizer: Tokenizer) -> TemplateProcessing:
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


def plain_tokenizer(tokenizer: Tokenizer) -> Tokenizer:
    """Return a copy without padding, truncation and recognition of special tokens in a text."""
    plain = Tokenizer.from_str(tokenizer.to_str())
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


def _wordpiece(vocab: dict[str, int], longest_word: int, normaliser: Any) -> Tokenizer:
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
    tokenizer = _wordpiece(vocab, BERT_WORD_CHARACTERS, normalizers.BertNormalizer(**flags))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.post_processor = _bert_template(tokenizer)
    return tokenizer


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
    tokenizer.post_processor = _bert_template(tokenizer)
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


def _train_wordpiece(texts: list[str], config: TokenizerConfig) -> Tokenizer:
    """Train WordPiece with a fixed numbering.

    Left to itself the trainer numbers the characters inside words (`##x`) in the order of a hash map, and
    ties between merges then fall differently in each process. Special tokens keep the order given.
    """
    tokenizer = _wordpiece({}, MAX_WORD_CHARACTERS, _normaliser(config))
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
    trained = _wordpiece(vocab, MAX_WORD_CHARACTERS, _normaliser(config))
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
