"""The path for any device: each row of blocks with the keys it sees, gathered, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from lra.kernels.flash.layout import NONE, find
from lra.kernels.flash.problem import Problem


def gather_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Block-sparse attention of `[T, H, D]` rows, `[T, H, D]`; dropout draws from PyTorch's generator."""
    assert problem.layout is not None
    layout = find(problem.layout)
    position = torch.arange(problem.max_length)
    blocks_seen = (layout.kinds(*layout.block) != NONE).any(0)  # by any head
    head = torch.arange(q.shape[1]) % len(layout.blocks)

    total = len(q)
    here = position.to(q.device)
    real = here < problem.length[:, None]  # [B, N]
    slot = torch.where(real, problem.start[:, None] + here, total)  # `total`: padding
    with_zero_row = (torch.cat([x, x.new_zeros(1, *x.shape[1:])]) for x in (q, k, v))
    q_BHND, k_BHND, v_BHND = (x[slot].transpose(1, 2) for x in with_zero_row)
    parts = [q_BHND[:, :, :0]]
    for i, rows in enumerate(position.split(layout.block[0])):
        columns = position[blocks_seen[i].repeat_interleave(layout.block[1])[: problem.max_length]]
        seen = layout.token_mask(rows, columns)[head].to(q.device)  # [H, rows, columns]
        rows, columns = rows.to(q.device), columns.to(q.device)
        seen = seen & real[:, columns][:, None, None]
        any_key = seen.any(-1, keepdim=True)
        scores = q_BHND[:, :, rows] @ k_BHND[:, :, columns].transpose(2, 3) * problem.scale
        weights = scores.masked_fill(~seen, float("-inf")).masked_fill(~any_key, 0.0).softmax(-1) * any_key
        parts.append(dropout(weights, problem.dropout) @ v_BHND[:, :, columns])
    rows = torch.cat(parts, 2).transpose(1, 2).flatten(0, 1)
    return q.new_zeros(total + 1, *q.shape[1:]).index_copy(0, slot.flatten(), rows)[:total]
