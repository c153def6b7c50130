from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import mlm
import mlm.data.vocabulary as module
from mlm.config.data import CorpusConfig, MaskingConfig, SourceConfig, TokenizerConfig
from mlm.config.errors import InputError
from mlm.data.collate import build_masking
from mlm.data.corpus import prepare_corpus
from mlm.data.encoding import DocumentEncoder
from mlm.data.vocabulary import train_tokenizer
from mlm.tokenizer import (
    SPECIAL_TOKENS,
    SpecialTokens,
    added_pieces,
    encode_documents,
    extra_special_tokens,
    load_tokenizer,
    num_ids,
    starts_word,
    tokenizer_digest,
    wordpiece,
)

WORDS = (
    "The quiet harbour lights turn slowly past an old stone wall; Café Öl, naïve boats don't wait (really)."
)
TEXTS = [WORDS, WORDS.lower(), "two boats drift past the mill while the tide turns, 灯光 慢慢", "x" * 30] * 3
TIES = [" ".join(f"{a}{b}" for b in ("ar", "el", "or", "un", "ek")) for a in "bcdfghjklmnpqrst"]

WORDPIECE = TokenizerConfig(vocab_size=200)
CASED = TokenizerConfig(vocab_size=200, lowercase=False)
BPE = TokenizerConfig(type="bpe", vocab_size=400)
CASED_BPE = TokenizerConfig(type="bpe", vocab_size=400, lowercase=False)
ALL = pytest.mark.parametrize(
    "config", [WORDPIECE, CASED, BPE, CASED_BPE], ids=["wordpiece", "cased", "bpe", "cased-bpe"]
)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return [str(tokenizer.id_to_token(id_)) for id_ in encode_documents(tokenizer, [text])[0]]


def longest_match(word: str, vocab: dict[str, int]) -> list[str]:
    """WordPiece by its definition: again and again the longest piece that fits."""
    pieces, start = [], 0
    while start < len(word):
        fitting = [("##" if start else "") + word[start:end] for end in range(len(word), start, -1)]
        piece = next((piece for piece in fitting if piece in vocab), None)
        if piece is None:
            return ["[UNK]"]
        pieces.append(piece)
        start += len(piece.removeprefix("##") if start else piece)
    return pieces


@pytest.mark.parametrize("config", [WORDPIECE, CASED])
def test_wordpiece_is_the_longest_match(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    for text in [*TEXTS, "unseen words turning, quietly; harbours Ψ"]:
        words = tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text))
        expected = [piece for word, _ in words for piece in longest_match(word, tokenizer.get_vocab())]
        assert tokens(tokenizer, text) == expected


