"""Embedding tables and their gradients: a vector for each token, and one for each place that is added to it."""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma

from lra.kernels.hopper import barrier, product_layout
from lra.kernels.layers.rows import drop_features, load_in_layout, load_keys, row_layout, tile_offset

FEATURE_SLICE = gl.constexpr(64)  # features that a program sums
NEIGHBOURS = gl.constexpr(4)  # features of a thread side by side: rows are in fp32, and are no operands


@gluon.jit
def look_up_rows(table_ptr, ids_ptr, first, real_M, count, D: gl.constexpr, num_warps: gl.constexpr):
    """The rows of a table of `count` rows with these ids. Ids that the table lacks give NaN."""
    layout: gl.constexpr = row_layout(D, num_warps, NEIGHBOURS)
    m, d = gl.arange(0, 16 * num_warps, gl.SliceLayout(1, layout)), gl.arange(0, D, gl.SliceLayout(0, layout))
    ids_M = gl.load(ids_ptr + first + m, mask=real_M, other=0).to(gl.int64)
    found_M = (ids_M >= 0) & (ids_M < count)
    return gl.load(table_ptr + (ids_M * D)[:, None] + d[None, :], mask=found_M[:, None], other=float("nan"))


@gluon.jit(do_not_specialize=["rows", "vocabulary", "places", "site", "threshold"])
def embed_kernel(
    table_ptr, ids_ptr, of_places_ptr, place_ptr, keys_ptr, x_ptr, rows, vocabulary, places, scale, site, threshold,
    D: gl.constexpr, PLACES: gl.constexpr, DROPOUT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    M: gl.constexpr = 16 * num_warps
    layout: gl.constexpr = row_layout(D, num_warps, NEIGHBOURS)
    first = gl.program_id(0).to(gl.int64) * M
    real_M = gl.arange(0, M, gl.SliceLayout(1, layout)) < rows - first
    keys_M = load_keys(keys_ptr, first, real_M, D, DROPOUT, num_warps)
    x_MD = look_up_rows(table_ptr, ids_ptr, first, real_M, vocabulary, D, num_warps)
    if PLACES:
        x_MD += look_up_rows(of_places_ptr, place_ptr, first, real_M, places, D, num_warps)
    x_MD = drop_features(x_MD * scale, keys_M, site, 0, threshold, DROPOUT, num_warps, NEIGHBOURS)
    gl.store(x_ptr + first * D + tile_offset(D, D, layout, num_warps), x_MD, mask=real_M[:, None])


@gluon.jit
def tile_rows(i, end, place, rows, start_ptr, length_ptr, M: gl.constexpr, PLACES: gl.constexpr):
    """(First row of tile `i`, how many of its M rows are real). With PLACES: of the tile at `place` in sequence `i`."""
    if PLACES:
        sequence = gl.minimum(i, end - 1)
        first = gl.load(start_ptr + sequence) + place
        count = gl.load(length_ptr + sequence) - place
    else:
        first = i * M
        count = rows - first
    return first.to(gl.int64), gl.where(i < end, count, 0)


@gluon.jit
def relative_ids(ids, first, V: gl.constexpr, HALF: gl.constexpr):
    """The ids relative to `first`, exact in 16 bits; -1 for ids that are not among the V from `first` on."""
    i = ids.to(gl.int32) - first
    return gl.where((i >= 0) & (i < V), i, -1).to(HALF)


@gluon.constexpr_function
def equal_assembly(dtype):
    kind = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return f"set.eq.{kind}.{kind} $0, $1, $2;"


@gluon.jit
def equal_mask(a, b):
    """One where two 16-bit floats are equal, else zero. An instruction compares two elements."""
    return gl.inline_asm_elementwise(equal_assembly(a.dtype), "=r,r,r", [a, b], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit(do_not_specialize=["rows", "sequences", "parts", "site", "threshold"])
def table_gradient_kernel(
    dy_ptr, ids_ptr, keys_ptr, start_ptr, length_ptr, sums_ptr, place_sums_ptr, rows, sequences, parts, site, threshold,
    D: gl.constexpr, V: gl.constexpr, TABLES: gl.constexpr, TILES: gl.constexpr, HALF: gl.constexpr,
    DROPOUT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Sums of the kept elements: one-hot idsᵀ dy in HALF, and with TILES of places the sums over the sequences.

    A program has FEATURE_SLICE features and V rows of the table. It has one in so many tiles of M rows or, with places,
    one tile of places in one of so many sequences. The caller adds up `sums_ptr`, `[parts, TABLES, V, D]`, and
    `place_sums_ptr`, `[parts / TILES, TILES * M, D]`.
    """
    M: gl.constexpr = 16 * num_warps
    PLACES: gl.constexpr = TILES > 0
    layout: gl.constexpr = row_layout(FEATURE_SLICE, num_warps, NEIGHBOURS)
    product: gl.constexpr = product_layout(FEATURE_SLICE, num_warps)
    one_hot: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    part, table = gl.program_id(0) // TABLES, gl.program_id(0) % TABLES
    part, feature = part // (D // FEATURE_SLICE), part % (D // FEATURE_SLICE) * FEATURE_SLICE
    place, first_tile, end, step = 0, part, gl.cdiv(rows, M), parts
    if PLACES:
        place, first_tile, end, step = part % TILES * M, part // TILES, sequences, parts // TILES

    id_layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    m, column = gl.arange(0, M, gl.SliceLayout(1, layout)), gl.arange(0, M, id_layout)
    v = gl.arange(0, V, gl.SliceLayout(1, one_hot)).to(HALF)
    dy_smem = gl.allocate_shared_memory(
        HALF, [2, M, FEATURE_SLICE], gl.NVMMASharedLayout.get_default_for([M, FEATURE_SLICE], HALF)
    )
    ids_smem = gl.allocate_shared_memory(HALF, [2, M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    total = gl.zeros([V, FEATURE_SLICE], gl.float32, product)
    of_places = gl.zeros([M, FEATURE_SLICE], gl.float32, layout)
    first, count = tile_rows(first_tile, end, place, rows, start_ptr, length_ptr, M, PLACES)
    next_first, next_count = tile_rows(first_tile + step, end, place, rows, start_ptr, length_ptr, M, PLACES)
    ids = gl.load(ids_ptr + first + column, mask=column < count, other=-1)
    keys_M = load_keys(keys_ptr, first, m < count, FEATURE_SLICE, DROPOUT, num_warps)
    dy = load_in_layout(dy_ptr + feature, first, m < count, FEATURE_SLICE, D, layout, num_warps)
    slot = 0
    for i in range(first_tile, end, step):
        dy = drop_features(dy, keys_M, site, feature, threshold, DROPOUT, num_warps, NEIGHBOURS)
        if PLACES:
            of_places += dy
        dy_smem.index(slot).store(dy.to(HALF))
        ids_smem.index(slot).store(relative_ids(ids, table * V, V, HALF))
        first, count = next_first, next_count
        # load the next tile while this one is summed
        next_first, next_count = tile_rows(i + 2 * step, end, place, rows, start_ptr, length_ptr, M, PLACES)
        ids = gl.load(ids_ptr + first + column, mask=column < count, other=-1)
        keys_M = load_keys(keys_ptr, first, m < count, FEATURE_SLICE, DROPOUT, num_warps)
        dy = load_in_layout(dy_ptr + feature, first, m < count, FEATURE_SLICE, D, layout, num_warps)
        fence_async_shared()
        barrier()  # and the last product has read the other slot
        named = ids_smem.index(slot).load(gl.SliceLayout(0, one_hot))
        total = warpgroup_mma(equal_mask(v[:, None], named[None, :]), dy_smem.index(slot), total)
        slot = slot ^ 1

    d = feature + gl.arange(0, FEATURE_SLICE, gl.SliceLayout(0, product))
    row = (part * TABLES + table) * V + gl.arange(0, V, gl.SliceLayout(1, product))
    gl.store(sums_ptr + row[:, None] * D + d[None, :], total)
    if PLACES:
        d = feature + gl.arange(0, FEATURE_SLICE, gl.SliceLayout(0, layout))
        row = first_tile * (TILES * M) + place + m
        if table == 0:
            gl.store(place_sums_ptr + row[:, None] * D + d[None, :], of_places)
