from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from mlm.config.data import TokenizerConfig
from mlm.config.errors import InputError
from mlm.data import encoding as module
from mlm.data.encoding import DocumentEncoder, encode_in_order
from mlm.data.vocabulary import train_tokenizer
from mlm.tokenizer import encode_documents, plain_tokenizer

TEXTS = [
    "The quiet harbour lights turn slowly past an old stone wall; Café Öl, naïve boats don't wait (really).",
    "two boats  drift\n\npast the mill, 灯光 慢慢 [MASK] ΟΔΟΣ ΣΑΣ ǅ ŉ İstanbul",
]
ODD = [
    *"ab ß.,'-ÉéΣ灯ǅﬁ1²_\"",
    *"   \n\n\t\r\x0b\x0c\x1c\x1d\x1f\x85\xa0\u1680\u2003\u2028\u3000",
    *"\x00\x07\xad\u200b\u200d\ufeff\ufffd\u0301\u0308\u0300\u093f\u0489\ue000\U0001f468\U000e0001“—…",
    *["[MASK]", "[SEP]", "'s", " '", "  ", " \u0301 \u0301 ", "the", " boat"],
]


def trained(**options: object) -> Tokenizer:
    return train_tokenizer(TEXTS * 3, TokenizerConfig(vocab_size=400, **options))  # type: ignore[arg-type]


def bert_like(**options: bool) -> Tokenizer:
    tokenizer = trained()
    tokenizer.normalizer = normalizers.BertNormalizer(**options) if options else None  # type: ignore[assignment]
    return tokenizer


KNOWN = {
    "wordpiece": trained(),
    "cased": trained(lowercase=False),
    "bare": bert_like(),
    "unclean": bert_like(clean_text=False, handle_chinese_chars=False, strip_accents=True, lowercase=False),
    "bpe": trained(type="bpe"),
    "cased-bpe": trained(type="bpe", lowercase=False),
}


def without(tokenizer: Tokenizer, **changes: object) -> Tokenizer:
    for name, value in changes.items():
        setattr(tokenizer, name, value)
    return tokenizer


def with_words(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken("old stone", normalized=False)])
    return tokenizer


UNKNOWN = {
    "other splitter": without(trained(), pre_tokenizer=pre_tokenizers.Whitespace()),
    "other normalizer": without(trained(), normalizer=normalizers.NFKC()),
    "prefix space": without(
        trained(type="bpe"), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "added words": with_words(trained()),
    "unigram": without(
        Tokenizer(models.Unigram([("[UNK]", 0.0), ("a", -1.0), ("▁", -1.0)], unk_id=0)),
        pre_tokenizer=pre_tokenizers.Metaspace(),
    ),
}


def lists(encoder: DocumentEncoder, texts: list[str]) -> list[list[int]]:
    encoded = encoder(texts)
    assert encoded.lengths.sum() == len(encoded.ids)
    return [ids.tolist() for ids in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])]


@pytest.mark.parametrize("kind", [*KNOWN, *UNKNOWN])
def test_tokens_are_those_of_the_library(kind: str) -> None:
    tokenizer = (KNOWN | UNKNOWN)[kind]
    encoder = DocumentEncoder(tokenizer)
    assert (encoder._split is None) == (kind in UNKNOWN)
    draw = random.Random(kind)
    for _ in range(30):
        texts = ["".join(draw.choices(ODD, k=draw.randrange(40))) for _ in range(30)]
        assert lists(encoder, texts) == encode_documents(tokenizer, texts)
    assert lists(encoder, TEXTS) == encode_documents(tokenizer, TEXTS)


@pytest.mark.parametrize("kind", KNOWN)
def test_long_texts_and_full_memory_change_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, long = KNOWN[kind], " ".join(TEXTS * 300)
    texts = [long, "", TEXTS[0], "x" * 100_000, long[::-1], " "]
    expected = encode_documents(tokenizer, texts)
    assert lists(DocumentEncoder(tokenizer), texts) == expected
    monkeypatch.setattr(module, "WORD_MEMORY", 20 * module.WORD_OVERHEAD)
    encoder = DocumentEncoder(tokenizer)
    for _ in range(2):
        assert lists(encoder, texts) == expected
    assert len(encoder._numbers) <= 20


def test_known_words_are_a_snapshot() -> None:
    tokenizer = KNOWN["wordpiece"]
    first = DocumentEncoder(tokenizer)
    first(TEXTS[:1])
    known = first.known
    first(TEXTS[1:])
    assert len(known[0]) == len(known[1].lengths) < len(first.known[0])
    assert lists(DocumentEncoder(tokenizer, known), TEXTS) == encode_documents(tokenizer, TEXTS)


def test_texts_are_hashed_and_measured() -> None:
    encoded = DocumentEncoder(KNOWN["wordpiece"])(["café", "tea", "café"])
    assert encoded.num_bytes.tolist() == [5, 3, 5]
    first, second, third = encoded.text_hashes.tolist()
    assert first == third != second


