"""BERT's WordPiece pipeline, and older BERT folders, which have a vocab.txt but no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from mlm.config.errors import InputError
from mlm.tokenizer.special import SPECIAL_TOKENS, UNK, bert_template

BERT_WORD_CHARACTERS = 100
"""Longest word that BERT's own WordPiece cuts; a longer one becomes [UNK]."""
SWITCHES = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
"""Settings of tokenizer_config.json that change the tokens, with their defaults."""


def wordpiece(
    vocab: dict[str, int],
    max_word_characters: int,
    lowercase: bool,
    strip_accents: bool | None,
    split_chinese: bool = True,
) -> Tokenizer:
    """Return a WordPiece tokenizer with BERT's normaliser, splitter and decoder; `vocab` may be empty."""
    model = models.WordPiece(vocab, unk_token=UNK, max_input_chars_per_word=max_word_characters)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True, handle_chinese_chars=split_chinese, strip_accents=strip_accents, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def read_vocab_txt(file: Path) -> Tokenizer:
    """Return the tokenizer of a vocab.txt, one token a line, and the tokenizer_config.json beside it.

    Raises:
        InputError: a file is damaged, or a special token is missing.
    """
    described = file.with_name("tokenizer_config.json")
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        settings = json.loads(described.read_text(encoding="utf-8")) if described.exists() else {}
        switches = {name: settings.get(name, default) for name, default in SWITCHES.items()}
        if odd := {name: value for name, value in switches.items() if value not in (True, False, None)}:
            raise ValueError(f"{odd} must be true or false")
    except (ValueError, AttributeError) as error:  # of encoding, or of JSON
        raise InputError(f"{file.parent}: vocab.txt or {described.name} is damaged: {error}") from None
    tokens = lines[:-1] if lines[-1] == "" else lines
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if missing := [token for token in SPECIAL_TOKENS if token not in vocab]:
        raise InputError(f"{file} has no {', '.join(missing)}: it is not a vocabulary of BERT")
    tokenizer = wordpiece(
        vocab,
        BERT_WORD_CHARACTERS,
        lowercase=bool(switches["do_lower_case"]),
        strip_accents=switches["strip_accents"],
        split_chinese=bool(switches["tokenize_chinese_chars"]),
    )
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in SPECIAL_TOKENS])
    tokenizer.post_processor = bert_template(tokenizer)
    return tokenizer
