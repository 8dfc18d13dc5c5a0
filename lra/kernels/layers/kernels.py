"""Parts of a pre-norm Transformer block of width 64, one kernel each way: feed-forward, LayerNorm with the projection
to q, k and v, output projection.

LayerNorm's gain g and shift s are folded into the weight behind it, W (g * xhat + s) + b = (W g) xhat + (b + W s). So
the kernels see only the normalised rows xhat, and of the gradients only S = dh^T xhat and db, from which the others
follow: dW = S g + db s^T, dg = sum of W S over the rows of W, ds = W^T db. A program goes over tiles of rows with the
weights in its registers or shared memory and keeps its own sums of the weights' gradients; those of the programs
are added by small kernels, always in the same order: nothing is atomic, every result is bitwise the same again.

Suffixes: M rows of a tile, D model width, F features of the feed-forward's hidden layer, C those worked on at a time,
N rows of a weight.
"""

# ruff: noqa: RUF005 - Triton adds tuples and cannot unpack them
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportReturnType=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BITS = 24  # of a hash that decide, as in lra/models/dropout.py
LOWEST = tl.constexpr((1 << BITS) - 1)
EPS = tl.constexpr(1e-5)  # of nn.LayerNorm
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


# ----------------------------------------------------------------------------------------------------------- parts


@triton.jit
def mix(x):
    """`mix` of lra/models/dropout.py, on uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def drop(x_MN, key_M, column_N, site, threshold, scale, DROPOUT: tl.constexpr):
    """`drop` of lra/models/dropout.py; columns are features."""
    if DROPOUT:
        bits_MN = mix(mix(key_M + site.to(tl.uint32))[:, None] + column_N.to(tl.uint32)[None, :])
        x_MN = tl.where((bits_MN & LOWEST) >= threshold.to(tl.uint32), x_MN * scale, 0.0)
    return x_MN


@triton.jit
def load_keys(key_ptr, row_M, inside_M, DROPOUT: tl.constexpr):
    """uint32 `[M]`; without dropout anything."""
    if DROPOUT:
        return tl.load(key_ptr + row_M, mask=inside_M, other=0).to(tl.uint32, bitcast=True)
    else:
        return inside_M


@triton.jit
def load_rows(ptr, tile, inside_M, M: tl.constexpr, D: tl.constexpr):
    """A tile of contiguous rows `[T, D]`; zeros past the last row."""
    i_MD = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(ptr + tl.full([], M * D, tl.int64) * tile + i_MD, mask=inside_M[:, None], other=0.0)


@triton.jit
def store_rows(ptr, x_MD, tile, inside_M, M: tl.constexpr, D: tl.constexpr):
    i_MD = tl.arange(0, M)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(ptr + tl.full([], M * D, tl.int64) * tile + i_MD, x_MD.to(ptr.dtype.element_ty), mask=inside_M[:, None])


@triton.jit
def load_matrix(ptr, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.load(ptr + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def store_matrix(ptr, x, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    tl.store(ptr + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :], x)


@triton.jit
def load_folded(w_ptr, b_ptr, gain_ptr, shift_ptr, N: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr):
    """W g in the products' type `[N, D]`, and b + W s, fp32 `[N]`."""
    d = tl.arange(0, D)
    w_ND = load_matrix(w_ptr, D, N, D)
    b_N = tl.load(b_ptr + tl.arange(0, N)) + tl.sum(w_ND * tl.load(shift_ptr + d)[None, :], 1)
    return (w_ND * tl.load(gain_ptr + d)[None, :]).to(DOT), b_N


@triton.jit
def normalize(x_MD, D: tl.constexpr):
    """xhat, and 1 / the standard deviation."""
    x_MD -= (tl.sum(x_MD, 1) * (1.0 / D))[:, None]
    scale_M = tl.rsqrt(tl.sum(x_MD * x_MD, 1) * (1.0 / D) + EPS)
    return x_MD * scale_M[:, None], scale_M


