"""The parameters of the generator of Pathfinder images, by resolution and level."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lra.errors import UsageError


@dataclass(frozen=True)
class ImageLaw:
    """Parameters of the generator, lengths in pixels. Contours are chains of dashes, which are called paddles."""

    resolution: int  # side of the image
    padding: int  # outermost rows and columns that no contour enters
    paddle_length: int
    thickness: float  # of a paddle
    margins: tuple[int, ...]  # free space around a paddle; each image draws one of them
    continuity: float  # a contour turns by less than 90 / continuity degrees from paddle to paddle
    seed_distance: int  # between the first tips of the two target contours
    marker_radius: float
    target_contrast: float  # brightness of the paddles, where a marker has 1
    distractor_contrast: float
    contour_length: int  # paddles of a target contour
    distractor_length: int  # paddles of a distractor
    distractors: int  # that are tried; one that finds no place is left out


# LRA's published parameters, with the public generator's defaults where LRA names none; at 128 and 256 the contrasts
# and the number of distractors that the released images show, which are not the published ones.
_BY_RESOLUTION: dict[int, dict[str, Any]] = {
    32: {
        "padding": 1, "paddle_length": 2, "thickness": 0.5, "margins": (1,), "continuity": 1.0, "seed_distance": 7,
        "marker_radius": 1.5, "target_contrast": 1.5, "distractor_contrast": 2.0,
    },
    64: {
        "padding": 1, "paddle_length": 5, "thickness": 1.0, "margins": (1,), "continuity": 1.8, "seed_distance": 12,
        "marker_radius": 2.5, "target_contrast": 0.8, "distractor_contrast": 0.8,
    },
    128: {
        "padding": 1, "paddle_length": 5, "thickness": 1.5, "margins": (2, 3), "continuity": 1.8, "seed_distance": 20,
        "marker_radius": 3.0, "target_contrast": 0.8, "distractor_contrast": 0.8,
    },
    256: {
        "padding": 22, "paddle_length": 5, "thickness": 2.0, "margins": (3,), "continuity": 1.8, "seed_distance": 27,
        "marker_radius": 5.0, "target_contrast": 0.8, "distractor_contrast": 0.8,
    },
}  # fmt: skip
_BUDGET = {32: 20, 64: 22, 128: 70, 256: 30}  # paddles that the distractors share, by resolution
_CONTOUR_LENGTH = {"easy": 6, "intermediate": 9, "hard": 14}  # LRA's curv_baseline, curv_contour_length_9 and _14

RESOLUTIONS = tuple(_BY_RESOLUTION)
LEVELS = tuple(_CONTOUR_LENGTH)


def image_law(resolution: int, level: str) -> ImageLaw:
    """The parameters of LRA's images of this side in pixels and this level; UsageError if there are none."""
    if resolution not in RESOLUTIONS:
        known = ", ".join(map(str, RESOLUTIONS))
        raise UsageError(f"no Pathfinder images of resolution {resolution}: choose from {known}")
    if level not in LEVELS:
        raise UsageError(f"no Pathfinder level '{level}': choose from {', '.join(LEVELS)}")
    length = _CONTOUR_LENGTH[level]
    return ImageLaw(
        resolution=resolution, contour_length=length, distractor_length=length // 3,
        distractors=_BUDGET[resolution] // (length // 3), **_BY_RESOLUTION[resolution],
    )  # fmt: skip
