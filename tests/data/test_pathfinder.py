"""Pathfinder: the law of the generator, checked against measured statistics and by walks over the recorded contours."""

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest

from lra.data.pathfinder import generate as pathfinder
from lra.data.pathfinder.generate import draw_image, generate_images, marker_distance, threshold_accuracy
from lra.data.pathfinder.law import LEVELS, RESOLUTIONS, image_law
from lra.data.pathfinder.stamps import DEGREES, make_tables, marker_windows
from lra.errors import UsageError

QUICK = {32: 2000, 64: 100, 128: 100, 256: 500}  # images in the default run: the others take milliseconds each
# Of the hard level, from so many images of an independent implementation: (value, its rounding)
REFERENCE: dict[int, dict[str, Any]] = {
    32: {
        "images": 6000,
        "pairs": (324, 1),
        "distractors": (1.17, 0.005),
        "mean": (0.0745, 5e-5),
        "std": (0.190, 5e-4),
        "lit": (0.362, 5e-4),
        "distance 1": (13.3, 0.05),
        "distance 0": (12.7, 0.05),
        "threshold": 0.54,
        "placed": {0: 0.25, 1: 0.42, 2: 0.245, 3: 0.074, 4: 0.01},
    },
    64: {
        "images": 3000,
        "pairs": (3981, 1),
        "distractors": (2.64, 0.005),
        "mean": (0.0456, 5e-5),
        "std": (0.143, 5e-4),
        "lit": (0.248, 5e-4),
        "distance 1": (32.5, 0.25),
        "distance 0": (29, 0.5),
        "threshold": 0.57,
        "placed": {0: 0.02, 1: 0.13, 2: 0.30, 3: 0.33, 4: 0.19, 5: 0.03},
    },
    128: {
        "images": 3000,
        "pairs": (361, 1),
        "distractors": (14.87, 0.005),
        "mean": (0.0366, 5e-5),
        "std": (0.139, 5e-4),
        "lit": (0.192, 5e-4),
        "distance 1": (76.5, 0.25),
        "distance 0": (74.5, 0.25),
        "threshold": 0.54,
        "placed": {11: 0.02, 12: 0.065, 13: 0.145, 14: 0.168, 15: 0.166, 16: 0.223, 17: 0.207},
    },
    256: {
        "images": 2000,
        "pairs": (8.0, 0.05),
        "distractors": (6.98, 0.005),
        "mean": (0.0090, 5e-5),
        "std": (0.076, 5e-4),
        "lit": (0.037, 5e-4),
        "distance 1": (124.5, 0.25),
        "distance 0": (126, 0.5),
        "threshold": 0.59,
        "placed": {6: 0.011, 7: 0.989},
    },
}


def slow(resolution, count):
    return pytest.param(resolution, count, marks=pytest.mark.slow)


@cache
def sample(resolution: int, count: int) -> dict[str, np.ndarray]:
    """What can be said of `count` images in one number each."""

    def features(index: int) -> tuple[Any, ...]:
        one = draw_image(image_law(resolution, "hard"), seed=0, index=index)
        levels = np.bincount(one.pixels.ravel(), minlength=256) / one.pixels.size
        mean = levels @ np.arange(256)
        std = np.sqrt(levels @ np.arange(256) ** 2 - mean**2)
        distance = np.hypot(*(one.markers[0] - one.markers[1]))
        strokes = len(one.distractors)
        return one.label, distance, mean / 255, std / 255, 1 - levels[0], levels[128:].sum(), strokes, one.pairs

    names = ("label", "distance", "mean", "std", "lit", "bright", "distractors", "pairs")
    with ThreadPoolExecutor() as pool:
        return dict(zip(names, np.array(list(pool.map(features, range(count)))).T, strict=True))


def near(values, reference, count):
    """Within four standard errors of the difference of two samples, and the reference's own rounding."""
    value, rounding = reference
    error = np.std(values) * np.sqrt(1 / len(values) + 1 / count)
    return abs(np.mean(values) - value) <= 4 * error + rounding


EVERY = [*QUICK.items(), slow(64, 2000), slow(128, 2000), slow(256, 2000)]


