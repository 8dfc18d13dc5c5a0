"""The gradient of a table whose rows were looked up, such as the tokens' vectors."""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from lra.kernels.layers.weights import share_of


@triton.jit
def mix(x):
    """`reference.mix` of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["rows", "threshold", "site"])
def table_gradient_kernel(
    dy_ptr, ids_ptr, keys_ptr, sums_ptr, rows, threshold, site,
    D: tl.constexpr, V: tl.constexpr, M: tl.constexpr, HALF: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """One-hot idsᵀ dy in HALF, of what dropout keeps; of a part of the rows. The one-hot ids are in registers only.

    `sums_ptr`: `[parts, tiles of V rows, V, D]`, to be added up.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    v, d, m = tl.arange(0, V), tl.arange(0, D), tl.arange(0, M)
    first, end = share_of(rows, M)
    dy_ptr += first.to(tl.int64) * D
    ids_ptr += first
    left = end - first
    total = tl.zeros([V, D], tl.float32)
    for row in range(0, left, M):
        real = row + m < left
        ids = tl.load(ids_ptr + row + m, mask=real, other=-1) - tile * V  # this tile's rows of the table from 0 on
        dy = tl.load(dy_ptr + (row + m)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        if DROPOUT:
            keys = tl.load(keys_ptr + first + row + m, mask=real, other=0).to(tl.uint32, bitcast=True)
            words = mix(mix(keys + tl.cast(site, tl.uint32))[:, None] + tl.arange(0, D // 4).to(tl.uint32)[None, :])
            low, high = words & 0xFFFF, words >> 16  # the bytes of `reference.kept` are bits 6 to 0 and 15, and 14 to 7
            front, back = tl.join(low << 1 | low >> 15, high << 1 | high >> 15), tl.join(low >> 7, high >> 7)
            drawn = tl.join(front, back).permute(0, 1, 3, 2).reshape(M, D) & 0xFF
            dy = tl.where(drawn >= tl.cast(threshold, tl.uint32), dy, 0.0)
        total = tl.dot((v[:, None] == ids[None, :]).to(HALF), dy.to(HALF), total)
    sums_ptr += (part * tl.num_programs(1) + tile) * (V * D)
    tl.store(sums_ptr + v[:, None] * D + d[None, :], total)
