from itertools import islice

import numpy as np
import pytest

from mlm.data.sampler import BLOCK_ROWS, Part, TrainingSampler, ValidationSampler, divide_block


def draw(count, **options):
    options = {"num_rows": 37, "seed": 3, "global_batch_size": 8, "micro_batch_size": 8} | options
    batches = list(islice(TrainingSampler(**options), count))
    return [(int(p), int(r)) for batch in batches for p, r in zip(batch.passes, batch.rows, strict=True)]


def test_every_row_comes_once_a_pass_in_a_new_order():
    stream = draw(37)  # 8 whole passes
    for number in range(8):
        rows = [row for found, row in stream if found == number]
        assert sorted(rows) == list(range(37))
        assert rows != sorted(rows)
    assert [row for found, row in stream if found == 0] != [row for found, row in stream if found == 1]


@pytest.mark.parametrize("consumed", [8, 32, 40, 296])
def test_resume_goes_on_with_the_next_row(consumed):
    assert draw(5, rows_consumed=consumed) == draw(5 + consumed // 8)[consumed:]


@pytest.mark.parametrize(("world", "micro"), [(1, 2), (2, 4), (2, 1), (4, 2), (8, 1)])
def test_global_batches_are_the_same_for_any_number_of_ranks_and_any_micro_batch(world, micro):
    passes = 8 // (world * micro)
    ranks = [draw(6 * passes, micro_batch_size=micro, rank=rank, world_size=world) for rank in range(world)]
    share = 8 // world
    for step, reference in enumerate(np.array(draw(6)).reshape(6, 8, 2)):
        together = np.concatenate([np.array(rank[step * share : (step + 1) * share]) for rank in ranks])
        assert np.array_equal(together, reference)


def test_a_corpus_smaller_than_the_batch_repeats_rows_in_further_passes():
    assert draw(1, num_rows=3) == sorted(draw(1, num_rows=3), key=lambda pair: pair[0])
    assert [found for found, _ in draw(1, num_rows=3)] == [0, 0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_validation_covers_every_row_once_for_any_number_of_ranks(world):
    samplers = [ValidationSampler(21, 4, rank, world) for rank in range(world)]
    rows = [row for sampler in samplers for batch in sampler for row in batch.rows.tolist()]
    assert sorted(rows) == list(range(21))
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]


def test_the_first_batch_costs_the_same_anywhere():
    far = TrainingSampler(10**9, 0, 4, 4, rows_consumed=10**12 + 7)
    batch = next(iter(far))
    assert batch.passes.tolist() == [1000] * 4
    assert len(set(batch.rows.tolist())) == 4


# ---------------------------------------------------------------------------------------- weighted mixes

SHARES = [0.5, 0.3, 0.2]
PARTS = tuple(map(Part, [2500, 40, 7], divide_block(SHARES)))
MIX = {"num_rows": 2547, "parts": PARTS, "global_batch_size": 512, "micro_batch_size": 512}


@pytest.mark.parametrize(
    "shares", [[1.0], [1, 1, 1], [0.7, 0.3], [1e-9, 1.0], [3, 2, 1e-6, 1e-6], [1.0] * 1000]
)
def test_a_block_is_divided_in_proportion(shares):
    counts = divide_block(shares)
    assert sum(counts) == BLOCK_ROWS
    exact = np.array(shares) / sum(shares) * BLOCK_ROWS
    assert min(counts) >= 1
    assert np.abs(counts - np.maximum(exact, 1)).max() <= 2 + (exact < 1).sum()


def stream_of(parts):
    """The stream of MIX as (part, pass, row of the part)."""
    first = np.cumsum([0] + [part.num_rows for part in parts])
    stream = []
    for found, row in draw(2 * BLOCK_ROWS // 512, **MIX):
        part = int(np.searchsorted(first, row, side="right")) - 1
        stream.append((part, found, row - int(first[part])))
    return stream


def test_every_block_holds_the_shares():
    stream = stream_of(PARTS)
    for start in (0, BLOCK_ROWS):
        owners = [part for part, _, _ in stream[start : start + BLOCK_ROWS]]
        assert [owners.count(part) for part in range(3)] == [part.per_block for part in PARTS]
        assert 150 < owners[:512].count(0) < 350, "mixed, not one part after the other"
    assert [part for part, _, _ in stream[:BLOCK_ROWS]] != [part for part, _, _ in stream[BLOCK_ROWS:]]


def test_every_part_is_read_whole_before_it_is_repeated():
    for number, part in enumerate(PARTS):
        mine = [(found, row) for owner, found, row in stream_of(PARTS) if owner == number]
        for found in range(len(mine) // part.num_rows):
            once = [row for passed, row in mine if passed == found]
            assert sorted(once) == list(range(part.num_rows))
        assert [found for found, _ in mine] == sorted(found for found, _ in mine)


@pytest.mark.parametrize("consumed", [512, 4096, 5120])
def test_mix_resumes_with_the_next_row(consumed):
    assert draw(3, **MIX, rows_consumed=consumed) == draw(3 + consumed // 512, **MIX)[consumed:]


def test_mix_is_the_same_for_any_number_of_ranks():
    options = MIX | {"global_batch_size": 8, "micro_batch_size": 2}
    ranks = [draw(8, **options, rank=rank, world_size=2) for rank in range(2)]
    together = [ranks[rank][4 * step + place] for step in range(4) for rank in range(2) for place in range(4)]
    assert together == draw(4, **(options | {"micro_batch_size": 8}))


def test_the_first_batch_of_a_mix_costs_the_same_anywhere():
    parts = tuple(map(Part, [10**9, 10**6], divide_block([0.5, 0.5])))
    far = TrainingSampler(10**9 + 10**6, 0, 4, 4, rows_consumed=10**12 + 7, parts=parts)
    batch = next(iter(far))
    assert set(batch.passes.tolist()) <= {500, 500_000}


def test_the_mask_rate_of_a_step_travels_with_its_batches_and_is_asked_for_when_they_are_drawn():
    asked = []
    sampler = TrainingSampler(
        37, 3, 8, 2, rank=1, world_size=2, mask_rate=lambda step: asked.append(step) or step
    )
    batches = iter(sampler)
    assert [next(batches).mask_rate for _ in range(3)] == [0, 0, 1]
    assert asked == [0, 1]
    assert next(iter(TrainingSampler(37, 3, 8, 2))).mask_rate is None
