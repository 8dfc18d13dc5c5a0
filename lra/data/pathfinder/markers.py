"""Finds the two markers of a Pathfinder image from its pixels alone. Compiled."""

from __future__ import annotations

import numpy as np

from lra.data.numba_rng import cached_njit


@cached_njit
def _shortfall(pixels, side, expected, y, x, limit):
    """How much darker an image is than a marker at pixel (y, x), summed over the marker; at most about `limit`."""
    window, missing = len(expected), 0
    top, left = min(max(y - window // 2, 0), side - window), min(max(x - window // 2, 0), side - window)
    for row in range(window):
        for column in range(window):
            missing += max(expected[y - top, x - left, row, column] - pixels[(top + row) * side + left + column], 0)
        if missing >= limit:
            break
    return missing


@cached_njit
def find_markers(pixels, expected):
    """The two pixels of each image where a marker fits best, int64 `[n, 2, 2]`; -1 where there are not two.

    Args:
        pixels: uint8 `[n, side * side]`.
        expected: int64 `[w, w, w, w]`, the windows of `marker_windows` as pixels.
    """
    side, middle = round(np.sqrt(pixels.shape[1])), len(expected) // 2
    worst = expected[middle, middle].sum() // 4  # what is darker by more than a quarter is no marker
    bright = 0.75 * expected[middle, middle, middle, middle]
    tips = np.full((len(pixels), 2, 2), -1)
    for n in range(len(pixels)):
        best, second = worst, worst
        for at in range(side * side):
            if pixels[n, at] < bright:
                continue
            y, x = at // side, at % side
            missing = _shortfall(pixels[n], side, expected, y, x, second)
            if missing < best:
                tips[n, 1], second = tips[n, 0], best
                tips[n, 0, 0], tips[n, 0, 1], best = y, x, missing
            elif missing < second:
                tips[n, 1, 0], tips[n, 1, 1], second = y, x, missing
    return tips
