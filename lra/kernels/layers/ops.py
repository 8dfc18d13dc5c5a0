"""The kernels as PyTorch operators, and the derivatives of `lra::project` and `lra::feed_forward`.

An operator is given weights in 16 bits with the norm's gain and shift and dropout's scale in them. The gradients of
those and of the biases follow from the products that the backward returns; this is plain PyTorch, of which
torch.compile makes a few kernels. On a CPU the operators are their definition, reference.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lra.kernels.flash.ops import define, once
from lra.kernels.layers import reference
from lra.kernels.layers.reference import ONES


class Project(torch.autograd.Function):
    """(x, q, k, v): the residual passes through, so that its gradient and the projections' are added in the kernel."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor,
        cos: Tensor | None, sin: Tensor | None, eps: float, dtype: torch.dtype,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        half = (weight * gain).to(dtype)  # the projections are given unit * gain + shift
        q, k, v, unit, rstd = project(x, half, bias + (weight * shift).sum(1), cos, sin, eps)
        ctx.save_for_backward(unit, rstd, half, cos, sin, x, gain, shift, weight)
        return x.view_as(x), q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *saved, x, gain, shift, weight = ctx.saved_tensors
        with torch.no_grad():
            dy, dq, dk, dv = (grad.contiguous() for grad in grads)
            dx, tiles = project_backward(dq, dk, dv, dy, *saved)
            (by_unit, dbias), *_ = untiled(tiles, (len(weight), x.shape[1]))
            found = dx, *through_norm(by_unit, dbias, weight, gain, shift), dbias
        return *once(found, *grads, x, weight), None, None, None, None


class FeedForward(torch.autograd.Function):
    """Of o, x, weight and bias of out, norm, up and down in fp32, and numbers."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, x: Tensor, *rest: Any) -> Tensor:
        out, out_bias, gain, shift, up, up_bias, down, down_bias, eps, scale, threshold, keys, site = rest
        # up is given unit * gain + shift, and what dropout keeps is scaled
        scale = 1.0 if keys is None else scale
        half_out, half_up, half_down = ((w * by).to(o.dtype) for w, by in ((out, scale), (up, gain), (down, scale**2)))
        layers = half_out, half_up, up_bias + (up * shift).sum(1), half_down
        y, unit, rstd = feed_forward(
            o, x, half_out, out_bias * scale, *layers[1:], down_bias * scale, eps, threshold, keys, site
        )
        ctx.save_for_backward(o, unit, rstd, *layers, x, gain, shift, up, keys)
        ctx.numbers = scale, threshold, site
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (*saved, x, gain, shift, up, keys) = grads, ctx.saved_tensors
        scale, threshold, site = ctx.numbers
        with torch.no_grad():
            do, dx, tiles = feed_forward_backward(dy.contiguous(), *saved, threshold, keys, site)
            f, d = up.shape
            (dout, dout_bias), (by_unit, dup_bias), (ddown, ddown_bias) = untiled(tiles, (d, d), (f, d), (d, f))
            dgain, dshift, dup = through_norm(by_unit, dup_bias, up, gain, shift)
            out, down = (scale * dout, scale * dout_bias), (scale**2 * ddown, scale * ddown_bias)
            found = do, dx, *out, dgain, dshift, dup, dup_bias, *down
        return *once(found, dy, saved[0], x, up), None, None, None, None, None


def untiled(tiles: Tensor, *shapes: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """Gradients of weight `[N, K]` and bias of layers of these shapes, from their tiles, all contiguous.

    The gradients of all parameters are summed in one launch then.
    """
    d = tiles.shape[1]
    found = []
    for (n, k), part in zip(shapes, tiles.split([n * k // d**2 for n, k in shapes]), strict=True):
        part = part.unflatten(0, (n // d, k // d))
        weight = part[..., :d].transpose(1, 2).reshape(n, k).contiguous()
        found.append((weight, part[:, 0, :, d].reshape(n).contiguous()))
    return found


def through_norm(
    by_unit: Tensor, dbias: Tensor, weight: Tensor, gain: Tensor, shift: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of gain, shift and weight of a norm and a layer behind it, from the layer's with unit for its input."""
    dweight = by_unit * gain + dbias[:, None] * shift
    return (weight * by_unit).sum(0), (weight * dbias[:, None]).sum(0), dweight


def computed_by(name: str) -> Callable[..., Any]:
    """An operator's kernels, `launch_<name>`, or on a CPU its definition."""

    def run(*arguments: Any) -> Any:
        if arguments[0].is_cuda:
            from lra.kernels.layers import launch  # which imports Triton: a machine without it can import this

            return getattr(launch, f"launch_{name}")(*arguments)
        with torch.autocast(arguments[0].device.type, enabled=False):
            return getattr(reference, name)(*arguments)

    return run


# Shapes and dtypes of what they return, all contiguous.
def fake_project(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return *(weight.new_empty(x.shape) for _ in range(4)), x.new_empty(x.shape[0])


def fake_project_backward(dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, *_: Any) -> tuple[Tensor, ...]:
    d = dy.shape[1]
    return dy.new_empty(dy.shape), dy.new_empty(3, d, d + ONES)


def fake_feed_forward(o: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return x.new_empty(x.shape), o.new_empty(o.shape), x.new_empty(x.shape[0])


def fake_feed_forward_backward(dy: Tensor, o: Tensor, unit: Tensor, rstd: Tensor, *layers: Any) -> tuple[Tensor, ...]:
    d, f = dy.shape[1], len(layers[1])
    return o.new_empty(o.shape), dy.new_empty(dy.shape), dy.new_empty(1 + 2 * f // d, d, d + ONES)


def fake_table_gradient(dy: Tensor, ids: Tensor, vocabulary: int, *_: Any) -> Tensor:
    return dy.new_empty(vocabulary, dy.shape[1])


ROTATION = "Tensor? cos, Tensor? sin"
LAYERS = "Tensor out, Tensor out_bias, Tensor up, Tensor up_bias, Tensor down, Tensor down_bias"
DROPOUT = "int threshold, Tensor? keys, int site"
project = define(
    "project",
    f"(Tensor x, Tensor weight, Tensor bias, {ROTATION}, float eps)"
    " -> (Tensor q, Tensor k, Tensor v, Tensor unit, Tensor rstd)",
    computed_by("project"),
    fake_project,
)
project_backward = define(
    "project_backward",
    f"(Tensor dq, Tensor dk, Tensor dv, Tensor dy, Tensor unit, Tensor rstd, Tensor weight, {ROTATION})"
    " -> (Tensor dx, Tensor tiles)",
    computed_by("project_backward"),
    fake_project_backward,
)
feed_forward = define(
    "feed_forward",
    f"(Tensor o, Tensor x, {LAYERS}, float eps, {DROPOUT}) -> (Tensor y, Tensor unit, Tensor rstd)",
    computed_by("feed_forward"),
    fake_feed_forward,
)
feed_forward_backward = define(
    "feed_forward_backward",
    f"(Tensor dy, Tensor o, Tensor unit, Tensor rstd, Tensor out, Tensor up, Tensor up_bias, Tensor down, "
    f"{DROPOUT}) -> (Tensor do, Tensor dx, Tensor tiles)",
    computed_by("feed_forward_backward"),
    fake_feed_forward_backward,
)
table_gradient = define(
    "table_gradient",
    f"(Tensor dy, Tensor ids, SymInt vocabulary, ScalarType half, {DROPOUT}) -> Tensor",
    computed_by("table_gradient"),
    fake_table_gradient,
)
