"""Device functions that attention's Gluon kernels for Hopper share: visited tiles, row statistics, dropout, gradients.

flash/tiles.py explains shape suffixes. `lra.kernels.hopper` says which elements of a tile a thread holds.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from lra.kernels.flash import tiles
from lra.kernels.hopper import coalesced_layout

sequence_tile, dropout_key = gluon.jit(tiles.sequence_tile.fn), gluon.jit(tiles.dropout_key.fn)
is_extreme = gluon.jit(tiles.is_extreme.fn)
draw_words, draw_words_by_row = gluon.jit(tiles.draw_words.fn), gluon.jit(tiles.draw_words_by_row.fn)
Sequences = namedtuple("Sequences", "start_ptr length_ptr heads max_length padded_length")  # of a batch


@gluon.jit
def owned_tile(tile, sequences, ROWS: gl.constexpr):
    """`tiles.sequence_tile` for these sequences."""
    return sequence_tile(
        tile, sequences.start_ptr, sequences.length_ptr, sequences.max_length, sequences.padded_length,
        sequences.heads, ROWS,
    )  # fmt: skip


@gluon.constexpr_function
def visit_list_layout(max_visits, num_warps):
    """A layout in which every warp has the whole list, so that its sum needs no shared memory."""
    lanes = min(max_visits, 32)
    return gl.DistributedLinearLayout(
        [[lanes * 2**i] for i in range((max_visits // lanes).bit_length() - 1)],
        [[2**i if 2**i < max_visits else 0] for i in range(5)],
        [[0]] * (num_warps.bit_length() - 1), [], [max_visits],
    )  # fmt: skip


@gluon.jit
def visit_list(visits_ptr, layouts, tiles, head, tile, limit, MAX_VISITS: gl.constexpr, num_warps: gl.constexpr):
    """(A tile's list of `layout.Visits`, how many of the first `limit` tiles are in it)."""
    visits_ptr += (head % layouts * tiles + tile) * MAX_VISITS
    entries = gl.load(visits_ptr + gl.arange(0, MAX_VISITS, visit_list_layout(MAX_VISITS, num_warps)))
    return visits_ptr, gl.sum((entries < 2 * limit).to(gl.int32), 0)


@gluon.jit
def visited_tile(list_ptr, i, n, SIZE: gl.constexpr, MAX_VISITS: gl.constexpr):
    """Where tile number `i` of the n in the list begins. SIZE is a tile's. An `i` outside the list gives any tile."""
    if MAX_VISITS:
        i = gl.load(list_ptr + gl.maximum(gl.minimum(i, n - 1), 0)) // 2
    return i * SIZE


@gluon.jit
def query_shift(first_column, n, max_length, BLOCK_N: gl.constexpr):
    """The `shift` of `query_place`. All tiles of keys of a head add to the same dQ, so each begins at another place."""
    return first_column // BLOCK_N * (n - 1) // gl.cdiv(max_length, BLOCK_N)


@gluon.jit
def query_place(t, n, shift):
    """Which of its n tiles of queries a tile of keys visits as number `t`: first the last one, then from `shift` on.

    Only the last tile may be partial.
    """
    place = t - 1 + shift
    place = gl.where(place < n - 1, place, place - (n - 1))
    return gl.where(t == 0, n - 1, place)


@gluon.jit
def load_statistics(stats_ptr, heads, total, rows, length):
    """The two statistics of `prepare_backward_kernel` for a tile's rows. Past the length they make every weight 0."""
    real = rows < length
    lse = gl.load(stats_ptr + rows, mask=real, other=float("inf"))
    return lse, gl.load(stats_ptr + heads.to(gl.int64) * total + rows, mask=real, other=0.0)


@gluon.jit
def scored_keys(length):
    """The number of keys whose scores have a gradient: none if there is a single key, whose weight is always 1."""
    return gl.where(length == 1, 0, length)


@gluon.jit
def store_owned_tile(
    pointer, tile, first, start, length, owned, heads, head, dtype: gl.constexpr, num_warps: gl.constexpr
):
    """Store the rows from `first` on that the sequence owns. Rows past its length become zeros."""
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = coalesced_layout(D, num_warps)
    values = gl.convert_layout(tile.to(dtype), layout)
    rows = first + gl.arange(0, tile.shape[0], gl.SliceLayout(1, layout))
    d = gl.arange(0, D, gl.SliceLayout(0, layout))
    values = gl.where((rows < length)[:, None], values, gl.zeros_like(values))
    offset = (start + rows).to(gl.int64) * (heads * D)
    gl.store(pointer + offset[:, None] + (head * D + d)[None, :], values, mask=(rows < owned)[:, None])


@gluon.constexpr_function
def dropout_layout(rows, columns, row_warps, column_warps):
    """The layout of the draws `[rows, columns]` of a tile of scores: lane % 4 is the column, lane / 4 the row."""
    registers = [[8 * row_warps * 2**i, 0] for i in range((rows // (8 * row_warps)).bit_length() - 1)]
    registers += [[0, 4 * column_warps * 2**i] for i in range((columns // (4 * column_warps)).bit_length() - 1)]
    warps = [[8 * 2**i, 0] for i in range(row_warps.bit_length() - 1)]
    warps += [[0, 4 * 2**i] for i in range(column_warps.bit_length() - 1)]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [rows, columns])


@gluon.jit
def draw_forward(
    key, first_row, first_column, scores: gl.constexpr, M: gl.constexpr, N: gl.constexpr, num_warps: gl.constexpr
):
    """int32 `[M, N]` in the layout `scores`: the word of a draw that decides on this weight and three others."""
    layout: gl.constexpr = dropout_layout(M // 2, N // 8, num_warps, 1)
    rows = first_row // 2 + gl.arange(0, M // 2, gl.SliceLayout(1, layout))
    columns = first_column // 4 + 2 * gl.arange(0, N // 8, gl.SliceLayout(0, layout))
    w0, w1, w2, w3 = draw_words(key, rows[:, None], columns[None, :])
    words = gl.join(gl.join(w0, w2), gl.join(w1, w3)).to(gl.int32, bitcast=True)  # for the four columns 8 j
    words = gl.join(gl.join(words, words), gl.join(words, words))  # for two neighbouring columns and the row 8 below
    words = words.reshape(M // 16, 8, N // 32, 4, 4, 2, 2).permute(0, 5, 1, 2, 4, 3, 6).reshape(M, N)
    return gl.convert_layout(words, scores)


@gluon.jit
def draw_backward(key, first_row, first_column, M: gl.constexpr, N: gl.constexpr, num_warps: gl.constexpr):
    """int32 `[M, N / 4]` for `spread_backward`: M / 2 rows for the keys 0 to 7 of each 16, M / 2 for the others.

    Two warps, which have 16 keys each, need two words of a draw each. So both make the whole draw, as in the forward.
    To make one half each and exchange them through shared memory takes longer. Then a warp transposes its 8 x 8 blocks.
    In a word a thread has two weights of a block, and those of the rows 8 below.
    """
    layout: gl.constexpr = dropout_layout(M // 2, N // 4, 1, num_warps)
    rows = first_row // 2 + gl.arange(0, M // 2, gl.SliceLayout(1, layout))
    i = gl.arange(0, N // 4, gl.SliceLayout(0, layout))
    columns = first_column // 4 + 2 * (i // 8 * 4 + i % 4)
    w0, w1, w2, w3 = draw_words_by_row(key, rows[:, None], columns[None, :])
    second = (i // 4 % 2 == 1)[None, :]  # of the two warps
    words = gl.join(gl.where(second, w2, w0), gl.where(second, w3, w1)).to(gl.int32, bitcast=True)
    words = words.permute(2, 0, 1).reshape(M, N // 4)
    return transpose_blocks(gl.convert_layout(words, dropout_layout(M, N // 4, 1, num_warps), assert_trivial=True))


@gluon.jit
def spread_backward(drawn, scores: gl.constexpr):
    """The words of `draw_forward` for the transposed tile, int32 `[N, M]` in the layout `scores`."""
    M: gl.constexpr = drawn.shape[0]
    N: gl.constexpr = 4 * drawn.shape[1]
    words = gl.join(gl.join(drawn, drawn), gl.join(drawn, drawn))
    words = words.reshape(2, M // 16, 8, N // 16, 4, 2, 2).permute(3, 0, 2, 1, 5, 4, 6).reshape(N, M)
    return gl.convert_layout(words, scores)


@gluon.jit
def transpose_blocks(words):
    """Transpose each warp's 8 x 8 matrices of 16-bit numbers. A thread has two neighbours of a row in a word."""
    return gl.inline_asm_elementwise(
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def packed_assembly(dtype, assembly):
    """Assembly whose instructions compute two 16-bit elements. `KIND` stands for their type."""
    return assembly.replace("KIND", "bf16x2" if dtype == gl.bfloat16 else "f16x2")


# dS = P * (dP - delta), two 16-bit elements in an instruction. Where a key has nearly all of the weight, dP and delta
# are nearly equal. If both were rounded to 16 bits, the error could exceed the difference. So without dropout the
# subtraction is in fp32. With dropout that would cost 3 to 8% of the pass (docs/lab-log.md), so both are rounded first,
# as plain PyTorch rounds dP.


@gluon.jit
def packed_score_gradient(p, difference):
    """dS from P and from dP - delta, which is in fp32."""
    return gl.inline_asm_elementwise(
        packed_assembly(p.dtype, "mul.rn.KIND $0, $1, $2;"), "=r,r,r", [p, difference.to(p.dtype)],
        dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip


@gluon.jit
def packed_dropped_score_gradient(kept, p, dp, minus_delta):
    """dS = kept * dP - p * delta. `kept` is p with zeros where dropout drops it. -delta has 16 bits."""
    return gl.inline_asm_elementwise(
        packed_assembly(p.dtype, "{ .reg .b32 x;  mul.rn.KIND x, $2, $4;  fma.rn.KIND $0, $1, $3, x; }"), "=r,r,r,r,r",
        [kept, p, dp.to(p.dtype), minus_delta], dtype=p.dtype, is_pure=True, pack=2,
    )  # fmt: skip
