import numpy as np
import pytest

from mlm.counter import permute, random_bits, uniform


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64, 65, 1000, 4097])
def test_permute_visits_every_number_once(size):
    assert sorted(permute(np.arange(size), size, 7, 3)) == list(range(size))


def test_permute_depends_on_key_and_not_on_neighbours():
    index = np.arange(1000)
    whole = permute(index, 1000, 1, 0)
    assert np.array_equal(permute(index[500:510], 1000, 1, 0), whole[500:510])
    assert not np.array_equal(permute(index, 1000, 1, 1), whole)
    assert not np.array_equal(permute(index, 1000, 2, 0), whole)


def test_permute_leaves_no_order():
    order = permute(np.arange(100_000), 100_000, 0, 0)
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.01
    assert np.mean(np.diff(order) == 1) < 1e-3


def test_uniform_is_flat_and_uncorrelated():
    draws = uniform(3, np.arange(500)[:, None], np.arange(400))
    assert draws.shape == (500, 400)
    assert draws.min() >= 0
    assert draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.003
    assert abs(np.corrcoef(draws[:, :-1].ravel(), draws[:, 1:].ravel())[0, 1]) < 0.01
    assert np.histogram(draws, 20, (0, 1))[0] == pytest.approx(np.full(20, 10_000), rel=0.05)


def test_order_of_counters_matters():
    assert random_bits(1, 2).item() != random_bits(2, 1).item()
    assert random_bits(0).item() != random_bits(0, 0).item()
