"""`softmax_attention`: the public function, and its path in plain PyTorch."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.kernels.dropout import dropout_threshold
from lra.kernels.impl import resolve_impl
from lra.kernels.inputs import check_inputs, check_randomness, check_sequences
from lra.kernels.softmax.softmax_ops import real_row_mask, softmax_forward, to_heads_first, to_rows_first


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    length: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    index: Tensor | None = None,
    impl: str = "auto",
) -> Tensor:
    """Exact softmax attention of each sequence with itself, by way of its scores in memory; differentiable in q, k, v.

    q, k and v are `[B, N, H, D]` of any strides and sequence `b` owns the first `length[b]` of its N rows. The others
    may hold anything, NaN included: they influence nothing, and their output and gradients are zeros. One kernel turns
    the scores into weights in place: scale, mask, softmax and dropout, as in Megatron-LM (Shoeybi et al. 2019, arXiv
    1909.08053); matrix products do the rest. What is kept for the backward is one matrix of weights for each head, as
    they are before dropout, of N rounded up to 16: the mask is drawn again.

    Args:
        length: int32 `[B]`, on the device of q; all N rows by default.
        scale: `D ** -0.5` by default.
        dropout, seed, index: as in `flash_attention`; the mask of the Triton path is the same.
        impl: "triton" (CUDA); "torch" (any device: plain PyTorch, where dropout has the same distribution but draws
            from PyTorch's generator); "auto", Triton on CUDA and torch elsewhere.

    Returns:
        A contiguous tensor of the shape and dtype of q.
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
            return torch_attention(q, k, v, length, scale, threshold / 256)
    seed, index = check_randomness(seed, index, len(length), q.device) if threshold else (None, None)
    return softmax_forward(q, k, v, length, scale, threshold, seed, index)[0]


def torch_attention(q: Tensor, k: Tensor, v: Tensor, length: Tensor, scale: float, dropout: float) -> Tensor:
    """The path for any device, `[B, N, H, D]`; the softmax is in fp32."""
    n = q.shape[1]
    q_BHND, k_BHND, v_BHND = (to_heads_first(x, length, n) for x in (q, k, v))
    s_BHNN = (q_BHND @ k_BHND.transpose(2, 3)).float() * scale
    # the smallest finite number, not -inf: a sequence of length 0 must not make NaN
    s_BHNN = s_BHNN.masked_fill(~real_row_mask(length, n)[:, None, None, :], torch.finfo(torch.float32).min)
    p_BHNN = F.dropout(s_BHNN.softmax(-1), dropout)
    return to_rows_first(p_BHNN.to(v.dtype) @ v_BHND, length, n)
