"""The path for any device: `torch.nn.functional.scaled_dot_product_attention` on the padded form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lra.kernels.flash.padding import pad_rows, row_slots, unpad_rows
from lra.kernels.flash.problem import Problem


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> Tensor:
    """Attention of `[T, H, D]` rows, `[T, H, D]`; dropout draws from PyTorch's generator. Waits for no device."""
    slot = row_slots(problem, len(q))
    # Under the causal mask a real row sees real columns only. Otherwise hide the padding columns, but leave a
    # sequence of length 0 its first one (zeros): a softmax over nothing is NaN.
    position = torch.arange(problem.max_length, device=q.device)
    seen = None if problem.causal else (position < problem.length.clamp(min=1)[:, None])[:, None, None, :]
    out = scaled_dot_product_attention(
        pad_rows(q, slot), pad_rows(k, slot), pad_rows(v, slot),
        attn_mask=seen, dropout_p=problem.dropout, is_causal=problem.causal, scale=problem.scale,
    )  # fmt: skip
    return unpad_rows(out, slot, len(q))
