"""Attention as the PyTorch operators `lra::flash_forward` and `lra::flash_backward`, and the derivative of the first.

torch.compile treats an operator as one node: the graph does not break, and tensors keep their strides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lra.kernels.flash.problem import Problem
from lra.kernels.operators import LIBRARY, define_operator, forbid_second_derivative, needs_no_dispatcher

PROBLEM_SCHEMA = (  # the fields of `Problem`, in their order
    "Tensor start, Tensor length, SymInt max_length, bool padded, bool causal, float scale, int threshold, "
    "Tensor? seed, Tensor? index, bool deterministic, int? layout"
)


class FlashFunction(torch.autograd.Function):
    """The first derivative of the result with respect to q, k and v. The softmax statistics have none.

    Args:
        compute: `run_flash_forward`, or the operator without its derivative.
        problem: the fields of `Problem`. They are one argument, because PyTorch looks at each.
    """

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, problem: tuple[Any, ...]
    ) -> tuple[Tensor, Tensor]:
        # The tensors of the problem are saved, too: autograd then notices if the caller overwrites one too early.
        start, length, *numbers, seed, index, deterministic, layout = problem
        out, softmax = compute(q, k, v, *problem)
        ctx.save_for_backward(q, k, v, out, softmax, start, length, seed, index)
        ctx.numbers, ctx.rest = numbers, (deterministic, layout)
        ctx.mark_non_differentiable(softmax)
        ctx.set_materialize_grads(False)  # `softmax` gets None as its gradient, not zeros
        return out, softmax

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return None, None, None, None, None
        q, k, v, out, softmax, start, length, seed, index = ctx.saved_tensors
        problem = (start, length, *ctx.numbers, seed, index, *ctx.rest)
        if needs_no_dispatcher(q, k, v, out, softmax, do, start, length, seed, index):
            gradients = run_flash_backward(q, k, v, out, softmax, do, *problem)
        else:
            with torch.no_grad():
                gradients = flash_backward(q, k, v, out, softmax, do, *problem)
        return None, *forbid_second_derivative(gradients, q, k, v, do), None


def flash_forward_below_autograd(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    with torch._C._AutoDispatchBelowAutograd():  # without it the operator would call FlashFunction again
        return flash_forward(q, k, v, *problem)  # type: ignore[no-any-return]


def differentiable_flash_forward(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    return FlashFunction.apply(flash_forward_below_autograd, q, k, v, problem)  # type: ignore[no-any-return]


# The first call imports Triton, so that a machine without Triton can use the fallback.
def run_flash_forward(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    from lra.kernels.flash.launch_attention import launch_flash_forward

    return launch_flash_forward(q, k, v, Problem(*problem))


def run_flash_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, *problem: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from lra.kernels.flash.launch_attention import launch_flash_backward

    return launch_flash_backward(q, k, v, out, softmax, do, Problem(*problem))


# Empty tensors with the shapes and dtypes of the results. All are contiguous.
def fake_flash_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(2, q.shape[1], q.shape[0], dtype=torch.float32)


def fake_flash_backward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


flash_forward = define_operator(
    "flash_forward",
    f"(Tensor q, Tensor k, Tensor v, {PROBLEM_SCHEMA}) -> (Tensor out, Tensor softmax)",
    run_flash_forward,
    fake_flash_forward,
)
flash_backward = define_operator(
    "flash_backward",
    f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax, Tensor do, {PROBLEM_SCHEMA})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    run_flash_backward,
    fake_flash_backward,
)
LIBRARY.impl("flash_forward", differentiable_flash_forward, "Autograd")
