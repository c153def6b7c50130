import numpy as np
import pytest

from mlm.config.data import IGNORE_INDEX, MaskingConfig
from mlm.masking import Masking, mask_rate_at

PAD, UNK, CLS, SEP, MASK = SPECIAL = range(5)
V = 200


def masking(strategy="token", rate=0.15, vocabulary=V, mask_id=MASK, special=SPECIAL, **split):
    is_special = np.isin(np.arange(vocabulary), special)
    starts_word = np.arange(vocabulary) % 3 != 0  # every third id continues a word
    return Masking(MaskingConfig(strategy=strategy, **split), rate, mask_id, is_special, starts_word)


def batch(rows=64, length=64, seed=0):
    """Rows CLS tokens SEP with padding of random length behind."""
    ids = np.random.default_rng(seed).integers(5, V, (rows, length))
    ids[:, 0] = CLS
    for row, real in enumerate(np.random.default_rng(seed).integers(3, length + 1, rows)):
        ids[row, real - 1] = SEP
        ids[row, real:] = PAD
    return ids


def run(masker, ids, seed=0, number=0, rows=None):
    rows = np.arange(len(ids)) if rows is None else rows
    return masker(ids, seed, np.full(len(ids), number), rows)


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
@pytest.mark.parametrize("rate", [0.15, 0.4, 1.0])
def test_special_tokens_are_never_touched_and_labels_are_the_originals(strategy, rate):
    ids, masker = batch(), masking(strategy, rate)
    for number in range(20):
        out = run(masker, ids, number=number)
        used = out.labels != IGNORE_INDEX
        row, slot = np.nonzero(used)
        place = out.masked_positions[row, slot]
        assert np.array_equal(out.labels[row, slot], ids[row, place])
        assert not np.isin(out.labels[used], SPECIAL).any()
        changed = np.zeros(ids.shape, bool)
        changed[row, place] = True
        assert changed.sum() == used.sum()  # no place twice
        assert np.array_equal(out.input_ids[~changed], ids[~changed])
        assert out.labels.shape == (len(ids), int(np.ceil(rate * (ids.shape[1] - 2))))


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_selected_share_and_split_are_as_configured(strategy):
    ids = np.random.default_rng(0).integers(5, V, (2000, 102))
    ids[:, 0], ids[:, -1] = CLS, SEP
    out = run(masking(strategy), ids)
    used = out.labels != IGNORE_INDEX
    assert used.sum() / 200_000 == pytest.approx(0.15, abs=0.002)
    row, slot = np.nonzero(used)
    shown, label = out.input_ids[row, out.masked_positions[row, slot]], out.labels[row, slot]
    assert (shown == MASK).mean() == pytest.approx(0.8, abs=0.01)
    assert (shown == label).mean() == pytest.approx(0.1 + 0.1 / (V - 5), abs=0.01)
    replaced = shown[(shown != MASK) & (shown != label)]
    assert not np.isin(replaced, SPECIAL).any()
    counts = np.bincount(replaced, minlength=V)[5:]  # uniform over the ordinary ids
    assert ((counts - counts.mean()) ** 2 / counts.mean()).sum() < 260  # chi square, 194 degrees: p = 0.001


@pytest.mark.parametrize(("mask_share", "random_share"), [(1.0, 0.0), (0.0, 1.0), (0.0, 0.0), (0.5, 0.25)])
def test_other_splits(mask_share, random_share):
    split = {"mask_token_fraction": mask_share, "random_token_fraction": random_share}
    ids = batch(500)
    out = run(masking(rate=0.5, **split), ids)
    row, slot = np.nonzero(out.labels != IGNORE_INDEX)
    shown, label = out.input_ids[row, out.masked_positions[row, slot]], out.labels[row, slot]
    assert (shown == MASK).mean() == pytest.approx(mask_share, abs=0.02)
    assert (shown == label).mean() == pytest.approx(
        1 - mask_share - random_share * (1 - 1 / (V - 5)), abs=0.02
    )


def test_the_mask_id_is_the_one_of_the_tokenizer():
    """A vocabulary whose special tokens stand in another order: [MASK] [UNK] [PAD] [SEP] [CLS]."""
    ids = np.random.default_rng(0).integers(5, V, (100, 50))
    out = run(masking(mask_id=0), ids)
    row, slot = np.nonzero(out.labels != IGNORE_INDEX)
    assert (out.input_ids[row, out.masked_positions[row, slot]] == 0).mean() == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_a_row_with_one_ordinary_token_predicts_it_and_one_without_predicts_nothing(strategy):
    ids = np.array([[CLS, 9, SEP, PAD], [CLS, UNK, SEP, PAD], [PAD, PAD, PAD, PAD]])
    out = run(masking(strategy), ids)
    assert (out.labels != IGNORE_INDEX).sum(1).tolist() == [1, 0, 0]


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
def test_masks_depend_on_seed_pass_and_row_only(strategy):
    ids, masker = batch(8), masking(strategy)
    whole = run(masker, ids)
    for row in range(8):  # alone or among others
        alone = run(masker, ids[row : row + 1], rows=np.array([row]))
        assert all(np.array_equal(a[0], b[row]) for a, b in zip(alone, whole, strict=True))
    for other in (
        run(masker, ids, seed=1),
        run(masker, ids, number=1),
        run(masker, ids, rows=np.arange(8) + 8),
    ):
        assert not np.array_equal(other.masked_positions, whole.masked_positions)


