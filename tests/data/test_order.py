"""The order of rows: a permutation an epoch, from the seed and the epoch alone."""

import numpy as np
import pytest

from mesh_mpi.data.order import RowOrder
from mesh_mpi.errors import DataError


@pytest.mark.parametrize("n", [1, 2, 3, 5, 7, 16, 17, 63, 64, 65, 1000, 4097])
def test_an_epoch_is_a_permutation_whatever_the_number_of_rows(n):
    order = RowOrder(n, 3)
    for epoch in range(3):
        rows = order.row(1, np.arange(n) + epoch * n, 1)
        assert sorted(rows.tolist()) == list(range(n))


def test_the_order_is_that_of_the_seed_and_the_epoch_and_of_no_batch():
    n = 101
    whole = RowOrder(n, 5).row(1, np.arange(4 * n), 1)
    for batch in (1, 7, 101, 250):
        order = RowOrder(n, 5)
        steps = np.concatenate([order.row(step, np.arange(batch), batch) for step in range(1, 4 * n // batch + 1)])
        assert np.array_equal(steps, whole[:len(steps)])
    epochs = whole.reshape(4, n)
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 4
    assert not np.array_equal(RowOrder(n, 6).row(1, np.arange(n), 1), epochs[0])


def test_the_order_of_a_seed_never_changes():
    assert RowOrder(10, 0).row(1, np.arange(10), 10).tolist() == [0, 7, 5, 3, 4, 2, 9, 1, 6, 8]
    assert RowOrder(10**12, 1).row(7, np.arange(3), 8).tolist() == [331211478959, 264568131016, 290114886624]


def test_numbers_and_arrays_and_steps_far_away_are_taken():
    order = RowOrder(1000, 1)
    assert int(order.row(10**9, 3, 512)) == order.row(10**9, np.array([3]), 512)[0]
    assert order.row(4, np.arange(6).reshape(2, 3), 6).shape == (2, 3)


def test_without_shuffle_the_rows_come_as_they_stand():
    assert RowOrder(5, 1, shuffle=False).row(2, np.arange(4), 4).tolist() == [4, 0, 1, 2]


def test_neighbours_do_not_stay_neighbours():
    rows = RowOrder(10_000, 2).row(1, np.arange(10_000), 1)
    assert np.count_nonzero(np.diff(rows) == 1) < 20
    assert abs(np.corrcoef(np.arange(10_000), rows)[0, 1]) < 0.05


def test_no_rows_are_refused():
    with pytest.raises(DataError, match="0 rows"):
        RowOrder(0, 1)
