"""Launches of the kernels on the rows of a batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lra.kernels.feed_forward.kernels import feed_forward_backward_kernel, feed_forward_kernel
from lra.kernels.feed_forward.ops import ROWS, SPARE, programs


def launch_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    eps: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, z normalised with a one behind each row, the inverse of what z was divided by)."""
    (rows, d), f = x.shape, len(up)
    y, unit, rstd = torch.empty_like(x), o.new_empty(rows, d + SPARE), x.new_empty(rows)
    chunk, registers = (32, 128) if d < 128 else (64, 255)  # registers for four programs on a multiprocessor, or two
    with torch.cuda.device_of(x):
        feed_forward_kernel[(programs(rows),)](
            o, x, y, unit, rstd, keys, out, out_bias, up, up_bias, down, down_bias,
            rows, eps, site, threshold,
            **options(d, f, keys, C=chunk, num_warps=4, num_stages=3, maxnreg=registers),
        )  # fmt: skip
    return y, unit, rstd


def launch_backward(
    dy: Tensor, o: Tensor, unit: Tensor, rstd: Tensor, out: Tensor, up: Tensor, up_bias: Tensor, down: Tensor,
    threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(do, dx, the products for the weights of out, up and down, sums for the biases of out and down)."""
    (rows, d), f = dy.shape, len(up)
    dx, do, dout, ddown = torch.empty_like(dy), *(torch.empty_like(o) for _ in range(3))
    du, h, sums = o.new_empty(rows, f), o.new_empty(rows, f), dy.new_empty(programs(rows), 2 * d)
    registers = 128 if d < 128 else 168  # for four programs on a multiprocessor, or three
    with torch.cuda.device_of(dy):
        feed_forward_backward_kernel[(programs(rows),)](
            dy, unit, rstd, keys, out, up, up_bias, down, dx, do, dout, du, h, ddown, sums,
            rows, site, threshold,
            **options(d, f, keys, C=32, num_warps=4, num_stages=2, maxnreg=registers),
        )  # fmt: skip
    return do, dx, product(dout, o), product(du, unit), product(ddown, h), sums


def product(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of a linear layer's weight, in fp32."""
    if dy.is_cuda:
        return torch.mm(dy.t(), x, out_dtype=torch.float32)
    return dy.t().float() @ x.float()


def options(d: int, f: int, keys: Tensor | None, **tile: int) -> dict[str, Any]:
    return dict(D=d, F=f, WIDE=d + SPARE, DROPOUT=keys is not None, M=ROWS, **tile)
