"""The last norm and the sum over a sequence's rows in one pass each: what is normalised is never written."""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from lra.kernels.layers.weights import share_of


@triton.jit
def normalised(x, eps, D: tl.constexpr):
    """As `reference.normalise`; zeros of a row of zeros."""
    centred = x - (tl.sum(x, 1) / D)[:, None]
    rstd = tl.rsqrt(tl.sum(centred * centred, 1) / D + eps)
    return centred * rstd[:, None], rstd


@triton.jit
def pool_kernel(x_ptr, start_ptr, length_ptr, sums_ptr, eps, D: tl.constexpr, M: tl.constexpr):
    """`sums_ptr`: `[shares, B, D]`."""
    b, d, m = tl.program_id(1), tl.arange(0, D), tl.arange(0, M)
    first, end = share_of(tl.load(length_ptr + b), M)
    x_ptr += tl.load(start_ptr + b).to(tl.int64) * D
    total = tl.zeros([M, D], tl.float32)
    x = tl.load(x_ptr + (first + m)[:, None] * D + d[None, :], mask=(first + m < end)[:, None], other=0.0)
    for row in range(first, end, M):
        after = row + M + m  # the next rows, while these are normalised
        x_next = tl.load(x_ptr + after[:, None] * D + d[None, :], mask=(after < end)[:, None], other=0.0)
        unit, _ = normalised(x, eps, D)
        total += unit
        x = x_next
    tl.store(sums_ptr + (tl.program_id(0) * tl.num_programs(1) + b) * D + d, tl.sum(total, 0))


@triton.jit(do_not_specialize=["padded_length"])
def pool_backward_kernel(
    dy_ptr, x_ptr, start_ptr, length_ptr, dx_ptr, padded_length, eps, D: tl.constexpr, M: tl.constexpr
):
    """Zeros for the rows past a length."""
    b, d, m = tl.program_id(1), tl.arange(0, D), tl.arange(0, M)
    length = tl.load(length_ptr + b)
    first, end = share_of(tl.maximum(length, padded_length), M)
    start = tl.load(start_ptr + b).to(tl.int64) * D
    dy = tl.load(dy_ptr + b * D + d)
    dy -= tl.sum(dy, 0) / D  # the unit's own mean is 0, so that what follows is the same
    for row in range(first, end, M):
        rows = (row + m)[:, None]
        at = start + rows * D + d[None, :]
        unit, rstd = normalised(tl.load(x_ptr + at, mask=rows < end, other=0.0), eps, D)
        along = tl.sum(unit * dy[None, :], 1) / D
        dx = (dy[None, :] - unit * along[:, None]) * rstd[:, None]
        tl.store(dx_ptr + at, tl.where(rows < length, dx, 0.0), mask=rows < end)
