from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from stores import build_store
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from mlm.config.data import MaskingConfig, TokenizerConfig
from mlm.data.collate import MaskedRows, Rows, build_masking
from mlm.data.packing import pack_documents
from mlm.data.sampler import Part, RowBatch
from mlm.data.vocabulary import train_tokenizer
from mlm.tokenizer import SpecialTokens, encode_documents, starts_word

SEQ_LEN = 24


@pytest.fixture
def rows_of(tmp_path, documents, tokenizer):
    store = build_store(tmp_path / "store", documents, tokenizer)
    special = SpecialTokens.from_tokenizer(tokenizer)

    def build(packing):
        return Rows(store, pack_documents(store.documents, SEQ_LEN, packing), special, SEQ_LEN, packing)

    return build


@pytest.mark.parametrize("packing", ["isolate", "concat", "none"])
def test_rows_hold_the_documents_and_the_right_special_tokens(rows_of, documents, tokenizer, packing):
    rows = rows_of(packing)
    special = rows.special
    ids, numbers = rows.render(np.arange(len(rows)))
    ordinary = ids[~np.isin(ids, special.ids)]
    expected = np.concatenate(encode_documents(tokenizer, documents))
    assert np.array_equal(np.sort(ordinary), np.sort(expected))
    for row, row_numbers in zip(ids, numbers, strict=True):
        real = row[row_numbers > 0]
        assert len(real) + (row == special.pad).sum() == SEQ_LEN
        assert (row[len(real) :] == special.pad).all()
        assert real[0] == special.cls
        assert real[-1] == special.sep
        pieces = row_numbers.max()
        assert (row == special.cls).sum() == pieces
        if packing != "concat":
            assert (row == special.sep).sum() == pieces
            assert pieces == 1 or packing == "isolate"
        for number in range(1, pieces + 1):
            inside = row[row_numbers == number]
            assert inside[0] == special.cls
            assert inside[-1] == special.sep
    assert rows.num_tokens(np.arange(len(rows))) == (numbers > 0).sum()
    assert rows.num_tokens(np.array([3, 1, 3])) == (numbers[[3, 1, 3]] > 0).sum()
    assert rows.tokens_per_row == pytest.approx((numbers > 0).sum(1).mean())
    mixed = replace(rows, parts=(Part(5, 1), Part(len(rows) - 5, 3)))
    means = (numbers[:5] > 0).sum(1).mean(), (numbers[5:] > 0).sum(1).mean()
    assert mixed.tokens_per_row == pytest.approx((means[0] + 3 * means[1]) / 4)


def test_concat_keeps_the_order_of_the_documents(rows_of, documents, tokenizer):
    rows = rows_of("concat")
    ids, _ = rows.render(np.arange(len(rows)))
    expected = np.concatenate(encode_documents(tokenizer, documents))
    assert np.array_equal(ids[~np.isin(ids, rows.special.ids)], expected)


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_a_batch_has_the_same_keys_and_shapes_for_every_strategy(rows_of, tokenizer, strategy):
    rows = rows_of("isolate")
    masking = build_masking(MaskingConfig(strategy=strategy), 0.15, tokenizer)
    batch = MaskedRows(rows, masking, seed=0)[RowBatch(np.zeros(4, np.int64), np.arange(4))]
    assert {name: tuple(value.shape) for name, value in batch.items() if torch.is_tensor(value)} == {
        "input_ids": (4, SEQ_LEN),
        "attention_mask": (4, SEQ_LEN),
        "masked_positions": (4, 4),
        "labels": (4, 4),
    }
    assert batch["num_tokens"] == (batch["attention_mask"] > 0).sum()
    assert batch["num_masked"] == (batch["labels"] >= 0).sum() > 0


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
@pytest.mark.parametrize("split", [(0.8, 0.1), (1.0, 0.0), (0.0, 1.0), (0.3, 0.3)])
def test_what_stands_in_masked_places_is_counted(rows_of, tokenizer, strategy, split):
    rows = rows_of("isolate")
    masking = build_masking(MaskingConfig(strategy, 0.4, None, 0.15, *split), 0.4, tokenizer)
    index = np.arange(len(rows))
    batch = MaskedRows(rows, masking, seed=0)[RowBatch(np.zeros_like(index), index, 0.25)]
    original, _ = rows.render(index)
    counts = dict.fromkeys(("hidden", "random", "unchanged"), 0)
    columns = (batch[name].tolist() for name in ("input_ids", "masked_positions", "labels"))
    for row, places, labels in zip(*columns, strict=True):
        for place, label in zip(places, labels, strict=True):
            if label >= 0:
                shown = row[place]
                kind = "hidden" if shown == rows.special.mask else "random" if shown != label else "unchanged"
                counts[kind] += 1
    assert batch["num_hidden"] == counts["hidden"]
    assert batch["num_random"] == counts["random"]
    assert batch["num_masked"] == sum(counts.values())
    assert batch["num_ordinary"] == (~np.isin(original, rows.special.ids)).sum()
    assert batch["num_masked"] / batch["num_ordinary"] == pytest.approx(0.25, abs=0.04)


