"""Device functions that attention kernels share: places of programs, loads and stores, masks, one tile of scores.

Shape suffixes: M query rows, N key columns (rows of k and v), D head dimension. A raw score is q k^T without the scale.
A weight is exp2((raw - maximum) * scale_log2), where `scale_log2` is the scale times log2(e), because the hardware has
an instruction for exp2. The difference comes before the product, so that no score is too large: near the largest float
the product could overflow, and from 2^31 on its rounding alone would make weights infinite.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# (device code is compiled by Triton; its tensors do not type-check as Python)

from __future__ import annotations

import triton
import triton.language as tl

from lra.kernels.flash.reference import PHILOX_ROUNDS, ROW_FACTORS

ROUNDS = tl.constexpr(PHILOX_ROUNDS)
R0, R1, R2, R3 = map(tl.constexpr, ROW_FACTORS)
LOG2_E = 1.4426950408889634
# Scores in base 2 beyond this number are extreme. From 2^15 on, half a unit in the last place of fp32 is more than
# 2^-10. A 16-bit weight has that error if a single number holds the log-sum-exp of its row.
EXTREME = tl.constexpr(2.0**15)


@triton.jit
def program_tile(program, tiles, heads):
    """(Tile, head, sequence) of a program. Tiles of one head are neighbours, so that they share K and V in L2."""
    return program % tiles, program // tiles % heads, program // tiles // heads


@triton.jit
def sequence_tile(program, start_ptr, length_ptr, max_length, padded_length, heads, ROWS: tl.constexpr):
    """(Head, sequence, its first row, its length, its owned rows, where the program's tile of ROWS begins in it)."""
    tile, head, b = program_tile(program, tl.cdiv(max_length, ROWS), heads)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    length = tl.load(length_ptr + b)
    return head, b, tl.load(start_ptr + b), length, tl.maximum(length, padded_length), tile * ROWS


@triton.jit
def visit_list(visits_ptr, layouts, tiles, head, tile, end, SIZE: tl.constexpr, MAX_VISITS: tl.constexpr):
    """(A tile's list of `layout.Visits`, the end of a loop in steps of SIZE over its listed tiles before `end`)."""
    visits_ptr += (head % layouts * tiles + tile) * MAX_VISITS
    before = tl.load(visits_ptr + tl.arange(0, MAX_VISITS)) < 2 * tl.cdiv(end, SIZE)
    return visits_ptr, tl.sum(before.to(tl.int32)) * SIZE


@triton.jit
def visited_tile(list_ptr, place, SIZE: tl.constexpr, MAX_VISITS: tl.constexpr):
    """(Where the tile at this place of the loop begins, whether it lies in a set block of the layout)."""
    is_full_tile = True
    if MAX_VISITS:
        entry = tl.load(list_ptr + place // SIZE)
        place = entry // 2 * SIZE
        is_full_tile = entry % 2 == 1
    return place, is_full_tile


@triton.jit
def head_pointer(pointer, row, head, stride_row, stride_head):
    """Where row `row` of head `head` begins. The offset has 64 bits: a batch can have more than 2^31 elements."""
    return pointer + tl.cast(row, tl.int64) * stride_row + tl.cast(head, tl.int64) * stride_head


@triton.jit
def load_rows(pointer, rows, end, stride_row, stride_d, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """`[len(rows), BLOCK_D]`. From row `end` and from column D on it is zero, and memory is not read."""
    d = tl.arange(0, BLOCK_D)
    offset = rows.to(tl.int64)[:, None] * stride_row + d.to(tl.int64)[None, :] * stride_d
    return tl.load(pointer + offset, mask=(rows < end)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_rows(pointer, tile, rows, length, owned, stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store the rows that the sequence owns. Rows past its length become zeros, whatever `tile` holds there."""
    d = tl.arange(0, BLOCK_D)
    offset = rows.to(tl.int64)[:, None] * stride_row + d[None, :]
    values = tl.where((rows < length)[:, None], tile, 0.0).to(pointer.dtype.element_ty)
    tl.store(pointer + offset, values, mask=(rows < owned)[:, None] & (d < D)[None, :])


@triton.jit
def add_rows(pointer, tile, rows, length, stride_row, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Add to the real rows of the sequence. Other programs add to them at the same time."""
    d = tl.arange(0, BLOCK_D)
    offset = rows.to(tl.int64)[:, None] * stride_row + d[None, :]
    tl.atomic_add(pointer + offset, tile, mask=(rows < length)[:, None] & (d < D)[None, :], sem="relaxed")


@triton.jit
def visible_mask(row, column, length, is_full_tile, CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr):
    """Whether a query row sees a key column. The arguments broadcast, so they may be a tile's or its transpose's.

    A full tile lies in a set block. The rules BAND and GLOBALS of `layout.Layout` decide on all others.
    """
    seen = column < length
    if BAND is not None or GLOBALS > 0:
        rule = is_full_tile
        if BAND is not None:
            rule = rule | (tl.abs(row - column) <= BAND)
        if GLOBALS > 0:
            rule = rule | (row < GLOBALS) | (column < GLOBALS)
        seen = seen & rule
    if CAUSAL:
        seen = seen & (column <= row)
    return seen


@triton.jit
def sees_single_key(row, length, CAUSAL: tl.constexpr):
    """Whether a query sees a single column. Its weight is 1 whatever the score, so the score has no gradient."""
    single = (row * 0 + length) == 1
    if CAUSAL:
        single = single | (row == 0)
    return single


@triton.jit
def dropout_key(seed, index, head):
    """The four words of a head's key, as in `reference.keep_mask`."""
    return tl.philox(seed, index, head, 0, 0, ROUNDS)


@triton.jit
def mix_round(x, y, z, w):
    """One round of `reference._mix_round`."""
    x += y * w
    y += z * x
    z += x * y
    w += y * z
    return x, y, z, w


@triton.jit
def swap_halves(word):
    """A word with its halves swapped."""
    return (word >> 16) | (word << 16)


@triton.jit
def mix_words(x, y, z, w):
    """Two rounds, with the halves of the words swapped in between."""
    x, y, z, w = mix_round(x, y, z, w)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    return mix_round(swap_halves(x), swap_halves(y), swap_halves(z), swap_halves(w))


@triton.jit
def draw_words(key, rows, columns):
    """Four words at each (row, column), as in `reference.draw_words`. The arguments broadcast."""
    k0, k1, k2, k3 = key
    rows, columns = rows.to(tl.uint32), columns.to(tl.uint32)
    x, y, z, w = rows * R0 + k0, rows * R1 + k1, rows * R2 + k2, rows * R3 + k3
    return mix_words(columns * z + x, columns * w + y, columns * x + z, columns * y + w)


@triton.jit
def draw_words_by_row(key, rows, columns):
    """The same words, by products with the row. A loop over rows keeps the factors that depend on columns alone."""
    k0, k1, k2, k3 = key
    rows, columns = rows.to(tl.uint32), columns.to(tl.uint32)
    return mix_words(
        rows * (columns * R2 + R0) + (columns * k2 + k0),
        rows * (columns * R3 + R1) + (columns * k3 + k1),
        rows * (columns * R0 + R2) + (columns * k0 + k2),
        rows * (columns * R1 + R3) + (columns * k1 + k3),
    )


@triton.jit
def keep_tile(
    key, first_row, first_column, threshold,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """The dropout mask of a tile, `[BLOCK_M, BLOCK_N]` or transposed. The tile begins at multiples of 16.

    It is the function of (seed, index, head, row, column) that `reference.keep_mask` defines: four words for 16 scores.
    """
    BLOCKS: tl.constexpr = (BLOCK_N + 31) // 32
    WORDS: tl.constexpr = BLOCK_N // BLOCKS // 8  # of the four of a draw; two if the tile is 16 columns wide
    rows = first_row // 16 * 8 + tl.arange(0, BLOCK_M // 2)
    columns = first_column // 32 * 8 + 2 * tl.arange(0, BLOCKS * 4)
    w0, w1, w2, w3 = draw_words(key, rows[:, None], columns[None, :])  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    if WORDS == 4:
        # join adds a last dimension; the outer join is for the low bit of the word's number, the inner one for the high
        words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    else:
        second = first_column % 32 == 16
        words = tl.join(tl.where(second, w2, w0), tl.where(second, w3, w1))
    words = ((words << 1) & 0xFFFEFFFE) | ((words >> 15) & 0x00010001)  # both halves rotated
    words = words.reshape(BLOCK_M // 2, BLOCKS * 4, WORDS, 1)
    byte = (words >> (8 * tl.arange(0, 4))[None, None, None, :]) & 0xFF
    keep = byte.to(tl.int32) >= threshold
    keep = keep.reshape(BLOCK_M // 16, 8, BLOCKS, 4, WORDS, 2, 2)
    if TRANSPOSED:
        keep = keep.permute(2, 4, 3, 5, 0, 6, 1).reshape(BLOCK_N, BLOCK_M)
    else:
        keep = keep.permute(0, 6, 1, 2, 4, 3, 5).reshape(BLOCK_M, BLOCK_N)
    return keep


@triton.jit
def store_softmax(softmax_ptr, top, sums, start, head, heads, total, rows, length, dtype: tl.constexpr):
    """Store the statistics from which the backward recomputes weights: each row's maximum and its normaliser.

    With 16-bit inputs the normaliser is the logarithm of the sum relative to the maximum. It is part of an exponent and
    costs no operation. With fp32 it is the reciprocal of the sum, because rounding a logarithm near 10 costs several
    times the error of a weight. A row whose scores are all -inf, or that sees no key, gets the maximum +inf, so that
    all its weights are 0.
    """
    real = rows < length
    top = tl.where(top == float("-inf"), float("inf"), top)
    norm = (1.0 / sums).to(tl.float32) if dtype == tl.float32 else tl.log2(sums)
    tl.store(head_pointer(softmax_ptr, start, head, 1, total) + rows, top, mask=real)
    tl.store(head_pointer(softmax_ptr, start, heads + head, 1, total) + rows, norm, mask=real)


@triton.jit
def load_softmax(softmax_ptr, start, head, heads, total, rows, length):
    """The statistics of `store_softmax`. Past the length they are +inf and 0, which make every weight 0."""
    real = rows < length
    top = tl.load(head_pointer(softmax_ptr, start, head, 1, total) + rows, mask=real, other=float("inf"))
    norm = tl.load(head_pointer(softmax_ptr, start, heads + head, 1, total) + rows, mask=real, other=0.0)
    return top, norm


@triton.jit
def load_delta(delta_ptr, start, head, total, rows, length):
    return tl.load(head_pointer(delta_ptr, start, head, 1, total) + rows, mask=rows < length, other=0.0)


@triton.jit
def is_extreme(top, scale_log2):
    """Whether rows with these maxima have scores beyond `EXTREME`."""
    return (tl.abs(top) < float("inf")) & (tl.abs(top * scale_log2) > EXTREME)


@triton.jit
def split_columns(x):
    """(The even columns, the odd columns)."""
    return tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))


@triton.jit
def dot_split_columns(a_MD, b_ND):
    """a b^T, as one sum over the even d and one over the odd d. tl.fma keeps the compiler from merging the two."""
    even_a, odd_a = split_columns(a_MD)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    even_b, odd_b = split_columns(b_ND)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    s = tl.dot(even_a, tl.trans(even_b), input_precision="ieee")
    return tl.fma(tl.dot(odd_a, tl.trans(odd_b), input_precision="ieee"), 1.0, s)


@triton.jit
def score_products(a_MD, b_ND):
    """The raw scores a b^T. In fp32 they are made of up to four sums, which round less than a single sum over d."""
    D: tl.constexpr = a_MD.shape[1]
    if a_MD.dtype == tl.float32 and D >= 64:  # tl.dot needs 16 of each
        even_a, odd_a = split_columns(a_MD)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        even_b, odd_b = split_columns(b_ND)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        s = dot_split_columns(even_a, even_b) + dot_split_columns(odd_a, odd_b)
    elif a_MD.dtype == tl.float32 and D == 32:
        s = dot_split_columns(a_MD, b_ND)
    else:
        s = tl.dot(a_MD, tl.trans(b_ND), input_precision="ieee")
    return s


@triton.constexpr_function
def accumulator_type(dtype):
    """The type of sums over tiles. In fp32, a sum of thousands of fp32 tiles would round more than plain PyTorch."""
    return tl.float64 if dtype == tl.float32 else tl.float32


@triton.jit
def add_dot(acc, a, b):
    """acc + a b, where acc has the `accumulator_type` of the inputs."""
    if acc.dtype == tl.float64:
        acc += tl.dot(a, b, input_precision="ieee")
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def update_softmax(
    q_MD, k_ND, v_ND, top_M, total_M, acc_MD, seen_MN, keep_MN, scale_log2,
    DROPOUT: tl.constexpr, SPARSE: tl.constexpr, ANY_SCORES: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys to the running softmax (Algorithm 1, lines 9 to 12; normalised only at the end).

    `top` is the maximum raw score so far, `total` the sum of the weights relative to it, and `acc` the same sum
    weighted by v. Dropout does not change `total`: it applies to the normalised weights. SPARSE: a row may have seen no
    key yet. ANY_SCORES: the result is also right for -inf and huge scores, at one more operation on each. Without it
    `is_softmax_wrong` tells which rows are wrong.
    """
    raw_MN = tl.where(seen_MN, score_products(q_MD, k_ND), float("-inf"))
    new_top_M = tl.maximum(top_M, tl.max(raw_MN, 1))
    base_M = new_top_M
    if SPARSE or ANY_SCORES:
        base_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    if ANY_SCORES:
        p_MN = tl.exp2((raw_MN - base_M[:, None]) * scale_log2)
    else:
        p_MN = tl.exp2(raw_MN * scale_log2 - (base_M * scale_log2)[:, None])  # one fused operation, so one rounding
    shrink_M = tl.exp2((top_M - base_M) * scale_log2)
    total_M = total_M * shrink_M + tl.sum(p_MN, 1)
    if DROPOUT:
        p_MN = tl.where(keep_MN, p_MN, 0.0)
    acc_MD = add_dot(acc_MD * shrink_M[:, None], p_MN.to(v_ND.dtype), v_ND)
    return new_top_M, total_M, acc_MD


@triton.jit
def is_softmax_wrong(top, total, scale_log2):
    """Whether `update_softmax` without ANY_SCORES got a row wrong. NaN is wrong; a row that sees nothing is right."""
    fit = (total >= 0.5) & (total < float("inf")) & (is_extreme(top, scale_log2) == 0)
    return (fit | ((top == float("-inf")) & (total == 0.0))) == 0
