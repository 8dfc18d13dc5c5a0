"""Dropout between layers, as a function of the place: seed, site in the model, sequence, position, feature.

So a run drops the same whatever the layout of its batches, the micro-batches and the devices, and a captured step what
an eager one drops. PyTorch's generator counts calls and elements instead. The hash is a few integer operations for
each element, which torch.compile fuses with what is next to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lra.batch import Batch

BITS = 16  # of a hash that decide: the rate is exact to 2^-16, and one hash serves two features


def row_keys(batch: Batch) -> Tensor:
    """A hash of (seed, index of the sequence, position) for each row, int32 `[T]`."""
    assert batch.seed is not None, "a training batch carries its step's seed"
    low, high = ((batch.seed >> shift).to(torch.int32) for shift in (0, 32))
    sequence_B = mix(mix(batch.index ^ low) ^ high)
    return mix(batch.per_row(sequence_B) ^ batch.token_positions().to(torch.int32))


def drop(x_TD: Tensor, rate: float, keys_T: Tensor | None, site: int) -> Tensor:
    """`x_TD` with a share `rate` of its elements zeroed and the others divided by 1 - rate; itself without keys."""
    if keys_T is None or not rate:
        return x_TD
    feature_D = torch.arange(x_TD.shape[1], device=x_TD.device, dtype=torch.int32)
    hash_TD = mix(mix(keys_T + site)[:, None] + (feature_D >> 1)) >> BITS * (feature_D & 1)
    dropped = threshold(rate)
    kept_TD = (hash_TD & (1 << BITS) - 1) >= dropped
    return torch.where(kept_TD, x_TD * keep_scale(dropped), 0.0)


def threshold(rate: float) -> int:
    """How many of 2^BITS hashes drop an element."""
    return round(rate * (1 << BITS))


def keep_scale(threshold: int) -> float:
    """What the elements are multiplied by that so many hashes don't drop."""
    return (1 << BITS) / ((1 << BITS) - threshold)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 whose every output bit depends on every input bit: xor-shifts and odd factors that wrap."""
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * -0x7B935975  # 0x846CA68B
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left: PyTorch's copies the sign."""
    return (x >> by) & (1 << 32 - by) - 1
