"""The data order is a pure function of seed and step."""

import hashlib

import numpy as np
import pytest

from lra.data.order import epoch_order, hold_out, share_rows, step_rows
from lra.errors import UsageError


def digest(array):
    return hashlib.sha256(np.ascontiguousarray(array, "<i8").tobytes()).hexdigest()[:16]


def test_every_epoch_is_another_permutation():
    epochs = [epoch_order(seed, epoch, 1000) for seed in (0, 1) for epoch in (0, 1, 2)]
    assert all(np.array_equal(np.sort(epoch), np.arange(1000)) for epoch in epochs)
    assert len({digest(epoch) for epoch in epochs}) == 6
    assert epochs[0].dtype == np.int64 and not epochs[0].flags.writeable


def test_golden_orders():
    """They must never change: a resumed run and a colleague's machine rely on it."""
    assert epoch_order(0, 0, 8).tolist() == GOLDEN[0]
    assert digest(epoch_order(7, 3, 96_000)) == GOLDEN[1]
    assert digest(step_rows(5, 999, 32, 25_000)) == GOLDEN[2]
    assert digest(hold_out(0, 25_000, 0.1)[1]) == GOLDEN[3]


GOLDEN = ([6, 4, 1, 3, 2, 7, 5, 0], "72dac1a2112cdf8b", "3c95419149b82e20", "ea2b5b04633eeebc")


@pytest.mark.parametrize(("size", "count"), [(4, 10), (5, 10), (10, 10), (32, 10), (1, 3), (7, 1)])
def test_steps_cut_the_endless_stream(size, count):
    stream = np.concatenate([epoch_order(3, epoch, count) for epoch in range(-(-20 * size // count))])
    steps = [step_rows(3, step, size, count) for step in range(20)]
    assert all(step.shape == (size,) and step.dtype == np.int64 for step in steps)
    assert np.array_equal(np.concatenate(steps), stream[: 20 * size])  # nothing dropped, whatever the border
    assert np.array_equal(step_rows(3, 13, size, count), steps[13])  # a resumed run asks for step 13 first


def test_all_orders_are_equally_likely():
    counts = np.zeros((4, 4))
    for epoch in range(4000):
        counts[np.arange(4), epoch_order(11, epoch, 4)] += 1
    assert np.abs(counts / 4000 - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / 4000)


def test_returned_rows_can_be_changed_without_harm():
    first = step_rows(0, 0, 4, 10)
    first[:] = 0
    assert not np.array_equal(step_rows(0, 0, 4, 10), first)


def test_split_off_partitions_and_is_its_own_draw():
    kept, held = hold_out(0, 25_000, 0.1)
    assert len(held) == 2500 and np.array_equal(np.sort(np.concatenate([kept, held])), np.arange(25_000))
    assert (np.diff(kept) > 0).all() and (np.diff(held) > 0).all()
    assert not np.array_equal(held, hold_out(1, 25_000, 0.1)[1])
    assert not np.array_equal(held, np.sort(epoch_order(0, 0, 25_000)[:2500]))


@pytest.mark.parametrize("arguments", [(0, 10, 0), (0, 10, 1.0), (0, 10, 0.01), (0, 1, 0.5), (0, 10, -0.5)])
def test_split_off_leaves_both_parts(arguments):
    with pytest.raises(UsageError, match="cannot hold out"):
        hold_out(*arguments)


def test_a_share_is_random_and_within_a_larger_one():
    few, more = (share_rows(3, 1000, part) for part in (0.01, 0.1))
    assert (len(few), len(more)) == (10, 100) and {*few} < {*more} and list(few) == sorted(few)
    assert {*few} != {*share_rows(4, 1000, 0.01)} and len(share_rows(3, 10, 0.01)) == 1
    assert list(share_rows(3, 7, 1.0)) == list(range(7))


def test_bad_input():
    with pytest.raises(UsageError, match="no training rows"):
        step_rows(0, 0, 4, 0)
