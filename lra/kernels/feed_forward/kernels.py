"""What follows attention in a block, one kernel a pass: projection, residual, norm, feed-forward and residual.

    y = z + drop(down(drop(gelu(up(norm(z)))))),  z = x + drop(out(o))

By themselves these layers read and write what they pass to each other, some 15 tensors of a batch's rows, and take
longer for it than for the arithmetic. A program owns some rows and runs over the hidden features in chunks, as
FlashAttention over keys. Of the forward the normalised rows are kept; the backward computes the hidden features again,
and writes what the gradients of the weights are products of: those sum over all rows, a library's product does it best.
What a program writes it reads again where that costs fewer registers than to hold it: it is in the GPU's cache still.

The norm's gain and shift are part of `up`. Norm, GELU, residuals and sums are in fp32, products of 16-bit operands.
Dropout is that of `lra.models.dropout`.

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
def drop(x, keys_M, site, features, threshold, keep_scale, DROPOUT: tl.constexpr):
    """`lra.models.dropout.drop` of a tile of rows and `features`."""
    if DROPOUT:
        pair = (features >> 1).to(tl.uint32)[None, :]
        hashed = mix(mix(keys_M + tl.cast(site, tl.uint32))[:, None] + pair)
        bits = tl.where((features & 1)[None, :] == 0, hashed & 0xFFFF, hashed >> 16)
        x = tl.where(bits >= tl.cast(threshold, tl.uint32), x * keep_scale, 0.0)
    return x


@triton.jit
def density(u):
    """Of the standard normal distribution, times the square root of 2 pi."""
    return tl.exp2(u * u * -0.7213475204444817)


@triton.jit
def below(u, density):
    """The standard normal distribution function within 1e-7 (Abramowitz and Stegun, 7.1.26): GELU is u * below(u)."""
    t = 1.0 / (1.0 + 0.2316418882663604 * tl.abs(u))
    tail = (
        t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145)))) * density
    )
    return tl.where(u < 0, tail, 1.0 - tail)


@triton.jit
def rows_of(keys_ptr, rows, M: tl.constexpr, DROPOUT: tl.constexpr):
    """(the rows of this program, which are real, their keys)."""
    row_M = tl.program_id(0) * M + tl.arange(0, M)
    keys_M = tl.zeros([M], tl.uint32)
    if DROPOUT:
        keys_M = tl.load(keys_ptr + row_M, mask=row_M < rows, other=0).to(tl.uint32, bitcast=True)
    return row_M.to(tl.int64), (row_M < rows)[:, None], keys_M


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_kernel(
    o_ptr, x_ptr, y_ptr, unit_ptr, rstd_ptr, keys_ptr, out_ptr, out_bias_ptr, up_ptr, up_bias_ptr, down_ptr,
    down_bias_ptr, rows, eps, site, threshold, keep_scale,
    D: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`unit_ptr`: z normalised and a one, `WIDE` elements a row; `rstd_ptr`: what z was divided by, inverted."""
    row_M, real_M1, keys_M = rows_of(keys_ptr, rows, M, DROPOUT)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    d, c, rest = tl.arange(0, D), tl.arange(0, C), tl.arange(0, WIDE - D)
    half = o_ptr.dtype.element_ty
    at_MD = row_M[:, None] * D + d[None, :]

    out_DD = tl.load(out_ptr + d[:, None] * D + d[None, :])
    z_MD = tl.dot(tl.load(o_ptr + at_MD, mask=real_M1, other=0.0), out_DD.T) + tl.load(out_bias_ptr + d)[None, :]
    z_MD = drop(z_MD, keys_M, site, d, threshold, keep_scale, DROPOUT) + tl.load(x_ptr + at_MD, mask=real_M1, other=0.0)
    centred_MD = z_MD - tl.sum(z_MD, 1)[:, None] / D
    rstd_M = tl.math.rsqrt(tl.sum(centred_MD * centred_MD, 1) / D + eps)
    tl.store(rstd_ptr + row_M, rstd_M, mask=row_M < rows)
    unit_MD = (centred_MD * rstd_M[:, None]).to(half)
    tl.store(unit_ptr + row_M[:, None] * WIDE + d[None, :], unit_MD, mask=real_M1)
    one = tl.where(rest == 0, 1.0, 0.0)[None, :] + tl.zeros([M, WIDE - D], tl.float32)
    tl.store(unit_ptr + row_M[:, None] * WIDE + D + rest[None, :], one.to(half), mask=real_M1)

    y_MD = tl.zeros([M, D], tl.float32)
    for first in range(0, F, C):
        up_CD = tl.load(up_ptr + (first + c)[:, None] * D + d[None, :])
        down_DC = tl.load(down_ptr + d[:, None] * F + (first + c)[None, :])
        u_MC = tl.dot(unit_MD, up_CD.T) + tl.load(up_bias_ptr + first + c)[None, :]
        h_MC = u_MC * below(u_MC, density(u_MC))
        h_MC = drop(h_MC, keys_M, site + 1, first + c, threshold, keep_scale, DROPOUT)
        y_MD = tl.dot(h_MC.to(half), down_DC.T, y_MD)
    y_MD = drop(y_MD + tl.load(down_bias_ptr + d)[None, :], keys_M, site + 2, d, threshold, keep_scale, DROPOUT)
    tl.store(y_ptr + at_MD, z_MD + y_MD, mask=real_M1)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def feed_forward_backward_kernel(
    dy_ptr, unit_ptr, rstd_ptr, keys_ptr, out_ptr, up_ptr, up_bias_ptr, down_ptr, dx_ptr, do_ptr, dout_ptr, du_ptr,
    h_ptr, ddown_ptr, sums_ptr, rows, site, threshold, keep_scale,
    D: tl.constexpr, F: tl.constexpr, WIDE: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """dx and do; the gradients of what the three linear layers return, and h, what `down` is given.

    `sums_ptr`: over these rows, of the gradients of what `out` and `down` return.
    """
    row_M, real_M1, keys_M = rows_of(keys_ptr, rows, M, DROPOUT)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    d, c = tl.arange(0, D), tl.arange(0, C)
    half = unit_ptr.dtype.element_ty
    at_MD = row_M[:, None] * D + d[None, :]
    unit_at_MD = row_M[:, None] * WIDE + d[None, :]
    sums_ptr += tl.program_id(0) * (2 * D)

    dy_MD = tl.load(dy_ptr + at_MD, mask=real_M1, other=0.0)
    dy_MD = drop(dy_MD, keys_M, site + 2, d, threshold, keep_scale, DROPOUT)
    tl.store(sums_ptr + D + d, tl.sum(dy_MD, 0))
    ddown_MD = dy_MD.to(half)
    tl.store(ddown_ptr + at_MD, ddown_MD, mask=real_M1)
    unit_MD = tl.load(unit_ptr + unit_at_MD, mask=real_M1, other=0.0)
    for first in range(0, F, C):
        at_MC = row_M[:, None] * F + (first + c)[None, :]
        up_CD = tl.load(up_ptr + (first + c)[:, None] * D + d[None, :])
        down_DC = tl.load(down_ptr + d[:, None] * F + (first + c)[None, :])
        u_MC = tl.dot(unit_MD, up_CD.T) + tl.load(up_bias_ptr + first + c)[None, :]
        density_MC = density(u_MC)
        below_MC = below(u_MC, density_MC)
        h_MC = drop(u_MC * below_MC, keys_M, site + 1, first + c, threshold, keep_scale, DROPOUT)
        tl.store(h_ptr + at_MC, h_MC.to(half), mask=real_M1)
        dh_MC = drop(tl.dot(ddown_MD, down_DC), keys_M, site + 1, first + c, threshold, keep_scale, DROPOUT)
        du_MC = dh_MC * (below_MC + u_MC * density_MC * 0.3989422804014327)
        tl.store(du_ptr + at_MC, du_MC.to(half), mask=real_M1)
    tl.debug_barrier()

    dz_MD = tl.zeros([M, D], tl.float32)
    for first in range(0, F, C):
        du_MC = tl.load(du_ptr + row_M[:, None] * F + (first + c)[None, :], mask=real_M1, other=0.0)
        dz_MD = tl.dot(du_MC, tl.load(up_ptr + (first + c)[:, None] * D + d[None, :]), dz_MD)
    unit_MD = tl.load(unit_ptr + unit_at_MD, mask=real_M1, other=0.0).to(tl.float32)
    dz_MD -= tl.sum(dz_MD, 1)[:, None] / D + unit_MD * (tl.sum(dz_MD * unit_MD, 1)[:, None] / D)
    dz_MD *= tl.load(rstd_ptr + row_M, mask=row_M < rows, other=0.0)[:, None]
    dz_MD += tl.load(dy_ptr + at_MD, mask=real_M1, other=0.0)
    tl.store(dx_ptr + at_MD, dz_MD, mask=real_M1)
    dz_MD = drop(dz_MD, keys_M, site, d, threshold, keep_scale, DROPOUT)
    tl.store(sums_ptr + d, tl.sum(dz_MD, 0))
    tl.store(dout_ptr + at_MD, dz_MD.to(half), mask=real_M1)
    tl.debug_barrier()

    dout_MD = tl.load(dout_ptr + at_MD, mask=real_M1, other=0.0)
    do_MD = tl.dot(dout_MD, tl.load(out_ptr + d[:, None] * D + d[None, :]))
    tl.store(do_ptr + at_MD, do_MD.to(half), mask=real_M1)
