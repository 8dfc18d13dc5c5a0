"""The layers after attention in a block, one kernel a pass: projection, residual, norm, feed-forward and residual.

    y = z + drop(down(drop(gelu(up(norm(z)))))),  z = x + drop(out(o))

As separate kernels these layers would read and write some 15 tensors of a batch's rows, which takes longer than the
arithmetic. A program holds the weights in shared memory and works on one tile of rows after another, in chunks of
hidden features. The forward saves the normalised rows. The backward computes the hidden features again, and writes the
operands of the weights' gradients: these are sums over all rows, which weights.py computes.

The norm's gain and shift and dropout's scale are parts of the weights. Norm, GELU, residuals and sums are in fp32.
Operands of products have 16 bits.

POOLED is for the last block: the model takes the mean of its normalised rows over each sequence. The kernel writes y
normalised. The gradient of y comes from the gradients of the sequences.

Shape suffixes are those of rows.py, and C hidden features of a chunk.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma

from lra.kernels.hopper import allocate_barriers, barrier, invalidate_barriers, product_layout
from lra.kernels.layers.rows import (
    as_operand,
    broadcast_bias,
    drop_features,
    group_tiles,
    load_bias,
    load_keys,
    load_rows,
    load_weight,
    multiply_weight,
    normalise,
    normalise_backward,
    prefetch_rows,
    receive_rows,
    request_rows,
    row_layout,
    rows_from_product,
    store_rows,
    tile_first_row,
)

# The arguments of a group of warps: those of the kernel, and tiles in shared memory.
FeedForwardWeights = namedtuple("FeedForwardWeights", "out up down")  # as `load_feed_forward_weights` describes them
FeedForwardArguments = namedtuple(
    "FeedForwardArguments",
    "o_ptr x_desc y_ptr xhat_ptr rstd_ptr keys_ptr final_rstd_ptr weights out_bias up_bias down_bias x_tiles ready "
    "rows eps final_eps site threshold",
)
PooledArguments = namedtuple("PooledArguments", "dsums_ptr of_row_ptr final_ptr final_rstd_ptr")
FeedForwardBackwardArguments = namedtuple(
    "FeedForwardBackwardArguments",
    "dy_desc pooled xhat_ptr rstd_ptr keys_ptr weights up_bias dx_ptr do_ptr dout_ptr du_ptr h_ptr ddown_ptr "
    "dy_tiles ready rows site threshold",
)


@gluon.jit
def normal_pdf(u):
    """The density of the standard normal distribution."""
    return gl.exp2(u * u * -0.7213475204444817 - 1.3257480647361593)


@gluon.jit
def normal_cdf(u):
    """The standard normal distribution function, GELU's factor of u. Its error, also times u, is within 3.2e-5.

    It is a logistic function of an odd polynomial, fitted here. More precision would be lost in 16 bits.
    """
    square = gl.minimum(u * u, 40.0)  # beyond it the polynomial turns back, and the result is 0 or 1
    exponent = u * (-2.301467 + square * (-0.1065446 + square * 0.00098442))
    root = gl.rsqrt(1.0 + gl.exp2(exponent))  # its square is the inverse, in fewer instructions
    return root * root


@gluon.jit
def load_feed_forward_weights(
    out_ptr, up_ptr, down_ptr, D: gl.constexpr, F: gl.constexpr, C: gl.constexpr, num_warps: gl.constexpr
):
    """The weights in shared memory: `out` [D, D] and, for each chunk of hidden features, `up` [C, D], `down` [D, C]."""
    half: gl.constexpr = out_ptr.dtype.element_ty
    square: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, D], half)
    tall: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], half)
    flat: gl.constexpr = gl.NVMMASharedLayout.get_default_for([D, C], half)
    out = gl.allocate_shared_memory(half, [D, D], square)
    up = gl.allocate_shared_memory(half, [F // C, C, D], tall)
    down = gl.allocate_shared_memory(half, [F // C, D, C], flat)
    load_weight(out, out_ptr, D, num_warps)
    for i in range(F // C):
        load_weight(up.index(i), up_ptr + i * C * D, D, num_warps)
        load_weight(down.index(i), down_ptr + i * C, F, num_warps)
    fence_async_shared()
    barrier()
    return FeedForwardWeights(out, up, down)


@gluon.jit
def feed_forward_tiles(
    args, DROPOUT: gl.constexpr, POOLED: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The tiles of group INDEX of a program's GROUPS."""
    weights, rows = args.weights, args.rows
    M: gl.constexpr = args.x_tiles.shape[1]
    D: gl.constexpr = args.x_tiles.shape[2]
    CHUNKS: gl.constexpr = weights.up.shape[0]
    C: gl.constexpr = weights.up.shape[1]
    half: gl.constexpr = args.o_ptr.dtype.element_ty
    layout: gl.constexpr = row_layout(D, num_warps)
    sums: gl.constexpr = product_layout(D, num_warps)
    m = gl.arange(0, M, gl.SliceLayout(1, layout))
    x_tile, x_ready = args.x_tiles.index(INDEX), args.ready.index(INDEX)
    begin, tiles, step = group_tiles(rows, M, INDEX, GROUPS)
    first = tile_first_row(begin, tiles, rows, M)
    phase = 0
    request_rows(args.x_desc, first, x_tile, x_ready, first < rows)
    o_MD = load_rows(args.o_ptr, first, m < rows - first, D, D, num_warps)
    for tile in range(begin, tiles, step):
        first, following = tile_first_row(tile, tiles, rows, M), tile_first_row(tile + step, tiles, rows, M)
        real_M = m < rows - first
        keys_M = load_keys(args.keys_ptr, first, real_M, D, DROPOUT, num_warps)
        prefetch_rows(args.o_ptr, following, rows, D, num_warps)
        bias_D = broadcast_bias(args.out_bias.index(0), num_warps)
        z_MD = multiply_weight(o_MD, weights.out.permute((1, 0)), num_warps) + bias_D
        x_MD = receive_rows(args.x_desc, following, rows, x_tile, x_ready, phase, num_warps)
        phase = phase ^ 1
        z_MD = x_MD + drop_features(z_MD, keys_M, args.site, 0, args.threshold, DROPOUT, num_warps)
        xhat_MD, rstd_M = normalise(z_MD, args.eps, D)
        xhat_MD = xhat_MD.to(half)
        gl.store(args.rstd_ptr + first + m, rstd_M, mask=real_M)
        store_rows(args.xhat_ptr, xhat_MD, first, real_M, D, num_warps)

        y_MD = gl.zeros([M, D], gl.float32, sums)
        for i in range(CHUNKS):
            bias_C = broadcast_bias(args.up_bias.index(i), num_warps)
            u_MC = multiply_weight(xhat_MD, weights.up.index(i).permute((1, 0)), num_warps) + bias_C
            h_MC = (u_MC * normal_cdf(u_MC)).to(half)
            h_MC = drop_features(h_MC, keys_M, args.site + 1, i * C, args.threshold, DROPOUT, num_warps)
            y_MD = warpgroup_mma(as_operand(h_MC, sums), weights.down.index(i).permute((1, 0)), y_MD)
        o_MD = load_rows(args.o_ptr, following, m < rows - following, D, D, num_warps)
        dy_MD = rows_from_product(y_MD, num_warps) + broadcast_bias(args.down_bias.index(0), num_warps)
        z_MD += drop_features(dy_MD, keys_M, args.site + 2, 0, args.threshold, DROPOUT, num_warps)
        if POOLED:
            z_MD, final_rstd_M = normalise(z_MD, args.final_eps, D)
            z_MD = z_MD.to(half)
            gl.store(args.final_rstd_ptr + first + m, final_rstd_M, mask=real_M)
        store_rows(args.y_ptr, z_MD, first, real_M, D, num_warps)


