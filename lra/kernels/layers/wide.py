"""The layers around attention for wide models, in Triton: products whose prologues and epilogues do all the rest.

The weights do not fit in shared memory. So a program takes one tile of rows and streams weights from the L2 cache.
Kernels are of two kinds. One holds entire rows as operands in shared memory, and computes a chunk of features at a
time. The other holds entire rows as sums in registers, and takes a chunk of its operands at a time. Then it normalises.
Between two kernels, operands of products lie in memory in 16 bits.

- Before attention: `project_kernel`. Backward: `rotate_back_kernel` and `project_backward_kernel`.
- After attention: `out_kernel` ends with the norm, `up_kernel` computes the hidden features, `down_kernel` the result.
- Backward: `hidden_backward_kernel` computes the gradients of the hidden layer, `out_backward_kernel` those of
  attention and of the residual.

Arguments and results are those of reference.py. Shape suffixes: M rows, D model features, C a chunk of features, K a
chunk of what a product sums over.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from lra.kernels.layers import reference

SITE_STRIDE = tl.constexpr(reference.SITE_STRIDE)


@triton.jit
def mix_bits(x):
    """`reference.mix_bits` for uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept_features(keys_M, site, first, threshold, N: tl.constexpr):
    """Which of N features from `first` on, an even number, `reference.drop_features` keeps: int1 `[M, N]`."""
    pair = first // 2 + tl.arange(0, N // 2)
    place = (site * SITE_STRIDE + 2 * (pair // 2)).to(tl.uint32, bitcast=True)
    swapped_M = keys_M << 16 | keys_M >> 16
    words = mix_bits(keys_M[:, None] + swapped_M[:, None] * place[None, :])
    turned = (words << 1 & 0xFFFEFFFE) | (words >> 15 & 0x00010001)  # each half, rotated by one bit
    turned = turned >> (8 * (pair % 2)).to(tl.uint32)[None, :]
    both = tl.join(turned & 0xFF, turned >> 16 & 0xFF).reshape(keys_M.shape[0], N)
    return both.to(tl.int32) >= threshold


@triton.jit
def load_keys(keys_ptr, first, real_M, DROPOUT: tl.constexpr):
    """The keys of dropout for the rows, uint32. Without dropout they are zeros."""
    m = tl.arange(0, real_M.shape[0])
    if DROPOUT:
        keys_M = tl.load(keys_ptr + first + m, mask=real_M, other=0).to(tl.uint32, bitcast=True)
    else:
        keys_M = tl.zeros([real_M.shape[0]], tl.uint32)
    return keys_M


@triton.jit
def drop_features(x_MN, keys_M, site, first, threshold, DROPOUT: tl.constexpr):
    """`reference.drop_features` of a tile whose features begin at `first`, an even number."""
    if DROPOUT:
        x_MN = tl.where(kept_features(keys_M, site, first, threshold, x_MN.shape[1]), x_MN, 0.0)
    return x_MN


@triton.jit
def normal_pdf(u):
    """The density of the standard normal distribution."""
    return tl.exp2(u * u * -0.7213475204444817 - 1.3257480647361593)


@triton.jit
def normal_cdf(u):
    """The standard normal distribution function, as in feed_forward.py."""
    square = tl.minimum(u * u, 40.0)
    exponent = u * (-2.301467 + square * (-0.1065446 + square * 0.00098442))
    root = tl.rsqrt(1.0 + tl.exp2(exponent))
    return root * root


@triton.jit
def normalise(z_MD, eps, D: tl.constexpr):
    """(z minus its mean, divided by its deviation; the inverse of the deviation)."""
    centred_MD = z_MD - (tl.sum(z_MD, 1) * (1 / D))[:, None]
    rstd_M = tl.rsqrt(tl.sum(centred_MD * centred_MD, 1) * (1 / D) + eps)
    return centred_MD * rstd_M[:, None], rstd_M


@triton.jit
def normalise_backward(dxhat_MD, xhat_MD, rstd_M, D: tl.constexpr):
    """The gradient of the input of `normalise`, from that of its result."""
    mean_M = tl.sum(dxhat_MD, 1) * (1 / D)
    along_M = tl.sum(dxhat_MD * xhat_MD, 1) * (1 / D)
    return (dxhat_MD - mean_M[:, None] - xhat_MD * along_M[:, None]) * rstd_M[:, None]


@triton.jit
def first_row(M: tl.constexpr, UPWARDS: tl.constexpr):
    """The first row of a program's tile. Where rows were written last, the L2 cache still has them."""
    return (tl.program_id(0) if UPWARDS else tl.num_programs(0) - 1 - tl.program_id(0)).to(tl.int64) * M


@triton.jit
def chunk_place(CHUNKS: tl.constexpr, M: tl.constexpr, UPWARDS: tl.constexpr):
    """(The first row of a program's tile, which of the CHUNKS of its features). Chunks of a tile follow each other."""
    tile, tiles = tl.program_id(0) // CHUNKS, tl.num_programs(0) // CHUNKS
    return (tile if UPWARDS else tiles - 1 - tile).to(tl.int64) * M, tl.program_id(0) % CHUNKS


@triton.jit
def load_rows(desc, first, column=0):
    """A tile of rows by TMA, from `first` on. So it never occupies registers in another layout than a product's."""
    return desc.load([first.to(tl.int32), column])


@triton.jit
def store_rows(desc, first, x_MN, column=0):
    desc.store([first.to(tl.int32), column], x_MN.to(desc.dtype))


@triton.jit
def paired_features(pair, P: tl.constexpr):
    """The first features of these pairs, P of each head. The second ones are P further."""
    return pair // P * (2 * P) + pair % P


@triton.jit
def normalise_rows(x_desc, xhat_desc, rstd_ptr, first, rows, eps, D: tl.constexpr, M: tl.constexpr):
    """A tile of rows, normalised, as an operand of products. It is also stored."""
    m = tl.arange(0, M)
    xhat_MD, rstd_M = normalise(load_rows(x_desc, first), eps, D)
    tl.store(rstd_ptr + first + m, rstd_M, mask=first + m < rows)
    xhat_MD = xhat_MD.to(xhat_desc.dtype)
    store_rows(xhat_desc, first, xhat_MD)
    return xhat_MD


@triton.jit
def store_rotated(y_ptr, y_MC, a_P, cos_ptr, sin_ptr, first, rows, D: tl.constexpr, P: tl.constexpr):
    """Rotate pairs of features that are side by side, and store each feature in its place."""
    M: tl.constexpr = y_MC.shape[0]
    m = tl.arange(0, M)
    real = (first + m < rows)[:, None]
    a_MP, b_MP = tl.split(y_MC.reshape(M, y_MC.shape[1] // 2, 2))
    angle = (first + m[:, None]) * P + (a_P % P)[None, :]
    cos_MP, sin_MP = tl.load(cos_ptr + angle, mask=real, other=0.0), tl.load(sin_ptr + angle, mask=real, other=0.0)
    y_ptr += (first + m[:, None]) * D + a_P[None, :]
    tl.store(y_ptr, (a_MP * cos_MP - b_MP * sin_MP).to(y_ptr.dtype.element_ty), mask=real)
    tl.store(y_ptr + P, (a_MP * sin_MP + b_MP * cos_MP).to(y_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def project_kernel(
    x_desc, q_desc, k_desc, v_desc, q_ptr, k_ptr, xhat_desc, rstd_ptr, weight_desc, weight_ptr, bias_ptr,
    cos_ptr, sin_ptr, rows, eps,
    D: tl.constexpr, P: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """q, k and v. `xhat_desc`: x normalised. `rstd_ptr`: the inverse of its deviation.

    Rotary positions rotate the pairs `(x[p], x[p + P])` of each head. Without them P is 0.
    """
    first = first_row(M, True)
    c, d, p = tl.arange(0, C), tl.arange(0, D), tl.arange(0, C // 2)
    xhat_MD = normalise_rows(x_desc, xhat_desc, rstd_ptr, first, rows, eps, D, M)
    for part in tl.static_range(3):
        if P > 0 and part < 2:
            y_ptr = (q_ptr, k_ptr)[part]
            for i in range(0, D // 2, C // 2):
                a_P = paired_features(i + p, P)
                row_C = part * D + paired_features(i + c // 2, P) + c % 2 * P  # the features of a pair, in turn
                weight_CD = tl.load(weight_ptr + row_C[:, None] * D + d[None, :])
                bias_C = tl.load(bias_ptr + row_C)[None, :]
                store_rotated(y_ptr, tl.dot(xhat_MD, weight_CD.T) + bias_C, a_P, cos_ptr, sin_ptr, first, rows, D, P)
        else:
            y_desc = (q_desc, k_desc, v_desc)[part]
            for i in range(0, D, C):
                weight_CD = weight_desc.load([part * D + i, 0])
                bias_C = tl.load(bias_ptr + part * D + i + c)[None, :]
                store_rows(y_desc, first, tl.dot(xhat_MD, weight_CD.T) + bias_C, i)


@triton.jit(do_not_specialize=["rows"])
def rotate_back_kernel(
    dq_ptr, dk_ptr, cos_ptr, sin_ptr, back_q_ptr, back_k_ptr, rows, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr
):
    """dq and dk before rotation."""
    first = first_row(M, True)
    m, pair = tl.arange(0, M), tl.arange(0, D // 2)
    real = (first + m < rows)[:, None]
    angle = (first + m[:, None]) * P + (pair % P)[None, :]
    cos = tl.load(cos_ptr + angle, mask=real, other=0.0)
    sin = tl.load(sin_ptr + angle, mask=real, other=0.0)
    at = (first + m[:, None]) * D + paired_features(pair, P)[None, :]
    for part in tl.static_range(2):
        d_ptr, back_ptr = (dq_ptr, dk_ptr)[part] + at, (back_q_ptr, back_k_ptr)[part] + at
        a = tl.load(d_ptr, mask=real, other=0.0).to(tl.float32)
        b = tl.load(d_ptr + P, mask=real, other=0.0).to(tl.float32)
        tl.store(back_ptr, (a * cos + b * sin).to(back_q_ptr.dtype.element_ty), mask=real)
        tl.store(back_ptr + P, (b * cos - a * sin).to(back_q_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["rows"])
def project_backward_kernel(
    dq_desc, dk_desc, dv_desc, dy_desc, xhat_desc, rstd_ptr, weight_desc, dx_desc, rows,
    D: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dx, which includes `dy_desc`, the gradient that bypasses attention. dq and dk are those before rotation."""
    first = first_row(M, False)
    m = tl.arange(0, M)
    dxhat_MD = tl.zeros([M, D], tl.float32)
    for part in tl.static_range(3):
        for i in range(0, D, K):
            d_MK = load_rows((dq_desc, dk_desc, dv_desc)[part], first, i)
            dxhat_MD = tl.dot(d_MK, weight_desc.load([part * D + i, 0]), dxhat_MD)
    xhat_MD = load_rows(xhat_desc, first).to(tl.float32)
    rstd_M = tl.load(rstd_ptr + first + m, mask=first + m < rows, other=0.0)
    dx_MD = normalise_backward(dxhat_MD, xhat_MD, rstd_M, D) + load_rows(dy_desc, first)
    store_rows(dx_desc, first, dx_MD)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def out_kernel(
    o_desc, x_desc, z_desc, xhat_desc, rstd_ptr, keys_ptr, out_desc, out_bias_ptr, rows, eps, site, threshold,
    D: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """`z_desc`: x + drop(out(o)). `xhat_desc`: z normalised. `rstd_ptr`: the inverse of its deviation."""
    first = first_row(M, False)
    m, d = tl.arange(0, M), tl.arange(0, D)
    real_M = first + m < rows
    keys_M = load_keys(keys_ptr, first, real_M, DROPOUT)
    z_MD = tl.zeros([M, D], tl.float32)
    for k in range(0, D, K):
        z_MD = tl.dot(load_rows(o_desc, first, k), out_desc.load([0, k]).T, z_MD)
    z_MD = drop_features(z_MD + tl.load(out_bias_ptr + d)[None, :], keys_M, site, 0, threshold, DROPOUT)
    z_MD += load_rows(x_desc, first)
    store_rows(z_desc, first, z_MD)
    xhat_MD, rstd_M = normalise(z_MD, eps, D)
    tl.store(rstd_ptr + first + m, rstd_M, mask=real_M)
    store_rows(xhat_desc, first, xhat_MD)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def up_kernel(
    xhat_desc, h_desc, slope_desc, keys_ptr, up_desc, up_bias_ptr, rows, site, threshold,
    D: tl.constexpr, F: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """`h_desc`: C hidden features of a tile of rows. `slope_desc`: their derivatives for the output of `up`."""
    first, f = chunk_place(F // C, M, True)
    f *= C
    real_M = first + tl.arange(0, M) < rows
    u_MC = tl.zeros([M, C], tl.float32)
    for k in range(0, D, K):
        u_MC = tl.dot(load_rows(xhat_desc, first, k), up_desc.load([f, k]).T, u_MC)
    u_MC += tl.load(up_bias_ptr + f + tl.arange(0, C))[None, :]
    cdf_MC = normal_cdf(u_MC)
    h_MC, slope_MC = u_MC * cdf_MC, cdf_MC + u_MC * normal_pdf(u_MC)
    if DROPOUT:
        kept_MC = kept_features(load_keys(keys_ptr, first, real_M, DROPOUT), site + 1, f, threshold, C)
        h_MC, slope_MC = tl.where(kept_MC, h_MC, 0.0), tl.where(kept_MC, slope_MC, 0.0)
    store_rows(h_desc, first, h_MC, f)
    store_rows(slope_desc, first, slope_MC, f)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def down_kernel(
    h_desc, z_desc, y_desc, final_rstd_ptr, keys_ptr, down_desc, down_bias_ptr, rows, final_eps, site, threshold,
    D: tl.constexpr, F: tl.constexpr, DROPOUT: tl.constexpr, POOLED: tl.constexpr,
    M: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """C features of y = z + drop(down(h)) for a tile of rows.

    POOLED: y normalised, with all features. `final_rstd_ptr`: the inverse of its deviation.
    """
    first, c = chunk_place(D // C, M, False)
    c, m = c * C, tl.arange(0, M)
    real_M = first + m < rows
    y_MC = tl.zeros([M, C], tl.float32)
    for k in range(0, F, K):
        y_MC = tl.dot(load_rows(h_desc, first, k), down_desc.load([c, k]).T, y_MC)
    keys_M = load_keys(keys_ptr, first, real_M, DROPOUT)
    y_MC += tl.load(down_bias_ptr + c + tl.arange(0, C))[None, :]
    y_MC = drop_features(y_MC, keys_M, site + 2, c, threshold, DROPOUT) + load_rows(z_desc, first, c)
    if POOLED:
        y_MC, rstd_M = normalise(y_MC, final_eps, D)
        tl.store(final_rstd_ptr + first + m, rstd_M, mask=real_M)
    store_rows(y_desc, first, y_MC, c)


@triton.jit(do_not_specialize=["rows"])
def pooled_gradient_kernel(
    dsums_ptr, of_row_ptr, final_ptr, final_rstd_ptr, dy_ptr, rows, D: tl.constexpr, M: tl.constexpr
):
    """The gradients of rows, from those of the sums of normalised rows over sequences."""
    first = first_row(M, False)
    m, d = tl.arange(0, M), tl.arange(0, D)
    real_M = first + m < rows
    sequence_M = tl.load(of_row_ptr + first + m, mask=real_M, other=-1)
    rstd_M = tl.load(final_rstd_ptr + first + m, mask=real_M, other=0.0)
    at = sequence_M[:, None] * D + d[None, :]
    dxhat_MD = tl.load(dsums_ptr + at, mask=(sequence_M >= 0)[:, None], other=0.0)
    at = (first + m[:, None]) * D + d[None, :]
    xhat_MD = tl.load(final_ptr + at, mask=real_M[:, None], other=0.0).to(tl.float32)
    tl.store(dy_ptr + at, normalise_backward(dxhat_MD, xhat_MD, rstd_M, D), mask=real_M[:, None])


@triton.jit
def drop_rows(dy_desc, ddown_desc, keys_ptr, first, rows, site, threshold, DROPOUT: tl.constexpr, M: tl.constexpr):
    """The gradient of the output of `down` for a tile of rows, as an operand of products. It is also stored."""
    keys_M = load_keys(keys_ptr, first, first + tl.arange(0, M) < rows, DROPOUT)
    ddown_MD = drop_features(load_rows(dy_desc, first), keys_M, site, 0, threshold, DROPOUT).to(ddown_desc.dtype)
    store_rows(ddown_desc, first, ddown_MD)
    return ddown_MD


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def hidden_backward_kernel(
    dy_desc, slope_desc, keys_ptr, down_desc, du_desc, ddown_desc, rows, site, threshold,
    D: tl.constexpr, F: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The gradients of the outputs of `up` and `down`."""
    first = first_row(M, True)
    ddown_MD = drop_rows(dy_desc, ddown_desc, keys_ptr, first, rows, site + 2, threshold, DROPOUT, M)
    for f in range(0, F, C):
        down_DC = down_desc.load([0, f])
        store_rows(du_desc, first, tl.dot(ddown_MD, down_DC) * load_rows(slope_desc, first, f).to(tl.float32), f)


@triton.jit(do_not_specialize=["rows", "site", "threshold"])
def out_backward_kernel(
    dy_desc, du_desc, xhat_desc, rstd_ptr, keys_ptr, up_desc, out_desc, dx_desc, dout_desc, do_desc,
    rows, site, threshold,
    D: tl.constexpr, F: tl.constexpr, DROPOUT: tl.constexpr, M: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """dx, do, and the gradient of the output of `out`. `dx_desc` may be `dy_desc`."""
    first = first_row(M, False)
    m = tl.arange(0, M)
    real_M = first + m < rows
    keys_M = load_keys(keys_ptr, first, real_M, DROPOUT)
    dxhat_MD = tl.zeros([M, D], tl.float32)
    for k in range(0, F, K):
        dxhat_MD = tl.dot(load_rows(du_desc, first, k), up_desc.load([k, 0]), dxhat_MD)
    xhat_MD = load_rows(xhat_desc, first).to(tl.float32)
    rstd_M = tl.load(rstd_ptr + first + m, mask=real_M, other=0.0)
    dz_MD = normalise_backward(dxhat_MD, xhat_MD, rstd_M, D) + load_rows(dy_desc, first)
    store_rows(dx_desc, first, dz_MD)
    dout_MD = drop_features(dz_MD, keys_M, site, 0, threshold, DROPOUT).to(do_desc.dtype)
    store_rows(dout_desc, first, dout_MD)
    for c in range(0, D, C):
        store_rows(do_desc, first, tl.dot(dout_MD, out_desc.load([0, c])), c)
