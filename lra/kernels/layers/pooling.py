"""The sum over a sequence's rows."""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["padded_length"])
def pool_kernel(x_ptr, start_ptr, length_ptr, sums_ptr, of_row_ptr, padded_length, D: tl.constexpr, M: tl.constexpr):
    """Sum the rows of each sequence. `sums_ptr`: `[shares, B, D]`. `of_row_ptr`: each row's sequence or -1."""
    b, d, m = tl.program_id(1), tl.arange(0, D), tl.arange(0, M)
    start, length = tl.load(start_ptr + b).to(tl.int64), tl.load(length_ptr + b)
    owned = tl.maximum(length, padded_length)
    total = tl.zeros([M, D], tl.float32)
    for first in range(tl.program_id(0) * M, owned, tl.num_programs(0) * M):
        rows = first + m
        real = rows < length
        total += tl.load(x_ptr + (start + rows)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        tl.store(of_row_ptr + start + rows, tl.where(real, b, -1), mask=rows < owned)
    tl.store(sums_ptr + (tl.program_id(0) * tl.num_programs(1) + b) * D + d, tl.sum(total, 0))
