"""Pathfinder: are two markers on the same contour? Images as in LRA's sets, with 32 to 256 pixels a side.

An image shows two target contours of paddles, shorter distractors, and two markers. One marker is where a target
begins, the other where a target ends. Label 1 means that it is the same target (Linsley et al. 2018, arXiv 1805.08315;
Tay et al. 2020, arXiv 2011.04006). Targets may touch, cross and even end on one pixel, so a few images are ambiguous.
"""

from __future__ import annotations

import itertools
import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from lra.data.pathfinder.law import ImageLaw, image_law
from lra.data.writer import StoreWriter
from lra.errors import UsageError

GENERATORS = {1: "lra.data.pathfinder@1", 2: "lra.data.pathfinder@2"}  # by version of the images: see `_key`
GENERATOR = GENERATORS[2]
ROUNDING = 0.4999  # added to grey values before they are cut to whole levels, as in LRA's images
CHUNK = 64  # images per call: 4 MB at 256 pixels a side


@dataclass(frozen=True, eq=False)
class ImageChunk:
    """Consecutive images. Image `i` is a function of (law, seed, version, i) alone."""

    pixels: np.ndarray  # uint8 [n, resolution * resolution], row by row
    labels: np.ndarray  # int64 [n], 1 if the markers are on one contour
    marker_distance: np.ndarray  # float64 [n], in pixels


@dataclass(frozen=True, eq=False)
class Drawing:
    """One image and what it shows. A contour runs from tip to tip, a paddle is its two ends, a pixel is y and x."""

    pixels: np.ndarray  # uint8 [resolution, resolution]
    label: int
    targets: np.ndarray  # int64 [2, contour_length, 2, 2]
    distractors: np.ndarray  # int64 [n, distractor_length, 2, 2]
    markers: np.ndarray  # int64 [2, 2], at the first tip of a target and at the last tip of a target
    pairs: int  # of targets that were tried


def build_pathfinder(
    writer: StoreWriter, *, resolution: int, level: str, seed: int, train: int, val: int, test: int, version: int = 2
) -> None:
    """Generate the splits train, val and test, with so many images each, and the baseline of the marker distance.

    UsageError if there is no such resolution or level, or if a split is empty.
    """
    if min(train, val, test) < 1:
        raise UsageError(f"train={train}, val={val} and test={test} must be 1 or more")
    chosen = image_law(resolution, level)
    distances = {}
    for split, first, count in (("train", 0, train), ("val", train, val), ("test", train + val, test)):
        seen = []
        for images in generate_images(chosen, seed=seed, first=first, count=count, version=version):
            writer.add(split, images.pixels, images.labels)
            seen.append((images.marker_distance, images.labels))
        distances[split] = tuple(np.concatenate(parts) for parts in zip(*seen, strict=True))
    accuracy = {split: threshold_accuracy(distances["train"], distances[split]) for split in ("val", "test")}
    writer.baseline("marker distance", accuracy)


def generate_images(
    law: ImageLaw, *, seed: int, first: int, count: int, version: int = 2, workers: int | None = None,
    added: float = ROUNDING,
) -> Iterator[ImageChunk]:  # fmt: skip
    """Images `first` to `first + count - 1` of `seed`, in consecutive chunks.

    Args:
        workers: threads, by default one per core. The images do not depend on them. Each draws up to two chunks ahead.
        added: to grey values before they are cut to whole levels. 0 truncates them, which LRA's images are not.
    """
    from lra.data.pathfinder import contours, stamps

    tables, key = stamps.make_tables(law), _key(law, seed, version)

    def chunk(start: int) -> ImageChunk:
        images = start, min(CHUNK, first + count - start), np.float32(added)
        pixels, labels, tips, *_ = contours.draw_images(*tables, key, *images)
        return ImageChunk(pixels, labels, _distance(tips))

    workers = workers or os.cpu_count() or 1
    starts = iter(range(first, first + count, CHUNK))
    pool = ThreadPoolExecutor(workers)
    try:
        ahead = deque(pool.submit(chunk, start) for start in itertools.islice(starts, 2 * workers))
        while ahead:
            images = ahead.popleft().result()
            ahead.extend(pool.submit(chunk, start) for start in itertools.islice(starts, 1))
            yield images
    finally:
        pool.shutdown(cancel_futures=True)


