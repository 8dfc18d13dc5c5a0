"""Gradients of weights, sums over all rows of a batch. Each program sums a part of the rows for a tile of one weight;
those sums are added up in the end, always in the same order.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def weight_gradients_kernel(
    dy_ptr, x_ptr, dy1_ptr, x1_ptr, dy2_ptr, x2_ptr, sums_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, N1: tl.constexpr, K1: tl.constexpr, N2: tl.constexpr, K2: tl.constexpr,
    SIDE: tl.constexpr, M: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """Of three linear layers dyᵀ x, and dyᵀ 1 for the biases, which is a product of the same kind.

    `sums_ptr`: `[parts, tiles, SIDE, SIDE + ONES]`; one layer's tiles, `[N / SIDE, K / SIDE]`, follow another's.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    sums_ptr += (part * tl.num_programs(1) + tile) * (SIDE * (SIDE + ONES))
    n, k = N, K
    first: tl.constexpr = (N // SIDE) * (K // SIDE)
    second: tl.constexpr = (N1 // SIDE) * (K1 // SIDE)
    if tile >= first:
        dy_ptr, x_ptr, n, k = dy1_ptr, x1_ptr, N1, K1
        tile -= first
        if tile >= second:
            dy_ptr, x_ptr, n, k = dy2_ptr, x2_ptr, N2, K2
            tile -= second
    tiles_k = k // SIDE
    side, spare, m = tl.arange(0, SIDE), tl.arange(0, ONES), tl.arange(0, M)
    share = tl.cdiv(tl.cdiv(rows, M), tl.num_programs(0)) * M
    begin = (part * share).to(tl.int64)
    dy_ptr += begin * n + tile // tiles_k * SIDE
    x_ptr += begin * k + tile % tiles_k * SIDE
    left = tl.minimum(rows - begin, share).to(tl.int32)

    weight = tl.zeros([SIDE, SIDE], tl.float32)
    bias = tl.zeros([SIDE, ONES], tl.float32)
    ones = tl.full([M, ONES], 1.0, dy_ptr.dtype.element_ty)
    for row in range(0, left, M):
        real = (row + m < left)[:, None]
        dy = tl.load(dy_ptr + (row + m)[:, None] * n + side[None, :], mask=real, other=0.0)
        x = tl.load(x_ptr + (row + m)[:, None] * k + side[None, :], mask=real, other=0.0)
        weight = tl.dot(dy.T, x, weight)
        bias = tl.dot(dy.T, ones, bias)
    sums_ptr += side[:, None] * (SIDE + ONES)
    tl.store(sums_ptr + side[None, :], weight)
    tl.store(sums_ptr + SIDE + spare[None, :], bias)


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
    """Of a table whose rows were looked up by `ids`: one-hot idsᵀ dy in HALF, of what dropout keeps.

    `sums_ptr`: `[parts, tiles of V rows, V, D]`.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    v, d, m = tl.arange(0, V), tl.arange(0, D), tl.arange(0, M)
    share = tl.cdiv(tl.cdiv(rows, M), tl.num_programs(0)) * M
    begin = (part * share).to(tl.int64)
    dy_ptr += begin * D
    ids_ptr += begin
    left = tl.minimum(rows - begin, share).to(tl.int32)
    total = tl.zeros([V, D], tl.float32)
    for row in range(0, left, M):
        real = row + m < left
        ids = tl.load(ids_ptr + row + m, mask=real, other=-1) - tile * V  # this tile's rows of the table from 0 on
        dy = tl.load(dy_ptr + (row + m)[:, None] * D + d[None, :], mask=real[:, None], other=0.0)
        if DROPOUT:
            keys = tl.load(keys_ptr + begin + row + m, mask=real, other=0).to(tl.uint32, bitcast=True)
            hashed = mix(mix(keys + tl.cast(site, tl.uint32))[:, None] + tl.arange(0, D // 2).to(tl.uint32)[None, :])
            words = tl.join(hashed << 16, hashed).reshape(M, D)  # a feature's half is the upper one
            dy = tl.where(words >= tl.cast(threshold, tl.uint32) << 16, dy, 0.0)
        total = tl.dot((v[:, None] == ids[None, :]).to(HALF), dy.to(HALF), total)
    sums_ptr += (part * tl.num_programs(1) + tile) * (V * D)
    tl.store(sums_ptr + v[:, None] * D + d[None, :], total)