def test_ids_are_as_small_as_the_vocabulary_allows() -> None:
    words = {f"w{number}": number for number in range(2**16 - 4)}
    special = {name: 2**16 - 4 + number for number, name in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]"])}
    for extra, kind in (({}, np.uint16), ({"[MASK]": 2**16}, np.uint32)):
        tokenizer = Tokenizer(models.WordPiece(words | special | extra, unk_token="[UNK]"))
        assert DocumentEncoder(tokenizer)(["w1"]).ids.dtype == kind


# --------------------------------------------------------------------------------------- processes


def batches() -> list[tuple[int, list[str]]]:
    return [(number // 3, [f"{TEXTS[number % 2]} {number}", "the boat"]) for number in range(30)]


def test_processes_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Used here first, then in processes: forking would hang, and give a warning."""
    tokenizer = KNOWN["wordpiece"]
    alone = list(encode_in_order(batches(), tokenizer, 1))
    monkeypatch.setattr(module, "BATCHES_ALONE", 2)
    together = list(encode_in_order(batches(), tokenizer, 2))
    assert [label for label, _ in together] == [label for label, _ in alone] == [n // 3 for n in range(30)]
    for (_, a), (_, b) in zip(alone, together, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_little_text_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ProcessPoolExecutor", None)
    count = module.BATCHES_ALONE
    assert len(list(encode_in_order(batches()[:count], KNOWN["wordpiece"], 4))) == count


def test_batches_are_drawn_as_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCHES_ALONE", 1)
    drawn = 0

    def counted():
        nonlocal drawn
        for batch in batches() * 10:
            drawn += 1
            yield batch

    encoded = encode_in_order(counted(), KNOWN["wordpiece"], 1)
    next(encoded)
    assert drawn == 1
    encoded = encode_in_order(counted(), KNOWN["wordpiece"], 2)
    for number in range(1, 200):
        next(encoded)
        assert drawn <= number + 2 + 2 * module.BATCHES_AHEAD
    encoded.close()


def test_the_callers_choice_of_library_threads_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for value in (None, "true"):
        if value:
            monkeypatch.setenv("TOKENIZERS_PARALLELISM", value)
        list(encode_in_order(batches()[:2], KNOWN["wordpiece"], 1))
        assert os.environ.get("TOKENIZERS_PARALLELISM") == value


SCRIPT = """
import sys
from mlm.data import encoding
from mlm.tokenizer import load_tokenizer
encoding.BATCHES_ALONE = 0
{guard}
    batches = ((n, ["the boat " * 1000] * 100) for n in range(10**6))
    for label, _ in encoding.encode_in_order(batches, load_tokenizer(sys.argv[1]), 2):
        print(label, flush=True)
"""


def start_script(tmp_path, guard: str) -> subprocess.Popen[str]:
    KNOWN["wordpiece"].save(str(tmp_path / "tokenizer.json"))
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT).format(guard=guard))
    command = [sys.executable, str(script), str(tmp_path)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def test_processes_end_with_the_one_that_started_them(tmp_path) -> None:
    run = start_script(tmp_path, 'if __name__ == "__main__":')
    assert run.stdout is not None
    assert run.stdout.readline() == "0\n"
    run.kill()
    run.wait()
    for _ in range(200):
        try:
            os.killpg(run.pid, 0)  # is anybody left of the group?
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("a process is left")


def test_script_without_guard_is_an_error(tmp_path) -> None:
    run = start_script(tmp_path, "if True:")
    _, errors = run.communicate(timeout=60)
    assert "InputError" in errors
    assert "data.num_proc=1" in errors


def test_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BATCHES_ALONE", 0)
    encoded = encode_in_order(batches() * 10_000, KNOWN["wordpiece"], 2)
    next(encoded)
    for child in multiprocessing.active_children():
        child.kill()
    with pytest.raises(InputError, match="a process that tokenizes was killed"):
        list(encoded)


@pytest.mark.parametrize("kind", [*KNOWN, *UNKNOWN])
def test_unknown_bytes_are_those_of_unknown_tokens(kind: str) -> None:
    """Whatever the words seen before; the oracle is the library's own offsets."""
    tokenizer = (KNOWN | UNKNOWN)[kind]
    encoder, unknown = DocumentEncoder(tokenizer), tokenizer.token_to_id("[UNK]")
    texts = [*TEXTS, "the \u4e16 boat \u754c\u754c", "x" * 300, "the mill"]
    for _ in range(2):
        counted = encoder(texts).unknown_bytes
        for text, number in zip(texts, counted.tolist(), strict=True):
            found = plain_tokenizer(tokenizer).encode(text, add_special_tokens=False)
            spans = zip(found.ids, found.offsets, strict=True)
            lost = [text[slice(*span)] for id_, span in spans if unknown is not None and id_ == unknown]
            assert number == len("".join(lost).encode()), text[:40]
