"""Weights in the form that the kernels read, and their gradients, which are sums over all rows of a batch.

A launch works on three linear layers, because each is small. Their weights `[N, K]` are cut into square tiles, whose
side SIDE is the model's width: row by row, one layer after another. NORMED has a bit for each layer that follows the
norm. Its input is xhat * gain + shift: gain and shift become parts of its weights, as dropout's scale does.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def select_layer(layer, a, b, c):
    """The argument that belongs to layer 0, 1 or 2."""
    return tl.where(layer == 1, b, tl.where(layer == 2, c, a))


@triton.jit
def locate_tile(
    tile, N: tl.constexpr, K: tl.constexpr, N1: tl.constexpr, K1: tl.constexpr, N2: tl.constexpr, K2: tl.constexpr,
    SIDE: tl.constexpr,
):  # fmt: skip
    """(The layer of a tile, the layer's N, its K, the tile's first row in it, its first column in it)."""
    first: tl.constexpr = (N // SIDE) * (K // SIDE)
    second: tl.constexpr = first + (N1 // SIDE) * (K1 // SIDE)
    layer = (tile >= first).to(tl.int32) + (tile >= second).to(tl.int32)
    tile -= select_layer(layer, 0, first, second)
    n, k = select_layer(layer, N, N1, N2), select_layer(layer, K, K1, K2)
    return layer, n, k, tile // (k // SIDE) * SIDE, tile % (k // SIDE) * SIDE


@triton.jit(do_not_specialize=["scale"])
def fold_kernel(
    weight_ptr, weight1_ptr, weight2_ptr, bias_ptr, bias1_ptr, bias2_ptr, gain_ptr, shift_ptr,
    half_ptr, half1_ptr, half2_ptr, folded_ptr, folded1_ptr, folded2_ptr, scale,
    N: tl.constexpr, K: tl.constexpr, N1: tl.constexpr, K1: tl.constexpr, N2: tl.constexpr, K2: tl.constexpr,
    SIDE: tl.constexpr, R: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """16-bit weights and biases that include dropout's scale and, for layers in NORMED, gain and shift.

    The scale applies to the output of the first layer, and to the input and the output of the third.
    """
    layer, _, k, n0, k0 = locate_tile(tl.program_id(1), N, K, N1, K1, N2, K2, SIDE)
    n, side = n0 + tl.program_id(0) * R + tl.arange(0, R), k0 + tl.arange(0, SIDE)
    at = n[:, None] * k + side[None, :]
    normed = (((NORMED >> layer) & 1) == 1) & (side >= 0)
    gain = tl.load(gain_ptr + side, mask=normed, other=1.0)
    shift = tl.load(shift_ptr + side, mask=normed, other=0.0)
    weight = tl.load(select_layer(layer, weight_ptr, weight1_ptr, weight2_ptr) + at)
    half = weight * gain[None, :] * select_layer(layer, scale, 1.0, scale * scale)
    tl.store(select_layer(layer, half_ptr, half1_ptr, half2_ptr) + at, half.to(half_ptr.dtype.element_ty))
    if k0 == 0:  # a NORMED layer's K is SIDE
        bias = tl.load(select_layer(layer, bias_ptr, bias1_ptr, bias2_ptr) + n) + tl.sum(weight * shift[None, :], 1)
        tl.store(
            select_layer(layer, folded_ptr, folded1_ptr, folded2_ptr) + n, bias * select_layer(layer, scale, 1.0, scale)
        )


@triton.jit(do_not_specialize=["rows"])
def sum_kernel(
    dy_ptr, x_ptr, dy1_ptr, x1_ptr, dy2_ptr, x2_ptr, sums_ptr, rows,
    N: tl.constexpr, K: tl.constexpr, N1: tl.constexpr, K1: tl.constexpr, N2: tl.constexpr, K2: tl.constexpr,
    SIDE: tl.constexpr, M: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """dyᵀ x of each layer for a part of the rows, and dyᵀ 1 for the biases, which is a product of the same kind.

    `sums_ptr`: `[parts, tiles, SIDE, SIDE + ONES]`.
    """
    part, tile = tl.program_id(0), tl.program_id(1)
    sums_ptr += (part * tl.num_programs(1) + tile) * (SIDE * (SIDE + ONES))
    layer, n, k, n0, k0 = locate_tile(tile, N, K, N1, K1, N2, K2, SIDE)
    side, spare, m = tl.arange(0, SIDE), tl.arange(0, ONES), tl.arange(0, M)
    dy_ptr = select_layer(layer, dy_ptr, dy1_ptr, dy2_ptr) + n0
    x_ptr = select_layer(layer, x_ptr, x1_ptr, x2_ptr) + k0

    weight = tl.zeros([SIDE, SIDE], tl.float32)
    bias = tl.zeros([SIDE, ONES], tl.float32)
    ones = tl.full([M, ONES], 1.0, dy_ptr.dtype.element_ty)
    # upwards, because the previous kernel wrote the first rows last
    for row in range(part * M, rows, tl.num_programs(0) * M):
        first, real = tl.cast(row, tl.int64), (row + m < rows)[:, None]
        dy = tl.load(dy_ptr + first * n + m[:, None] * n + side[None, :], mask=real, other=0.0)
        x = tl.load(x_ptr + first * k + m[:, None] * k + side[None, :], mask=real, other=0.0)
        weight = tl.dot(dy.T, x, weight)
        bias = tl.dot(dy.T, ones, bias)
    sums_ptr += side[:, None] * (SIDE + ONES)
    tl.store(sums_ptr + side[None, :], weight)
    tl.store(sums_ptr + SIDE + spare[None, :], bias)


@triton.jit(do_not_specialize=["parts", "scale"])
def unfold_kernel(
    sums_ptr, weight_ptr, weight1_ptr, weight2_ptr, gain_ptr, shift_ptr,
    dweight_ptr, dweight1_ptr, dweight2_ptr, dbias_ptr, dbias1_ptr, dbias2_ptr, norms_ptr, parts, scale,
    N: tl.constexpr, K: tl.constexpr, N1: tl.constexpr, K1: tl.constexpr, N2: tl.constexpr, K2: tl.constexpr,
    SIDE: tl.constexpr, ONES: tl.constexpr, R: tl.constexpr, P: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """The gradients of the inputs of `fold_kernel`, from the sums of `sum_kernel`, P parts at a time.

    `norms_ptr`: `[2, SIDE, programs]`, each program's share of the gradients of gain and shift.
    """
    chunk, tile = tl.program_id(0), tl.program_id(1)
    layer, _, k, n0, k0 = locate_tile(tile, N, K, N1, K1, N2, K2, SIDE)
    r, side, p = chunk * R + tl.arange(0, R), tl.arange(0, SIDE), tl.arange(0, P)
    size = tl.num_programs(1) * (SIDE * (SIDE + ONES))
    sums_ptr += tile * (SIDE * (SIDE + ONES)) + r * (SIDE + ONES)
    dweight = tl.zeros([R, SIDE], tl.float32)
    dbias = tl.zeros([R], tl.float32)
    for first in range(0, parts, P):
        real = first + p < parts
        at = sums_ptr[None, :] + ((first + p) * size)[:, None]
        dweight += tl.sum(tl.load(at[:, :, None] + side[None, None, :], mask=real[:, None, None], other=0.0), 0)
        dbias += tl.sum(tl.load(at + SIDE, mask=real[:, None], other=0.0), 0)

    n, side = n0 + r, k0 + side
    at = n[:, None] * k + side[None, :]
    normed = (((NORMED >> layer) & 1) == 1) & (side >= 0)
    gain = tl.load(gain_ptr + side, mask=normed, other=1.0)[None, :]
    shift = tl.load(shift_ptr + side, mask=normed, other=0.0)[None, :]
    weight = tl.load(select_layer(layer, weight_ptr, weight1_ptr, weight2_ptr) + at, mask=normed[None, :], other=0.0)
    count = tl.num_programs(0) * tl.num_programs(1)
    norms_ptr += tile * tl.num_programs(0) + chunk + tl.arange(0, SIDE) * count
    tl.store(norms_ptr, tl.sum(weight * dweight, 0))
    tl.store(norms_ptr + SIDE * count, tl.sum(weight * dbias[:, None], 0))
    dweight = (dweight * gain + dbias[:, None] * shift) * select_layer(layer, scale, 1.0, scale * scale)
    tl.store(select_layer(layer, dweight_ptr, dweight1_ptr, dweight2_ptr) + at, dweight)
    if k0 == 0:
        tl.store(
            select_layer(layer, dbias_ptr, dbias1_ptr, dbias2_ptr) + n, dbias * select_layer(layer, scale, 1.0, scale)
        )
