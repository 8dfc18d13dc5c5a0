"""Tables of a Pathfinder law: whatever its contours can do lies on the pixel lattice and is computed once.

A kind of paddle is a direction under one margin. Of each margin the first 360 kinds are the directions in which a
contour may begin, -180 to 179 degrees; they are drawn from their first pixel on. The other kinds are the steps by
which it goes on, from a pivot to one of the pixels on a circle around it; they are drawn from that pixel backwards.

A map of the image is flat, with a border wide enough for every patch: the pixel at `at + offset` always exists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from lra.data.pathfinder.law import ImageLaw

DEGREES = 360
CHOICES = 16  # at most so many steps may follow a paddle
SOLID = 204  # least value of an entry of a mask that may overlap another: with 255 it sums to 1.8 of 255
_ANTIALIAS = 2  # rasters are drawn this much larger, then scaled down

# Displacements are y and x in pixels, patches the range of their entries.
KIND = np.dtype(
    [
        ("step", "f8", 2),  # from a contour's pivot to the next one, after this paddle
        ("end", "f8", 2),  # from the paddle's first pixel to its last
        ("back", "f8", 2),  # from the last pixel of a contour's first paddle to its pivot
        ("cumulative", "f8", CHOICES),  # sums of the weights of the steps that may follow, the last is 1
        ("weight", "f8", CHOICES),  # of each, the likeliest first
        ("place", "i4", CHOICES),  # of each, from the pivot to its first pixel in a map
        ("following", "i4", CHOICES),  # its kind
        ("startable", "?"),  # whether a contour may begin in this direction
        ("extent", "i4", (2, 2)),  # of the probe: least and largest y, least and largest x
        ("probe", "i4", 2),  # pixels that must be free where a contour begins
        ("mask", "i4", 2),  # space that the paddle occupies, the largest values first
        ("solid", "i4"),  # end of those entries of the mask that may overlap another
        ("disc", "i4", 2),  # pixels around a tip that must be free: as far as the margin
        ("ink", "i4", 2),
    ],
    align=True,
)
SPACE = np.dtype([("offset", "i4"), ("value", "u1")], align=True)  # entry of a probe, mask or disc
INK = np.dtype([("offset", "i4"), ("value", "f4")], align=True)  # entry of a patch of ink, where a marker has 1


_SIZES = [
    ("side", "i8"),  # of the image
    ("border", "i8"),  # of a map, on each side
    ("width", "i8"),  # of a map
    ("padding", "i8"),
    ("frame", "i8"),  # outermost rows and columns in which the first target does not begin
    ("contour_length", "i8"),
    ("distractor_length", "i8"),
    ("distractors", "i8"),
    ("target_contrast", "f8"),
    ("distractor_contrast", "f8"),
]
LAW = np.dtype(_SIZES)


class Tables(NamedTuple):
    """What the compiled generator reads, in the order of its arguments."""

    law: np.ndarray  # LAW [1]
    starts: np.ndarray  # int64 [margins], the first kind under each margin
    kinds: np.ndarray  # KIND [kinds]
    space: np.ndarray  # SPACE [entries]
    ink: np.ndarray  # INK [entries]
    bearings: np.ndarray  # float64 [360, 2], from the first tip of the first target to that of the second
    markers: np.ndarray  # float32 [window, window, window, window], see `marker_windows`


@lru_cache(maxsize=8)
def make_tables(law: ImageLaw) -> Tables:
    """The tables of a law, within a second."""
    border = max(_half(law, margin) + margin for margin in law.margins) + 2
    width = law.resolution + 2 * border
    first, kinds, space, ink = [], np.empty(0, KIND), np.empty(0, SPACE), np.empty(0, INK)
    for margin in law.margins:
        first.append(len(kinds))
        more, *entries = _kinds(law, margin, width)
        more["following"] += len(kinds)
        for name in ("probe", "mask", "solid", "disc"):
            more[name] += len(space)
        more["ink"] += len(ink)
        kinds, space, ink = (np.concatenate(pair) for pair in zip((kinds, space, ink), (more, *entries), strict=True))
    sizes = {"side": law.resolution, "border": border, "width": width, "frame": max(law.padding, 2 * law.seed_distance)}
    return Tables(
        np.array([tuple((asdict(law) | sizes)[name] for name, _ in _SIZES)], LAW),
        np.array(first),
        kinds,
        space,
        ink,
        law.seed_distance * _unit(degree * math.pi / 180 for degree in range(DEGREES)),
        marker_windows(law),
    )


@lru_cache(maxsize=8)
def marker_windows(law: ImageLaw) -> np.ndarray:
    """Markers as they lie in the image: float32 `[w, w, w, w]`, 1 inside, with the overshoot of Lanczos at the rim.

    `[y, x]` is a window of the image with the marker at its pixel (y, x). The middle one holds everywhere but near
    the image's edges, where the others say how scaling down is cut off.
    """
    reach = math.ceil(law.marker_radius) + 5  # beyond the disc Lanczos reaches three pixels, and again three pixels
    window = 2 * reach + 1
    at = np.arange(window * _ANTIALIAS)
    windows = np.empty((window,) * 4, np.float32)
    for y in range(window):
        for x in range(window):
            square = (at[:, None] - _ANTIALIAS * y) ** 2 + (at - _ANTIALIAS * x) ** 2
            disc = square <= (law.marker_radius * _ANTIALIAS) ** 2
            windows[y, x] = _shrink(disc.astype(np.float32), window)
    return windows


def _half(law: ImageLaw, margin: int) -> int:
    """Half the side of a paddle's patch."""
    return law.paddle_length + math.ceil(law.thickness) + margin


def _kinds(law: ImageLaw, margin: int, width: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """All kinds under one margin with the entries of their patches: KIND `[kinds]`, SPACE and INK `[entries]`."""
    half, radius = _half(law, margin), law.paddle_length + margin
    circle = _circle(radius)
    starts, steps = [degree * math.pi / 180 for degree in range(-180, 180)], [math.atan2(y, x) for y, x in circle]
    # Turned so that all stay within -pi to pi: with the other sign some round to another pixel
    backward = _unit(angle + math.pi if angle < 0 else angle - math.pi for angle in starts + steps)
    drawn = np.concatenate([_unit(starts), backward[DEGREES:]])
    kinds = np.zeros(len(drawn), KIND)
    kinds["step"] = (law.paddle_length + 2 * margin) * _unit(starts + steps)
    kinds["end"] = law.paddle_length * drawn
    kinds["back"] = radius * backward
    following, kinds["weight"] = _turns(law, np.degrees(starts + steps))
    kinds["cumulative"] = np.cumsum(kinds["weight"], axis=1)
    kinds["cumulative"] /= kinds["cumulative"][:, -1:]
    kinds["place"] = np.array([y * width + x for y, x in circle])[following]
    kinds["following"] = DEGREES + following

    lines = np.stack([_line(law, half, direction) for direction in drawn])
    mask = np.stack([_shrink(line, 2 * half + 1) for line in _dilate(lines, _ANTIALIAS * margin)])
    disc = _dilate(np.pad(np.ones((1, 1, 1), np.uint8), ((0, 0), (margin, margin), (margin, margin))), margin)
    # The generator of the released images looks one pixel further down and right than it draws, ...
    probe = np.zeros_like(mask)
    here, shifted = slice(half - radius, half + radius + 1), slice(half - radius - 1, half + radius)
    probe[:DEGREES, here, here] = mask[:DEGREES, shifted, shifted] == 255
    # ... and takes a direction as blocked unless what it looks at lies on all sides of the tip
    sides = slice(half + 1), slice(half, None)
    kinds["startable"] = np.all([probe[:, y, x].any((1, 2)) for y in sides for x in sides], axis=0)
    kinds["extent"] = np.stack([_extent(probe.max(axis), half) for axis in (2, 1)], axis=1)
    parts = []
    for name, patches in (("probe", probe), ("mask", mask), ("disc", disc)):
        kinds[name], entries = _sparse(patches, width, SPACE)
        kinds[name] += sum(map(len, parts))
        parts.append(entries)
    ink = np.stack([_shrink(line.astype(np.float32), 2 * half + 1) for line in lines]) / np.float32(255)
    kinds["solid"] = kinds["mask"][:, 0] + (mask >= SOLID).sum((1, 2))
    kinds["ink"], drops = _sparse(np.maximum(ink, 0), width, INK)
    return kinds, np.concatenate(parts), drops


def _circle(radius: int) -> list[tuple[int, int]]:
    """Pixels on a circle around a pivot, each once: points about a pixel apart, rounded down."""
    angles = [k / radius for k in range(math.ceil(2 * math.pi * radius))]
    return list(dict.fromkeys((math.floor(radius * math.sin(a)), math.floor(radius * math.cos(a))) for a in angles))


def _unit(angles: Iterable[float]) -> np.ndarray:
    """Unit vectors float64 `[n, 2]`. With the C library's digits: the last one of NumPy depends on the processor."""
    return np.array([(math.sin(angle), math.cos(angle)) for angle in angles])


def _turns(law: ImageLaw, degrees: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The steps that may follow each paddle, the likeliest first, and their weights: both `[kinds, choices]`."""
    turn = np.abs((degrees[:, None] - degrees[DEGREES:] + 180) % 360 - 180)
    turn = np.minimum(law.continuity * turn.round(9), 90)  # mirrored steps weigh the same, so keep their order
    weight = np.where(turn < 90, np.cos(np.radians(turn)) ** 2, 0)
    order = np.argsort(-weight, axis=1, kind="stable")[:, :CHOICES]
    return order, np.take_along_axis(weight, order, axis=1)


def _line(law: ImageLaw, half: int, direction: np.ndarray) -> np.ndarray:
    """A paddle from the middle of its patch on, drawn large: uint8, 255 where it is."""
    middle = _ANTIALIAS * half
    y, x = (math.ceil(middle + _ANTIALIAS * law.paddle_length * part) for part in direction)
    image = Image.new("L", (2 * middle + 1, 2 * middle + 1))
    ImageDraw.Draw(image).line((middle, middle, x, y), fill=255, width=round(_ANTIALIAS * law.thickness))
    return np.asarray(image)


def _shrink(raster: np.ndarray, side: int) -> np.ndarray:
    """Scaled down with Lanczos' filter: float32 keeps its overshoot, uint8 is cut to 0 .. 255."""
    return np.asarray(Image.fromarray(raster).resize((side, side), Image.Resampling.LANCZOS))


def _dilate(patches: np.ndarray, radius: int) -> np.ndarray:
    """Each pixel the largest within a disc. `patches`: `[n, side, side]`."""
    side, padded = patches.shape[-1], np.pad(patches, ((0, 0), (radius, radius), (radius, radius)))
    result = patches.copy()
    for y in range(-radius, radius + 1):
        reach = math.isqrt(radius**2 - y**2)
        for x in range(radius - reach, radius + reach + 1):
            np.maximum(result, padded[:, radius + y : radius + y + side, x : x + side], out=result)
    return result


def _extent(hit: np.ndarray, half: int) -> np.ndarray:
    """First and last place that is hit, from the middle: `[n, 2]`. `hit`: uint8 `[n, side]`."""
    return np.stack([hit.argmax(axis=1) - half, half - hit[:, ::-1].argmax(axis=1)], axis=1)


def _sparse(patches: np.ndarray, width: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """The pixels of `patches` `[n, side, side]` that are not 0, the largest first: ranges `[n, 2]` and entries."""
    patch, y, x = np.nonzero(patches)
    order = np.lexsort((-patches[patch, y, x].astype(np.float32), patch))
    patch, y, x = patch[order], y[order], x[order]
    entries = np.empty(len(patch), dtype)
    half = patches.shape[1] // 2
    entries["offset"], entries["value"] = (y - half) * width + x - half, patches[patch, y, x]
    ends = np.searchsorted(patch, np.arange(len(patches) + 1))
    return np.stack([ends[:-1], ends[1:]], axis=1), entries
