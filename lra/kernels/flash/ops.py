"""The kernels as PyTorch operators, `lra::flash_forward` and `lra::flash_backward`, and the derivative of the first.

torch.compile takes an operator as one node: the graph does not break, and strides arrive as they are. Defined by the
lower level of PyTorch's `library`, because `custom_op` with `register_autograd` costs about 35 us more per call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, library

from lra.kernels.flash.problem import Problem

PROBLEM = (  # the fields of `Problem`, in their order
    "Tensor start, Tensor length, SymInt max_length, bool padded, bool causal, float scale, int threshold, "
    "Tensor? seed, Tensor? index, bool deterministic, int? layout"
)


class Once(torch.autograd.Function):
    """The first `count` tensors, gradients, as functions of those that follow; their own derivative is an error.

    PyTorch's `once_differentiable` lets them pass for constants where only the gradient of the result has none.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors[:count]

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:
        raise RuntimeError("this kernel can't be differentiated twice: use plain PyTorch")


def once(gradients: tuple[Tensor, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    """The gradients, which depend on `inputs`; where a graph of them is made, without a derivative."""
    return Once.apply(len(gradients), *gradients, *inputs) if torch.is_grad_enabled() else gradients  # type: ignore[no-any-return]


class Attention(torch.autograd.Function):
    """The derivative with respect to q, k and v of the result alone, not of the statistics, and only the first."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():  # or the operator would come back here
            out, softmax = flash_forward(q, k, v, *problem)
        # The tensors of the problem too, so that autograd notices if the caller overwrites one before the backward.
        start, length, *numbers, seed, index, deterministic, layout = problem
        ctx.save_for_backward(q, k, v, out, softmax, start, length, seed, index)
        ctx.numbers, ctx.rest = numbers, (deterministic, layout)
        ctx.mark_non_differentiable(softmax)
        ctx.set_materialize_grads(False)  # no zeros in the place of the gradient of `softmax`
        return out, softmax

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        if do is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, out, softmax, start, length, seed, index = ctx.saved_tensors
        problem = (start, length, *ctx.numbers, seed, index, *ctx.rest)
        with torch.no_grad():
            gradients = flash_backward(q, k, v, out, softmax, do, *problem)
        return *once(gradients, q, k, v, do), *(None,) * len(problem)


# Triton is imported by the first call, so that a machine without it has the other path.
def run_forward(q: Tensor, k: Tensor, v: Tensor, *problem: Any) -> tuple[Tensor, Tensor]:
    from lra.kernels.flash.forward import launch_forward

    return launch_forward(q, k, v, Problem(*problem))


def run_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, *problem: Any
) -> tuple[Tensor, Tensor, Tensor]:
    from lra.kernels.flash.backward import launch_backward

    return launch_backward(q, k, v, out, softmax, do, Problem(*problem))


# Shapes and dtypes of what the two return, all contiguous.
def fake_forward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(2, q.shape[1], q.shape[0], dtype=torch.float32)


def fake_backward(q: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape), q.new_empty(q.shape)


LIBRARY = library.Library("lra", "FRAGMENT")


def define(name: str, signature: str, run: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    LIBRARY.define(name + signature, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    library.register_fake(f"lra::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.lra, name).default


flash_forward = define(
    "flash_forward",
    f"(Tensor q, Tensor k, Tensor v, {PROBLEM}) -> (Tensor out, Tensor softmax)",
    run_forward,
    fake_forward,
)
flash_backward = define(
    "flash_backward",
    f"(Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax, Tensor do, {PROBLEM})"
    " -> (Tensor dq, Tensor dk, Tensor dv)",
    run_backward,
    fake_backward,
)
LIBRARY.impl("flash_forward", Attention.apply, "Autograd")