@ALL
def test_round_trip_through_a_file_and_transformers(config: TokenizerConfig, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = train_tokenizer(TEXTS, config)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    stock = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert tokenizer_digest(loaded) == tokenizer_digest(tokenizer)
    for text in [*TEXTS, "a [MASK] b", "[MASK], unseen Ωmega", ""]:
        encoding = tokenizer.encode(text)
        assert loaded.encode(text).ids == encoding.ids == stock(text)["input_ids"]
    program = (
        "import json, sys; from mlm.tokenizer import load_tokenizer\n"
        "tokenizer, texts = load_tokenizer(sys.argv[1]), json.loads(sys.argv[2])\n"
        "print(json.dumps([tokenizer.encode(text).ids for text in texts]))"
    )
    command = [sys.executable, "-c", program, str(tmp_path), json.dumps(TEXTS)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert json.loads(output) == [tokenizer.encode(text).ids for text in TEXTS]


@ALL
def test_special_tokens_and_templates(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    special = SpecialTokens.from_tokenizer(tokenizer)
    assert special.ids == (0, 1, 2, 3, 4)
    assert [tokenizer.id_to_token(id_) for id_ in special.ids] == list(SPECIAL_TOKENS)
    single = tokenizer.encode("old [MASK] wall")
    assert single.ids.count(special.mask) == 1
    assert (single.ids[0], single.ids[-1]) == (special.cls, special.sep)
    pair = tokenizer.encode("old", "wall")
    end = pair.ids.index(special.sep)
    assert pair.type_ids == [0] * (end + 1) + [1] * (len(pair.ids) - end - 1)
    assert pair.ids[-1] == special.sep
    assert tokenizer.get_vocab_size() <= config.vocab_size


@ALL
def test_mask_takes_the_place_of_a_word(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    text = "the quiet harbour lights"
    ids = tokenizer.encode(text).ids
    masked = tokenizer.encode(text.replace("harbour", "[MASK]")).ids
    start = masked.index(4)
    assert masked[:start] == ids[:start]
    assert masked[start + 1 :] == ids[len(ids) - len(masked) + start + 1 :]


@ALL
def test_decoder_gives_the_text_back(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    text = "quiet harbour lights turn slowly"
    assert tokenizer.decode(encode_documents(tokenizer, [text])[0]) == text


@pytest.mark.parametrize("threads", ["1", "2"])
def test_training_is_the_same_in_every_process(threads: str) -> None:
    configs = [
        TokenizerConfig(vocab_size=60),
        TokenizerConfig(vocab_size=100),
        WORDPIECE,
        TokenizerConfig(type="bpe", vocab_size=290),
    ]
    expected = [tokenizer_digest(train_tokenizer(TIES + TEXTS, config)) for config in configs]
    program = (
        "import json, sys; from mlm.config.data import TokenizerConfig\n"
        "from mlm.tokenizer import tokenizer_digest\nfrom mlm.data.vocabulary import train_tokenizer\n"
        "texts, configs = json.loads(sys.argv[1])\n"
        "for config in configs: print(tokenizer_digest(train_tokenizer(texts, TokenizerConfig(**config))))"
    )
    command = [
        sys.executable,
        "-c",
        program,
        json.dumps([TIES + TEXTS, [vars(config) for config in configs]]),
    ]
    environment = {**os.environ, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
    output = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert output.split() == expected


@pytest.mark.parametrize("switches", [(True, "all"), (True, False), (False, True), (False, False)])
def test_alphabet_equals_counting_normalised_words(switches) -> None:
    texts = [*TEXTS, "İstanbul ǅ ŉ ﬁ Å\u030a \u2028 a\u00adb \ud55c\uad6d a\x00b \t 𝔘 😀", "\u0958 ßẞ ΣΑΣ ǆ"]
    config = TokenizerConfig(lowercase=switches[0], strip_accents=switches[1])
    tokenizer = wordpiece({}, 200, module._normaliser(config))
    counts: Counter[str] = Counter()
    for text in texts:
        for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(tokenizer.normalizer.normalize_str(text)):
            counts.update(word)
    order = sorted(counts, key=lambda character: (-counts[character], character))
    for limit in (3, 20, 10**6):
        assert module._alphabet(texts, tokenizer, limit, config) == sorted(order[:limit])


@pytest.mark.parametrize("vocab_size", [16, 17, 30, 64, 150, 1000])
def test_vocabulary_is_never_larger_than_asked_for(vocab_size: int) -> None:
    tokenizer = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=vocab_size))
    vocab = tokenizer.get_vocab()
    assert len(vocab) <= vocab_size
    assert sorted(vocab.values()) == list(range(len(vocab)))


def test_characters_that_are_words_have_no_inner_piece() -> None:
    vocab = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=1000)).get_vocab()
    assert {"灯", ",", "a", "##a"} <= vocab.keys()
    assert not {"##灯", "##,"} & vocab.keys()


def test_case_and_accents_are_kept_or_folded() -> None:
    cased, folded = (
        train_tokenizer(TEXTS, CASED),
        train_tokenizer(TEXTS, replace(WORDPIECE, strip_accents=True)),
    )
    assert tokens(cased, "The") != tokens(cased, "the")
    assert "".join(tokens(cased, "Öl")).replace("##", "") == "Öl"
    assert tokens(folded, "The Café") == tokens(folded, "the cafe")
    assert tokens(train_tokenizer(TEXTS, WORDPIECE), "CAFÉ")[0][-1] == "é"
    bpe = train_tokenizer(TEXTS, replace(BPE, strip_accents=True))
    assert tokens(bpe, "The Café") == tokens(bpe, "the cafe")
    kept = train_tokenizer(TEXTS, CASED_BPE)
    assert kept.decode(encode_documents(kept, ["The Café\nÖl  灯 😀"])[0]) == "The Café\nÖl  灯 😀"


def test_odd_characters_are_removed_or_become_spaces() -> None:
    odd = [
        "a\x00b",
        "a\u200bb",
        "soft\u00adhyphen",
        "👨\u200d👩\u200d👧 ok",
        "tab\there",
        "bad\ufffdchar",
        "a\u2028b",
        "\x07",
    ]
    plain = ["ab", "ab", "softhyphen", "👨👩👧 ok", "tab here", "badchar", "a b", ""]
    tokenizer = train_tokenizer(odd + plain, WORDPIECE)
    assert encode_documents(tokenizer, odd) == encode_documents(tokenizer, plain)
    removed = set("\x00\u200b\u00ad\u200d\ufffd\x07\t\u2028")
    assert not any(removed & set(token) for token in tokenizer.get_vocab())
    bpe = train_tokenizer(odd, BPE)
    assert bpe.decode(encode_documents(bpe, [odd[0]])[0]) == odd[0]


@ALL
def test_written_special_tokens_are_ordinary_text(config: TokenizerConfig) -> None:
    texts = ["write [MASK] on the door", "the tag [SEP] and [CLS] are only words here", "[PAD][UNK] ##x"]
    tokenizer = train_tokenizer([*TEXTS, *texts * 3], config)
    before = tokenizer.to_str()
    for ids in encode_documents(tokenizer, texts):
        assert not set(ids) & set(SpecialTokens.from_tokenizer(tokenizer).ids)
    assert tokenizer.to_str() == before
    assert 4 in tokenizer.encode(texts[0]).ids  # the tokenizer itself still knows a mask when it sees one


@ALL
def test_padding_and_truncation_of_the_file_do_not_matter(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    expected = encode_documents(tokenizer, TEXTS)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    assert encode_documents(tokenizer, TEXTS) == expected
    assert len(tokenizer.encode(TEXTS[0]).ids) == 64


@ALL
def test_cutting_long_documents_changes_no_token(
    config: TokenizerConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    texts = ["", "\n".join(TEXTS), "a  b\n\nc\t d " + WORDS * 4, " ", "old wall " * 50]
    whole = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for size in (40, 57, 100):
        monkeypatch.setattr(mlm.tokenizer, "PIECE_CHARACTERS", size)
        monkeypatch.setattr(mlm.tokenizer, "GROUP_CHARACTERS", 3 * size)
        assert [piece for text in texts for piece in module.text_pieces(text)] != texts
        assert encode_documents(tokenizer, texts) == whole


@ALL
def test_text_without_spaces_is_safe(config: TokenizerConfig) -> None:
    giant = "abcdefghij" * 100_000
    tokenizer = train_tokenizer([giant, *TEXTS], config)
    assert max(map(len, tokenizer.get_vocab())) <= module.MAX_WORD_CHARACTERS + 2
    assert len(encode_documents(tokenizer, [giant])[0]) > 0


@pytest.mark.slow
def test_a_line_of_64_megabytes_without_a_space_fits_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_bytes(os.urandom(2**25).hex().encode())
    program = "import resource, sys; from mlm.__main__ import main; main(sys.argv[1:]);"
    program += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    command = [sys.executable, "-c", program, "tokenizer", "train", "--data.sources", str(path)]
    command += ["--output", str(tmp_path / "tokenizer")]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert int(output.splitlines()[-1]) * 1024 < 2e9


def test_long_words_are_cut_up_to_the_limit() -> None:
    limit = module.MAX_WORD_CHARACTERS
    tokenizer = train_tokenizer(["a" * 101, "aa aa"], WORDPIECE)
    unknown = SpecialTokens.from_tokenizer(tokenizer).unk
    fits, too_long = encode_documents(tokenizer, ["a" * limit, "a" * (limit + 1)])
    assert unknown not in fits
    assert too_long == [unknown]


def test_word_with_an_unseen_character_is_one_unknown_token() -> None:
    tokenizer = train_tokenizer(["quiet harbour unwanted wall lamp"] * 3, WORDPIECE)
    assert encode_documents(tokenizer, ["quiet harbour unwantedψ wall ☂ lamp"])[0].count(1) == 2


def test_training_reads_no_more_than_needed() -> None:
    read: list[str] = []

    def long() -> Iterator[str]:
        for document in ["some words"] * 100:
            read.append(document)
            yield document
        raise AssertionError("read too far")

    tokenizer = train_tokenizer(long(), replace(WORDPIECE, max_bytes=95))
    assert sum(map(len, read)) == 100
    assert tokenizer_digest(tokenizer) == tokenizer_digest(
        train_tokenizer(["some words"] * 9 + ["some "], WORDPIECE)
    )


@ALL
@pytest.mark.parametrize("texts", [[], [""], [" ", "\n"]])
def test_training_without_text_is_an_error(config: TokenizerConfig, texts: list[str]) -> None:
    with pytest.raises(InputError, match=r"a\.txt: has no text to learn a vocabulary from"):
        train_tokenizer(texts, config, name="a.txt")


def test_bpe_needs_room_for_every_byte() -> None:
    with pytest.raises(InputError, match=r"tokenizer\.vocab_size=260 must be at least 261 for type bpe"):
        train_tokenizer(TEXTS, TokenizerConfig(type="bpe", vocab_size=260))
    assert train_tokenizer(TEXTS, TokenizerConfig(type="bpe", vocab_size=261)).get_vocab_size() == 261


def grouped(tokenizer: Tokenizer, text: str) -> list[str]:
    """Return the words of a text according to `starts_word`."""
    starts = starts_word(tokenizer)
    words: list[list[int]] = []
    for number, id_ in enumerate(encode_documents(tokenizer, [text])[0]):
        if starts[id_] or number == 0:
            words.append([])
        words[-1].append(id_)
    return [tokenizer.decode(word).strip() for word in words]


@ALL
def test_words_are_found_from_the_ids(config: TokenizerConfig) -> None:
    tokenizer = train_tokenizer(TEXTS, config)
    starts = starts_word(tokenizer)
    assert starts.shape == (tokenizer.get_vocab_size(),)
    assert starts.dtype == np.bool_
    assert starts[:5].all()
    assert grouped(tokenizer, "unharboured lights, slowly") == ["unharboured", "lights", ",", "slowly"]


def test_words_of_chinese_are_characters() -> None:
    tokenizer = train_tokenizer(TEXTS, TokenizerConfig(vocab_size=1000))
    assert grouped(tokenizer, "灯光boats") == ["灯", "光", "boats"]


def test_words_of_other_vocabularies_are_an_error() -> None:
    unigram = Tokenizer(models.Unigram([("a", 0.0)], unk_id=0))
    characters = Tokenizer(models.BPE({"a": 0}, []))
    for tokenizer, kind in ((unigram, "Unigram"), (characters, "BPE")):
        with pytest.raises(InputError, match=f"byte-level BPE vocabulary, not {kind}"):
            starts_word(tokenizer)


def test_roberta_names_are_found() -> None:
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "a": 4, "<mask>": 5}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>"))
    assert SpecialTokens.from_tokenizer(tokenizer) == SpecialTokens(pad=1, unk=3, cls=0, sep=2, mask=5)


def test_byte_level_is_found_in_a_sequence() -> None:
    tokenizer = train_tokenizer(TEXTS, BPE)
    expected = starts_word(tokenizer)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(), tokenizer.pre_tokenizer])
    assert (starts_word(tokenizer) == expected).all()


def test_bad_tokenizer_files_are_errors(tmp_path: Path) -> None:
    without_mask = Tokenizer(
        models.WordPiece({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3}, unk_token="[UNK]")
    )
    without_mask.normalizer = normalizers.BertNormalizer()
    without_mask.save(str(tmp_path / "no_mask.json"))
    (tmp_path / "text.json").write_text("no JSON\nat all")
    (tmp_path / "config.json").write_text("{}")
    for name, message in {
        "nowhere.json": r"nowhere\.json: no such file; expected a tokenizer\.json",
        ".": r"tokenizer\.json: no such file",
        "text.json": r"text\.json: is not a tokenizer\.json",
        "config.json": r"config\.json: is not a tokenizer\.json",
        "no_mask.json": r"no_mask\.json: the tokenizer has no \[MASK\] \(or <mask>\)",
    }.items():
        with pytest.raises(InputError, match=message) as error:
            load_tokenizer(tmp_path / name)
        assert "\n" not in str(error.value)


@ALL
def test_added_words_are_tokens_where_they_stand_whole(config, tmp_path):
    plain = train_tokenizer(TEXTS, config)
    plain.save(str(tmp_path / "tokenizer.json"))
    words = tmp_path / "words.txt"
    words.write_text("zebrafish\n\n  gene fold \nzebrafish\n")
    larger = load_tokenizer(tmp_path, str(words))
    size = plain.get_vocab_size()
    assert (larger.token_to_id("zebrafish"), larger.token_to_id("gene fold")) == (size, size + 1)
    assert added_pieces(plain, larger) == {
        size: encode_documents(plain, ["zebrafish"])[0],
        size + 1: encode_documents(plain, ["gene fold"])[0],
    }
    (ids,) = encode_documents(larger, ["the zebrafish gene fold, zebrafishes"])
    assert (ids.count(size), ids.count(size + 1)) == (1, 1)
    assert starts_word(larger)[[size, size + 1]].all()
    if config.type == "bpe":
        assert encode_documents(larger, ["the zebrafish"])[0] == [*encode_documents(plain, ["the"])[0], size]
    reloaded = Tokenizer.from_str(larger.to_str())
    assert encode_documents(reloaded, ["a Zebrafish"]) == encode_documents(larger, ["a Zebrafish"])


def test_words_that_are_not_utf8_are_refused(tmp_path):
    train_tokenizer(TEXTS, WORDPIECE).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "words.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"add_tokens=.*words.txt cannot be read as UTF-8"):
        load_tokenizer(tmp_path, str(tmp_path / "words.txt"))


def words_file(tmp_path, *words):
    path = tmp_path / "words.txt"
    path.write_text("\n".join(words))
    return str(path)


def test_added_words_are_taken_as_the_vocabulary_normalises_them(tmp_path):
    """Two tokens for what is one word to the normaliser would be found by chance."""
    config = TokenizerConfig(vocab_size=120)
    train_tokenizer(["the import of apples"] * 20, config).save(str(tmp_path / "tokenizer.json"))
    before = load_tokenizer(tmp_path)
    after = load_tokenizer(
        tmp_path, words_file(tmp_path, "Quokka", "QUOKKA", "quokka", "Import", "the", "Órbita")
    )
    assert set(after.get_vocab()) - set(before.get_vocab()) == {"quokka", "órbita"}
    for text in ("Quokka", "quokka", "QUOKKA"):
        assert encode_documents(after, [text]) == [[after.token_to_id("quokka")]]
    assert encode_documents(after, ["Import"]) == encode_documents(before, ["import"])


@pytest.mark.parametrize("word", ["[MASK]", "<pad>", "[SEP]"])
def test_names_of_special_tokens_are_no_words(tmp_path, word):
    train_tokenizer(["the import of apples"] * 20, TokenizerConfig(vocab_size=120)).save(
        str(tmp_path / "tokenizer.json")
    )
    with pytest.raises(InputError, match=f"{re.escape(word)} is a special token"):
        load_tokenizer(tmp_path, words_file(tmp_path, "quokka", word))


def test_special_tokens_are_those_the_vocabulary_came_with():
    names = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "a", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocab = {token: number for number, token in enumerate(names)}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="<unk>"))
    assert SpecialTokens.from_tokenizer(tokenizer).ids == (1, 3, 0, 2, 4)
    vocab = {token: number for number, token in enumerate([*names[6:], *names[:5]])}
    assert SpecialTokens.from_tokenizer(Tokenizer(models.WordPiece(vocab))).ids == (0, 1, 2, 3, 4)


