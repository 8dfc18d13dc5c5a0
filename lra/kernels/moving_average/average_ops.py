"""Moving averages as the PyTorch operators `lra::moving_average` and `lra::moving_average_backward`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lra.kernels.operators import define_operator, forbid_second_derivative, record_kernel


def moving_average(
    x: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor, *, max_length: int, padded: bool
) -> Tensor:
    """Returns the sum of weighted moving averages of each feature, fp32 `[T, D]`, by Triton kernels.

    y_t is the sum over dimensions of weight h_t, with h_t = q h_{t-1} + x_t from the first token of a sequence on. A
    second direction adds the same of the reversed sequence. Rows that no sequence owns get zeros.

    Args:
        x: `[T, D]`, fp32 or 16 bits. Rows past a length may be anything.
        start, length: int32 `[B]`, as a Batch has them.
        q, weight: fp32 `[directions, dimensions, D]`, with q from 0 to 1.
        max_length: at least the largest length.
        padded: whether there may be rows that no sequence owns.
    """
    return _MovingAverage.apply(x, start, length, q, weight, max_length, padded)  # type: ignore[no-any-return]


def _added(sides: Tensor) -> Tensor:
    """The sum of what comes from both sides: outside of the operators, so that torch.compile fuses it."""
    return sides[0] if len(sides) == 1 else sides[0] + sides[1]


# The first call imports Triton, so that a machine without it can use a convolution.
def _forward(
    x: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor, max_length: int, padded: bool
) -> Tensor:
    from lra.kernels.moving_average.average_kernels import launch_average

    record_kernel("layers", "moving_average")
    y = (torch.zeros if padded else torch.empty)((len(q), *x.shape), dtype=torch.float32, device=x.device)
    q, weight = q.contiguous(), weight.contiguous()
    launch_average(x.contiguous(), start, length, q, weight, max_length, 0, len(q) - 1 or -1, y)
    return y


def _backward(
    dy: Tensor, x: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor, max_length: int, padded: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from lra.kernels.moving_average.average_kernels import launch_average, launch_coefficient_gradient

    dy, x, q, weight = dy.contiguous(), x.contiguous(), q.contiguous(), weight.contiguous()
    dx = (torch.zeros if padded else torch.empty)((len(q), *x.shape), dtype=torch.float32, device=x.device)
    # what a token adds to later ones, it gets of them; so the directions change places
    launch_average(dy, start, length, q, weight, max_length, len(q) - 1 or -1, 0, dx)
    sums = launch_coefficient_gradient(x, dy, start, length, q, max_length, len(q) - 1 or -1)
    return dx, sums[:, 1] * weight, sums[:, 0].contiguous()


average_forward = define_operator(
    "moving_average",
    "(Tensor x, Tensor start, Tensor length, Tensor q, Tensor weight, SymInt max_length, bool padded) -> Tensor",
    _forward,
    lambda x, start, length, q, *_: x.new_empty((len(q), *x.shape), dtype=torch.float32),
)
average_backward = define_operator(
    "moving_average_backward",
    "(Tensor dy, Tensor x, Tensor start, Tensor length, Tensor q, Tensor weight, SymInt max_length, bool padded) "
    "-> (Tensor, Tensor, Tensor)",
    _backward,
    lambda dy, x, start, length, q, weight, *_: (
        dy.new_empty((len(q), *x.shape)),
        q.new_empty(q.shape),
        weight.new_empty(weight.shape),
    ),
)


class _MovingAverage(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor, *rest: Any) -> Tensor:
        ctx.save_for_backward(x, start, length, q, weight)
        ctx.rest = rest
        return _added(average_forward(x, start, length, q, weight, *rest))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, start, length, q, weight = ctx.saved_tensors
        sides, dq, dweight = average_backward(dy, x, start, length, q, weight, *ctx.rest)
        gradients = _added(sides).to(x.dtype), dq, dweight
        dx, dq, dweight = forbid_second_derivative(gradients, dy, x, q, weight)
        return dx, None, None, dq, dweight, None, None
