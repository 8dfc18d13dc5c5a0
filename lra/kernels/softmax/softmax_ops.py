"""The Triton path as the PyTorch operators `lra::softmax_forward` and `lra::softmax_backward`, and its derivative.

The operators include the matrix products. Autograd would keep P before and after dropout for them. Here only P before
dropout is kept. The scores and P share memory; in the backward dP and dS do, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lra.kernels.operators import LIBRARY, define_operator, forbid_second_derivative, record_kernel

SOFTMAX_SCHEMA = "Tensor length, float scale, int threshold, Tensor? seed, Tensor? index"


class SoftmaxFunction(torch.autograd.Function):
    """The first derivative of the result with respect to q, k and v. P has none."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():  # without it the operator would call this function again
            out, p = softmax_forward(q, k, v, *problem)
        length, scale, threshold, seed, index, _ = problem  # P has zeros where a causal mask hides a column
        ctx.save_for_backward(q, k, v, p, length, seed, index)
        ctx.numbers = scale, threshold
        ctx.mark_non_differentiable(p)
        ctx.set_materialize_grads(False)  # P gets None as its gradient, not zeros
        return out, p

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, p, length, seed, index = ctx.saved_tensors
        with torch.no_grad():
            gradients = softmax_backward(q, k, v, p, do, length, *ctx.numbers, seed, index)
        return *forbid_second_derivative(gradients, q, k, v, do), *(None,) * 6


# The first call imports Triton, so that a machine without Triton can use the fallback.
def run_softmax_forward(
    q: Tensor, k: Tensor, v: Tensor, length: Tensor, scale: float, threshold: int, seed: Tensor | None,
    index: Tensor | None, causal: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    from lra.kernels.softmax.softmax_kernels import launch_softmax_forward

    n = q.shape[1]
    record_kernel("forward", "softmax_forward")
    with torch.autocast(q.device.type, enabled=False):  # the result has the dtype of q
        q, k, v = (to_heads_first(x, length, padded_side(n)) for x in (q, k, v))
        p = q @ k.transpose(2, 3)
        if causal:
            p.masked_fill_(later_column_mask(p), float("-inf"))
        dropped = launch_softmax_forward(p, length, scale, threshold, seed, index)
        return to_rows_first(dropped @ v, length, n), p


def run_softmax_backward(
    q: Tensor, k: Tensor, v: Tensor, p: Tensor, do: Tensor, length: Tensor, scale: float, threshold: int,
    seed: Tensor | None, index: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from lra.kernels.softmax.softmax_kernels import launch_softmax_backward

    n = q.shape[1]
    record_kernel("backward", "softmax_backward")
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, do = (to_heads_first(x, length, padded_side(n)) for x in (q, k, v, do))
        ds = do @ v.transpose(2, 3)
        dropped = launch_softmax_backward(p, ds, length, scale, threshold, seed, index)
        dv = to_rows_first(dropped.transpose(2, 3) @ do, length, n)
        del dropped
        return to_rows_first(ds @ k, length, n), to_rows_first(ds.transpose(2, 3) @ q, length, n), dv


# Empty tensors with the shapes and dtypes of the results. All are contiguous.
def fake_softmax_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    n = padded_side(q.shape[1])
    return q.new_empty(q.shape), q.new_empty(q.shape[0], q.shape[2], n, n)


def fake_softmax_backward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


def padded_side(n: int) -> int:
    """The rows and columns of the scores in memory: a multiple of 16, so that any N has aligned rows and full tiles."""
    return (n + 15) // 16 * 16


def real_row_mask(length: Tensor, n: int) -> Tensor:
    """bool `[B, n]`: whether a row lies before the length of its sequence."""
    return torch.arange(n, device=length.device) < length[:, None]


def later_column_mask(scores: Tensor) -> Tensor:
    """bool `[N, N]` of scores `[B, H, N, N]`: whether a column is after the row, which a causal mask hides."""
    return scores.new_ones(scores.shape[2:], dtype=torch.bool).triu(1)


def to_heads_first(x: Tensor, length: Tensor, rows: int) -> Tensor:
    """`[B, N, H, D]` to contiguous `[B, H, rows, D]`, with zeros past each length whatever is there."""
    size, n, heads, d = x.shape
    padded = x.new_zeros(size, heads, rows, d)
    padded[:, :, :n] = x.transpose(1, 2).where(real_row_mask(length, n)[:, None, :, None], 0)
    return padded


def to_rows_first(x: Tensor, length: Tensor, n: int) -> Tensor:
    """`[B, H, N or more, D]` to contiguous `[B, n, H, D]`, with zeros past each length."""
    return x[:, :, :n].transpose(1, 2).where(real_row_mask(length, n)[:, :, None, None], 0).contiguous()


softmax_forward = define_operator(
    "softmax_forward",
    f"(Tensor q, Tensor k, Tensor v, {SOFTMAX_SCHEMA}, bool causal) -> (Tensor out, Tensor p)",
    run_softmax_forward,
    fake_softmax_forward,
)
softmax_backward = define_operator(
    "softmax_backward",
    f"(Tensor q, Tensor k, Tensor v, Tensor p, Tensor do, {SOFTMAX_SCHEMA}) -> (Tensor dq, Tensor dk, Tensor dv)",
    run_softmax_backward,
    fake_softmax_backward,
)
LIBRARY.impl("softmax_forward", SoftmaxFunction.apply, "Autograd")
