"""The path for any device: `torch.nn.functional.scaled_dot_product_attention` on the padded form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lra.kernels.flash.problem import Problem


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Attention of `[T, H, D]` rows, `[T, H, D]`; dropout draws from PyTorch's generator. Waits for no device."""
    total, size, max_length = len(q), problem.size, problem.max_length
    position = torch.arange(max_length, device=q.device)
    real = position < problem.length[:, None]  # [B, N]
    slot = torch.where(real, problem.start[:, None] + position, total).flatten()  # `total`: padding

    def pad(rows: Tensor) -> Tensor:  # [T, H, D] -> [B, H, N, D], zeros past each length whatever the rows there hold
        with_zero_row = torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])
        return with_zero_row.index_select(0, slot).unflatten(0, (size, max_length)).transpose(1, 2)

    # Under the causal mask a real row sees real columns only. Otherwise hide the padding columns, but leave a
    # sequence of length 0 its first one (zeros): a softmax over nothing is NaN.
    seen = None if problem.causal else (position < problem.length.clamp(min=1)[:, None])[:, None, None, :]
    padded = scaled_dot_product_attention(
        pad(q), pad(k), pad(v), attn_mask=seen, dropout_p=problem.dropout, is_causal=problem.causal, scale=problem.scale
    )
    rows = padded.transpose(1, 2).flatten(0, 1)
    return q.new_zeros(total + 1, *q.shape[1:]).index_copy(0, slot, rows)[:total]
