"""Tokens of texts and pairs against the library's own encoding; batches that lose and repeat nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from mlm.config.errors import InputError
from mlm.data.examples import batches_by_length, batches_in_order, encode_examples
from mlm.data.labelled import Examples
from mlm.tokenizer import SpecialTokens


@pytest.fixture(scope="module")
def special(tokenizer):
    return SpecialTokens.from_tokenizer(tokenizer)


def rows_of(encoded):
    batch = encoded[np.arange(len(encoded))]
    return [
        (ids[mask == 1].tolist(), types[mask == 1].tolist())
        for ids, types, mask in zip(
            batch["input_ids"], batch["token_type_ids"], batch["attention_mask"], strict=True
        )
    ]


@pytest.mark.parametrize("with_pairs", [False, True])
def test_tokens_are_those_of_the_template(tokenizer, documents, special, with_pairs):
    texts, pairs = documents[:40], documents[40:80] if with_pairs else None
    encoded = encode_examples(tokenizer, Examples(texts, pairs), None)
    expected = [
        tokenizer.encode(*words)
        for words in (zip(texts, pairs, strict=True) if pairs else ((t,) for t in texts))
    ]
    assert rows_of(encoded) == [(one.ids, one.type_ids) for one in expected]
    assert encoded.num_truncated == 0
    batch = encoded[np.array([3, 0, 7])]
    lengths = [len(expected[row].ids) for row in (3, 0, 7)]
    assert batch["input_ids"].shape == (3, max(lengths))
    assert batch["attention_mask"].sum(1).tolist() == lengths
    assert batch["num_tokens"] == sum(lengths)
    assert (batch["input_ids"][batch["attention_mask"] == 0] == special.pad).all()
    assert batch["labels"] is None


def test_text_that_spells_special_tokens_is_text(tokenizer, special):
    ids = rows_of(encode_examples(tokenizer, Examples(["a [SEP] b [MASK] [CLS] [PAD]"]), None))[0][0]
    assert [ids.count(one) for one in (special.cls, special.sep, special.mask, special.pad)] == [1, 1, 0, 0]


def word(tokenizer, number):
    """Return a word of exactly one token."""
    words = [
        text for text in ("the", "a", "lamp", "gull", "old", "every") if len(tokenizer.encode(text).ids) == 3
    ]
    return words[number]


def test_longer_text_of_a_pair_is_cut_first(tokenizer, special):
    one, two = word(tokenizer, 0), word(tokenizer, 1)
    lengths = [(3, 40), (40, 3), (40, 40), (4, 0), (0, 40)]
    texts = [" ".join([one] * first) for first, _ in lengths]
    pairs = [" ".join([two] * second) for _, second in lengths]
    encoded = encode_examples(tokenizer, Examples(texts, pairs), 12)
    assert encoded.lengths.tolist() == [12, 12, 12, 7, 12]
    assert encoded.num_truncated == 4
    kept = []
    for ids, types in rows_of(encoded):
        first, second = (ids.count(tokenizer.token_to_id(text)) for text in (one, two))
        kept.append((first, second))
        assert ids[0] == special.cls
        assert ids.count(special.sep) == 2
        assert types == [0] * (first + 2) + [1] * (second + 1)
    assert kept[:2] == [(3, 6), (6, 3)]
    assert kept[2] in [(5, 4), (4, 5)]
    assert kept[3:] == [(4, 0), (0, 9)]


def test_long_single_text_is_cut_and_counted(tokenizer, documents):
    whole = rows_of(encode_examples(tokenizer, Examples(documents[:50]), None))
    cut = encode_examples(tokenizer, Examples(documents[:50]), 16)
    for (ids, _), (long, _) in zip(rows_of(cut), whole, strict=True):
        assert ids == (long if len(long) <= 16 else [*long[:15], long[-1]])
    assert cut.num_truncated == sum(len(ids) > 16 for ids, _ in whole) > 0


def test_settings_of_the_tokenizer_neither_count_nor_change(tokenizer, documents):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.enable_truncation(5)
    other.enable_padding(length=99)
    before = other.to_str()
    examples = Examples(documents[:5])
    assert rows_of(encode_examples(other, examples, None)) == rows_of(
        encode_examples(tokenizer, examples, None)
    )
    assert other.to_str() == before


def test_tokenizer_without_a_template_is_refused(tokenizer):
    from tokenizers import processors

    other = Tokenizer.from_str(tokenizer.to_str())
    other.post_processor = processors.Sequence([])
    with pytest.raises(InputError, match=r"does not begin a text with \[CLS\]"):
        encode_examples(other, Examples(["a"]), None)


@pytest.mark.parametrize(
    ("labels", "dtype"), [(np.array([2, 0, 1]), torch.int64), (np.array([0.5, 1.5, 2.5]), torch.float32)]
)
def test_labels_come_with_their_rows(tokenizer, labels, dtype):
    encoded = encode_examples(tokenizer, Examples(["a", "b", "c"], None, labels), None)
    found = encoded[np.array([2, 0])]["labels"]
    assert found.dtype == dtype
    assert found.tolist() == labels[[2, 0]].tolist()
    assert encoded.label_tensor().tolist() == labels.tolist()


LENGTHS = np.random.default_rng(0).integers(3, 200, 1000)


@pytest.mark.parametrize("batch_size", [1, 7, 32, 1000, 5000])
@pytest.mark.parametrize("num_rows", [1, 31, 1000])
def test_every_row_comes_once_an_epoch(num_rows, batch_size):
    for epoch in range(2):
        batches = batches_by_length(LENGTHS[:num_rows], batch_size, 0, epoch)
        assert sorted(np.concatenate(batches).tolist()) == list(range(num_rows))
        assert len(batches) == -(-num_rows // batch_size)
        assert sorted(map(len, batches))[1:] == [batch_size] * (len(batches) - 1)
    in_order = batches_in_order(LENGTHS[:num_rows], batch_size)
    assert sorted(np.concatenate(in_order).tolist()) == list(range(num_rows))


def test_order_is_a_function_of_seed_and_epoch():
    def order(seed, epoch):
        return np.concatenate(batches_by_length(LENGTHS, 32, seed, epoch)).tolist()

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(*key)) for key in ((0, 0), (0, 1), (1, 0), (1, 1))}) == 4


def test_grouping_by_length_saves_most_of_the_padding():
    def padding(batches):
        return sum(LENGTHS[rows].max() * len(rows) - LENGTHS[rows].sum() for rows in batches)

    shuffled = np.random.default_rng(0).permutation(1000)
    plain = [shuffled[start : start + 32] for start in range(0, 1000, 32)]
    assert padding(batches_by_length(LENGTHS, 32, 0, 0)) < 0.3 * padding(plain)
    firsts = [int(LENGTHS[rows].max()) for rows in batches_by_length(LENGTHS, 32, 0, 0)]
    assert firsts != sorted(firsts)


def test_long_texts_come_few_at_a_time():
    lengths = np.array([8192] * 6 + [10] * 200)
    batches = batches_in_order(lengths, 64)
    assert sorted(np.concatenate(batches).tolist()) == list(range(206))
    assert max(len(rows) * lengths[rows].max() for rows in batches) <= 2**15
    assert len(batches_in_order(np.array([10**6] * 3), 64)) == 3