@gluon.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_kernel(
    o_ptr, x_desc, y_ptr, xhat_ptr, rstd_ptr, keys_ptr, final_rstd_ptr, out_ptr, out_bias_ptr, up_ptr, up_bias_ptr,
    down_ptr, down_bias_ptr, rows, eps, final_eps, site, threshold,
    D: gl.constexpr, F: gl.constexpr, C: gl.constexpr, DROPOUT: gl.constexpr, POOLED: gl.constexpr,
    GROUPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`xhat_ptr`: z normalised. `rstd_ptr`: the inverse of its deviation. `final_rstd_ptr`: that of y."""
    x_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS, 16 * num_warps, D], x_desc.layout)
    ready = allocate_barriers(GROUPS)
    out_bias = load_bias(out_bias_ptr, 1, D, num_warps)
    up_bias = load_bias(up_bias_ptr, F // C, C, num_warps)
    down_bias = load_bias(down_bias_ptr, 1, D, num_warps)
    weights = load_feed_forward_weights(out_ptr, up_ptr, down_ptr, D, F, C, num_warps)
    args = FeedForwardArguments(
        o_ptr=o_ptr, x_desc=x_desc, y_ptr=y_ptr, xhat_ptr=xhat_ptr, rstd_ptr=rstd_ptr, keys_ptr=keys_ptr,
        final_rstd_ptr=final_rstd_ptr, weights=weights, out_bias=out_bias, up_bias=up_bias, down_bias=down_bias,
        x_tiles=x_tiles, ready=ready, rows=rows, eps=eps, final_eps=final_eps, site=site, threshold=threshold,
    )  # fmt: skip
    if GROUPS == 1:
        feed_forward_tiles(args, DROPOUT, POOLED, 0, GROUPS, num_warps)
    else:
        gl.warp_specialize(
            [(feed_forward_tiles, (args, DROPOUT, POOLED, gl.constexpr(i), GROUPS, num_warps)) for i in (0, 1)],
            [num_warps], [256],  # registers of a thread in the second group; the first has what is left of 512
        )  # fmt: skip
    invalidate_barriers(ready)


@gluon.jit
def pooled_gradient(pooled, first, real_M, D: gl.constexpr, num_warps: gl.constexpr):
    """The gradient of a tile of rows, from that of the sums of normalised rows over sequences."""
    layout: gl.constexpr = row_layout(D, num_warps)
    m, d = gl.arange(0, 16 * num_warps, gl.SliceLayout(1, layout)), gl.arange(0, D, gl.SliceLayout(0, layout))
    xhat_MD = load_rows(pooled.final_ptr, first, real_M, D, D, num_warps)
    sequence_M = gl.load(pooled.of_row_ptr + first + m, mask=real_M, other=-1)
    rstd_M = gl.load(pooled.final_rstd_ptr + first + m, mask=real_M, other=0.0)
    at = sequence_M[:, None] * D + d[None, :]
    dxhat_MD = gl.load(pooled.dsums_ptr + at, mask=(sequence_M >= 0)[:, None], other=0.0)
    return normalise_backward(dxhat_MD, xhat_MD.to(gl.float32), rstd_M, D)


@gluon.jit
def feed_forward_backward_tiles(
    args, DROPOUT: gl.constexpr, POOLED: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """The tiles of group INDEX of a program's GROUPS."""
    weights, rows = args.weights, args.rows
    M: gl.constexpr = args.dy_tiles.shape[1]
    D: gl.constexpr = args.dy_tiles.shape[2]
    CHUNKS: gl.constexpr = weights.up.shape[0]
    C: gl.constexpr = weights.up.shape[1]
    half: gl.constexpr = args.xhat_ptr.dtype.element_ty
    layout: gl.constexpr = row_layout(D, num_warps)
    sums: gl.constexpr = product_layout(D, num_warps)
    m = gl.arange(0, M, gl.SliceLayout(1, layout))
    dy_tile, dy_ready = args.dy_tiles.index(INDEX), args.ready.index(INDEX)
    begin, tiles, step = group_tiles(rows, M, INDEX, GROUPS)
    first = tile_first_row(begin, tiles, rows, M)
    phase = 0
    if not POOLED:
        request_rows(args.dy_desc, first, dy_tile, dy_ready, first < rows)
    for tile in range(begin, tiles, step):
        first = tile_first_row(tile, tiles, rows, M)
        real_M = m < rows - first
        keys_M = load_keys(args.keys_ptr, first, real_M, D, DROPOUT, num_warps)
        xhat_MD = load_rows(args.xhat_ptr, first, real_M, D, D, num_warps)
        rstd_M = gl.load(args.rstd_ptr + first + m, mask=real_M, other=0.0)
        if POOLED:
            dy_tile.store(pooled_gradient(args.pooled, first, real_M, D, num_warps))
        else:
            mbarrier.wait(dy_ready, phase)
        ddown_MD = drop_features(
            dy_tile.load(layout).to(half), keys_M, args.site + 2, 0, args.threshold, DROPOUT, num_warps
        )
        store_rows(args.ddown_ptr, ddown_MD, first, real_M, D, num_warps)

        dxhat_MD = gl.zeros([M, D], gl.float32, sums)
        for i in range(CHUNKS):
            bias_C = broadcast_bias(args.up_bias.index(i), num_warps)
            u_MC = multiply_weight(xhat_MD, weights.up.index(i).permute((1, 0)), num_warps) + bias_C
            cdf_MC = normal_cdf(u_MC)
            h_MC = (u_MC * cdf_MC).to(half)
            h_MC = drop_features(h_MC, keys_M, args.site + 1, i * C, args.threshold, DROPOUT, num_warps)
            du_MC = multiply_weight(ddown_MD, weights.down.index(i), num_warps) * (cdf_MC + u_MC * normal_pdf(u_MC))
            du_MC = drop_features(du_MC.to(half), keys_M, args.site + 1, i * C, args.threshold, DROPOUT, num_warps)
            store_rows(args.h_ptr + i * C, h_MC, first, real_M, CHUNKS * C, num_warps)
            store_rows(args.du_ptr + i * C, du_MC, first, real_M, CHUNKS * C, num_warps)
            dxhat_MD = warpgroup_mma(as_operand(du_MC, sums), weights.up.index(i), dxhat_MD)

        dz_MD = normalise_backward(rows_from_product(dxhat_MD, num_warps), xhat_MD.to(gl.float32), rstd_M, D)
        # read dy again: without this barrier the compiler would keep it in registers, which others need
        if POOLED:
            barrier()
        else:
            mbarrier.wait(dy_ready, phase)
            phase = phase ^ 1
        dz_MD += dy_tile.load(layout)
        if not POOLED:
            barrier()
            following = tile_first_row(tile + step, tiles, rows, M)
            request_rows(args.dy_desc, following, dy_tile, dy_ready, following < rows)
        store_rows(args.dx_ptr, dz_MD, first, real_M, D, num_warps)
        dout_MD = drop_features(dz_MD.to(half), keys_M, args.site, 0, args.threshold, DROPOUT, num_warps)
        store_rows(args.dout_ptr, dout_MD, first, real_M, D, num_warps)
        store_rows(args.do_ptr, multiply_weight(dout_MD, weights.out, num_warps).to(half), first, real_M, D, num_warps)


@gluon.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_backward_kernel(
    dy_desc, dsums_ptr, of_row_ptr, final_ptr, final_rstd_ptr, xhat_ptr, rstd_ptr, keys_ptr, out_ptr, up_ptr,
    up_bias_ptr, down_ptr, dx_ptr, do_ptr, dout_ptr, du_ptr, h_ptr, ddown_ptr, rows, site, threshold,
    D: gl.constexpr, F: gl.constexpr, C: gl.constexpr, DROPOUT: gl.constexpr, POOLED: gl.constexpr,
    GROUPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dx and do; the gradients of the outputs of the three linear layers; and h, the input of `down`.

    POOLED: instead of `dy_desc` there are `dsums_ptr`, a gradient for each sequence, and `of_row_ptr`, each row's
    sequence.
    """
    M: gl.constexpr = 16 * num_warps
    tile_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], gl.float32)
    dy_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS, M, D], tile_layout)
    ready = allocate_barriers(GROUPS)
    up_bias = load_bias(up_bias_ptr, F // C, C, num_warps)
    weights = load_feed_forward_weights(out_ptr, up_ptr, down_ptr, D, F, C, num_warps)
    args = FeedForwardBackwardArguments(
        dy_desc=dy_desc, pooled=PooledArguments(dsums_ptr, of_row_ptr, final_ptr, final_rstd_ptr), xhat_ptr=xhat_ptr,
        rstd_ptr=rstd_ptr, keys_ptr=keys_ptr, weights=weights, up_bias=up_bias, dx_ptr=dx_ptr, do_ptr=do_ptr,
        dout_ptr=dout_ptr, du_ptr=du_ptr, h_ptr=h_ptr, ddown_ptr=ddown_ptr, dy_tiles=dy_tiles, ready=ready,
        rows=rows, site=site, threshold=threshold,
    )  # fmt: skip
    if GROUPS == 1:
        feed_forward_backward_tiles(args, DROPOUT, POOLED, 0, GROUPS, num_warps)
    else:
        gl.warp_specialize(
            [
                (feed_forward_backward_tiles, (args, DROPOUT, POOLED, gl.constexpr(i), GROUPS, num_warps))
                for i in (0, 1)
            ],
            [num_warps], [256],
        )  # fmt: skip
    invalidate_barriers(ready)
