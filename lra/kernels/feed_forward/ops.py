"""The kernels as PyTorch operators, `lra::feed_forward` and `lra::feed_forward_backward`, and the derivative.

What else a pass takes, the weights in 16 bits and the gradients that follow from the products, is plain PyTorch, which
torch.compile makes a few kernels of.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lra.kernels.flash.ops import define, once

ROWS = 64  # that a program owns: what a wgmma takes
SPARE = 8  # columns behind those of the normalised rows: the first is ones, the others keep rows aligned to 16 bytes
LAYERS = "Tensor out, Tensor out_bias, Tensor up, Tensor up_bias, Tensor down, Tensor down_bias"
DROPOUT = "int threshold, Tensor? keys, int site"


class FeedForward(torch.autograd.Function):
    """Of o, x, weight and bias of out, norm, up and down in fp32, and numbers; the first derivative only."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, x: Tensor, *rest: Any) -> Tensor:
        out, out_bias, gain, shift, up, up_bias, down, down_bias, eps, scale, threshold, keys, site = rest
        # up is given unit * gain + shift, and what dropout keeps is scaled: both are made part of the weights
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
            do, dx, dout, by_unit, ddown, sums = feed_forward_backward(dy.contiguous(), *saved, threshold, keys, site)
            dout_bias, ddown_bias = (scale * sums.sum(0)).chunk(2)
            d = x.shape[1]
            by_unit, dup_bias = by_unit[:, :d], by_unit[:, d].contiguous()  # gradients are summed in one launch then
            dup = by_unit * gain + dup_bias[:, None] * shift
            dgain, dshift = (up * by_unit).sum(0), (up * dup_bias[:, None]).sum(0)
            found = do, dx, scale * dout, dout_bias, dgain, dshift, dup, dup_bias, scale**2 * ddown, ddown_bias
        return *once(found, dy, saved[0], x, up), None, None, None, None, None


def programs(rows: int) -> int:
    return (rows + ROWS - 1) // ROWS


# Triton is imported by the first call, so that a machine without it can import this.
def run_forward(*arguments: Any) -> tuple[Tensor, ...]:
    from lra.kernels.feed_forward.launch import launch_forward

    return launch_forward(*arguments)


def run_backward(*arguments: Any) -> tuple[Tensor, ...]:
    from lra.kernels.feed_forward.launch import launch_backward

    return launch_backward(*arguments)


def fake_forward(o: Tensor, x: Tensor, *_: Any) -> tuple[Tensor, ...]:
    rows, d = x.shape
    return x.new_empty(rows, d), o.new_empty(rows, d + SPARE), x.new_empty(rows)


def fake_backward(dy: Tensor, o: Tensor, unit: Tensor, rstd: Tensor, *layers: Any) -> tuple[Tensor, ...]:
    (rows, d), f, new = dy.shape, len(layers[1]), dy.new_empty
    sums = new(programs(rows), 2 * d)
    return o.new_empty(rows, d), new(rows, d), new(d, d), new(f, d + SPARE), new(d, f), sums


feed_forward = define(
    "feed_forward",
    f"(Tensor o, Tensor x, {LAYERS}, float eps, {DROPOUT}) -> (Tensor y, Tensor unit, Tensor rstd)",
    run_forward,
    fake_forward,
)
feed_forward_backward = define(
    "feed_forward_backward",
    f"(Tensor dy, Tensor o, Tensor unit, Tensor rstd, Tensor out, Tensor up, Tensor up_bias, Tensor down, "
    f"{DROPOUT}) -> (Tensor do, Tensor dx, Tensor dout, Tensor by_unit, Tensor ddown, Tensor sums)",
    run_backward,
    fake_backward,
)
