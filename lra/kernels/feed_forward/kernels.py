"""What follows attention in a block, one kernel a pass: projection, residual, norm, feed-forward and residual.

    y = z + drop(down(drop(gelu(up(norm(z)))))),  z = x + drop(out(o))

By themselves these layers read and write what they pass to each other, some 15 tensors of a batch's rows, and take
longer for it than for the arithmetic. A program owns some rows and runs over the hidden features in chunks, as
FlashAttention over keys. Of the forward the normalised rows are kept; the backward computes the hidden features again,
and writes what the gradients of the weights are products of: those sum over all rows, a library's product does it best.
What a program writes it reads again where that costs fewer registers than to hold it: it is in the GPU's cache still.

The norm's gain and shift and what dropout multiplies by are parts of the weights. Norm, GELU, residuals and sums are in
fp32, products of 16-bit operands.

Shape suffixes: M rows, D model features, C hidden features of a chunk.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def mix(x):
    """`lra.models.dropout.mix` of uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept(x, keys_M, site, first, column, threshold, DROPOUT: tl.constexpr):
    """`lra.models.dropout.drop` of a tile of the features from `first` on, an even one; what is kept stays as it is."""
    if DROPOUT:
        pair = (first // 2 + (column >> 1)).to(tl.uint32)[None, :]
        hashed = mix(mix(keys_M + tl.cast(site, tl.uint32))[:, None] + pair)
        upper = tl.where((column & 1)[None, :] == 0, hashed << 16, hashed)  # the feature's half decides
        x = tl.where(upper >= tl.cast(threshold, tl.uint32) << 16, x, 0.0)
    return x


@triton.jit
def density(u):
    """Of the standard normal distribution, times the square root of 2 pi."""
    return tl.exp2(u * u * -0.7213475204444817)


@triton.jit
def below(u, density):
    """The standard normal distribution function within 1e-7 (Abramowitz and Stegun, 7.1.26): GELU is u * below(u)."""
    root = tl.math.rsqrt(1.0 + 0.2316418882663604 * tl.abs(u))  # its square is an inverse in fewer instructions
    t = root * root
    series = 0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))
    tail = t * series * density
    return tl.where(u < 0, tail, 1.0 - tail)


