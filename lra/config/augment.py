"""The fields of what is changed at random in training batches, `augment.*`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from lra.config.checks import check_at_least, check_at_most

# the largest values: a half turn, a shift out of sight, and changes beyond which nothing is left of an image
LIMITS = {"rotate": 180, "shift": 1, "scale": 0.9, "shear": 80, "brightness": 1, "contrast": 1, "levels": 255}


@dataclass(frozen=True)
class AugmentConfig:
    """Random changes of training examples, drawn anew in every step. Validation and test see the data as they are.

    With task.tokens=lit only `flip` and `levels` change images: the others need all pixels.
    """

    # images are mirrored: left and right, or also top and bottom, each with probability 1/2
    flip: Literal["none", "horizontal", "both"] = "none"
    rotate: float = 0.0  # largest angle in degrees by which images are turned
    shift: float = 0.0  # largest shift of images along each side, as a share of the side
    scale: float = 0.0  # largest relative change of the size of images: 0.1 means 0.9 to 1.1
    shear: float = 0.0  # largest angle in degrees by which the columns of images are slanted
    brightness: float = 0.0  # largest relative change of the grey values of images
    contrast: float = 0.0  # largest relative change of the distance of grey values from the image's mean
    levels: int = 0  # largest change of each pixel's grey level, drawn for each pixel
    operands: bool = False  # the operands of every operator of ListOps are permuted

    def __post_init__(self) -> None:
        check_at_least(0, "augment", self, *LIMITS)
        for name, limit in LIMITS.items():
            check_at_most(limit, "augment", self, name)

    def changes(self) -> dict[str, Any]:
        """Returns the fields that change something: those that are not at their defaults."""
        return {each.name: value for each in fields(self) if (value := getattr(self, each.name)) != each.default}
