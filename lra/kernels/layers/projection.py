"""The layers before attention in a block, one kernel a pass: norm, projections to q, k and v, rotary positions.

The forward saves the normalised rows. The backward computes the gradient of the norm's input. If q and k were rotated,
it also computes the gradients before rotation, from which weights.py makes those of the weights. The norm's gain and
shift are parts of the weights.

Shape suffixes are those of rows.py, and C features of a chunk, H heads of a chunk, P pairs of a head. Rotary positions
rotate the pairs by angles (Su et al. 2021, arXiv 2104.09864).
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from lra.kernels.hopper import allocate_barriers, barrier, invalidate_barriers, product_layout
from lra.kernels.layers.rows import (
    as_operand,
    broadcast_bias,
    group_tiles,
    load_bias,
    load_in_layout,
    load_rows,
    load_weight,
    multiply_weight,
    normalise,
    normalise_backward,
    receive_rows,
    request_rows,
    row_layout,
    rows_from_product,
    store_rows,
    tile_first_row,
)

# The arguments of a group of warps: those of the kernel, and tiles in shared memory.
ProjectionArguments = namedtuple(
    "ProjectionArguments",
    "x_desc q_ptr k_ptr v_ptr xhat_ptr rstd_ptr cos_ptr sin_ptr weight bias x_tiles ready rows eps",
)
ProjectionBackwardArguments = namedtuple(
    "ProjectionBackwardArguments",
    "dq_desc dk_desc dv_desc dy_ptr xhat_ptr rstd_ptr cos_ptr sin_ptr dx_ptr back_q_ptr back_k_ptr weight buffers "
    "ready rows",
)


@gluon.jit
def load_projection_weights(weight_ptr, D: gl.constexpr, C: gl.constexpr, num_warps: gl.constexpr):
    """The weights of the three projections in shared memory, `[C, D]` for each chunk of C of their 3 D features."""
    half: gl.constexpr = weight_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], half)
    weight = gl.allocate_shared_memory(half, [3 * D // C, C, D], layout)
    for i in range(3 * D // C):
        load_weight(weight.index(i), weight_ptr + i * C * D, D, num_warps)
    fence_async_shared()
    barrier()
    return weight


@gluon.jit
def apply_rotary(x_MC, cos_MP, sin_MP, num_warps: gl.constexpr):
    """Rotate each pair `(x[p], x[p + P])` of each head by its angle, as `lra.models.positions.rotate`."""
    M: gl.constexpr = x_MC.shape[0]
    C: gl.constexpr = x_MC.shape[1]
    P: gl.constexpr = cos_MP.shape[1]
    x_MC = gl.convert_layout(x_MC, pair_layout(C, P, num_warps))
    a_MHP, b_MHP = gl.split(x_MC.reshape(M, C // (2 * P), 2, P).permute(0, 1, 3, 2))
    layout: gl.constexpr = gl.SliceLayout(1, a_MHP.type.layout)
    cos = gl.convert_layout(cos_MP, layout, assert_trivial=True)[:, None, :]
    sin = gl.convert_layout(sin_MP, layout, assert_trivial=True)[:, None, :]
    turned = gl.join(a_MHP * cos - b_MHP * sin, a_MHP * sin + b_MHP * cos).permute(0, 1, 3, 2).reshape(M, C)
    return gl.convert_layout(turned, row_layout(C, num_warps))


@gluon.constexpr_function
def pair_layout(n, pairs, num_warps):
    """The layout of n features whose pairs are `pairs` apart: one thread has both features of a pair."""
    return row_layout(n, num_warps, pairs // 4)


@gluon.jit
def load_angles(pointer, first, real_M, P: gl.constexpr, num_warps: gl.constexpr):
    return load_in_layout(pointer, first, real_M, P, P, pair_layout(P, P, num_warps), num_warps)


@gluon.jit
def project_tiles(args, P: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr, num_warps: gl.constexpr):
    """The tiles of group INDEX of a program's GROUPS."""
    rows, outputs = args.rows, (args.q_ptr, args.k_ptr, args.v_ptr)
    M: gl.constexpr = args.x_tiles.shape[1]
    D: gl.constexpr = args.x_tiles.shape[2]
    C: gl.constexpr = args.weight.shape[1]
    half: gl.constexpr = args.q_ptr.dtype.element_ty
    layout: gl.constexpr = row_layout(D, num_warps)
    m = gl.arange(0, M, gl.SliceLayout(1, layout))
    x_tile, x_ready = args.x_tiles.index(INDEX), args.ready.index(INDEX)
    begin, tiles, step = group_tiles(rows, M, INDEX, GROUPS)
    first = tile_first_row(begin, tiles, rows, M)
    phase = 0
    request_rows(args.x_desc, first, x_tile, x_ready, first < rows)
    for tile in range(begin, tiles, step):
        first, following = tile_first_row(tile, tiles, rows, M), tile_first_row(tile + step, tiles, rows, M)
        real_M = m < rows - first
        x_MD = receive_rows(args.x_desc, following, rows, x_tile, x_ready, phase, num_warps)
        phase = phase ^ 1
        xhat_MD, rstd_M = normalise(x_MD, args.eps, D)
        xhat_MD = xhat_MD.to(half)
        gl.store(args.rstd_ptr + first + m, rstd_M, mask=real_M)
        store_rows(args.xhat_ptr, xhat_MD, first, real_M, D, num_warps)
        if P:
            cos_MP = load_angles(args.cos_ptr, first, real_M, P, num_warps)
            sin_MP = load_angles(args.sin_ptr, first, real_M, P, num_warps)
        for part in gl.static_range(3):
            for i in range(D // C):
                chunk = part * (D // C) + i
                y_MC = multiply_weight(xhat_MD, args.weight.index(chunk).permute((1, 0)), num_warps)
                y_MC += broadcast_bias(args.bias.index(chunk), num_warps)
                if P and part < 2:
                    y_MC = apply_rotary(y_MC, cos_MP, sin_MP, num_warps)
                store_rows(outputs[part] + i * C, y_MC.to(half), first, real_M, D, num_warps)


@gluon.jit(do_not_specialize=["rows"])
def project_kernel(
    x_desc, q_ptr, k_ptr, v_ptr, xhat_ptr, rstd_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, rows, eps,
    D: gl.constexpr, C: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`xhat_ptr`: x normalised. `rstd_ptr`: the inverse of its deviation. P is 0 without rotary positions."""
    x_tiles = gl.allocate_shared_memory(gl.float32, [GROUPS, 16 * num_warps, D], x_desc.layout)
    ready = allocate_barriers(GROUPS)
    bias = load_bias(bias_ptr, 3 * D // C, C, num_warps)
    weight = load_projection_weights(weight_ptr, D, C, num_warps)
    args = ProjectionArguments(
        x_desc=x_desc, q_ptr=q_ptr, k_ptr=k_ptr, v_ptr=v_ptr, xhat_ptr=xhat_ptr, rstd_ptr=rstd_ptr, cos_ptr=cos_ptr,
        sin_ptr=sin_ptr, weight=weight, bias=bias, x_tiles=x_tiles, ready=ready, rows=rows, eps=eps,
    )  # fmt: skip
    if GROUPS == 1:
        project_tiles(args, P, 0, GROUPS, num_warps)
    else:
        gl.warp_specialize(
            [(project_tiles, (args, P, gl.constexpr(i), GROUPS, num_warps)) for i in (0, 1, 2, 3)],
            [num_warps, num_warps, num_warps], [128, 128, 128],  # registers of a thread; the first has the rest of 512
        )  # fmt: skip
    invalidate_barriers(ready)


@gluon.jit
def project_backward_tiles(args, P: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr, num_warps: gl.constexpr):
    """The tiles of group INDEX of a program's GROUPS."""
    descs, turned_back = (args.dq_desc, args.dk_desc, args.dv_desc), (args.back_q_ptr, args.back_k_ptr)
    buffers, ready, rows = args.buffers, args.ready, args.rows
    M: gl.constexpr = buffers.shape[1]
    D: gl.constexpr = buffers.shape[2]
    half: gl.constexpr = args.xhat_ptr.dtype.element_ty
    sums: gl.constexpr = product_layout(D, num_warps)
    m = gl.arange(0, M, gl.SliceLayout(1, row_layout(D, num_warps)))
    begin, tiles, step = group_tiles(rows, M, INDEX, GROUPS)
    first = tile_first_row(begin, tiles, rows, M)
    phase = 0
    for part in gl.static_range(3):
        request_rows(descs[part], first, buffers.index(3 * INDEX + part), ready.index(3 * INDEX + part), first < rows)
    for tile in range(begin, tiles, step):
        first, following = tile_first_row(tile, tiles, rows, M), tile_first_row(tile + step, tiles, rows, M)
        real_M = m < rows - first
        xhat_MD = load_rows(args.xhat_ptr, first, real_M, D, D, num_warps)
        rstd_M = gl.load(args.rstd_ptr + first + m, mask=real_M, other=0.0)
        dxhat_MD = gl.zeros([M, D], gl.float32, sums)
        for part in gl.static_range(2):
            buffer, arrived = buffers.index(3 * INDEX + part), ready.index(3 * INDEX + part)
            d_MD = receive_rows(descs[part], following, rows, buffer, arrived, phase, num_warps)
            if P:
                cos_MP = load_angles(args.cos_ptr, first, real_M, P, num_warps)
                sin_MP = load_angles(args.sin_ptr, first, real_M, P, num_warps)
                d_MD = apply_rotary(d_MD.to(gl.float32), cos_MP, -sin_MP, num_warps).to(half)
                store_rows(turned_back[part], d_MD, first, real_M, D, num_warps)
            dxhat_MD = warpgroup_mma(as_operand(d_MD, sums), args.weight.index(part), dxhat_MD)
        buffer, arrived = buffers.index(3 * INDEX + 2), ready.index(3 * INDEX + 2)
        dv_MD = receive_rows(descs[2], following, rows, buffer, arrived, phase, num_warps)
        dy_MD = load_rows(args.dy_ptr, first, real_M, D, D, num_warps)  # an earlier load would exceed the registers
        dxhat_MD = warpgroup_mma(as_operand(dv_MD, sums), args.weight.index(2), dxhat_MD)
        phase = phase ^ 1
        dx_MD = normalise_backward(rows_from_product(dxhat_MD, num_warps), xhat_MD.to(gl.float32), rstd_M, D) + dy_MD
        store_rows(args.dx_ptr, dx_MD, first, real_M, D, num_warps)


@gluon.jit(do_not_specialize=["rows"])
def project_backward_kernel(
    dq_desc, dk_desc, dv_desc, dy_ptr, xhat_ptr, rstd_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, back_q_ptr, back_k_ptr,
    rows, D: gl.constexpr, P: gl.constexpr, GROUPS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dx, which includes `dy_ptr`, the gradient that bypasses attention; dq and dk before rotation."""
    buffers = gl.allocate_shared_memory(dq_desc.dtype, [3 * GROUPS, 16 * num_warps, D], dq_desc.layout)
    ready = allocate_barriers(3 * GROUPS)
    weight = load_projection_weights(weight_ptr, D, D, num_warps)
    args = ProjectionBackwardArguments(
        dq_desc=dq_desc, dk_desc=dk_desc, dv_desc=dv_desc, dy_ptr=dy_ptr, xhat_ptr=xhat_ptr, rstd_ptr=rstd_ptr,
        cos_ptr=cos_ptr, sin_ptr=sin_ptr, dx_ptr=dx_ptr, back_q_ptr=back_q_ptr, back_k_ptr=back_k_ptr, weight=weight,
        buffers=buffers, ready=ready, rows=rows,
    )  # fmt: skip
    if GROUPS == 1:
        project_backward_tiles(args, P, 0, GROUPS, num_warps)
    else:
        gl.warp_specialize(
            [(project_backward_tiles, (args, P, gl.constexpr(i), GROUPS, num_warps)) for i in (0, 1)],
            [num_warps], [256],  # registers of a thread in the second group; the first has what is left of 512
        )  # fmt: skip
    invalidate_barriers(ready)
