"""The resolution of dropout in all kernels: a random byte for each element, so rates are multiples of 1/256."""

from __future__ import annotations

MAX_DROP_THRESHOLD = 248  # of 256: a larger threshold would be NaN where kernels compare bytes as fp16 magnitudes


def dropout_threshold(dropout: float) -> int:
    """Dropout in units of 1/256, the resolution of the mask's random bytes: 0.1 becomes 26, that is p = 0.1016."""
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    threshold = round(256 * dropout)
    if threshold == 256:
        raise ValueError(f"dropout {dropout} rounds to 256/256 and would drop everything: use at most 0.998")
    return threshold


def effective_dropout(dropout: float) -> float:
    """The dropout that is used for a requested one: the nearest multiple of 1/256."""
    return dropout_threshold(dropout) / 256
