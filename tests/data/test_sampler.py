from itertools import islice

import numpy as np
import pytest

from mlm.data.sampler import TrainingSampler, ValidationSampler


def draw(count, **options):
    options = {"num_rows": 37, "seed": 3, "global_batch_size": 8, "micro_batch_size": 8} | options
    batches = list(islice(TrainingSampler(**options), count))
    return [(int(p), int(r)) for batch in batches for p, r in zip(*batch, strict=True)]


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