@pytest.mark.parametrize(("resolution", "count"), EVERY)
def test_statistics(resolution, count):
    seen, reference = sample(resolution, count), REFERENCE[resolution]
    for name in ("pairs", "distractors", "mean", "std", "lit"):
        assert near(seen[name], reference[name], reference["images"]), (name, seen[name].mean())
    for label in (0, 1):
        distance = seen["distance"][seen["label"] == label]
        assert near(distance, reference[f"distance {label}"], reference["images"] / 2), (label, distance.mean())
    for placed, share in reference["placed"].items():
        error = np.sqrt(share * (1 - share) * (1 / count + 1 / reference["images"]))
        assert abs((seen["distractors"] == placed).mean() - share) <= 4 * error + 0.005, placed
    assert abs(seen["label"].mean() - 0.5) < 4 * 0.5 / np.sqrt(count)


@pytest.mark.parametrize(
    ("resolution", "count"), [(32, 2000), (256, 500), *(slow(resolution, 20_000) for resolution in RESOLUTIONS)]
)
def test_no_feature_gives_the_label_away(resolution, count):
    seen, limit = sample(resolution, count), REFERENCE[resolution]["threshold"]
    allowed = 0.02 + (4 * 0.5 / np.sqrt(count) if count < 20_000 else 0)
    for name in ("distance", "mean", "std", "lit", "bright", "distractors"):
        accuracy = threshold_accuracy((seen[name], seen["label"]), (seen[name], seen["label"]))
        assert accuracy < limit + allowed, (name, accuracy)
        if name == "distance":
            assert accuracy > limit - allowed


@pytest.mark.parametrize(
    ("resolution", "level", "placed"),
    [(32, "easy", 3.3), (32, "intermediate", 1.8), (64, "easy", 7.85), (64, "intermediate", 4.5)],
)
def test_distractors_of_other_levels(resolution, level, placed):
    some = [len(draw_image(image_law(resolution, level), seed=0, index=i).distractors) for i in range(300)]
    assert near(some, (placed, 0.05), 300)


def walk(chain, margin):
    """Follow a contour from its first tip, paddle by paddle, to its last: both tips."""
    (tip, end), *others = chain.tolist()
    for following, far in others:
        assert np.hypot(following[0] - end[0], following[1] - end[1]) < 2 * margin + 3  # the gap between two paddles
        end = far
    return tip, end


@pytest.mark.parametrize(("resolution", "level"), [(side, level) for side in RESOLUTIONS for level in LEVELS])
def test_the_label_is_what_a_walk_finds(resolution, level):
    rules, labels = image_law(resolution, level), []
    for index in range(40):
        one = draw_image(rules, seed=3, index=index)
        assert one.targets.shape == (2, rules.contour_length, 2, 2)
        assert (
            one.distractors.shape[1:] == (rules.distractor_length, 2, 2) and len(one.distractors) <= rules.distractors
        )
        begin, arrive = one.markers.tolist()
        (first, first_last), (second, second_last) = (walk(chain, max(rules.margins)) for chain in one.targets)
        assert begin in (first, second) and arrive in (first_last, second_last)
        for chain in one.distractors:
            tips = walk(chain, max(rules.margins))
            assert begin not in tips and (arrive not in tips or arrive == first_last)
        if first_last != second_last:  # the law lets both targets end on one pixel, where nobody can tell
            assert ((first_last if begin == first else second_last) == arrive) == one.label
            labels.append(one.label)
    assert len(labels) >= 38 and 5 < sum(labels) < len(labels) - 5


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_what_is_recorded_is_drawn_and_nothing_else(resolution):
    rules = image_law(resolution, "hard")
    for index in range(4):
        one = draw_image(rules, seed=4, index=index)
        paddles = np.concatenate([one.targets.reshape(-1, 2, 2), one.distractors.reshape(-1, 2, 2)])
        y, x = np.indices(one.pixels.shape)
        away = np.hypot(y - one.markers[:, :1, None], x - one.markers[:, 1:, None]).min(0) > rules.marker_radius + 3.5
        for start, end in paddles:
            for share in (0, 0.25, 0.5, 0.75, 1):
                place = np.rint(start + share * (end - start)).astype(int)
                assert one.pixels[tuple(slice(max(at - 1, 0), at + 2) for at in place)].max() > 50
            along = ((y - start[0]) * (end - start)[0] + (x - start[1]) * (end - start)[1]) / ((end - start) ** 2).sum()
            off = np.stack([y, x], -1) - start - np.clip(along, 0, 1)[..., None] * (end - start)
            away &= np.hypot(off[..., 0], off[..., 1]) > rules.thickness / 2 + 3.5
        assert away.any() and not one.pixels[away].any()


