"""A small store."""

import numpy as np

from lra.data.store import StoreContent


def content(**changes):
    fields = {"task": "toy", "version": 1, "params": {"n": 3}, "source": "made up", "vocabulary": ["a", "b", "c"]}
    return StoreContent(**{**fields, "generator": "test@1", "seed": 0, **changes})


def sequences(count=5, high=3):
    rng = np.random.default_rng(0)
    return [rng.integers(0, high, length) for length in rng.integers(0, 9, count)]


def build(writer):
    writer.add("train", sequences(), [0, 1, 2, 1, 0])
    writer.add("test", np.array([[0, 1], [2, 0]]), [1, 1])
    writer.add("train", [np.array([2, 2, 2, 2])], [7])
