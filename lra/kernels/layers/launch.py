"""Launches of the kernels on the rows of a batch."""

# pyright: reportCallIssue=false

from __future__ import annotations

import functools

import torch
import triton.language as tl
from torch import Tensor

from lra.kernels.layers import feed_forward, gradients, projection
from lra.kernels.layers.reference import ONES

PARTS = 52  # of the rows, each summed by itself: as many programs as an H200 runs at once with five tiles
ROWS = {64: 128, 128: 64}  # of a weight's gradient at a time, by the model's width
HALVES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def launch_feed_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    eps: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, z normalised, the inverse of what z was divided by)."""
    (rows, d), f = x.shape, len(up)
    y, unit, rstd = torch.empty_like(x), torch.empty_like(o), x.new_empty(rows)
    warps, registers, residents = (4, 168, 3) if d == 64 else (8, 255, 1)
    with torch.cuda.device_of(x):
        feed_forward.feed_forward_kernel[programs(x, residents)](
            o, x, y, unit, rstd, keys, out, out_bias, up, up_bias, down, down_bias, rows, eps, site, threshold,
            D=d, F=f, C=64 if d == 64 else 32, DROPOUT=keys is not None, num_warps=warps, maxnreg=registers,
        )  # fmt: skip
    return y, unit, rstd


def launch_feed_forward_backward(
    dy: Tensor, o: Tensor, unit: Tensor, rstd: Tensor, out: Tensor, up: Tensor, up_bias: Tensor, down: Tensor,
    threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(do, dx, gradients of out, up and down as `launch_gradients` has them)."""
    (rows, d), f = dy.shape, len(up)
    dx, (do, dout, ddown) = torch.empty_like(dy), (torch.empty_like(o) for _ in range(3))
    du, h = o.new_empty(rows, f), o.new_empty(rows, f)
    warps, registers, residents = (4, 168, 3) if d == 64 else (8, 255, 1)
    with torch.cuda.device_of(dy):
        feed_forward.feed_forward_backward_kernel[programs(dy, residents)](
            dy, unit, rstd, keys, out, up, up_bias, down, dx, do, dout, du, h, ddown, rows, site, threshold,
            D=d, F=f, C=32, DROPOUT=keys is not None, num_warps=warps, maxnreg=registers,
        )  # fmt: skip
    return do, dx, launch_gradients(dout, o, du, unit, ddown, h)


def launch_project(
    x: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(q, k and v, `[T, D]` each, x normalised, the inverse of what it was divided by)."""
    rows, d = x.shape
    q, k, v, unit = (torch.empty_like(x, dtype=weight.dtype) for _ in range(4))
    rstd = x.new_empty(rows)
    warps, residents = (4, 4) if d == 64 else (8, 2)
    with torch.cuda.device_of(x):
        projection.project_kernel[programs(x, residents)](
            x, q, k, v, unit, rstd, weight, bias, cos, sin, rows, eps,
            D=d, C=64, P=pairs(cos), num_warps=warps, maxnreg=128,
        )  # fmt: skip
    return q, k, v, unit, rstd


def launch_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, unit: Tensor, rstd: Tensor, weight: Tensor,
    cos: Tensor | None, sin: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx with dy, gradients of the three parts of the weight as `launch_gradients` has them)."""
    rows, d = dy.shape
    dx = torch.empty_like(dy)
    back_q, back_k = (dq, dk) if cos is None else (torch.empty_like(dq), torch.empty_like(dk))
    warps, residents = (4, 4) if d == 64 else (8, 1)
    with torch.cuda.device_of(dy):
        projection.project_backward_kernel[programs(dy, residents)](
            dq, dk, dv, dy, unit, rstd, weight, cos, sin, dx, back_q, back_k, rows,
            D=d, C=64, P=pairs(cos), num_warps=warps, maxnreg=128 if d == 64 else 255,
        )  # fmt: skip
    return dx, launch_gradients(back_q, unit, back_k, unit, dv, unit)


def launch_gradients(dy: Tensor, x: Tensor, dy1: Tensor, x1: Tensor, dy2: Tensor, x2: Tensor) -> Tensor:
    """Of three layers, `[tiles, D, D + ONES]` in fp32: tiles of each weight's gradient, row by row, and the bias's."""
    rows, d = dy.shape
    sides = [tensor.shape[1] for tensor in (dy, x, dy1, x1, dy2, x2)]
    tiles = sum(n // d * (k // d) for n, k in zip(sides[::2], sides[1::2], strict=True))
    sums = dy.new_empty(PARTS, tiles, d, d + ONES, dtype=torch.float32)
    with torch.cuda.device_of(dy):
        gradients.weight_gradients_kernel[(PARTS, tiles)](
            dy, x, dy1, x1, dy2, x2, sums, rows, *sides, SIDE=d, M=ROWS[d], ONES=ONES,
            num_warps=d // 16, num_stages=3,
        )  # fmt: skip
    return sums.sum(0)


def launch_table_gradient(
    dy: Tensor, ids: Tensor, vocabulary: int, half: torch.dtype, threshold: int, keys: Tensor | None, site: int
) -> Tensor:
    """`[vocabulary, D]` in fp32."""
    rows, d = dy.shape
    v = min(256, max(64, 1 << (vocabulary - 1).bit_length()))  # rows of the table in a tile
    tiles = (vocabulary + v - 1) // v
    sums = dy.new_empty(max(1, 256 // tiles), tiles, v, d)
    with torch.cuda.device_of(dy):
        gradients.table_gradient_kernel[sums.shape[:2]](
            dy, ids, keys, sums, rows, threshold, site,
            D=d, V=v, M=64, HALF=HALVES[half], DROPOUT=keys is not None, num_warps=v // 32, num_stages=3,
        )  # fmt: skip
    return sums.sum(0).flatten(0, 1)[:vocabulary]


def pairs(cos: Tensor | None) -> int:
    return 0 if cos is None else cos.shape[1]


def programs(x: Tensor, residents: int) -> tuple[int]:
    """As many as run at once, `residents` on each multiprocessor: each takes one tile of rows after another."""
    return (multiprocessors(x.device) * residents,)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
