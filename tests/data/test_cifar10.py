"""Image: gray levels of CIFAR-10, from a folder laid out like the Hub's repository."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from lra.data import cifar10
from lra.data.store import StoreContent, prepare_store
from lra.errors import UsageError
from tests.fixtures import CIFAR10_CARD, pngs, write_cifar10


def colours(count, seed, side=32, channels=3):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, channels), np.uint8)


TRAIN, TEST = colours(12, seed=0), colours(10, seed=1)
COLUMNS = {
    "train": {"img": pngs(TRAIN), "label": [*range(10), 3, 3]},
    "test": {"img": pngs(TEST), "label": [*range(10)][::-1]},
}


@pytest.fixture
def mirror(tmp_path):
    """Makes a mirror; a split's columns can be replaced."""
    return lambda **splits: write_cifar10(tmp_path / "hub" / "cifar10", **(COLUMNS | splits))


def store(source):
    content = StoreContent("image", 1, {}, str(source), cifar10.PIXELS, cifar10.GENERATOR, None)
    return prepare_store(content, lambda writer: cifar10.build_cifar10(writer, source))


def luma(images):
    """ITU-R BT.601 in 16-bit fixed point, rounded, `[n, H * W]` row by row."""
    red, green, blue = np.moveaxis(images.astype(np.int64), -1, 0)
    return ((19595 * red + 38470 * green + 7471 * blue + (1 << 15)) >> 16).reshape(len(images), -1)


def test_gray_levels_and_labels(mirror):
    made = store(mirror())
    assert made.splits == ("train", "test")
    for name, pixels in (("train", TRAIN), ("test", TEST)):
        split = made.split(name)
        assert split.tokens.dtype == np.uint8 and set(split.lengths) == {1024}
        assert np.array_equal(np.reshape(split.tokens, (-1, 1024)), luma(pixels))
        assert split.labels.tolist() == COLUMNS[name]["label"]
    made.verify()


def test_primary_colours_and_their_places(mirror):
    pixels = np.zeros((1, 32, 32, 3), np.uint8)
    pixels[0, 0, 1], pixels[0, 1, 0], pixels[0, 31, 30], pixels[0, 31, 31] = np.array([*np.eye(3), [1, 1, 1]]) * 255
    tokens = store(mirror(train={"img": pngs(pixels), "label": [0]})).split("train")[0]
    assert tokens[[0, 1, 32, 1022, 1023]].tolist() == [0, 76, 150, 29, 255] and np.count_nonzero(tokens) == 4


def test_more_images_than_are_read_at_once(mirror):
    pixels = np.zeros((1003, 32, 32, 3), np.uint8) + (np.arange(1003) % 256).astype(np.uint8)[:, None, None, None]
    split = store(mirror(train={"img": pngs(pixels), "label": np.arange(1003) % 10})).split("train")
    assert split.tokens[:: 32 * 32].tolist() == [number % 256 for number in range(1003)]
    assert split.labels.tolist() == [number % 10 for number in range(1003)]


def test_vocabulary_names_the_level():
    assert len(cifar10.PIXELS) == 256 and all(int(name) == token for token, name in enumerate(cifar10.PIXELS))


GOOD = COLUMNS["test"]["img"][:2]
BROKEN = pngs(TEST[:1]).to_pylist()[0]["bytes"]


def files(*contents):
    return [{"bytes": content, "path": None} for content in contents]


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"img": GOOD, "label": [0, 10]}, "rows without a label 0 to 9"),
        ({"img": GOOD, "label": [-1, -1]}, "rows without a label 0 to 9"),
        ({"img": GOOD, "label": [None, 1]}, "rows without a label 0 to 9"),
        ({"img": pngs(colours(2, 2, side=31)), "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": pngs([*TEST[:1], TEST[0, :, :, 0]]), "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": pngs(colours(2, 3, channels=4)), "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": files(b"no image", b""), "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": files(BROKEN, BROKEN[:-100]), "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": [*files(BROKEN), None], "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": [1, 2], "label": [0, 1]}, "rows without a 32x32 RGB image"),
        ({"img": GOOD[:0], "label": np.arange(0)}, "no rows in its split 'train'"),
    ],
)
def test_other_data_is_refused(mirror, train, message):
    refuse(mirror(train=train), message)


def refuse(source, message):
    with pytest.raises(UsageError, match=message) as caught:
        store(source)
    assert str(source) in str(caught.value) and "\n" not in str(caught.value)
    assert "lra data prepare task=image source=<folder of a local mirror of uoft-cs/cifar10>" in str(caught.value)


@pytest.mark.parametrize("column", ["img", "label"])
def test_missing_column(mirror, column):
    source = mirror(**{split: {column: values[column]} for split, values in COLUMNS.items()})
    refuse(source, f"no column '{'label' if column == 'img' else 'img'}'")


def test_missing_split(mirror):
    source = mirror()
    (source / "README.md").write_text(CIFAR10_CARD.replace("split: test", "split: validation"))
    refuse(source, "no rows in its split 'test'")


@pytest.mark.realdata
def test_real_cifar10():
    made = store(Path(os.environ["LRA_TEST_DATA"]) / cifar10.HUB)
    for name, count, checksum in (("train", 5_000, "9bc6410e72e5a93c"), ("test", 1_000, "d3ede7f3f93b36ce")):
        split = made.split(name)
        assert np.bincount(split.labels).tolist() == [count] * 10
        rows = np.column_stack([split.labels.astype(np.uint8), np.reshape(split.tokens, (-1, 1024))])
        every = sorted(row.tobytes() for row in rows)  # mirrors may differ in the order of their rows
        assert hashlib.sha256(b"".join(every)).hexdigest()[:16] == checksum
    pixels = np.asarray(made.split("train").tokens, np.float32)
    assert abs(pixels.mean() - 122.6) < 0.05 and abs(pixels.std() - 61.0) < 0.05  # as others have measured
