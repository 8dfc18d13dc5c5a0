"""Dropout rates of all kernels. A random byte decides on each element, so rates are multiples of 1/256.

A mask is a function of the seed and the element's place, never of tiles, layout, micro-batches or devices. Attention's
is defined by `flash/reference.py`: a sequence's place in the global batch, the head, the row and the column. Between
layers it is `lra/models/dropout.py`. The seed is read on the device, and layer `l` adds `l` to it. SDPA, `gather`,
`standard` and the approximate attentions in plain PyTorch drop at the same rate, but draw from PyTorch's generator.
"""

from __future__ import annotations

MAX_DROP_THRESHOLD = 248  # of 256; kernels compare bytes as fp16 magnitudes, and a larger threshold would be NaN


def dropout_threshold(dropout: float) -> int:
    """The dropout rate in units of 1/256: 0.1 becomes 26, which is p = 0.1016.

    Raises:
        ValueError: `dropout` is not in [0, 1), or it rounds to 1.
    """
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"dropout must be in [0, 1), got {dropout}")
    threshold = round(256 * dropout)
    if threshold == 256:
        raise ValueError(f"dropout {dropout} rounds to 256/256 and would drop everything: use at most 0.998")
    return threshold


def effective_dropout(dropout: float) -> float:
    """The dropout rate that the kernels use for a requested one: the nearest multiple of 1/256."""
    return dropout_threshold(dropout) / 256