@pytest.mark.parametrize(("resolution", "inside"), [(64, 213), (128, 226), (256, 228)])
def test_pixels(resolution, inside):
    """Scaled to 0 to 255 by the overshoot of the markers' rims, which the released images show too."""
    images = [draw_image(image_law(resolution, "hard"), seed=5, index=index) for index in range(20)]
    assert all(one.pixels.dtype == np.uint8 and one.pixels.min() == 0 and one.pixels.max() == 255 for one in images)
    assert abs(np.median([one.pixels[tuple(tip)] for one in images for tip in one.markers]) - inside) <= 1


def collect(*args, **options):
    parts = list(generate_images(*args, **options))
    return [np.concatenate([getattr(part, name) for part in parts]) for name in ("pixels", "labels", "marker_distance")]


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_an_image_depends_on_seed_and_index_alone(resolution, monkeypatch):
    rules = image_law(resolution, "easy")
    whole = collect(rules, seed=1, first=0, count=40, workers=1)
    assert whole[0].shape == (40, resolution**2) and whole[0].dtype == np.uint8 and whole[1].dtype == np.int64
    for index in (0, 17, 39):
        one = draw_image(rules, seed=1, index=index)
        assert np.array_equal(one.pixels.ravel(), whole[0][index]) and one.label == whole[1][index]
        assert np.hypot(*(one.markers[0] - one.markers[1])) == pytest.approx(whole[2][index])
    monkeypatch.setattr(pathfinder, "CHUNK", 7)
    for workers in (1, 3):
        part = collect(rules, seed=1, first=5, count=30, workers=workers)
        assert all(np.array_equal(some, every[5:35]) for some, every in zip(part, whole, strict=True))
    others = collect(rules, seed=2, first=0, count=40)[0]
    assert len(np.unique(np.concatenate([whole[0], others]), axis=0)) == 80


def test_images_are_drawn_as_they_are_asked_for():
    endless = generate_images(image_law(256, "hard"), seed=0, first=0, count=10**12)
    assert len(next(endless).labels) == pathfinder.CHUNK


STREAMS = [(side, level, seed) for side in (32, 64) for level in ("easy", "hard") for seed in (0, 1)]


def labels(side: int, level: str, seed: int, version: int, count: int = 400) -> np.ndarray:
    return collect(image_law(side, level), seed=seed, first=0, count=count, version=version)[1]


def test_resolutions_levels_and_neighbouring_seeds_are_independent():
    """Labels of two streams agree as coins do: within five standard deviations, each pair also one image apart."""
    drawn = np.stack([labels(*stream, version=2) for stream in STREAMS])
    for shift in (0, 1):
        agree = (drawn[:, None, : 400 - shift] == drawn[None, :, shift:]).mean(-1)
        others = agree[~np.eye(len(drawn), dtype=bool)]
        assert abs(others - 0.5).max() < 5 * 0.5 / 20
    assert abs(drawn.mean(1) - 0.5).max() < 5 * 0.5 / 20


def test_the_stream_of_version_1_knows_no_resolution_and_no_level():
    first = labels(32, "easy", 0, version=1, count=64)
    assert all(np.array_equal(labels(side, level, 0, 1, 64), first) for side in (32, 64) for level in ("easy", "hard"))
    assert not np.array_equal(labels(32, "easy", 0, 2, 64), first)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("resolution", "level"), [*((side, "hard") for side in RESOLUTIONS), (32, "easy"), (64, "easy")]
)
def test_golden_images(resolution, level, version):
    """They must never change within a version: results are compared across machines and years."""
    pixels, labels, _ = collect(image_law(resolution, level), seed=0, first=0, count=8, version=version)
    made = hashlib.sha256(pixels.tobytes() + bytes(labels.tolist())).hexdigest()[:16]
    assert made == GOLDEN[version][resolution, level]


