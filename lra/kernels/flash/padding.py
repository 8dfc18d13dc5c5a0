"""Ragged rows as a padded batch and back. Nothing here waits for a device."""

from __future__ import annotations

import torch
from torch import Tensor

from lra.kernels.flash.problem import Problem


def flattens(x: Tensor) -> bool:
    """Whether `[B, N, H, D]` is a view of `[B * N, H, D]`, or `x` is `[T, H, D]`."""
    return x.dim() == 3 or x.stride(0) == x.shape[1] * x.stride(1) or 1 in x.shape[:2]


def as_rows(x: Tensor) -> Tensor:
    """`[T, H, D]` of `[B, N, H, D]` or of itself."""
    return x.flatten(0, 1) if x.dim() == 4 else x


def row_slots(problem: Problem, total: int) -> Tensor:
    """`[B, N]`: the row of each place of the padded batch. Past each length it is `total`, which is no row."""
    position = torch.arange(problem.max_length, device=problem.start.device)
    return torch.where(position < problem.length[:, None], problem.start[:, None] + position, total)


def pad_rows(rows: Tensor, slot: Tensor) -> Tensor:
    """`[T, H, D]` to `[B, H, N, D]`, with zeros past each length whatever the rows there hold."""
    with_zero_row = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
    return with_zero_row.index_select(0, slot.flatten()).unflatten(0, slot.shape).transpose(1, 2)


def unpad_rows(padded: Tensor, slot: Tensor, total: int) -> Tensor:
    """`[B, H, N, D]` to `[T, H, D]`, with zeros in rows that no sequence owns."""
    rows = padded.transpose(1, 2).flatten(0, 1)
    return rows.new_zeros(total + 1, *rows.shape[1:]).index_copy(0, slot.flatten(), rows)[:total]