def test_identical_rows_get_different_masks():
    ids = np.full((64, 64), 10)
    out = run(masking(), ids)
    assert len({tuple(row) for row in out.masked_positions}) == 64


def test_whole_words_are_hidden_whole():
    ids, masker = batch(200), masking("whole_word")
    out = run(masker, ids)
    for row in range(len(ids)):
        chosen = set(out.masked_positions[row][out.labels[row] != IGNORE_INDEX].tolist())
        for start, end in words(ids[row]):
            inside = chosen & set(range(start, end))
            assert len(inside) in (0, end - start)


def words(ids):
    """Spans of the words of a row, by brute force."""
    spans, start = [], None
    for place, number in enumerate([*ids, SEP]):
        ordinary = number not in SPECIAL
        if start is not None and (not ordinary or number % 3 != 0):
            spans.append((start, place))
            start = None
        if ordinary and start is None:
            start = place
    return spans


def test_a_word_longer_than_the_budget_does_not_use_it_up():
    """One word of 60 pieces among short ones: never chosen; alone: its beginning is hidden."""
    long_word = [7, *[9] * 59]
    mixed = np.array([[CLS, *long_word, *[7, 8] * 20, SEP]])
    masker = masking("whole_word")
    rates = []
    for number in range(200):
        out = run(masker, mixed, number=number)
        places = out.masked_positions[out.labels != IGNORE_INDEX]
        assert (places > 60).all()
        rates.append(len(places) / 100)
    assert np.mean(rates) == pytest.approx(0.15, abs=0.01)
    alone = run(masker, np.array([[CLS, *long_word, SEP]]))
    assert alone.masked_positions[alone.labels != IGNORE_INDEX].tolist() == list(range(1, 10))


def test_spans_are_runs_of_the_expected_length():
    ids = np.random.default_rng(0).integers(5, V, (500, 512))
    out = run(masking("span"), ids)
    runs = []
    for row in range(len(ids)):
        places = out.masked_positions[row][out.labels[row] != IGNORE_INDEX]
        runs += [len(part) for part in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)]
    assert (
        3.0 < np.mean(runs) < 4.5
    )  # geometric with stop rate 0.2, at most 10: 3.6; neighbours join, the last is cut


def test_the_rate_moves_in_a_straight_line_from_the_first_step_to_the_last():
    config = MaskingConfig(mask_rate=0.3, final_mask_rate=0.1)
    assert [mask_rate_at(config, step, 0, 11) for step in range(11)] == pytest.approx(
        np.linspace(0.3, 0.1, 11)
    )
    assert mask_rate_at(config, 50, 0, 11) == pytest.approx(0.1)  # after the end
    late = [mask_rate_at(config, step, 5, 16) for step in range(16)]
    assert late == pytest.approx([0.3] * 5 + np.linspace(0.3, 0.1, 11).tolist())
    assert mask_rate_at(config, 7, 0, None) == mask_rate_at(config, 0, 0, 1) == 0.3
    assert mask_rate_at(MaskingConfig(mask_rate=0.3), 7, 0, 11) == 0.3


@pytest.mark.parametrize("strategy", ["token", "whole_word", "span"])
@pytest.mark.parametrize("rate", [0.05, 0.2, 0.4])
def test_a_lower_rate_for_a_batch_is_met_within_the_same_shapes(strategy, rate):
    ids = np.random.default_rng(0).integers(5, V, (2000, 102))
    ids[:, 0], ids[:, -1] = CLS, SEP
    masker = masking(strategy, 0.4)
    assert masker.config.highest_mask_rate == 0.15
    out = masker(ids, 0, np.zeros(2000, np.int64), np.arange(2000), rate)
    assert out.labels.shape == (2000, 40)
    assert (out.labels != IGNORE_INDEX).sum() / 200_000 == pytest.approx(rate, abs=0.003)
    alone = masking(strategy, rate)(ids, 0, np.zeros(2000, np.int64), np.arange(2000))
    if strategy != "whole_word":  # a word longer than the budget is hidden where the slots can hold it
        assert np.array_equal(out.input_ids, alone.input_ids)