@triton.jit
def rows_of(keys_ptr, rows, M: tl.constexpr, DROPOUT: tl.constexpr):
    """(the first row of this program, which of its rows are real, their keys)."""
    first = tl.program_id(0).to(tl.int64) * M
    m = tl.arange(0, M)
    keys_M = tl.zeros([M], tl.uint32)
    if DROPOUT:
        keys_M = tl.load(keys_ptr + first + m, mask=m < rows - first, other=0).to(tl.uint32, bitcast=True)
    return first, m < rows - first, keys_M


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_kernel(
    o_ptr, x_ptr, y_ptr, unit_ptr, rstd_ptr, keys_ptr, out_ptr, out_bias_ptr, up_ptr, up_bias_ptr, down_ptr,
    down_bias_ptr, rows, eps, site, threshold,
    D: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`unit_ptr`: z normalised and a one, `WIDE` elements a row; `rstd_ptr`: what z was divided by, inverted."""
    first_row, real_M, keys_M = rows_of(keys_ptr, rows, M, DROPOUT)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    m, d, c, spare = tl.arange(0, M), tl.arange(0, D), tl.arange(0, C), tl.arange(0, WIDE - D)
    half = o_ptr.dtype.element_ty
    real_M1, at_MD = real_M[:, None], m[:, None] * D + d[None, :]
    unit_ptr += first_row * WIDE

    o_MD = tl.load(o_ptr + first_row * D + at_MD, mask=real_M1, other=0.0)
    z_MD = tl.dot(o_MD, tl.load(out_ptr + d[:, None] * D + d[None, :]).T) + tl.load(out_bias_ptr + d)[None, :]
    z_MD = kept(z_MD, keys_M, site, 0, d, threshold, DROPOUT)
    z_MD += tl.load(x_ptr + first_row * D + at_MD, mask=real_M1, other=0.0)
    centred_MD = z_MD - tl.sum(z_MD, 1)[:, None] * (1 / D)
    rstd_M = tl.math.rsqrt(tl.sum(centred_MD * centred_MD, 1) * (1 / D) + eps)
    tl.store(rstd_ptr + first_row + m, rstd_M, mask=real_M)
    unit_MD = (centred_MD * rstd_M[:, None]).to(half)
    tl.store(unit_ptr + m[:, None] * WIDE + d[None, :], unit_MD, mask=real_M1)
    one = tl.where(spare == 0, 1.0, 0.0)[None, :] + tl.zeros([M, WIDE - D], tl.float32)
    tl.store(unit_ptr + m[:, None] * WIDE + D + spare[None, :], one.to(half), mask=real_M1)

    y_MD = tl.zeros([M, D], tl.float32)
    for first in range(0, F, C):
        up_CD = tl.load(up_ptr + (first + c)[:, None] * D + d[None, :])
        down_DC = tl.load(down_ptr + d[:, None] * F + (first + c)[None, :])
        u_MC = tl.dot(unit_MD, up_CD.T) + tl.load(up_bias_ptr + first + c)[None, :]
        h_MC = kept(u_MC * below(u_MC, density(u_MC)), keys_M, site + 1, first, c, threshold, DROPOUT)
        y_MD = tl.dot(h_MC.to(half), down_DC.T, y_MD)
    y_MD = kept(y_MD + tl.load(down_bias_ptr + d)[None, :], keys_M, site + 2, 0, d, threshold, DROPOUT)
    tl.store(y_ptr + first_row * D + at_MD, z_MD + y_MD, mask=real_M1)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_backward_kernel(
    dy_ptr, unit_ptr, rstd_ptr, keys_ptr, out_ptr, up_ptr, up_bias_ptr, down_ptr, dx_ptr, do_ptr, dout_ptr, du_ptr,
    h_ptr, ddown_ptr, sums_ptr, rows, site, threshold,
    D: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx and do; the gradients of what the three linear layers return, and h, what `down` is given.

    `sums_ptr`: over these rows, of the gradients of what `out` and `down` return.
    """
    first_row, real_M, keys_M = rows_of(keys_ptr, rows, M, DROPOUT)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    m, d, c = tl.arange(0, M), tl.arange(0, D), tl.arange(0, C)
    half = unit_ptr.dtype.element_ty
    real_M1, at_MD = real_M[:, None], m[:, None] * D + d[None, :]
    at_MC = m[:, None] * F + c[None, :]
    unit_ptrs = unit_ptr + first_row * WIDE + m[:, None] * WIDE + d[None, :]
    dy_ptr += first_row * D
    dout_ptr += first_row * D
    du_ptr += first_row * F
    h_ptr += first_row * F
    sums_ptr += tl.program_id(0) * (2 * D)

    ddown_MD = tl.load(dy_ptr + at_MD, mask=real_M1, other=0.0)
    ddown_MD = kept(ddown_MD, keys_M, site + 2, 0, d, threshold, DROPOUT)
    tl.store(sums_ptr + D + d, tl.sum(ddown_MD, 0))
    ddown_MD = ddown_MD.to(half)
    tl.store(ddown_ptr + first_row * D + at_MD, ddown_MD, mask=real_M1)
    unit_MD = tl.load(unit_ptrs, mask=real_M1, other=0.0)
    for first in range(0, F, C):
        up_CD = tl.load(up_ptr + (first + c)[:, None] * D + d[None, :])
        down_DC = tl.load(down_ptr + d[:, None] * F + (first + c)[None, :])
        u_MC = tl.dot(unit_MD, up_CD.T) + tl.load(up_bias_ptr + first + c)[None, :]
        density_MC = density(u_MC)
        below_MC = below(u_MC, density_MC)
        h_MC = kept(u_MC * below_MC, keys_M, site + 1, first, c, threshold, DROPOUT)
        tl.store(h_ptr + at_MC + first, h_MC.to(half), mask=real_M1)
        dh_MC = kept(tl.dot(ddown_MD, down_DC), keys_M, site + 1, first, c, threshold, DROPOUT)
        du_MC = dh_MC * (below_MC + u_MC * density_MC * 0.3989422804014327)
        tl.store(du_ptr + at_MC + first, du_MC.to(half), mask=real_M1)
    tl.debug_barrier()  # what this thread reads another one may have written

    dz_MD = tl.zeros([M, D], tl.float32)
    for first in range(0, F, C):
        du_MC = tl.load(du_ptr + at_MC + first, mask=real_M1, other=0.0)
        dz_MD = tl.dot(du_MC, tl.load(up_ptr + (first + c)[:, None] * D + d[None, :]), dz_MD)
    unit_MD = tl.load(unit_ptrs, mask=real_M1, other=0.0).to(tl.float32)
    dz_MD -= tl.sum(dz_MD, 1)[:, None] * (1 / D) + unit_MD * (tl.sum(dz_MD * unit_MD, 1)[:, None] * (1 / D))
    dz_MD *= tl.load(rstd_ptr + first_row + m, mask=real_M, other=0.0)[:, None]
    dz_MD += tl.load(dy_ptr + at_MD, mask=real_M1, other=0.0)
    tl.store(dx_ptr + first_row * D + at_MD, dz_MD, mask=real_M1)
    dz_MD = kept(dz_MD, keys_M, site, 0, d, threshold, DROPOUT)
    tl.store(sums_ptr + d, tl.sum(dz_MD, 0))
    tl.store(dout_ptr + at_MD, dz_MD.to(half), mask=real_M1)
    tl.debug_barrier()

    dout_MD = tl.load(dout_ptr + at_MD, mask=real_M1, other=0.0)
    do_MD = tl.dot(dout_MD, tl.load(out_ptr + d[:, None] * D + d[None, :]))
    tl.store(do_ptr + first_row * D + at_MD, do_MD.to(half), mask=real_M1)
