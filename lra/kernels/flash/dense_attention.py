"""`flash_attention`, the public function: it checks its arguments, makes both forms ragged rows and picks a path."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from lra.kernels.dropout import dropout_threshold
from lra.kernels.flash.flash_ops import FlashFunction, flash_forward, run_flash_forward
from lra.kernels.flash.layout import Layout
from lra.kernels.flash.padding import as_rows, flattens
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.sdpa import sdpa_attention
from lra.kernels.impl import resolve_impl
from lra.kernels.inputs import check_inputs, check_randomness, check_sequences
from lra.kernels.operators import needs_no_dispatcher

MAX_HEAD_DIM = 128  # of the Triton kernels; a wider tile does not fit in registers


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

    FlashAttention (Dao et al. 2022, arXiv 2205.14135). q, k and v have one of two forms.

    Ragged form: q, k and v are `[T, H, D]`, and sequence `b` owns the rows `start[b] : start[b] + length[b]`. The rows
    are packed or padded. *Packed* rows have no gaps (`T = sum(length)`). *Padded* rows give every sequence `max_length`
    rows (`start = b * max_length`). Rows are padded exactly when `T == B * max_length`. Rows past a length may hold
    anything, NaN included: they influence nothing, and their output and gradients are zeros. No sequence influences
    another one. The results of rows in a gap, or of rows that two sequences share, are undefined. Only tensors on the
    CPU are searched for such rows.

    Batched form: q, k and v are `[B, N, H, D]`, with an optional `length`. The function reads it as padded rows. It
    copies only where `q.flatten(0, 1)` is no view: a `[B, N, ...]` tensor and its slices along later dimensions need no
    copy, a transposed `[B, H, N, D]` tensor does.

    The kernels read any strides in place, so the three slices of a fused `[T, 3, H, D]` projection need no copy. The
    result and the gradients are contiguous.

    Args:
        q, k, v: float16, bfloat16 or float32, `[T, H, D]` or `[B, N, H, D]`.
        start: int32 `[B]` on the device of q, the first row of each sequence; ragged form only.
        length: int32 `[B]` on the device of q, the rows of each sequence. In the batched form N by default.
        max_length: an integer on the host, at least `max(length)`, so that nothing waits for the device; ragged form
            only.
        causal: whether row i sees only the columns 0 to i of its sequence.
        scale: the factor of the scores, `D ** -0.5` by default.
        dropout: the probability that a softmax weight is dropped, 0 by default. It is rounded to a multiple of 1/256.
            Kept weights are multiplied by 256 / (256 - round(256 * dropout)).
        seed: int64 tensor with one element on the device of q. The Triton path needs it for dropout. The host never
            reads it, so a captured graph may change it between replays. The mask depends only on (seed, index[b], head,
            row, column); `reference.keep_mask` defines it.
        index: int32 `[B]`, the place of each sequence in the global batch, 0 to B - 1 by default.
        impl: "triton" (CUDA, D up to 128), "sdpa" (any device) or "auto" (the default: Triton on CUDA, SDPA elsewhere).
            SDPA is PyTorch's attention on padded rows. Its dropout has the same distribution, but draws from PyTorch's
            generator.
        deterministic: whether the gradients are bitwise equal over runs. `torch.use_deterministic_algorithms(True)`
            implies it. The result always is equal. The Triton path then sums dq without atomics, which takes longer.
            For "sdpa" on CUDA only PyTorch's mode can do it, and without that mode True is an error.

    Returns:
        A tensor of the shape and dtype of q.

    Raises:
        TypeError: an argument has a type or dtype that is not listed here.
        ValueError: an argument has another shape or device, or is out of range, or `impl` cannot compute the call.
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
    """Dense attention, or block-sparse attention with a layout. `impl=fallback_name` computes it by `fallback`."""
    check_inputs(q, k, v)
    impl = resolve_impl(impl, q.device, deterministic, fallback_name)
    start, length, max_length = check_sequences(q, start, length, max_length)
    if layout is not None and max_length > min(layout.size):
        raise ValueError(f"the layout covers {min(layout.size)} tokens, and max_length is {max_length}")
    scale = float(q.shape[-1] ** -0.5 if scale is None else scale)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    threshold = dropout_threshold(dropout)
    if not isinstance(causal, bool):
        raise TypeError(f"causal must be True or False, got {causal!r}")
    if threshold and (impl == "triton" or seed is not None):  # a call that a fallback takes is one for Triton, too
        seed, index = check_randomness(seed, index, len(start), q.device)
    if not threshold or impl == fallback_name:
        seed = index = None
    rows = len(q) if q.dim() == 3 else q.shape[0] * q.shape[1]
    padded = bool(rows == len(start) * max_length)  # the operator needs a bool, also for traced shapes
    deterministic = deterministic or torch.are_deterministic_algorithms_enabled()
    key = None if layout is None else layout.key
    problem = (start, length, max_length, padded, causal, scale, threshold, seed, index, deterministic, key)

    if impl == fallback_name:
        with torch.autocast(q.device.type, enabled=False):  # as in the kernels: the result has the dtype of q
            return fallback(as_rows(q), as_rows(k), as_rows(v), Problem(*problem)).view(q.shape)
    _check_triton(q, layout, fallback_name)
    direct = needs_no_dispatcher(q, k, v, start, length, seed, index)
    if direct and all(map(flattens, (q, k, v))) and type(deterministic) is bool:
        return FlashFunction.apply(run_flash_forward, q, k, v, problem)[0]
    out, _ = flash_forward(as_rows(q), as_rows(k), as_rows(v), *problem)
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