GOLDEN = {}
GOLDEN[2] = {
    (32, "hard"): "cace233852085198",
    (64, "hard"): "2d1e88df525a860e",
    (128, "hard"): "dc3696a7a7ab89d1",
    (256, "hard"): "08ace77b63ec56b7",
    (32, "easy"): "160ea52d6a2fbc58",
    (64, "easy"): "02f9910eb2b5221c",
}
GOLDEN[1] = {
    (32, "hard"): "5079202f15df4f37",
    (64, "hard"): "077b320ccdc355f2",
    (128, "hard"): "53e632180c2fd2da",
    (256, "hard"): "047cb3a163e1fbbc",
    (32, "easy"): "bb10bcf1501f53b5",
    (64, "easy"): "fae2ce5299814063",
}


def test_images_do_not_depend_on_the_hash_seed():
    code = """
from lra.data.pathfinder.generate import draw_image
from lra.data.pathfinder.law import image_law
one = draw_image(image_law(32, "hard"), seed=1, index=2)
print(one.pixels.tobytes().hex(), one.label, one.targets.tolist())
"""

    def output(seed):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout

    assert len(first := output("1")) > 2 * 32**2 and output("2") == first


def test_laws():
    shapes = {
        side: [
            (one.contour_length, one.distractor_length, one.distractors) for one in map(image_law, [side] * 3, LEVELS)
        ]
        for side in RESOLUTIONS
    }
    assert shapes == {
        32: [(6, 2, 10), (9, 3, 6), (14, 4, 5)],
        64: [(6, 2, 11), (9, 3, 7), (14, 4, 5)],
        128: [(6, 2, 35), (9, 3, 23), (14, 4, 17)],
        256: [(6, 2, 15), (9, 3, 10), (14, 4, 7)],
    }
    with pytest.raises(UsageError, match="no Pathfinder images of resolution 48: choose from 32, 64, 128, 256"):
        image_law(48, "hard")
    with pytest.raises(UsageError, match="no Pathfinder level 'harder': choose from easy, intermediate, hard"):
        image_law(32, "harder")


@pytest.mark.parametrize(
    ("resolution", "startable", "steps", "peak", "mass"),
    [
        (32, [30], [18], 0.435, 1.41),
        (64, [95], [38], 0.886, 6.19),
        (128, [354, 360], [41, 49], 1.123, 8.73),
        (256, [360], [49], 1.145, 11.61),
    ],
)
def test_paddles(resolution, startable, steps, peak, mass):
    """Directions, steps and ink, by margin, as measured on LRA's generator."""
    made = make_tables(image_law(resolution, "hard"))
    blocks = np.split(made.kinds, made.starts[1:])
    assert [block["startable"].sum() for block in blocks] == startable
    assert [len(block) - DEGREES for block in blocks] == steps
    ink = [made.ink["value"][start:end] for start, end in made.kinds["ink"]]
    assert np.median([values.max() for values in ink]) == pytest.approx(peak, abs=0.005)
    assert np.median([values.sum() for values in ink]) == pytest.approx(mass, abs=0.03)


@pytest.mark.parametrize(
    ("resolution", "rim", "area"), [(32, 1.114, 8), (64, 1.161, 20), (128, 1.124, 28), (256, 1.118, 81)]
)
def test_markers(resolution, rim, area):
    windows = marker_windows(image_law(resolution, "hard"))
    whole = windows[len(windows) // 2, len(windows) // 2]
    assert whole.max() == pytest.approx(rim, abs=5e-4) and (whole > 0.5).sum() == area
    assert np.argwhere(whole == whole.max()).mean() == pytest.approx(len(whole) // 2, abs=1)


@pytest.mark.parametrize("resolution", RESOLUTIONS)
def test_markers_are_found_in_the_pixels(resolution):
    for level in LEVELS if resolution != 64 else ("easy", "intermediate"):
        rules = image_law(resolution, level)
        pixels, _, distance = collect(rules, seed=6, first=0, count=200 if resolution in (32, 64) else 50)
        assert np.array_equal(marker_distance(pixels, rules), distance)


def test_images_without_markers():
    pixels = collect(image_law(32, "easy"), seed=0, first=0, count=3)[0]
    pixels[1] = 0
    assert np.isnan(marker_distance(pixels, image_law(32, "easy"))).tolist() == [False, True, False]
