"""Held-out parts and folds against brute force: groups, classes, order and sizes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mlm.config.errors import InputError
from mlm.config.labelled import LabelledConfig
from mlm.counter import uniform
from mlm.data.labelled import read_task
from mlm.data.splits import by_hash, fold_of, last_rows


def random_data(seed, number=120, num_keys=40, kind="classification"):
    random = np.random.default_rng(seed)
    keys = random.integers(0, 2**63, num_keys, dtype=np.uint64)[random.integers(0, num_keys, number)]
    labels = {
        "classification": random.integers(0, 4, number) ** 2 // 3,
        "regression": random.random(number),
        "multilabel": random.random((number, 3)) < (0.5, 0.2, 0.05),
    }
    return keys, labels[kind]


def test_last_rows_are_the_rounded_share_but_one_at_least_and_never_all():
    for number, fraction in itertools.product((2, 3, 10, 99, 1000), (0.001, 0.1, 0.25, 0.5, 0.999)):
        expected = sorted(range(number), reverse=True)[: min(max(round(fraction * number), 1), number - 1)]
        assert np.flatnonzero(last_rows(number, fraction)).tolist() == sorted(expected)
    assert not last_rows(1, 0.5).any()


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel"])
@pytest.mark.parametrize("seed", range(5))
def test_no_group_is_on_both_sides_and_every_class_is_trained(kind, seed):
    keys, labels = random_data(seed, kind=kind)
    for fraction in (0.01, 0.2, 0.7, 0.99):
        held_out = by_hash(keys, labels, fraction, grouped=True)
        assert 0 < held_out.sum() < len(keys)
        assert not set(keys[held_out]) & set(keys[~held_out])
        if kind == "classification":
            assert set(labels[~held_out]) == set(labels)
        if kind == "multilabel":
            assert labels[~held_out].any(0).tolist() == labels.any(0).tolist()


def test_groups_are_held_out_by_their_hash_alone():
    keys, labels = random_data(0, 3000, 1000)
    held_out = by_hash(keys, labels, 0.2, grouped=True)
    assert held_out.tolist() == (uniform(keys.view(np.int64)) < 0.2).tolist()
    some = np.arange(3000) % 7 > 0  # rows that are added later move none
    assert by_hash(keys[some], labels[some], 0.2, grouped=True).tolist() == held_out[some].tolist()


@pytest.mark.parametrize("kind", ["classification", "regression", "multilabel"])
@pytest.mark.parametrize("folds", [2, 5, 11])
def test_folds_are_a_partition_that_keeps_keys_together_in_any_order(kind, folds):
    keys, labels = random_data(folds, kind=kind)
    found = fold_of(keys, labels, folds)
    assert set(found) == set(range(folds))
    for key in set(keys):
        assert len(set(found[keys == key])) == 1
    order = np.random.default_rng(1).permutation(len(keys))
    assert fold_of(keys[order], labels[order], folds).tolist() == found[order].tolist()


@pytest.mark.parametrize("folds", [2, 3, 10])
def test_folds_of_single_texts_have_equal_sizes_and_equal_shares_of_each_class(folds):
    random = np.random.default_rng(folds)
    keys = random.permutation(2**20)[:317].astype(np.uint64)
    labels = random.choice(4, 317, p=[0.7, 0.2, 0.08, 0.02])
    found = fold_of(keys, labels, folds)
    for members in (labels == label for label in range(4)):
        sizes = np.bincount(found[members], minlength=folds)
        assert sizes.max() - sizes.min() <= 1
    sizes = np.bincount(found, minlength=folds)
    assert sizes.max() - sizes.min() <= 2
    numbers = np.bincount(fold_of(keys, random.random(317), folds))
    assert numbers.max() - numbers.min() <= 1


def test_as_many_folds_as_keys_hold_out_one_key_each():
    keys, labels = random_data(3, 60, 12)
    number = len(set(keys))
    found = fold_of(keys, labels, number)
    assert sorted(len(set(keys[found == fold])) for fold in range(number)) == [1] * number


def test_groups_of_unequal_sizes_are_balanced_almost_as_well_as_by_trying_everything():
    sizes = np.array([9, 7, 6, 5, 4, 3, 2, 2])
    keys = np.repeat(np.arange(8, dtype=np.uint64) * 1000, sizes)
    rows = np.bincount(fold_of(keys, np.zeros(len(keys), np.int64), 3))
    best = min(
        max(np.bincount(chosen, sizes, minlength=3)) for chosen in itertools.product(range(3), repeat=8)
    )
    assert rows.max() <= best + 1


# ------------------------------------------------------------------------------------ labelled files

NUM_GROUPS, NUM_TEXTS = 9, 60


@pytest.fixture
def path(tmp_path):
    """90 rows, some with the same text, of nine authors."""
    lines = [f"text {row % NUM_TEXTS},{'ab'[row % 3 == 0]},author {row % NUM_GROUPS}" for row in range(90)]
    file = tmp_path / "a.csv"
    file.write_text("\n".join(["text,label,author", *lines]))
    return str(file)


def task(path, **options):
    return read_task(LabelledConfig(train=[path], **options))


def test_order_holds_out_the_last_rows(path):
    found = task(path, split="order", validation_fraction=0.2)
    texts = [f"text {row % NUM_TEXTS}" for row in range(90)]
    assert (found.train.texts, found.validation.texts) == (texts[:72], texts[72:])
    assert found.validation_is == f"the last 20% of the rows of {path}"


@pytest.mark.parametrize("column", [None, "author"])
def test_every_row_is_held_out_in_one_fold(path, column, caplog):
    parts = [task(path, folds=4, fold=fold, group_column=column) for fold in range(1, 5)]
    rows = np.concatenate([part.validation_rows for part in parts])
    assert sorted(rows) == list(range(90))
    key = (lambda row: row % NUM_GROUPS) if column else (lambda row: row % NUM_TEXTS)
    for part in parts:
        held_out = {key(row) for row in part.validation_rows}
        assert not held_out & {key(row) for row in set(range(90)) - set(part.validation_rows.tolist())}
        assert part.validation.texts == [f"text {row % NUM_TEXTS}" for row in part.validation_rows]
        assert len(part.train) + len(part.validation) == 90
    assert ("validation texts are in training too" in caplog.text) is (column is not None)


def test_sizes_of_both_sides_are_told_in_groups(path):
    found = task(path, group_column="author", validation_fraction=0.3)
    groups = len(set(found.validation.groups.tolist()))
    assert not set(found.validation.groups.tolist()) & set(found.train.groups.tolist())
    assert found.validation_is == (
        f"30% of {path}, chosen by a hash of the author: {groups} of 9 groups by author"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"group_column": "nix"},
            "a.csv: has no column nix, but text, label, author; name it with --data.gro",
        ),
        ({"group_column": "one"}, "b.csv: every row has the same one; a split needs two groups or more"),
        (
            {"group_column": "gap"},
            "b.csv, row 2 (line 3): gap is missing; every row needs its group, such as",
        ),
        ({"folds": 61, "fold": 1}, "data.folds=61 is more than the 60 different texts of "),
        (
            {"folds": 10, "fold": 1, "group_column": "author"},
            "data.folds=10 is more than the 9 groups by author",
        ),
        ({"folds": 3}, "data.fold=null is not one of the 3 folds"),
        ({"folds": 1}, "data.folds=1 must be at least 2"),
        ({"folds": 3, "fold": 4}, "data.fold=4 is not one of the folds; data.folds=3"),
        ({"fold": 1}, "data.fold=1 is not one of the folds; data.folds=null"),
        ({"folds": 3, "split": "order"}, "data.split=order has no effect with data.folds; leave it out"),
        (
            {"folds": 3, "validation_fraction": 0.2},
            "data.validation_fraction=0.2 has no effect with data.folds",
        ),
        ({"group_column": "author", "split": "order"}, "data.group_column=author needs data.split=hash"),
        (
            {"folds": 3, "validation": "v.csv"},
            "data.folds=3 is about holding out a part of train, and data.v",
        ),
        ({"split": "order", "validation": "v.csv"}, "data.split=order is about holding out a part of train"),
    ],
)
def test_mistakes_are_one_line(path, tmp_path, options, message):
    if options.get("group_column") in ("one", "gap"):
        path = str(tmp_path / "b.csv")
        (tmp_path / "b.csv").write_text("text,label,one,gap\na,0,x,1\nb,1,x,\n")
    with pytest.raises(InputError) as caught:
        task(path, **options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_few_held_out_examples_are_told_with_the_remedy_where_there_is_one(path, caplog):
    told = "validation examples: their scores are hardly more than chance"
    held_out = len(task(path).validation)
    assert f"only {held_out} {told}; --data.folds 5 scores every row\n" in caplog.text
    caplog.clear()
    task(path, validation=[path], validation_fraction=0.1)
    task(path, folds=9, fold=1)
    assert f"only 10 {told}\n" in caplog.text
    assert "--data.folds" not in caplog.text
