"""Intervals and tests against exact values."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from lra.experiments.results.significance import (
    bootstrap_interval,
    least_p,
    mcnemar,
    permuted_means,
    permuted_pairs,
)


def test_an_interval_of_three_seeds_is_their_range_and_of_more_it_is_narrower():
    assert bootstrap_interval([35.0, 36.0, 38.0]) == (35.0, 38.0)
    low, high = bootstrap_interval([30.0, 31, 32, 33, 34, 35, 36, 37, 38, 39]) or (0, 0)
    assert 32 < low < 33.2 and 35.8 < high < 37
    assert bootstrap_interval([35.0, 36.0]) is None and bootstrap_interval([5.0] * 3) == (5.0, 5.0)


def test_an_interval_of_a_difference_is_of_the_second_minus_the_first():
    assert bootstrap_interval([1.0, 2, 3], [11.0, 12, 13]) == pytest.approx((8.6, 11.4), abs=0.5)
    assert bootstrap_interval([1.0, 2, 3], [11.0, 12]) is None


def test_the_permutation_test_of_means_is_exact_and_says_its_least_p():
    assert permuted_means([1, 2, 3], [4, 5, 6]) == pytest.approx(0.1) == least_p(3, 3)
    assert permuted_means([1, 2, 3], [1, 2, 3]) == 1
    assert permuted_means(range(5), range(10, 15)) == pytest.approx(least_p(5, 5)) == pytest.approx(2 / 252)
    assert permuted_means(range(3), range(10, 15)) == pytest.approx(least_p(3, 5)) == pytest.approx(1 / 56)
    assert least_p(10, 10) == 1e-4 <= permuted_means(range(10), range(20, 30)) < 1e-3, "drawn"


def right(*pattern: str) -> np.ndarray:
    return np.array([mark == "1" for mark in "".join(pattern)])


@pytest.mark.parametrize(("only_first", "only_second"), [(0, 8), (8, 0), (2, 9), (4, 4), (0, 0), (1, 0)])
def test_mcnemar_and_the_permutation_test_are_the_sign_test_of_what_one_alone_gets_right(only_first, only_second):
    first = right("1" * 20, "0" * 20, "1" * only_first, "0" * only_second)
    second = right("1" * 20, "0" * 20, "0" * only_first, "1" * only_second)
    n, k = only_first + only_second, min(only_first, only_second)
    exact = min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)
    assert mcnemar(first, second) == pytest.approx(exact)
    assert permuted_pairs(first.astype(float), second.astype(float)) == pytest.approx(exact, abs=0.01)


def test_shares_of_seeds_are_exchanged_example_by_example():
    first, second = np.array([0, 1, 2, 1, 0, 0, 1, 2]) / 3, np.array([1, 3, 2, 3, 1, 0, 3, 1]) / 3
    change = (second - first)[first != second]
    sums = [abs(sum(signs * change)) for signs in itertools.product((1, -1), repeat=len(change))]
    exact = np.mean(np.array(sums) >= abs(change.sum()) - 1e-9)
    assert 0.1 < permuted_pairs(first, second) == pytest.approx(exact, abs=0.02)


def test_many_examples_are_permuted_at_random_and_the_same_way_twice():
    rng = np.random.default_rng(1)
    first, second = (rng.random(50_000) < share for share in (0.36, 0.37))
    p = permuted_pairs(first.astype(float), second.astype(float))
    assert p == permuted_pairs(first.astype(float), second.astype(float))
    assert p == pytest.approx(mcnemar(first, second), abs=0.01)
