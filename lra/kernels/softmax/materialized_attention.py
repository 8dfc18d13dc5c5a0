"""`softmax_attention`, the public function, and its fallback in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.kernels.dropout import dropout_threshold
from lra.kernels.impl import resolve_impl
from lra.kernels.inputs import check_inputs, check_randomness, check_sequences
from lra.kernels.softmax.softmax_ops import (
    later_column_mask,
    real_row_mask,
    softmax_forward,
    to_heads_first,
    to_rows_first,
)


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    length: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    index: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Exact softmax attention of each sequence with itself, with the scores in memory; differentiable in q, k and v.

    Sequence `b` owns the first `length[b]` of its N rows. The other rows may hold anything, NaN included: they
    influence nothing, and their output and gradients are zeros. One kernel turns the scores into weights in place. It
    does scale, mask, softmax and dropout, as in Megatron-LM (Shoeybi et al. 2019, arXiv 1909.08053). Matrix products do
    the rest. For the backward one matrix of weights is kept for each head, before dropout, with N rounded up to 16. The
    backward draws the dropout mask again.

    Args:
        q, k, v: float16, bfloat16 or float32, `[B, N, H, D]`, of any strides.
        length: int32 `[B]`, on the device of q; all N rows by default.
        causal: whether row i sees only the columns 0 to i. The other scores are overwritten before the kernel.
        scale: the factor of the scores, `D ** -0.5` by default.
        dropout: as in `flash_attention`. The Triton path has the same mask.
        seed: as in `flash_attention`.
        index: as in `flash_attention`.
        impl: "triton" (CUDA), "torch" (any device) or "auto" (the default: Triton on CUDA, torch elsewhere). Torch is
            plain PyTorch. Its dropout has the same distribution, but draws from PyTorch's generator.

    Returns:
        A contiguous tensor of the shape and dtype of q.

    Raises:
        TypeError: an argument has a type or dtype that is not listed here.
        ValueError: an argument has another shape or device, or is out of range, or `impl` cannot compute the call.
    """
    impl = resolve_impl(impl, q.device, fallback="torch")
    check_inputs(q, k, v)
    if q.dim() != 4:
        raise ValueError(f"q, k and v must be [B, N, H, D], got {list(q.shape)}")
    _, length, _ = check_sequences(q, None, length, None)
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    threshold = dropout_threshold(dropout)
    if impl == "torch":
        with torch.autocast(q.device.type, enabled=False):  # as in the kernel: the result has the dtype of q
            return torch_attention(q, k, v, length, causal, scale, threshold / 256)
    seed, index = check_randomness(seed, index, len(length), q.device) if threshold else (None, None)
    return softmax_forward(q, k, v, length, scale, threshold, seed, index, causal)[0]


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, causal: bool, scale: float, dropout: float
) -> Tensor:
    """The fallback for any device, `[B, N, H, D]`. The softmax is in fp32."""
    n = q.shape[1]
    q_BHND, k_BHND, v_BHND = (to_heads_first(x, length, n) for x in (q, k, v))
    s_BHNN = (q_BHND @ k_BHND.transpose(2, 3)).float() * scale
    hidden = ~real_row_mask(length, n)[:, None, None, :]
    if causal:
        hidden = hidden | later_column_mask(s_BHNN)
    # the smallest finite number, not -inf: a sequence of length 0 must not make NaN
    s_BHNN = s_BHNN.masked_fill(hidden, torch.finfo(torch.float32).min)
    p_BHNN = F.dropout(s_BHNN.softmax(-1), dropout)
    return to_rows_first(p_BHNN.to(v.dtype) @ v_BHND, length, n)
