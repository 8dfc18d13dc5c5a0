"""A hash of each row of a batch, on which dropout between layers depends: `lra.kernels.layers.drop`."""

from __future__ import annotations

import torch
from torch import Tensor

from lra.batch import Batch
from lra.kernels.layers import mix


def row_keys(batch: Batch) -> Tensor:
    """A hash of (seed, index of the sequence, position) for each row, int32 `[T]`."""
    assert batch.seed is not None, "a training batch carries its step's seed"
    low, high = ((batch.seed >> shift).to(torch.int32) for shift in (0, 32))
    sequence_B = mix(mix(batch.index ^ low) ^ high)
    return mix(batch.per_row(sequence_B) ^ batch.token_positions().to(torch.int32))
