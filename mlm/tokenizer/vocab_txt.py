"""The tokenizer of older BERT folders, which hold vocab.txt and settings but no tokenizer.json."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from mlm.config.errors import InputError

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
SWITCHES = {"do_lower_case": True, "strip_accents": None, "tokenize_chinese_chars": True}
"""Settings of tokenizer_config.json that change the tokens, and what they are where it leaves them out."""


def read_vocab_txt(folder: Path) -> Tokenizer:
    """Return the WordPiece tokenizer that a vocab.txt, one token a line, and tokenizer_config.json describe.

    What the latter leaves out is as in BERT's original code: lower case, accents stripped with it, Chinese
    characters apart.

    Raises:
        InputError: a file is damaged, or a special token is missing.
    """
    file, described = folder / "vocab.txt", folder / "tokenizer_config.json"
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
        settings = json.loads(described.read_text(encoding="utf-8")) if described.exists() else {}
        switches = {name: settings.get(name, default) for name, default in SWITCHES.items()}
        if odd := {name: value for name, value in switches.items() if value not in (True, False, None)}:
            raise ValueError(f"{odd} must be true or false")
    except (ValueError, AttributeError) as error:  # of encoding, or of JSON
        raise InputError(f"{folder}: vocab.txt or tokenizer_config.json is damaged: {error}") from None
    tokens = lines[:-1] if lines[-1] == "" else lines
    vocab = {token.rstrip("\r"): number for number, token in enumerate(tokens)}
    if missing := [token for token in SPECIAL if token not in vocab]:
        raise InputError(f"{file} has no {', '.join(missing)}: it is no vocabulary of BERT")
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=bool(switches["tokenize_chinese_chars"]),
        strip_accents=switches["strip_accents"],
        lowercase=bool(switches["do_lower_case"]),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer
