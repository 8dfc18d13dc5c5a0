"""Dropout between layers, as a function of the place: seed, site in the model, sequence, position, feature.

So a run drops the same whatever the layout of its batches, the micro-batches and the devices, and a captured step what
an eager one drops. PyTorch's generator counts calls and elements instead. The hash is a few integer operations for
each element, which torch.compile fuses with what is next to them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lra.batch import Batch
from lra.kernels.dropout import dropout_threshold
from lra.kernels.layers.reference import drop_features, mix_bits
from lra.kernels.operators import define_operator

# Sites below those of dropout, which begin at 0. All are here, because two that are equal would draw the same.
HIDING_SITE, REPLACING_SITE, SPAN_SITE = -1, -2, -3  # lra/tasks/hiding.py
# lra/tasks/augmented.py
OPERANDS_SITE, ROTATE_SITE, COLUMN_SITE, ROW_SITE, SCALE_SITE, SHEAR_SITE = -4, -5, -6, -7, -8, -9
HORIZONTAL_SITE, VERTICAL_SITE, BRIGHTNESS_SITE, CONTRAST_SITE = -10, -11, -12, -13
LEVEL_SITE = -(1 << 20)  # below those of branches
BRANCH_SITE = -14  # the first of `drop_branch`; two for each layer, downwards


# An operator, because torch.compile evaluates the argument of `x ^ (x >> 16)` twice: that of four hashes in a row, as
# here, thousands of times. `lra.training.compiling` says how it compiles this one.
mix_keys = define_operator("mix_keys", "(Tensor x) -> Tensor", mix_bits, torch.empty_like)


def row_keys(batch: Batch) -> Tensor:
    """A hash of (seed, index of the sequence, position) for each row, int32 `[T]`."""
    assert batch.seed is not None, "a training batch carries its step's seed"
    return mix_keys(batch.per_row(sequence_keys(batch.index, batch.seed)) ^ batch.token_positions().to(torch.int32))


def sequence_keys(index_B: Tensor, seed: Tensor) -> Tensor:
    """A hash of (seed, index of the sequence), int32 `[B]`."""
    low, high = ((seed >> shift).to(torch.int32) for shift in (0, 32))
    return mix_keys(mix_keys(index_B ^ low) ^ high)


def drop(x_TD: Tensor, rate: float, keys_T: Tensor | None, site: int) -> Tensor:
    """`x_TD` with a share of its elements zeroed and the others scaled up to the same mean; itself without keys.

    The share is `rate` in steps of 1/256, as attention's dropout.
    """
    if keys_T is None or not rate:
        return x_TD
    dropped = dropout_threshold(rate)
    return drop_features(x_TD * keep_scale(dropped), keys_T, site, dropped)


def branch_keys(batch: Batch) -> Tensor:
    """Returns a hash of (seed, index of the sequence) for each row, int32 `[T]`."""
    assert batch.seed is not None, "a training batch carries its step's seed"
    return batch.per_row(sequence_keys(batch.index, batch.seed))


def drop_branch(x_TD: Tensor, rate: float, keys_T: Tensor | None, site: int) -> Tensor:
    """Returns `x_TD` with all rows of a share of the sequences zeroed and the others scaled up to the same mean.

    This is stochastic depth (Huang et al. 2016, arXiv 1603.09382, section 3), decided for each sequence. They scale
    branches in evaluation instead. The share is `rate` in steps of 1/256. Without keys nothing is dropped.
    """
    if keys_T is None or not (dropped := dropout_threshold(rate)):
        return x_TD
    kept_T = (mix_keys(keys_T + site) & 0xFF) >= dropped
    return torch.where(kept_T[:, None], x_TD * keep_scale(dropped), 0.0)


def keep_scale(threshold: int) -> float:
    """What the elements are multiplied by that are not dropped, with so many of 256 that are."""
    return 256 / (256 - threshold)
