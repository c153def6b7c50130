"""Folders of older BERTs against what transformers reads from them."""

from __future__ import annotations

import json

import pytest
from transformers import BertTokenizer

from mlm.config.data import TokenizerConfig
from mlm.config.errors import InputError
from mlm.startup.checks import check_tokenizer
from mlm.tokenizer import SpecialTokens, load_tokenizer

WORDS = [*"abcdefé水", *(f"##{letter}" for letter in "abcdefé"), "Café", "cafe", "cafes", "##s", ",", "!"]
TOKENS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
TEXTS = ["Cafés, beef!", "café 水水", "", "a [MASK] bed\u200b", "xyz cab" + "a" * 120]


def write(folder, settings, tokens=TOKENS):
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_ids_are_those_of_transformers(settings, tmp_path):
    folder = write(tmp_path, settings)
    ours, theirs = load_tokenizer(folder), BertTokenizer.from_pretrained(folder)
    for text in TEXTS:
        found, expected = ours.encode(text, "cab"), theirs(text, "cab")
        assert (found.ids, found.type_ids) == (expected["input_ids"], expected["token_type_ids"])
        assert ours.encode(text).ids == theirs(text)["input_ids"]
    assert ours.get_vocab_size() == len(theirs)
    assert SpecialTokens.from_tokenizer(ours).ids == (0, 2, 3, 4, 5)


def test_a_tokenizer_json_beside_it_comes_first(tmp_path):
    write(tmp_path, None)
    load_tokenizer(tmp_path).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "vocab.txt").write_text("broken")
    assert load_tokenizer(tmp_path).token_to_id("cafe") == TOKENS.index("cafe")


def test_a_folder_with_a_vocabulary_is_a_tokenizer_to_reuse(tmp_path):
    check_tokenizer(TokenizerConfig(path=str(write(tmp_path, None))))


def test_damage_is_an_error(tmp_path):
    with pytest.raises(InputError, match=r"vocab\.txt: has no \[MASK\]"):
        load_tokenizer(write(tmp_path, None, [token for token in TOKENS if token != "[MASK]"]))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(InputError, match="is damaged"):
        load_tokenizer(write(tmp_path, None))
    (tmp_path / "vocab.txt").write_bytes(b"\xff\n")
    with pytest.raises(InputError, match="is damaged"):
        load_tokenizer(tmp_path)
