"""`flash_attention`: the public function. Checks its arguments, brings every form to ragged rows, picks a path."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.flash_ops import flash_forward
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.sdpa import sdpa_attention
from lra.kernels.impl import resolve_impl
from lra.kernels.inputs import check_inputs, check_randomness, check_sequences

MAX_HEAD_DIM = 128  # of the Triton kernels: a wider tile does not fit in registers


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    start: Tensor | None = None,
    length: Tensor | None = None,
    max_length: int | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    seed: Tensor | None = None,
    index: Tensor | None = None,
    impl: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Exact softmax attention of each sequence with itself, `softmax(scale * q k^T) v`, differentiable in q, k and v.

    Ragged form: q, k, v are `[T, H, D]` and sequence `b` owns the rows `start[b] : start[b] + length[b]`. There
    are two layouts: *packed* has no gaps (`T = sum(length)`), *padded* gives every sequence `max_length` rows
    (`start = b * max_length`); the layout is padded exactly when `T == B * max_length`. Rows past a length
    may hold anything, NaN included: they influence nothing, and their output and gradients are zeros. Those of
    rows in a gap or of two sequences, which a GPU's tensors are not searched for, are not defined. No sequence
    influences another one, whatever it holds.

    Batched form: q, k, v are `[B, N, H, D]`, with an optional `length`. It is read as the padded ragged form,
    without a copy where `q.flatten(0, 1)` is a view, as it is for every `[B, N, ...]` tensor and its slices
    along later dimensions, and with a copy for others, such as `[B, H, N, D]` transposed.

    Any strides are read in place, so the three slices of a fused `[T, 3, H, D]` projection need no copy. The
    result and the gradients are contiguous.

    Args:
        start, length: int32 `[B]`, on the device of q; ragged form only, except that the batched form takes `length`.
        max_length: at least `max(length)`, on the host, so that nothing waits for the device.
        causal: row i sees the columns 0 to i of its sequence.
        scale: `D ** -0.5` by default.
        dropout: probability that a softmax weight is dropped. Rounded to a multiple of 1/256; what is kept is
            multiplied by 256 / (256 - round(256 * dropout)).
        seed: int64 tensor with one element on the device of q (it is never read on the host, so a captured graph
            may change it between replays); needed for dropout by the Triton path. The mask is a function of
            (seed, index[b], head, row, column) alone, defined by `reference.keep_mask`.
        index: int32 `[B]`, place of each sequence in the global batch, 0 to B - 1 by default.
        impl: "triton" (CUDA, D up to 128); "sdpa" (any device: PyTorch's attention on the padded form, where
            dropout has the same distribution but draws from PyTorch's generator); "auto", see `resolve_impl`.
        deterministic: gradients are bitwise equal over runs; `torch.use_deterministic_algorithms(True)` implies it.
            The result always is. The Triton path sums dq without atomics then, which takes longer. For "sdpa" on CUDA
            PyTorch's mode decides, and without it an explicit True is an error.

    Returns:
        A tensor of the shape and dtype of q.
    """
    return attend_sequences(
        q, k, v, None, sdpa_attention, start=start, length=length, max_length=max_length, causal=causal, scale=scale,
        dropout=dropout, seed=seed, index=index, impl=impl, fallback_name="sdpa", deterministic=deterministic,
    )  # fmt: skip


def attend_sequences(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: Layout | None,
    fallback: Callable[[Tensor, Tensor, Tensor, Problem], Tensor],
    *,
    start: Tensor | None,
    length: Tensor | None,
    max_length: int | None,
    causal: bool,
    scale: float | None,
    dropout: float,
    seed: Tensor | None,
    index: Tensor | None,
    impl: str,
    fallback_name: str,
    deterministic: bool,
) -> Tensor:
    """Dense attention or, with a layout, block-sparse; `fallback` is the path that is called `fallback_name`."""
    check_inputs(q, k, v)
    impl = resolve_impl(impl, q.device, deterministic, fallback_name)
    q_rows, k_rows, v_rows = (x.flatten(0, 1) if x.dim() == 4 else x for x in (q, k, v))
    start, length, max_length = check_sequences(q, start, length, max_length)
    if layout is not None and max_length > min(layout.size):
        raise ValueError(f"the layout covers {min(layout.size)} tokens, and max_length is {max_length}")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    threshold = dropout_threshold(dropout)
    seed, index = (
        check_randomness(seed, index, len(start), q.device) if threshold and impl == "triton" else (None, None)
    )
    padded = bool(len(q_rows) == len(start) * max_length)  # a bool for the operator, of traced shapes too
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = None if layout is None else layout.key
    problem = (start, length, max_length, padded, causal, scale, threshold, seed, index, deterministic, key)

    if impl == fallback_name:
        with torch.autocast(q.device.type, enabled=False):  # as in the kernels: the result has the dtype of q
            return fallback(q_rows, k_rows, v_rows, Problem(*problem)).view(q.shape)
    _check_triton(q, layout, fallback_name)
    out, _ = flash_forward(q_rows, k_rows, v_rows, *problem)
    return out.view(q.shape)


def _check_triton(q: Tensor, layout: Layout | None, fallback_name: str) -> None:
    if q.shape[-1] > MAX_HEAD_DIM:
        raise ValueError(
            f"impl='triton' takes head dimensions up to {MAX_HEAD_DIM}, got {q.shape[-1]}: use impl='{fallback_name}'"
        )
    if q.dtype == torch.bfloat16 and q.device.type != "cuda":
        raise TypeError(
            f"Triton's interpreter multiplies bfloat16 wrongly: use float16, float32 or impl='{fallback_name}'"
        )
    if layout is not None and any(side % 16 for side in layout.block):
        rows, columns = layout.block
        raise ValueError(f"impl='triton' takes blocks with sides that are multiples of 16, not {rows}x{columns}")
