"""The kernels as PyTorch operators, `lra::feed_forward`, `lra::project`, `lra::project_out`, and their derivatives.

Every tensor is contiguous. `dtype` is that of the products' factors; their sums, and the weights' gradients, are fp32.
What is kept for the backward is among the arguments: it computes the rest again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from lra.kernels.flash.ops import LIBRARY, define

DROPOUT = "float rate, Tensor? keys, int site"


# The derivatives of the operators, only the first ones.
class FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, rate: float,
        keys: Tensor | None, site: int, dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x, gain, shift, w1, b1, w2, keys)
        ctx.rate, ctx.rest = rate, (site, dtype)
        with torch._C._AutoDispatchBelowAutograd():  # or the operator would come back here
            return feed_forward(x, gain, shift, w1, b1, w2, b2, rate, keys, site, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        *saved, keys = ctx.saved_tensors
        return *feed_forward_backward(dy.contiguous(), *saved, ctx.rate, keys, *ctx.rest), *(None,) * 4


class Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, b: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, gain, shift, w)
        ctx.dtype = dtype
        with torch._C._AutoDispatchBelowAutograd():
            return project(x, gain, shift, w, b, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dqkv: Tensor) -> tuple[Tensor | None, ...]:
        return *project_backward(*(d.contiguous() for d in dqkv), *ctx.saved_tensors, ctx.dtype), None


class ProjectOut(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, o: Tensor, w: Tensor, b: Tensor, rate: float, keys: Tensor | None, site: int,
        dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(o, w, keys)
        ctx.rate, ctx.rest = rate, (site, dtype)
        with torch._C._AutoDispatchBelowAutograd():
            return project_out(x, o, w, b, rate, keys, site, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        o, w, keys = ctx.saved_tensors
        return dy, *project_out_backward(dy.contiguous(), o, w, ctx.rate, keys, *ctx.rest), *(None,) * 4


# Triton is imported by the first call, so that a machine without it has the other path.
def run(name: str) -> Any:
    def launch(*arguments: Any) -> Any:
        from lra.kernels.layers import kernels

        assert all(x.is_contiguous() for x in arguments if isinstance(x, Tensor)), f"lra::{name} reads contiguous rows"
        return getattr(kernels, f"launch_{name}")(*arguments)

    return launch


# Shapes and dtypes of what they return, all contiguous.
def fake_rows(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def fake_feed_forward_backward(
    dy: Tensor, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, *_: Any
) -> tuple[Tensor, ...]:
    return *(t.new_empty(t.shape) for t in (x, gain, shift, w1, b1, w2)), w2.new_empty(len(w2))


def fake_project(
    x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape, dtype=dtype) for _ in range(3))


def fake_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    return *(t.new_empty(t.shape) for t in (x, gain, shift, w)), w.new_empty(len(w))


def fake_project_out_backward(dy: Tensor, o: Tensor, w: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return o.new_empty(o.shape), w.new_empty(w.shape), w.new_empty(len(w))


def operator(name: str, signature: str, fake: Any) -> Any:
    return define(name, signature, run(name), fake)


feed_forward = operator(
    "feed_forward",
    f"(Tensor x, Tensor gain, Tensor shift, Tensor w1, Tensor b1, Tensor w2, Tensor b2, {DROPOUT}, ScalarType dtype)"
    " -> Tensor",
    fake_rows,
)
feed_forward_backward = operator(
    "feed_forward_backward",
    f"(Tensor dy, Tensor x, Tensor gain, Tensor shift, Tensor w1, Tensor b1, Tensor w2, {DROPOUT}, ScalarType dtype)"
    " -> (Tensor dx, Tensor dgain, Tensor dshift, Tensor dw1, Tensor db1, Tensor dw2, Tensor db2)",
    fake_feed_forward_backward,
)
project = operator(
    "project",
    "(Tensor x, Tensor gain, Tensor shift, Tensor w, Tensor b, ScalarType dtype) -> (Tensor q, Tensor k, Tensor v)",
    fake_project,
)
project_backward = operator(
    "project_backward",
    "(Tensor dq, Tensor dk, Tensor dv, Tensor x, Tensor gain, Tensor shift, Tensor w, ScalarType dtype)"
    " -> (Tensor dx, Tensor dgain, Tensor dshift, Tensor dw, Tensor db)",
    fake_project_backward,
)
project_out = operator(
    "project_out",
    f"(Tensor x, Tensor o, Tensor w, Tensor b, {DROPOUT}, ScalarType dtype) -> Tensor",
    fake_rows,
)
project_out_backward = operator(
    "project_out_backward",
    f"(Tensor dy, Tensor o, Tensor w, {DROPOUT}, ScalarType dtype) -> (Tensor do, Tensor dw, Tensor db)",
    fake_project_out_backward,
)
for name, function in (("feed_forward", FeedForward), ("project", Project), ("project_out", ProjectOut)):
    LIBRARY.impl(name, function.apply, "Autograd")