def draw_image(law: ImageLaw, *, seed: int, index: int, version: int = 2) -> Drawing:
    """Image `index` of `seed`, the same that `generate_images` makes, with the contours that it shows."""
    from lra.data.pathfinder import contours, stamps

    tables = stamps.make_tables(law)
    drawn = contours.draw_images(*tables, _key(law, seed, version), index, 1, np.float32(ROUNDING))
    pixels, labels, tips, paddles, distractors, pairs = (part[0] for part in drawn)
    border, width = tables.law["border"], tables.law["width"]
    begins = np.stack([paddles["at"] // width - border, paddles["at"] % width - border], axis=1)
    ends = np.ceil(begins + tables.kinds["end"][paddles["kind"]]).astype(np.int64)
    targets = 2 * law.contour_length
    drawn = np.stack([begins, ends], axis=1)
    return Drawing(
        pixels.reshape(law.resolution, law.resolution),
        int(labels),
        _in_order(drawn[:targets], law.contour_length),
        _in_order(drawn[targets:], law.distractor_length)[:distractors],
        tips,
        int(pairs),
    )


def _key(law: ImageLaw, seed: int, version: int) -> np.uint64:
    """The seed of the random bits.

    In version 1 it is `seed` alone. Then image `i` has the same label, and partly the same targets, at every resolution
    and level. In version 2 each resolution and level of a seed has its own stream.
    """
    if version == 1:
        return np.uint64(seed)
    name = f"{GENERATORS[version]}: resolution {law.resolution}, contour length {law.contour_length}, seed {seed}"
    return np.uint64(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little"))


def _in_order(paddles: np.ndarray, length: int) -> np.ndarray:
    """Contours `[n, length, 2, 2]`. All paddles but the first were drawn backwards, and are turned here."""
    contours = paddles.reshape(-1, length, 2, 2)
    contours[:, 1:] = contours[:, 1:, ::-1].copy()
    return contours


def marker_distance(pixels: np.ndarray, law: ImageLaw) -> np.ndarray:
    """Distance of the two markers, float64 `[n]` in pixels, found in the images uint8 `[n, resolution *
    resolution]`.

    It is NaN for an image that does not show two markers.
    """
    from lra.data.pathfinder import markers, stamps

    windows = stamps.marker_windows(law)
    middle = len(windows) // 2
    tips = markers.find_markers(pixels, np.minimum(255 / windows[middle, middle].max() * windows, 255).astype(np.int64))
    return np.where((tips < 0).any((1, 2)), np.nan, _distance(tips))


def _distance(tips: np.ndarray) -> np.ndarray:
    """Distance between the two pixels of each pair `[n, 2, 2]`, float64 `[n]`."""
    return np.sqrt(((tips[:, 0] - tips[:, 1]) ** 2).sum(axis=1))


def threshold_accuracy(train: tuple[np.ndarray, np.ndarray], scored: tuple[np.ndarray, np.ndarray]) -> float:
    """Share of `scored` that one threshold classifies correctly: the best one on `train`, with label 1 on either
    side.

    Both arguments are values `[n]` and labels `[n]`, 0 or 1.
    """
    values, labels = train
    order = np.argsort(values)
    thresholds, below = np.unique(values[order], return_index=True)  # how many values are below each
    ones = np.concatenate([[0], np.cumsum(labels[order])])[below]
    right = below - ones + labels.sum() - ones  # if label 1 is above
    best = np.argmax(np.abs(right - len(labels) / 2))
    above = 2 * right[best] > len(labels)
    values, labels = scored
    return float(np.mean(((values >= thresholds[best]) == above) == (labels == 1)))
