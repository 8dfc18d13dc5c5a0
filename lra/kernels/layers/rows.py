"""Device functions that the layers' Gluon kernels share: rows in registers, weights in shared memory, dropout, norm.

A program has one or several groups of four warps. Each group works on one tile of rows after another. A warp has 16
entire rows, each in four threads. Of every 32 features a thread has eight neighbours, so that it loads and stores 16
bytes of a 16-bit row. fp32 rows arrive by TMA, one tile ahead, or in threads that have four neighbours, which pairs of
threads then exchange. A product on tensor cores needs, of 32 features, four pairs that are eight apart. So features are
renumbered inside each 32, in all rows and weights alike. The result of one product is then the operand of the next.

Shape suffixes: M rows, D model features, N features of any tile.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from lra.kernels.hopper import barrier, drop_forward, load_tile_async, product_layout, threshold_words
from lra.kernels.layers import reference

SITE_STRIDE = gl.constexpr(reference.SITE_STRIDE)


@gluon.jit
def mix_bits(x):
    """`reference.mix_bits` for uint32."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@gluon.constexpr_function
def row_layout(n, num_warps, together=8):
    """The layout of rows `[16 * num_warps, n]`: of every 4 * `together` features a thread has `together` neighbours."""
    bits = together.bit_length() - 1
    neighbours = [[0, 2**i] for i in range(bits)]
    wide = [[0, 4 * together * 2**i] for i in range((n // (4 * together)).bit_length() - 1)]
    warps = [[16 * 2**i, 0] for i in range(num_warps.bit_length() - 1)]
    lanes = [[0, together], [0, 2 * together], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*neighbours, *wide, [8, 0]], lanes, warps, [], [16 * num_warps, n])


@gluon.constexpr_function
def word_layout(n, num_warps, together=8):
    """The layout of words `[16 * num_warps, n / 4]`, one for four neighbours of `row_layout`, in their thread."""
    return row_layout(n // 4, num_warps, together // 4)


@gluon.constexpr_function
def memory_layout(n, num_warps, dtype):
    """The layout in which rows are loaded and stored, 16 bytes a thread."""
    return row_layout(n, num_warps, 4 if dtype == gl.float32 else 8)


@gluon.jit
def product_feature(i):
    """The feature that has number `i` in products."""
    return i // 32 * 32 + i % 8 // 2 * 8 + i // 8 % 4 * 2 + i % 2


@gluon.jit
def load_weight(buffer, pointer, row_stride, num_warps: gl.constexpr):
    """Fill `[R, C]` of shared memory with a weight from `pointer` on. Its rows and columns are renumbered."""
    R: gl.constexpr = buffer.shape[0]
    C: gl.constexpr = buffer.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // C, C // 8], [num_warps, 1], [1, 0])
    r, c = product_feature(gl.arange(0, R, gl.SliceLayout(1, layout))), gl.arange(0, C, gl.SliceLayout(0, layout))
    values = gl.load(pointer + r[:, None] * row_stride + c[None, :])
    # loads are of 16 bytes, so columns are renumbered only here
    buffer.store(values.reshape(R, C // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(R, C))


@gluon.jit
def multiply_weight(x_MK, weight_KN, num_warps: gl.constexpr):
    """16-bit rows times a weight in shared memory, fp32 `[M, N]`."""
    N: gl.constexpr = weight_KN.shape[1]
    layout: gl.constexpr = product_layout(N, num_warps)
    nothing = gl.zeros([16 * num_warps, N], gl.float32, layout)
    return rows_from_product(warpgroup_mma(as_operand(x_MK, layout), weight_KN, nothing, use_acc=False), num_warps)


@gluon.jit
def as_operand(x_MK, product: gl.constexpr):
    """16-bit rows as the left operand of a product with this layout."""
    M: gl.constexpr = x_MK.shape[0]
    K: gl.constexpr = x_MK.shape[1]
    x_MK = x_MK.reshape(M, K // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(M, K)
    return gl.convert_layout(x_MK, gl.DotOperandLayout(0, product, 2), assert_trivial=True)


@gluon.jit
def rows_from_product(x_MN, num_warps: gl.constexpr):
    """A product's accumulator in the layout of rows."""
    M: gl.constexpr = x_MN.shape[0]
    N: gl.constexpr = x_MN.shape[1]
    x_MN = x_MN.reshape(M, N // 32, 4, 4, 2).permute(0, 1, 3, 2, 4).reshape(M, N)
    return gl.convert_layout(x_MN, row_layout(N, num_warps), assert_trivial=True)


@gluon.jit
def load_bias(pointer, CHUNKS: gl.constexpr, C: gl.constexpr, num_warps: gl.constexpr):
    """A bias `[CHUNKS, C]` in shared memory. Loads from global memory would queue behind the stores of rows."""
    bias = gl.allocate_shared_memory(gl.float32, [CHUNKS, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    c = gl.arange(0, C, gl.BlockedLayout([1], [32], [num_warps], [0]))
    for i in range(CHUNKS):
        bias.index(i).store(gl.load(pointer + i * C + c))
    return bias


@gluon.jit
def broadcast_bias(bias, num_warps: gl.constexpr):
    """A bias from shared memory, in a shape that broadcasts over rows."""
    return bias.load(gl.SliceLayout(0, row_layout(bias.shape[0], num_warps)))[None, :]


@gluon.jit
def drop_features(
    x_MN, keys_M, site, first, threshold, DROPOUT: gl.constexpr, num_warps: gl.constexpr, TOGETHER: gl.constexpr = 8
):
    """`reference.drop_features` of a tile whose features begin at `first`, a multiple of 4."""
    if DROPOUT:
        N: gl.constexpr = x_MN.shape[1]
        layout: gl.constexpr = word_layout(N, num_warps, TOGETHER)
        keys_M = gl.convert_layout(keys_M, gl.SliceLayout(1, layout), assert_trivial=True)
        place = (site * SITE_STRIDE + first // 2 + 2 * gl.arange(0, N // 4, gl.SliceLayout(0, layout))).to(gl.uint32)
        swapped_M = keys_M << 16 | keys_M >> 16
        words = mix_bits(keys_M[:, None] + swapped_M[:, None] * place[None, :]).to(gl.int32, bitcast=True)
        words = gl.join(words, words)
        words = gl.join(words, words).reshape(x_MN.shape[0], N)
        x_MN = zero_dropped(
            x_MN, gl.convert_layout(words, row_layout(N, num_warps, TOGETHER), assert_trivial=True), threshold
        )
    return x_MN


# DROP_FORWARD for fp32. The lower bytes of the halves of a word are for the first pair of the four elements.
DROP_WIDE = gl.constexpr("""{
.reg .b32 x;
.reg .pred p, q;
prmt.b32 x, $8, 0, 0x2301;
abs.f16x2 x, x;   setp.geu.f16x2 p|q, x, $12;  selp.f32 $0, $4, 0f00000000, p;  selp.f32 $1, $5, 0f00000000, q;
abs.f16x2 x, $8;  setp.geu.f16x2 p|q, x, $12;  selp.f32 $2, $6, 0f00000000, p;  selp.f32 $3, $7, 0f00000000, q;
}""")


@gluon.jit
def zero_dropped(x, words, threshold):
    """Zeros where an element's byte of its word is below the threshold, at most `dropout.MAX_DROP_THRESHOLD`."""
    if x.dtype == gl.float32:
        x = gl.inline_asm_elementwise(
            DROP_WIDE, "=f,=f,=f,=f,f,f,f,f,r,r,r,r,r,r,r,r", [x, words, threshold_words(threshold)],
            dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        x = drop_forward(x, words, threshold)
    return x


@gluon.jit
def load_keys(keys_ptr, first, real_M, D: gl.constexpr, DROPOUT: gl.constexpr, num_warps: gl.constexpr):
    """The keys of dropout for the rows, uint32. Without dropout they are zeros."""
    layout: gl.constexpr = gl.SliceLayout(1, row_layout(D, num_warps))
    m = gl.arange(0, 16 * num_warps, layout)
    keys_M = gl.zeros_like(m).to(gl.uint32)
    if DROPOUT:
        real_M = gl.convert_layout(real_M, layout, assert_trivial=True)
        keys_M = gl.load(keys_ptr + first + m, mask=real_M, other=0).to(gl.uint32, bitcast=True)
    return keys_M


@gluon.jit
def normalise(z_MD, eps, D: gl.constexpr):
    """(z minus its mean, divided by its deviation; the inverse of the deviation)."""
    centred_MD = z_MD - (gl.sum(z_MD, 1) * (1 / D))[:, None]
    rstd_M = gl.rsqrt(gl.sum(centred_MD * centred_MD, 1) * (1 / D) + eps)
    return centred_MD * rstd_M[:, None], rstd_M


@gluon.jit
def normalise_backward(dxhat_MD, xhat_MD, rstd_M, D: gl.constexpr):
    """The gradient of the input of `normalise`, from that of its result."""
    mean_M = gl.sum(dxhat_MD, 1) * (1 / D)
    along_M = gl.sum(dxhat_MD * xhat_MD, 1) * (1 / D)
    return (dxhat_MD - mean_M[:, None] - xhat_MD * along_M[:, None]) * rstd_M[:, None]


@gluon.jit
def tile_offset(N: gl.constexpr, stride: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr):
    m = gl.arange(0, 16 * num_warps, gl.SliceLayout(1, layout))
    return m[:, None] * stride + gl.arange(0, N, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def load_in_layout(
    pointer, first, real_M, N: gl.constexpr, stride: gl.constexpr, layout: gl.constexpr, num_warps: gl.constexpr
):
    """`load_rows` in the given layout."""
    real = gl.convert_layout(real_M, gl.SliceLayout(1, layout))
    return gl.load(pointer + first * stride + tile_offset(N, stride, layout, num_warps), mask=real[:, None], other=0.0)


@gluon.jit
def load_rows(pointer, first, real_M, N: gl.constexpr, stride: gl.constexpr, num_warps: gl.constexpr):
    """N features of the rows from `first` on, which lie `stride` elements apart. Rows that are not real are zeros."""
    layout: gl.constexpr = memory_layout(N, num_warps, pointer.dtype.element_ty)
    return gl.convert_layout(
        load_in_layout(pointer, first, real_M, N, stride, layout, num_warps), row_layout(N, num_warps)
    )


@gluon.jit
def store_rows(pointer, x_MN, first, real_M, stride: gl.constexpr, num_warps: gl.constexpr):
    N: gl.constexpr = x_MN.shape[1]
    layout: gl.constexpr = memory_layout(N, num_warps, pointer.dtype.element_ty)
    real = gl.convert_layout(real_M, gl.SliceLayout(1, layout))
    x_MN = gl.convert_layout(x_MN, layout)
    gl.store(pointer + first * stride + tile_offset(N, stride, layout, num_warps), x_MN, mask=real[:, None])


@gluon.jit
def group_tiles(rows, M: gl.constexpr, INDEX: gl.constexpr, GROUPS: gl.constexpr):
    """(The first tile of a group, the number of all tiles, the distance of the group's tiles). A tile has M rows."""
    return gl.program_id(0) * GROUPS + INDEX, gl.cdiv(rows, M), gl.num_programs(0) * GROUPS


@gluon.jit
def tile_first_row(tile, tiles, rows, M: gl.constexpr):
    """The first row of a tile, or `rows` if there is no such tile. Tile 0 is the last of the rows.

    The previous kernel, such as attention, may have ended with the last rows. The L2 cache then still has them.
    """
    return gl.where(tile < tiles, (tiles - 1 - tile) * M, rows).to(gl.int64)


@gluon.jit
def request_rows(desc, first, buffer, ready, wanted):
    """Start to copy the rows from `first` on to a tile in shared memory. Rows past the last one become zeros."""
    BYTES: gl.constexpr = 4 if buffer.dtype == gl.float32 else 2  # of an element
    mbarrier.expect(ready, BYTES * buffer.shape[0] * buffer.shape[1], pred=wanted)
    load_tile_async(desc, [first.to(gl.int32), 0], ready, buffer, pred=wanted)


@gluon.jit
def receive_rows(desc, following, rows, buffer, ready, phase, num_warps: gl.constexpr):
    """Wait for the requested rows and return them. Request the rows from `following` on, if there are any."""
    mbarrier.wait(ready, phase)
    x_MN = buffer.load(row_layout(buffer.shape[1], num_warps))
    barrier()
    request_rows(desc, following, buffer, ready, following < rows)
    return x_MN


@gluon.jit
def prefetch_rows(pointer, first, rows, N: gl.constexpr, num_warps: gl.constexpr):
    """Prefetch N features of this program's rows from `first` on into the L2 cache, if there are any."""
    LINE: gl.constexpr = 1024 // pointer.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
    LINES: gl.constexpr = N // LINE  # of a row
    i = gl.arange(0, 16 * num_warps * LINES, gl.BlockedLayout([1], [32], [num_warps], [0]))
    offset = (first + gl.minimum(i // LINES, rows - 1 - first)) * N + i % LINES * LINE
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointer + offset], dtype=gl.int32, is_pure=False, pack=1
    )
