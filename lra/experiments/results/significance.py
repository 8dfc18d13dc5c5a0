"""Intervals over seeds, and tests whether two models differ. Whatever is drawn is drawn from one seed.

SciPy has all of this. It is no dependency, because torchmetrics imports `scipy.signal` where SciPy is installed, and
every run would begin 0.7 seconds later.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

LEAST_SEEDS = 3  # of an interval over seeds: fewer say too little of their spread
RESAMPLES = 9_999
MOST_SPLITS = 20_000  # of two groups of seeds, of which all are looked at: 8 and 8 have 12,870
INTERVAL_METHOD = f"percentile bootstrap, {RESAMPLES:,} resamples of the seeds"  # as tables state it


def bootstrap_interval(*samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95% interval of the mean of a sample, or of the difference of the means of two, the second minus the first.

    It is the percentile bootstrap (Efron and Tibshirani 1993, An Introduction to the Bootstrap, chapter 13). Of three
    seeds it is their range. None if a sample has less than `LEAST_SEEDS` values.
    """
    if min(map(len, samples)) < LEAST_SEEDS:
        return None
    rng = np.random.default_rng(0)
    drawn = [rng.choice(np.asarray(each, float), (RESAMPLES, len(each))).mean(1) for each in samples]
    low, high = np.percentile(drawn[-1] - drawn[0] if len(drawn) > 1 else drawn[0], (2.5, 97.5))
    return float(low), float(high)


def permuted_means(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of a permutation test of the means of two groups of seeds.

    It is exact if there are at most `MOST_SPLITS` ways to split the seeds into such groups (Fisher 1935, The Design of
    Experiments, chapter 3). Otherwise splits are drawn.
    """
    seeds, count = np.array([*first, *second], float), len(first)

    def difference(sums: np.ndarray) -> np.ndarray:
        """The distance of the means, of the sums of the first group."""
        return np.abs((seeds.sum() - sums) / (len(seeds) - count) - sums / count)

    found = difference(seeds[:count].sum()) - 1e-9
    if math.comb(len(seeds), count) <= MOST_SPLITS:
        sums = np.array([sum(group) for group in itertools.combinations(seeds, count)])
        return float((difference(sums) >= found).mean())
    rng = np.random.default_rng(0)
    sums = rng.permuted(np.tile(seeds, (RESAMPLES, 1)), axis=1)[:, :count].sum(1)
    return float((1 + (difference(sums) >= found).sum()) / (1 + RESAMPLES))


def least_p(first: int, second: int) -> float:
    """The least p that `permuted_means` can give for groups of so many seeds."""
    splits = math.comb(first + second, first)
    return (2 if first == second else 1) / splits if splits <= MOST_SPLITS else 1 / (1 + RESAMPLES)


def mcnemar(first: np.ndarray, second: np.ndarray) -> float:
    """The two-sided p of McNemar's exact test.

    Args:
        first, second: whether two models classify each of the same examples correctly, bool `[n]`.

    The p is of the binomial distribution of the examples that one of them alone gets right (McNemar 1947,
    doi:10.1007/BF02295996).
    """
    only = int((first & ~second).sum()), int((second & ~first).sum())
    n, ways, below = sum(only), 1, 0
    for chosen in range(min(only) + 1):
        below += ways  # of choosing so many of n
        ways = ways * (n - chosen) // (chosen + 1)
    return min(1.0, 2 * below / 2**n)


def permuted_pairs(first: np.ndarray, second: np.ndarray) -> float:
    """The two-sided p of a paired permutation test: whether two models get equal shares of the same examples right.

    Args:
        first, second: the share of seeds that classify each example correctly, float `[n]`.

    The two models are exchanged in each example by chance (Fisher 1935, The Design of Experiments, chapter 3). For one
    seed of each this is McNemar's test with drawn permutations. Equal differences are drawn together.
    """
    difference = second - first
    sizes, counts = np.unique(np.abs(difference[difference != 0]).round(9), return_counts=True)
    exchanged = np.random.default_rng(0).binomial(counts, 0.5, (RESAMPLES, len(counts)))
    drawn, found = (counts - 2 * exchanged) @ sizes, difference.sum()
    return float((1 + (np.abs(drawn) >= abs(found) - 1e-6).sum()) / (1 + RESAMPLES))