@triton.jit
def normalize_backward(dxhat_MD, xhat_MD, scale_M, D: tl.constexpr):
    mean_M = tl.sum(dxhat_MD, 1) * (1.0 / D)
    along_M = tl.sum(dxhat_MD * xhat_MD, 1) * (1.0 / D)
    return (dxhat_MD - mean_M[:, None] - xhat_MD * along_M[:, None]) * scale_M[:, None]


@triton.jit
def normal(h):
    """Distribution function and density of the normal distribution; the first to 1e-7.

    Abramowitz and Stegun 7.1.26: the exponential that the density needs is the one of the series.
    """
    if INTERPRETED:
        e = tl.exp2(h * h * -0.7213475204444817)
        t = 1.0 / (1.0 + 0.23164189 * tl.abs(h))
    else:  # one instruction each: exp2 and the division take seven more, for denormal numbers
        u = h * 0.8493218002880191
        e = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [-u * u], tl.float32, True, 1)
        t = 1.0 + 0.23164189 * tl.abs(h)
        t = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [t], tl.float32, True, 1)
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * e
    return tl.where(h < 0, tail, 1.0 - tail), e * 0.3989422804014327


# ---------------------------------------------------------------------------------------------------- feed-forward


@triton.jit
def load_chunks(
    w1_ptr, b1_ptr, gain_ptr, shift_ptr, w2_ptr, bias_ptr,
    F: tl.constexpr, C: tl.constexpr, D: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Of each C hidden features: rows of W1, folded, and columns of W2.

    The folded bias goes to memory of the program's own: in registers it would be there once for each row of threads.
    """
    w1s, w2s = (), ()
    for i in tl.static_range(F // C):
        w1_CD, b1_C = load_folded(w1_ptr + i * C * D, b1_ptr + i * C, gain_ptr, shift_ptr, C, D, DOT)
        tl.store(bias_ptr + i * C + tl.arange(0, C), b1_C)
        w1s = w1s + (w1_CD,)
        w2s = w2s + (load_matrix(w2_ptr + i * C, F, D, C).to(DOT),)
    tl.debug_barrier()
    return w1s, w2s


@triton.jit
def zeros(COUNT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    made = ()
    for _ in tl.static_range(COUNT):
        made = made + (tl.zeros([ROWS, COLUMNS], tl.float32),)
    return made


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_kernel(
    x_ptr, key_ptr, gain_ptr, shift_ptr, w1_ptr, b1_ptr, w2_ptr, b2_ptr, y_ptr, bias_ptr,
    rows, site, threshold, scale,
    D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, DROPOUT: tl.constexpr, DOT: tl.constexpr,
    M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The hidden layer is worked through by C of its features, for which registers have room."""
    d = tl.arange(0, D)
    bias_ptr += tl.program_id(0) * F
    w1s, w2s = load_chunks(w1_ptr, b1_ptr, gain_ptr, shift_ptr, w2_ptr, bias_ptr, F, C, D, DOT)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0), num_stages=STAGES):
        row_M = tile * M + tl.arange(0, M)
        inside_M = row_M < rows
        key_M = load_keys(key_ptr, row_M, inside_M, DROPOUT)
        x_MD = load_rows(x_ptr, tile, inside_M, M, D)
        xhat_MD, _ = normalize(x_MD, D)
        xh_MD = xhat_MD.to(DOT)
        y_MD = tl.zeros([M, D], tl.float32)
        for i in tl.static_range(F // C):
            c = i * C + tl.arange(0, C)
            h_MC = tl.dot(xh_MD, tl.trans(w1s[i]), input_precision="ieee") + tl.load(bias_ptr + c)[None, :]
            cdf_MC, _ = normal(h_MC)
            a_MC = drop(h_MC * cdf_MC, key_M, c, site, threshold, scale, DROPOUT)
            y_MD = tl.dot(a_MC.to(DOT), tl.trans(w2s[i]), y_MD, input_precision="ieee")
        y_MD = x_MD + drop(y_MD + tl.load(b2_ptr + d)[None, :], key_M, d, site + 1, threshold, scale, DROPOUT)
        store_rows(y_ptr, y_MD, tile, inside_M, M, D)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_backward_kernel(
    x_ptr, key_ptr, gain_ptr, shift_ptr, w1_ptr, b1_ptr, w2_ptr, dy_ptr, dx_ptr, sum_ptr, bias_ptr,
    rows, site, threshold, scale,
    D: tl.constexpr, F: tl.constexpr, C: tl.constexpr, DROPOUT: tl.constexpr, DOT: tl.constexpr,
    M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and sums: S^T `[D, F]`, db1 `[F]`, dW2 `[D, F]`, db2 `[D]`."""
    COUNT: tl.constexpr = F // C
    d = tl.arange(0, D)
    bias_ptr += tl.program_id(0) * F
    w1s, w2s = load_chunks(w1_ptr, b1_ptr, gain_ptr, shift_ptr, w2_ptr, bias_ptr, F, C, D, DOT)
    dw2s, ss, db1s = zeros(COUNT, D, C), zeros(COUNT, D, C), zeros(COUNT, 1, C)
    db2_D = tl.zeros([D], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0), num_stages=STAGES):
        row_M = tile * M + tl.arange(0, M)
        inside_M = row_M < rows
        key_M = load_keys(key_ptr, row_M, inside_M, DROPOUT)
        x_MD = load_rows(x_ptr, tile, inside_M, M, D)
        dy_MD = load_rows(dy_ptr, tile, inside_M, M, D)
        xhat_MD, scale_M = normalize(x_MD, D)
        dz_MD = drop(dy_MD, key_M, d, site + 1, threshold, scale, DROPOUT)
        xh_MD, dzh_MD = xhat_MD.to(DOT), dz_MD.to(DOT)
        dxhat_MD = tl.zeros([M, D], tl.float32)
        db2_D += tl.sum(dz_MD, 0)
        new_dw2s, new_ss, new_db1s = (), (), ()
        for i in tl.static_range(COUNT):
            c = i * C + tl.arange(0, C)
            h_MC = tl.dot(xh_MD, tl.trans(w1s[i]), input_precision="ieee") + tl.load(bias_ptr + c)[None, :]
            da_MC = tl.dot(dzh_MD, w2s[i], input_precision="ieee")
            cdf_MC, density_MC = normal(h_MC)
            a_MC, slope_MC = h_MC * cdf_MC, cdf_MC + h_MC * density_MC
            if DROPOUT:  # the mask's factors are those of 1
                keep_MC = tl.full([M, C], 1.0, tl.float32)
                keep_MC = drop(keep_MC, key_M, c, site, threshold, scale, DROPOUT)
                a_MC, slope_MC = a_MC * keep_MC, slope_MC * keep_MC
            dh_MC = da_MC * slope_MC
            dhh_MC = dh_MC.to(DOT)
            new_dw2s = new_dw2s + (tl.dot(tl.trans(dzh_MD), a_MC.to(DOT), dw2s[i], input_precision="ieee"),)
            new_ss = new_ss + (tl.dot(tl.trans(xh_MD), dhh_MC, ss[i], input_precision="ieee"),)
            new_db1s = new_db1s + (db1s[i] + tl.sum(dh_MC, 0)[None, :],)
            dxhat_MD = tl.dot(dhh_MC, w1s[i], dxhat_MD, input_precision="ieee")
        dw2s, ss, db1s = new_dw2s, new_ss, new_db1s
        dx_MD = dy_MD + normalize_backward(dxhat_MD, xhat_MD, scale_M, D)
        store_rows(dx_ptr, dx_MD, tile, inside_M, M, D)
    sum_ptr += tl.program_id(0).to(tl.int64) * (2 * D * F + F + D)
    for i in tl.static_range(COUNT):
        store_matrix(sum_ptr + i * C, ss[i], F, D, C)
        store_matrix(sum_ptr + D * F + i * C, db1s[i], C, 1, C)
        store_matrix(sum_ptr + D * F + F + i * C, dw2s[i], F, D, C)
    tl.store(sum_ptr + 2 * D * F + F + d, db2_D)


# -------------------------------------------------------------------------------------------- LayerNorm, projection


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    x_ptr, gain_ptr, shift_ptr, w_ptr, b_ptr, q_ptr, k_ptr, v_ptr, rows,
    D: tl.constexpr, DOT: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wq_DD, bq_D = load_folded(w_ptr, b_ptr, gain_ptr, shift_ptr, D, D, DOT)
    wk_DD, bk_D = load_folded(w_ptr + D * D, b_ptr + D, gain_ptr, shift_ptr, D, D, DOT)
    wv_DD, bv_D = load_folded(w_ptr + 2 * D * D, b_ptr + 2 * D, gain_ptr, shift_ptr, D, D, DOT)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0), num_stages=STAGES):
        inside_M = tile * M + tl.arange(0, M) < rows
        xhat_MD, _ = normalize(load_rows(x_ptr, tile, inside_M, M, D), D)
        xh_MD = xhat_MD.to(DOT)
        q_MD = tl.dot(xh_MD, tl.trans(wq_DD), input_precision="ieee") + bq_D[None, :]
        store_rows(q_ptr, q_MD, tile, inside_M, M, D)
        k_MD = tl.dot(xh_MD, tl.trans(wk_DD), input_precision="ieee") + bk_D[None, :]
        store_rows(k_ptr, k_MD, tile, inside_M, M, D)
        v_MD = tl.dot(xh_MD, tl.trans(wv_DD), input_precision="ieee") + bv_D[None, :]
        store_rows(v_ptr, v_MD, tile, inside_M, M, D)


@triton.jit(do_not_specialize=["rows"])
def project_backward_kernel(
    x_ptr, gain_ptr, w_ptr, dq_ptr, dk_ptr, dv_ptr, dx_ptr, sum_ptr, rows,
    D: tl.constexpr, DOT: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx, and sums: S^T `[D, 3D]`, db `[3D]`."""
    d = tl.arange(0, D)
    gain_1D = tl.load(gain_ptr + d)[None, :]
    wq_DD = (load_matrix(w_ptr, D, D, D) * gain_1D).to(DOT)
    wk_DD = (load_matrix(w_ptr + D * D, D, D, D) * gain_1D).to(DOT)
    wv_DD = (load_matrix(w_ptr + 2 * D * D, D, D, D) * gain_1D).to(DOT)
    sq_DD = tl.zeros([D, D], tl.float32)
    sk_DD = tl.zeros([D, D], tl.float32)
    sv_DD = tl.zeros([D, D], tl.float32)
    dbq_D = tl.zeros([D], tl.float32)
    dbk_D = tl.zeros([D], tl.float32)
    dbv_D = tl.zeros([D], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0), num_stages=STAGES):
        inside_M = tile * M + tl.arange(0, M) < rows
        xhat_MD, scale_M = normalize(load_rows(x_ptr, tile, inside_M, M, D), D)
        xh_MD = xhat_MD.to(DOT)
        dq_MD = load_rows(dq_ptr, tile, inside_M, M, D).to(DOT)
        dk_MD = load_rows(dk_ptr, tile, inside_M, M, D).to(DOT)
        dv_MD = load_rows(dv_ptr, tile, inside_M, M, D).to(DOT)
        dxhat_MD = tl.dot(dq_MD, wq_DD, input_precision="ieee")
        dxhat_MD = tl.dot(dk_MD, wk_DD, dxhat_MD, input_precision="ieee")
        dxhat_MD = tl.dot(dv_MD, wv_DD, dxhat_MD, input_precision="ieee")
        sq_DD = tl.dot(tl.trans(dq_MD), xh_MD, sq_DD, input_precision="ieee")
        sk_DD = tl.dot(tl.trans(dk_MD), xh_MD, sk_DD, input_precision="ieee")
        sv_DD = tl.dot(tl.trans(dv_MD), xh_MD, sv_DD, input_precision="ieee")
        dbq_D += tl.sum(dq_MD.to(tl.float32), 0)
        dbk_D += tl.sum(dk_MD.to(tl.float32), 0)
        dbv_D += tl.sum(dv_MD.to(tl.float32), 0)
        store_rows(dx_ptr, normalize_backward(dxhat_MD, xhat_MD, scale_M, D), tile, inside_M, M, D)
    sum_ptr += tl.program_id(0).to(tl.int64) * (3 * D * D + 3 * D)
    store_matrix(sum_ptr, tl.trans(sq_DD), 3 * D, D, D)
    store_matrix(sum_ptr + D, tl.trans(sk_DD), 3 * D, D, D)
    store_matrix(sum_ptr + 2 * D, tl.trans(sv_DD), 3 * D, D, D)
    tl.store(sum_ptr + 3 * D * D + d, dbq_D)
    tl.store(sum_ptr + 3 * D * D + D + d, dbk_D)
    tl.store(sum_ptr + 3 * D * D + 2 * D + d, dbv_D)


# ------------------------------------------------------------------------------------------------- output projection


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def project_out_kernel(
    x_ptr, o_ptr, key_ptr, w_ptr, b_ptr, y_ptr, rows, site, threshold, scale,
    D: tl.constexpr, DROPOUT: tl.constexpr, DOT: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    d = tl.arange(0, D)
    w_DD, b_D = load_matrix(w_ptr, D, D, D).to(DOT), tl.load(b_ptr + d)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0), num_stages=STAGES):
        row_M = tile * M + tl.arange(0, M)
        inside_M = row_M < rows
        key_M = load_keys(key_ptr, row_M, inside_M, DROPOUT)
        o_MD = load_rows(o_ptr, tile, inside_M, M, D).to(DOT)
        y_MD = tl.dot(o_MD, tl.trans(w_DD), input_precision="ieee") + b_D[None, :]
        y_MD = drop(y_MD, key_M, d, site, threshold, scale, DROPOUT)
        y_MD += load_rows(x_ptr, tile, inside_M, M, D)
        store_rows(y_ptr, y_MD, tile, inside_M, M, D)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def project_out_backward_kernel(
    o_ptr, key_ptr, w_ptr, dy_ptr, do_ptr, sum_ptr, rows, site, threshold, scale,
    D: tl.constexpr, DROPOUT: tl.constexpr, DOT: tl.constexpr, M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradient of o, and sums: dW `[D, D]`, db `[D]`."""
    d = tl.arange(0, D)
    w_DD = load_matrix(w_ptr, D, D, D).to(DOT)
    dw_DD = tl.zeros([D, D], tl.float32)
    db_D = tl.zeros([D], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M), tl.num_programs(0), num_stages=STAGES):
        row_M = tile * M + tl.arange(0, M)
        inside_M = row_M < rows
        key_M = load_keys(key_ptr, row_M, inside_M, DROPOUT)
        o_MD = load_rows(o_ptr, tile, inside_M, M, D).to(DOT)
        dz_MD = load_rows(dy_ptr, tile, inside_M, M, D)
        dz_MD = drop(dz_MD, key_M, d, site, threshold, scale, DROPOUT)
        dzh_MD = dz_MD.to(DOT)
        do_MD = tl.dot(dzh_MD, w_DD, input_precision="ieee")
        dw_DD = tl.dot(tl.trans(dzh_MD), o_MD, dw_DD, input_precision="ieee")
        db_D += tl.sum(dz_MD, 0)
        store_rows(do_ptr, do_MD, tile, inside_M, M, D)
    sum_ptr += tl.program_id(0).to(tl.int64) * (D * D + D)
    store_matrix(sum_ptr, dw_DD, D, D, D)
    tl.store(sum_ptr + D * D + d, db_D)


# -------------------------------------------------------------------------------------------------- sums of programs


@triton.jit
def add_parts(part_ptr, parts, stride, column, mask, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum over the programs of these columns of their sums."""
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < parts)[:, None] & mask[None, :]
        total += tl.load(part_ptr + row[:, None] * stride + column[None, :], mask=inside, other=0.0)
    return tl.sum(total, 0)


