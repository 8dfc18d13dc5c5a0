"""The fallback for any device: plain PyTorch gathers the keys that each row of blocks sees."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from lra.kernels.flash.layout import NONE
from lra.kernels.flash.padding import pad_rows, row_slots, unpad_rows
from lra.kernels.flash.problem import Problem


def gather_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Block-sparse attention of `[T, H, D]` rows, as `[T, H, D]`. Dropout draws from PyTorch's generator.

    The softmax is in fp32, or in fp64 if q is.
    """
    layout = problem.pattern
    assert layout is not None
    precise = torch.promote_types(q.dtype, torch.float32)
    position = torch.arange(problem.max_length)
    blocks_seen = (layout.kinds(*layout.block) != NONE).any(0)  # by any head
    head = torch.arange(q.shape[1]) % len(layout.blocks)

    slot = row_slots(problem, len(q))
    real = slot < len(q)  # [B, N]
    q_BHND, k_BHND, v_BHND = (pad_rows(x, slot) for x in (q, k, v))
    parts = [q_BHND[:, :, :0]]
    for i, rows in enumerate(position.split(layout.block[0])):
        columns = position[blocks_seen[i].repeat_interleave(layout.block[1])[: problem.max_length]]
        seen = layout.token_mask(rows, columns)[head].to(q.device)  # [H, rows, columns]
        rows, columns = rows.to(q.device), columns.to(q.device)
        seen = seen & real[:, columns][:, None, None]
        any_key = seen.any(-1, keepdim=True)
        scores = (q_BHND[:, :, rows] @ k_BHND[:, :, columns].transpose(2, 3)).to(precise) * problem.scale
        weights = scores.masked_fill(~seen, float("-inf")).masked_fill(~any_key, 0.0).softmax(-1) * any_key
        parts.append(dropout(weights, problem.dropout).to(v.dtype) @ v_BHND[:, :, columns])
    return unpad_rows(torch.cat(parts, 2), slot, len(q))