def test_special_tokens_are_listed_once() -> None:
    """A module with several of the names would be a second list."""
    lists = []
    for path in Path(mlm.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        if len({node.value for node in nodes if isinstance(node, ast.Constant)} & {*SPECIAL_TOKENS}) > 1:
            lists.append(path.name)
    assert lists == ["tokenizer.py"]


def test_ids_that_no_token_has_are_counted():
    vocab = {**{token: number for number, token in enumerate(SPECIAL_TOKENS)}, "a": 90}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    assert tokenizer.get_vocab_size() == 6
    assert num_ids(tokenizer) == 91


SCRIPTS = {
    "hindi": "पोस्ट यहाँ हिन्दी में पढ़ें क़लम",
    "bengali": "বাংলা ভাষায় লেখা পড়ুন",
    "tamil": "தமிழ் மொழியில் எழுதுங்கள்",
    "thai": "แม่น้ำ ไหล ผ่าน เมือง",
    "japanese": "パンダ ハンダ かぎ かき ガラス",
    "korean": "오늘은 날씨가 좋습니다",
    "chinese": "漢字 繁體 简体 字典",
    "arabic": "كِتَابٌ جميل في المكتبة",
    "hebrew": "שָׁלוֹם עולם טוב",
    "greek": "Ελλάδα καλημέρα ΣΊΣΥΦΟΣ",
    "cyrillic": "Йод ёлка їжак паде́ж ўсё",
    "latin": "Łódź café naïve İstanbul straße",
}
LINES = {
    "dna": "ACGTTGCA GGCATTAC acgtnacg",
    "molecules": "C1CCCCC1 c1ccccc1 CC(=O)O",
    "code": "def f(x):\n    return x_1 + 0x1F",
    "log": "2026-12-01T04:18:25Z ERROR [worker-3] code=0x80070005",
    "codes": "E11.9 I10 J45.909 Z79.4",
}


def folded(text: str, config: TokenizerConfig) -> str:
    text = unicodedata.normalize("NFC", text)
    return "".join(character.lower() for character in text) if config.lowercase else text


@pytest.mark.parametrize("kind", ["wordpiece", "bpe", "wordlevel"])
@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("name", [*SCRIPTS, *LINES])
def test_no_character_of_any_script_is_lost(tmp_path, name, lowercase, kind):
    """A stock tokenizer of the saved file gives the same ids."""
    text = {**SCRIPTS, **LINES}[name]
    config = TokenizerConfig(type=kind, vocab_size=400, lowercase=lowercase)
    trained = train_tokenizer([text] * 5, config)
    (ids,) = encode_documents(trained, [text])
    written = (
        trained.decode(ids).replace(" ##", "") if kind != "wordlevel" else " ".join(tokens(trained, text))
    )
    assert "".join(written.split()) == "".join(folded(text, config).split())
    decomposed = unicodedata.normalize("NFD", text)
    assert encode_documents(trained, [decomposed]) == [ids]
    trained.save(str(tmp_path / "tokenizer.json"))
    stock = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert stock(text, add_special_tokens=False)["input_ids"] == ids


def test_accents_are_stripped_where_they_are_no_part_of_a_letter():
    config = TokenizerConfig(vocab_size=1000, strip_accents=True)
    normalise = module._normaliser(config).normalize_str
    assert normalise(SCRIPTS["latin"]) == "łodz cafe naive istanbul straße"
    assert normalise(SCRIPTS["greek"]) == "ελλαδα καλημερα σισυφοσ"
    assert normalise(SCRIPTS["cyrillic"]) == "йод ёлка їжак падеж ўсё"
    for name in ("hindi", "bengali", "tamil", "thai", "japanese", "korean", "arabic", "hebrew"):
        assert normalise(SCRIPTS[name]) == unicodedata.normalize("NFC", SCRIPTS[name]), name
    strip_all = module._normaliser(replace(config, strip_accents="all")).normalize_str
    assert strip_all(SCRIPTS["arabic"]) == "كتاب جميل في المكتبة"
    assert strip_all(SCRIPTS["hebrew"]) == "שלום עולם טוב"
    assert strip_all(SCRIPTS["hindi"]) == unicodedata.normalize("NFC", SCRIPTS["hindi"])


@pytest.mark.parametrize("separator", list("\x0b\x0c\x1c\x1d\x1e\x1f\x85\u2028\u2029\t\r\n"))
@pytest.mark.parametrize("kind", ["wordpiece", "wordlevel"])
def test_control_characters_that_separate_words_separate_them(kind, separator):
    tokenizer = train_tokenizer(["four five"] * 3, TokenizerConfig(type=kind, vocab_size=60))
    assert encode_documents(tokenizer, [f"four{separator}five"]) == encode_documents(tokenizer, ["four five"])


def test_the_alphabet_is_as_large_as_the_vocabulary_allows():
    characters = [chr(0x4E00 + number) for number in range(1500)]
    tokenizer = train_tokenizer([" ".join(characters)] * 2, TokenizerConfig(vocab_size=8192))
    assert tokenizer.get_vocab().keys() >= set(characters)


def test_whole_words_are_the_vocabulary_of_codes():
    tokenizer = train_tokenizer(
        ["I10 E11.9 I10", "Z79.4 I10 E11.9"], TokenizerConfig(type="wordlevel", vocab_size=7 + 10)
    )
    assert [tokenizer.id_to_token(id_) for id_ in range(8)] == [*SPECIAL_TOKENS, "i10", "e11.9", "z79.4"]
    assert starts_word(tokenizer).all()
    assert tokens(tokenizer, "I10 J45 e11.9") == ["i10", "[UNK]", "e11.9"]


def test_what_normalisation_makes_equal_is_reported(caplog):
    caplog.set_level("INFO", "mlm")
    molecules = ["C1CCCCC1", "c1ccccc1", "CCO", "cco", "N"]
    train_tokenizer(molecules, TokenizerConfig(vocab_size=60))
    assert (
        "makes 4 of 5 distinct documents of a sample equal to others (80.0 %): C1CCCCC1 = c1ccccc1"
        in caplog.text
    )
    assert "tokenizer.lowercase false" in caplog.text
    caplog.clear()
    train_tokenizer(molecules, TokenizerConfig(vocab_size=60, lowercase=False))
    assert "equal" not in caplog.text
    train_tokenizer(["The tide", "the mill"], TokenizerConfig(vocab_size=60))
    assert "2 of 4 distinct words of a sample equal to others (50.0 %): The = the" in caplog.text
    assert "documents" not in caplog.text


def test_special_tokens_that_are_only_in_the_vocabulary_are_recognised(tmp_path):
    vocab = {name: number for number, name in enumerate([*SPECIAL_TOKENS, *"ACGT"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("AC[MASK]G", add_special_tokens=False).ids == [5, 6, 4, 7]
    assert num_ids(loaded) == 9


def test_offsets_of_bytes_leave_out_the_space_before_a_word():
    tokenizer = train_tokenizer(TEXTS, CASED_BPE)
    text = "The quiet harbour lights"
    encoding = tokenizer.encode(text)
    assert encoding.ids[1:-1] == encode_documents(tokenizer, [text])[0]
    for begin, end in encoding.offsets[1:-1]:
        assert text[begin:end] == text[begin:end].strip()


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_extra_special_tokens_are_their_ids_and_the_five_are_text(kind, tmp_path, caplog):
    """A stock tokenizer gives the same ids."""
    words = ["four boats wait", "the harbour is near", "<ent> a keeper [E1] waits"]
    trained = train_tokenizer(words * 20, TokenizerConfig(type=kind, vocab_size=300))
    trained.add_special_tokens(["<ent>", "[E1]", "[E2]"])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    marks = extra_special_tokens(tokenizer)
    assert list(marks) == ["<ent>", "[E1]", "[E2]"]
    stock = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    texts = [*words, "the<ent>keeper [E1]", "[E2]"]
    encoder = DocumentEncoder(tokenizer)
    for text in texts:
        ids = stock(text, add_special_tokens=False)["input_ids"]
        assert encode_documents(tokenizer, [text]) == [ids]
        assert encoder([text]).ids.tolist() == ids
    assert encode_documents(tokenizer, ["<ent> boats"])[0][0] == marks["<ent>"]
    (five,) = encode_documents(tokenizer, ["[MASK] [CLS]"])
    assert not set(five) & set(SpecialTokens.from_tokenizer(tokenizer).ids) - {1}
    is_special = build_masking(MaskingConfig(), 0.15, tokenizer).is_special
    assert is_special[list(marks.values())].all()
    (tmp_path / "t.txt").write_text("\n".join(words * 20), encoding="utf-8")
    data = CorpusConfig(sources=[SourceConfig(str(tmp_path / "t.txt"))], seq_len=16)
    prepare_corpus(data, TokenizerConfig(path=str(tmp_path)))
    assert "special tokens that the text lacks are never trained: [E2]" in caplog.text