def test_literal_special_tokens_in_the_text_stay_text(tmp_path, tokenizer):
    texts = ["the [MASK] boat [SEP] [CLS]", "[PAD] a lamp [UNK]"]
    store = build_store(tmp_path / "s", texts, tokenizer)
    special = SpecialTokens.from_tokenizer(tokenizer)
    rows = Rows(store, pack_documents(store.documents, 64, "isolate"), special, 64, "isolate")
    ids, numbers = rows.render(np.arange(len(rows)))
    assert (ids == special.mask).sum() == 0
    assert (ids == special.cls).sum() == (ids == special.sep).sum() == 2
    assert (ids[numbers > 0] == special.pad).sum() == 0


def test_added_special_tokens_are_neither_predicted_nor_drawn(tokenizer):
    other = Tokenizer.from_str(tokenizer.to_str())
    other.add_special_tokens(["[EXTRA]"])
    masking = build_masking(MaskingConfig(), 0.15, other)
    assert masking.is_special[other.token_to_id("[EXTRA]")]
    assert masking.is_special.sum() == 6


def rows_from(tmp_path, texts, tokenizer, seq_len):
    store = build_store(tmp_path / "other", texts, tokenizer)
    special = SpecialTokens.from_tokenizer(tokenizer)
    return Rows(store, pack_documents(store.documents, seq_len, "isolate"), special, seq_len, "isolate")


def test_special_tokens_in_another_order_of_the_vocabulary_change_nothing(tmp_path):
    """[MASK] has id 0, where others have [PAD]; 200,000 ordinary tokens."""
    names = ["[MASK]", "[UNK]", "[PAD]", "[SEP]", "[CLS]", *(f"w{number}" for number in range(50))]
    other = Tokenizer(
        models.WordPiece({name: number for number, name in enumerate(names)}, unk_token="[UNK]")
    )
    other.pre_tokenizer = pre_tokenizers.Whitespace()
    other.add_special_tokens(names[:5])
    texts = [" ".join(names[5 + (number + word) % 50] for word in range(50)) for number in range(4000)]
    rows = rows_from(tmp_path, texts, other, 52)
    masking = build_masking(MaskingConfig(), 0.15, other)
    assert (masking.mask_id, rows.special.pad) == (0, 2)
    index = np.arange(len(rows))
    batch = MaskedRows(rows, masking, seed=0)[RowBatch(np.zeros_like(index), index)]
    assert batch["num_ordinary"] == 200_000
    assert batch["num_masked"] / batch["num_ordinary"] == pytest.approx(0.15, abs=0.005)
    assert batch["num_hidden"] / batch["num_masked"] == pytest.approx(0.8, abs=0.01)
    assert batch["num_random"] / batch["num_masked"] == pytest.approx(0.1 * 49 / 50, abs=0.01)
    assert (batch["input_ids"] == 0).sum() == batch["num_hidden"]


@pytest.mark.parametrize("kind", ["wordpiece", "bpe"])
def test_all_pieces_of_a_word_are_hidden_or_none(tmp_path, kind):
    texts = ["the harbourmaster and the keeper answer every harbour lamp"]
    tokenizer = train_tokenizer(
        ["abcdefghijklmnopqrstuvwxyz", *texts], TokenizerConfig(type=kind, vocab_size=290)
    )
    rows = rows_from(tmp_path, texts, tokenizer, 64)
    masking = build_masking(MaskingConfig("whole_word"), 0.4, tokenizer)
    ids, _ = rows.render(np.array([0]))
    special = np.isin(ids[0], rows.special.ids)
    begins = np.flatnonzero(starts_word(tokenizer)[ids[0]] | special | np.roll(special, 1))
    words = [range(a, b) for a, b in pairwise([*begins, ids.shape[1]]) if not special[a]]
    assert len(words) == len(texts[0].split())
    assert max(map(len, words)) >= 3
    hidden_ever = set()
    for number in range(1000):
        batch = MaskedRows(rows, masking, seed=0)[RowBatch(np.array([number]), np.array([0]))]
        hidden = set(batch["masked_positions"][batch["labels"] >= 0].tolist())
        assert all(len(hidden & set(word)) in (0, len(word)) for word in words)
        hidden_ever |= hidden
    assert len(hidden_ever) == sum(map(len, words))


@pytest.mark.parametrize("splits", [True, False])
def test_the_rate_holds_for_chinese_whether_or_not_characters_are_words(tmp_path, splits):
    texts = ["港口的灯光慢慢转过旧石墙", "两条小船漂过磨坊", "夜里的风很轻 boats wait"]
    characters = sorted(set("".join(texts)) - {" "})
    names = [
        *["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        *characters,
        *(f"##{one}" for one in characters),
    ]
    tokenizer = Tokenizer(models.WordPiece({name: n for n, name in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(handle_chinese_chars=splits)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(names[:5])
    rows = rows_from(tmp_path, texts, tokenizer, 64)
    masking = build_masking(MaskingConfig("whole_word"), 0.15, tokenizer)
    draws = [
        MaskedRows(rows, masking, seed=0)[RowBatch(np.full(len(rows), number), np.arange(len(rows)))]
        for number in range(1000)
    ]
    rate = sum(batch["num_masked"] for batch in draws) / sum(batch["num_ordinary"] for batch in draws)
    assert 0.10 < rate < 0.20