@triton.jit(do_not_specialize=["parts"])
def add_kernel(
    part_ptr, dw_ptr, db_ptr, parts, stride,
    D: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of a weight of SIZE numbers and of its bias `[D]` of their sums side by side."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = add_parts(part_ptr, parts, stride, column, column < SIZE + D, ROWS, COLUMNS)
    tl.store(dw_ptr + column, total, mask=column < SIZE)
    tl.store(db_ptr + column - SIZE, total, mask=(column >= SIZE) & (column < SIZE + D))


@triton.jit(do_not_specialize=["parts"])
def unfold_kernel(
    part_ptr, w_ptr, gain_ptr, shift_ptr, dgain_ptr, dshift_ptr, dw_ptr, db_ptr, parts, stride,
    D: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Gradients of W `[N, D]`, its bias, gain and shift of S^T `[D, N]` and db `[N]`; a program for a column of W."""
    d, n = tl.program_id(0), tl.arange(0, COLUMNS)
    inside = n < N
    s_N = add_parts(part_ptr, parts, stride, d * N + n, inside, ROWS, COLUMNS)
    db_N = add_parts(part_ptr, parts, stride, D * N + n, inside, ROWS, COLUMNS)
    w_N = tl.load(w_ptr + n * D + d, mask=inside, other=0.0)
    tl.store(dw_ptr + n * D + d, s_N * tl.load(gain_ptr + d) + db_N * tl.load(shift_ptr + d), mask=inside)
    tl.store(db_ptr + n, db_N, mask=inside & (d == 0))
    tl.store(dgain_ptr + d, tl.sum(w_N * s_N, 0))
    tl.store(dshift_ptr + d, tl.sum(w_N * db_N, 0))


# -------------------------------------------------------------------------------------------------------- launchers


@dataclass(frozen=True)
class Tile:
    """Rows of a tile, warps of a program, stages of the loads' pipeline, programs for each multiprocessor.

    Where products are chained, each warp takes whole rows: with fewer than 16 rows for each the work is done twice.
    """

    rows: int
    warps: int
    stages: int
    programs: int

    def options(self) -> dict[str, int]:
        return dict(M=self.rows, STAGES=self.stages, num_warps=self.warps)

    def count(self, x: Tensor) -> int:
        """Programs, as few as make no more rounds: each costs a load of the weights and a set of sums."""
        tiles = max(1, triton.cdiv(len(x), self.rows))  # of no rows too: the sums are zeros
        return triton.cdiv(tiles, triton.cdiv(tiles, self.programs * processors(x.device)))


HIDDEN = 64  # features of the hidden layer worked on at a time
FEED_FORWARD, PROJECT = Tile(64, 4, 2, 2), Tile(64, 4, 2, 3)
PROJECT_OUT, PROJECT_OUT_BACKWARD = Tile(64, 4, 2, 3), Tile(64, 4, 2, 3)
FEED_FORWARD_BACKWARD = Tile(128, 8, 2, 1)  # measured to be the fastest, although it puts registers aside
PROJECT_BACKWARD = Tile(64, 8, 2, 1)


def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU; for the interpreter few, so that programs go over several tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def dropout(rate: float, keys: Tensor | None, site: int) -> tuple[Tensor | None, tuple[int, int, float], bool]:
    """The keys, the numbers (first site, threshold, scale), and whether there is dropout at all."""
    numbers = site, round(rate * (1 << BITS)), 1 / (1 - rate)
    return keys, numbers, keys is not None and rate > 0


def launch_feed_forward(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, rate: float,
    keys: Tensor | None, site: int, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    (d, f), tile, y = w2.shape, FEED_FORWARD, torch.empty_like(x)
    keys, numbers, on = dropout(rate, keys, site)
    programs = tile.count(x)
    bias = torch.empty(programs, f, device=x.device)
    with torch.cuda.device_of(x):
        feed_forward_kernel[(programs,)](
            x, keys, gain, shift, w1, b1, w2, b2, y, bias, len(x), *numbers,
            D=d, F=f, C=HIDDEN, DROPOUT=on, DOT=TYPES[dtype], **tile.options(),
        )  # fmt: skip
    return y


def launch_feed_forward_backward(
    dy: Tensor, x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, rate: float,
    keys: Tensor | None, site: int, dtype: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of x, gain, shift, W1, b1, W2, b2."""
    (d, f), tile, dx = w2.shape, FEED_FORWARD_BACKWARD, torch.empty_like(x)
    keys, numbers, on = dropout(rate, keys, site)
    programs = tile.count(x)
    bias = torch.empty(programs, f, device=x.device)
    parts = torch.empty(programs, 2 * d * f + f + d, device=x.device)
    with torch.cuda.device_of(x):
        feed_forward_backward_kernel[(programs,)](
            x, keys, gain, shift, w1, b1, w2, dy, dx, parts, bias, len(x), *numbers,
            D=d, F=f, C=HIDDEN, DROPOUT=on, DOT=TYPES[dtype], **tile.options(),
        )  # fmt: skip
        return dx, *unfold(parts, w1, gain, shift), *add(parts[:, d * f + f :], w2)


def launch_project(
    x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, b: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.empty_like(x, dtype=dtype) for _ in range(3))
    with torch.cuda.device_of(x):
        project_kernel[(PROJECT.count(x),)](
            x, gain, shift, w, b, q, k, v, len(x), D=x.shape[1], DOT=TYPES[dtype], **PROJECT.options()
        )
    return q, k, v


def launch_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of x, gain, shift, W, b."""
    (n, d), tile, dx = w.shape, PROJECT_BACKWARD, torch.empty_like(x)
    programs = tile.count(x)
    parts = torch.empty(programs, n * d + n, device=x.device)
    with torch.cuda.device_of(x):
        project_backward_kernel[(programs,)](
            x, gain, w, dq, dk, dv, dx, parts, len(x), D=d, DOT=TYPES[dtype], **tile.options()
        )
        return dx, *unfold(parts, w, gain, shift)


def launch_project_out(
    x: Tensor, o: Tensor, w: Tensor, b: Tensor, rate: float, keys: Tensor | None, site: int, dtype: torch.dtype
) -> Tensor:
    y, tile = torch.empty_like(x), PROJECT_OUT
    keys, numbers, on = dropout(rate, keys, site)
    with torch.cuda.device_of(x):
        project_out_kernel[(tile.count(x),)](
            x, o, keys, w, b, y, len(x), *numbers, D=len(w), DROPOUT=on, DOT=TYPES[dtype], **tile.options()
        )
    return y


def launch_project_out_backward(
    dy: Tensor, o: Tensor, w: Tensor, rate: float, keys: Tensor | None, site: int, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of o, W, b."""
    do, d, tile = torch.empty_like(o), len(w), PROJECT_OUT_BACKWARD
    keys, numbers, on = dropout(rate, keys, site)
    programs = tile.count(o)
    parts = torch.empty(programs, d * d + d, device=o.device)
    with torch.cuda.device_of(o):
        project_out_backward_kernel[(programs,)](
            o, keys, w, dy, do, parts, len(o), *numbers, D=d, DROPOUT=on, DOT=TYPES[dtype], **tile.options()
        )
        return do, *add(parts, w)


def add(parts: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of W and its bias."""
    dw, db = torch.empty_like(w), w.new_empty(len(w))
    add_kernel[(triton.cdiv(dw.numel() + db.numel(), 64),)](
        parts, dw, db, len(parts), parts.stride(0), D=db.numel(), SIZE=dw.numel(), ROWS=64, COLUMNS=64
    )
    return dw, db


def unfold(parts: Tensor, w: Tensor, gain: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
    """Gradients of gain, shift, W and its bias."""
    (n, d), columns = w.shape, triton.next_power_of_2(len(w))
    gradients = torch.empty_like(gain), torch.empty_like(shift), torch.empty_like(w), w.new_empty(n)
    unfold_kernel[(d,)](
        parts, w, gain, shift, *gradients, len(parts), parts.stride(0), D=d, N=n, ROWS=4096 // columns, COLUMNS=columns
    )
    return gradients
