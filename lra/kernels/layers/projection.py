"""What precedes attention in a block, one kernel a pass: the norm, projections to queries, keys and values, rotation.

The forward keeps the normalised rows. The backward gives the gradient of what is normalised and, where queries and keys
were turned, the gradients of what the projections returned, of which those of their weights are made (weights.py).
The norm's gain and shift are parts of the weights.

Shape suffixes as in rows.py, C features of a chunk, H heads of a chunk and P pairs of a head, which rotary positions
turn by their angles (Su et al. 2021, arXiv 2104.09864).
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from lra.kernels.flash.hopper import barrier, product_layout
from lra.kernels.layers.rows import (
    from_product,
    load_rows,
    load_weight,
    multiply,
    normalise,
    normalise_backward,
    of_features,
    operand,
    row_layout,
    store_rows,
)


@gluon.jit
def load_weights(weight_ptr, D: gl.constexpr, C: gl.constexpr, num_warps: gl.constexpr):
    """The three projections' weights in shared memory, `[C, D]` for each chunk of C of their 3 D features."""
    half: gl.constexpr = weight_ptr.dtype.element_ty
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, D], half)
    weight = gl.allocate_shared_memory(half, [3 * D // C, C, D], layout)
    for i in range(3 * D // C):
        load_weight(weight.index(i), weight_ptr + i * C * D, D, num_warps)
    fence_async_shared()
    barrier()
    return weight


@gluon.jit
def turn(x_MC, cos_MP, sin_MP, num_warps: gl.constexpr):
    """Each pair `(x[p], x[p + P])` of each head by its angle, as `lra.models.positions.rotate`."""
    M: gl.constexpr = x_MC.shape[0]
    C: gl.constexpr = x_MC.shape[1]
    P: gl.constexpr = cos_MP.shape[1]
    a_MHP, b_MHP = gl.split(x_MC.reshape(M, C // (2 * P), 2, P).permute(0, 1, 3, 2))
    layout: gl.constexpr = gl.SliceLayout(1, a_MHP.type.layout)
    cos = gl.convert_layout(cos_MP, layout, assert_trivial=True)[:, None, :]
    sin = gl.convert_layout(sin_MP, layout, assert_trivial=True)[:, None, :]
    turned = gl.join(a_MHP * cos - b_MHP * sin, a_MHP * sin + b_MHP * cos).permute(0, 1, 3, 2).reshape(M, C)
    return gl.convert_layout(turned, row_layout(C, num_warps), assert_trivial=True)


@gluon.jit(do_not_specialize=["rows"])
def project_kernel(
    x_ptr, q_ptr, k_ptr, v_ptr, unit_ptr, rstd_ptr, weight_ptr, bias_ptr, cos_ptr, sin_ptr, rows, eps,
    D: gl.constexpr, C: gl.constexpr, P: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """`unit_ptr`: x normalised; `rstd_ptr`: what it was divided by, inverted. P is 0 where nothing is turned."""
    M: gl.constexpr = 16 * num_warps
    half: gl.constexpr = q_ptr.dtype.element_ty
    m = gl.arange(0, M, gl.SliceLayout(1, row_layout(D, num_warps)))
    weight = load_weights(weight_ptr, D, C, num_warps)
    ahead = gl.num_programs(0).to(gl.int64) * M  # of this program's next tile
    AHEAD: gl.constexpr = D == 64  # the next tile's rows are loaded with this one at work; wider, registers are full
    if AHEAD:
        first = gl.program_id(0).to(gl.int64) * M
        x_MD = load_rows(x_ptr, first, m < rows - first, D, D, num_warps)
    for tile in range(gl.program_id(0), gl.cdiv(rows, M), gl.num_programs(0)):
        first = tile.to(gl.int64) * M
        real_M = m < rows - first
        if not AHEAD:
            x_MD = load_rows(x_ptr, first, real_M, D, D, num_warps)
        unit_MD, rstd_M = normalise(x_MD, eps, D)
        unit_MD = unit_MD.to(half)
        if AHEAD:
            x_MD = load_rows(x_ptr, first + ahead, m < rows - first - ahead, D, D, num_warps)
        gl.store(rstd_ptr + first + m, rstd_M, mask=real_M)
        store_rows(unit_ptr, unit_MD, first, real_M, D, num_warps)
        if P:
            cos_MP = load_rows(cos_ptr, first, real_M, P, P, num_warps)
            sin_MP = load_rows(sin_ptr, first, real_M, P, P, num_warps)
        for part in gl.static_range(3):
            for i in range(D // C):
                chunk = part * (D // C) + i
                bias_C = of_features(bias_ptr + chunk * C, C, num_warps)
                y_MC = multiply(unit_MD, weight.index(chunk).permute((1, 0)), num_warps) + bias_C
                if P and part < 2:
                    y_MC = turn(y_MC, cos_MP, sin_MP, num_warps)
                store_rows((q_ptr, k_ptr, v_ptr)[part] + i * C, y_MC.to(half), first, real_M, D, num_warps)


@gluon.jit(do_not_specialize=["rows"])
def project_backward_kernel(
    dq_ptr, dk_ptr, dv_ptr, dy_ptr, unit_ptr, rstd_ptr, weight_ptr, cos_ptr, sin_ptr, dx_ptr, back_q_ptr, back_k_ptr,
    rows, D: gl.constexpr, P: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """dx, with the gradient `dy_ptr` that passes the attention by; dq and dk as they were before they were turned."""
    M: gl.constexpr = 16 * num_warps
    half: gl.constexpr = dq_ptr.dtype.element_ty
    sums: gl.constexpr = product_layout(D, num_warps)
    m = gl.arange(0, M, gl.SliceLayout(1, row_layout(D, num_warps)))
    weight = load_weights(weight_ptr, D, D, num_warps)
    for tile in range(gl.program_id(0), gl.cdiv(rows, M), gl.num_programs(0)):
        first = tile.to(gl.int64) * M
        real_M = m < rows - first
        dq_MD = load_rows(dq_ptr, first, real_M, D, D, num_warps)  # all that registers hold is asked for at once
        dk_MD = load_rows(dk_ptr, first, real_M, D, D, num_warps)
        dv_MD = load_rows(dv_ptr, first, real_M, D, D, num_warps)
        unit_MD = load_rows(unit_ptr, first, real_M, D, D, num_warps)
        rstd_M = gl.load(rstd_ptr + first + m, mask=real_M, other=0.0)
        if P:
            cos_MP = load_rows(cos_ptr, first, real_M, P, P, num_warps)
            sin_MP = load_rows(sin_ptr, first, real_M, P, P, num_warps)
            dq_MD = turn(dq_MD.to(gl.float32), cos_MP, -sin_MP, num_warps).to(half)
            store_rows(back_q_ptr, dq_MD, first, real_M, D, num_warps)
            dk_MD = turn(dk_MD.to(gl.float32), cos_MP, -sin_MP, num_warps).to(half)
            store_rows(back_k_ptr, dk_MD, first, real_M, D, num_warps)
        dunit_MD = gl.zeros([M, D], gl.float32, sums)
        dunit_MD = warpgroup_mma(operand(dq_MD, sums), weight.index(0), dunit_MD)
        dunit_MD = warpgroup_mma(operand(dk_MD, sums), weight.index(1), dunit_MD)
        dy_MD = load_rows(dy_ptr, first, real_M, D, D, num_warps)
        dunit_MD = warpgroup_mma(operand(dv_MD, sums), weight.index(2), dunit_MD)
        dx_MD = normalise_backward(from_product(dunit_MD, num_warps), unit_MD.to(gl.float32), rstd_M, D)
        store_rows(dx_ptr, dx_MD + dy_MD, first, real_M, D, num_warps)
