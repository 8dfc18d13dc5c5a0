"""The fallback for any device: `torch.nn.functional.scaled_dot_product_attention` on padded rows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lra.kernels.flash.padding import pad_rows, row_slots, unpad_rows
from lra.kernels.flash.problem import Problem


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Attention of `[T, H, D]` rows, as `[T, H, D]`. Dropout draws from PyTorch's generator. It waits for no device."""
    slot = row_slots(problem, len(q))
    # With a causal mask a real row sees real columns only. Without one, hide the columns of padding. A sequence of
    # length 0 keeps its first column, which is zeros: a softmax over nothing would be NaN.
    position = torch.arange(problem.max_length, device=q.device)
    seen = None if problem.causal else (position < problem.length.clamp(min=1)[:, None])[:, None, None, :]
    out = scaled_dot_product_attention(
        pad_rows(q, slot), pad_rows(k, slot), pad_rows(v, slot),
        attn_mask=seen, dropout_p=problem.dropout, is_causal=problem.causal, scale=problem.scale,
    )  # fmt: skip
    return unpad_rows(out, slot, len(q))
