"""Stores of generated images, and the baseline that they state."""

import numpy as np
import pytest

from lra.data.cifar10 import PIXELS
from lra.data.pathfinder import generate as pathfinder
from lra.data.pathfinder.generate import threshold_accuracy
from lra.data.pathfinder.law import image_law
from lra.data.store import StoreContent, prepare_store
from lra.errors import UsageError
from tests.data.test_pathfinder import collect


@pytest.mark.parametrize(
    ("values", "labels", "accuracy"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1),
        ([1, 2, 3, 4], [1, 1, 0, 0], 1),
        ([1, 2, 3, 4], [1, 0, 0, 0], 1),
        ([1, 1, 1, 2], [0, 1, 0, 1], 0.75),  # equal values cannot be told apart
        ([5, 5, 5, 5], [1, 1, 1, 0], 0.75),
    ],
)
def test_threshold(values, labels, accuracy):
    some = np.array(values, float), np.array(labels)
    assert threshold_accuracy(some, some) == accuracy


def test_threshold_is_chosen_on_train():
    train = np.array([1.0, 2, 3, 4]), np.array([0, 0, 1, 1])
    assert threshold_accuracy(train, (np.array([0.0, 2.9, 3, 9]), np.array([0, 1, 1, 1]))) == 0.75


def content(**params):
    return StoreContent("pathfinder", 1, params, "generated", PIXELS, pathfinder.GENERATOR, 0)


def test_build():
    options = {"resolution": 32, "level": "hard", "seed": 4, "train": 150, "val": 60, "test": 70}
    store = prepare_store(content(), lambda writer: pathfinder.build_pathfinder(writer, **options))
    pixels, labels, distance = collect(image_law(32, "hard"), seed=4, first=0, count=280)
    parts = {"train": slice(0, 150), "val": slice(150, 210), "test": slice(210, 280)}
    for name, part in parts.items():
        split = store.split(name)
        assert split.tokens.dtype == np.uint8
        assert np.array_equal(np.stack([*split]), pixels[part])
        assert np.array_equal(split.labels, labels[part])
    train, val, test = ((distance[part], labels[part]) for part in parts.values())
    expected = {"val": threshold_accuracy(train, val), "test": threshold_accuracy(train, test)}
    assert store.manifest["baselines"] == {"marker distance": expected}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 0}, "train=0, val=1 and test=1 must be 1 or more"),
        ({"level": "none"}, "no Pathfinder level 'none'"),
    ],
)
def test_bad_input_of_build(options, message):
    options = {"resolution": 32, "level": "easy", "seed": 0, "train": 1, "val": 1, "test": 1} | options
    with pytest.raises(UsageError, match=message):
        prepare_store(content(**options), lambda writer: pathfinder.build_pathfinder(writer, **options))
