"""Backward for Hopper GPUs at d = 64 where every query sees every key, with specialised warps.

A program works on one tile of 128 keys after another. Four warps fetch tiles of queries by TMA. Two groups of four
warps have 64 keys each, and compute dK, dV and the gradients of the scores. Four more warps multiply these gradients
with all 128 keys, and add the share of dQ to memory. So queries and dQ travel half as often as in backward.py, and a
group only waits for data that it needs.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_wait

from lra.kernels.flash.hopper.tiles import (
    Sequences,
    load_statistics,
    owned_tile,
    packed_score_gradient,
    query_place,
    query_shift,
    scored_keys,
    store_owned_tile,
)
from lra.kernels.hopper import (
    add_tile_async,
    advance_slot,
    allocate_barriers,
    await_tile,
    barrier,
    claim_tile,
    load_tile_async,
    product_layout,
    publish_tile,
    skip_head,
    store_accumulator,
    zero_rows_past,
    zero_tile_past,
)

GROUP_WARPS = gl.constexpr(4)
HALVES = gl.constexpr(2)  # of a tile of keys
BUFFERS = gl.constexpr(2)  # of keys, of gradients of scores, of shares of dQ


class KeyBuffers(NamedTuple):
    """Shared memory for tiles of K and V, with the barriers of each buffer."""

    k: Any  # [BUFFERS * HALVES, KEYS, D]
    v: Any
    number: Any  # [BUFFERS, 1]: the number of the tile in a buffer
    ready: Any  # completes when the buffer is filled
    freed: Any  # completes when both halves, and the warps that add to dQ, have read it


class QueryBuffers(NamedTuple):
    """Shared memory for tiles of Q and dO and two statistics of each row, with the barriers of each slot."""

    q: Any  # [STAGES, BLOCK_M, D]
    do: Any
    lse: Any  # [STAGES, BLOCK_M]
    delta: Any
    ready: Any  # completes when Q and dO have arrived
    stats_ready: Any  # completes when the statistics are stored and the rows of other sequences are zeroed
    freed: Any  # completes when both halves of the keys have read the slot


class GradientBuffers(NamedTuple):
    """Shared memory for the gradients of scores, with the barriers of each buffer."""

    ds: Any  # [BUFFERS * HALVES, KEYS, BLOCK_M]
    ready: Any  # completes when both halves of the keys have stored theirs
    freed: Any  # completes when the warps that add to dQ have read them


@gluon.jit
def query_visits(first_column, length, max_length, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """(The number of tiles of queries that a tile of keys visits, the shift for `query_place`)."""
    n = gl.where(first_column < length, gl.cdiv(length, BLOCK_M), 0)
    return n, query_shift(first_column, n, max_length, BLOCK_N)


@gluon.jit
def fetch_backward_tiles(q_desc, k_desc, v_desc, do_desc, stats_ptr, taken_ptr, tiles, total, sequences, keys, queries):
    """Fetch tiles of keys that no program has claimed, and their tiles of queries, as far ahead as there is room."""
    STAGES: gl.constexpr = queries.q.shape[0]
    BLOCK_M: gl.constexpr = queries.q.shape[1]
    KEYS: gl.constexpr = keys.k.shape[1]
    BLOCK_N: gl.constexpr = HALVES * KEYS
    D: gl.constexpr = queries.q.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [GROUP_WARPS], [0])
    row = gl.arange(0, BLOCK_M, layout)
    slot, phase = 0, 1
    buffer, kv_phase = 0, 1
    tile = gl.program_id(0)
    while tile < tiles:
        head, _b, start, length, owned, first_column = owned_tile(tile, sequences, BLOCK_N)
        if first_column < owned:  # else it is empty
            n, shift = query_visits(first_column, length, sequences.max_length, BLOCK_M, BLOCK_N)
            column = head * D
            mbarrier.wait(keys.freed.index(buffer), kv_phase)
            publish_tile(tile, keys.number.index(buffer), GROUP_WARPS)
            mbarrier.expect(keys.ready.index(buffer), 2 * BLOCK_N * D * 2, pred=n > 0)
            mbarrier.arrive(keys.ready.index(buffer), count=1, pred=n == 0)
            for half in gl.static_range(HALVES):
                place = [start + first_column + half * KEYS, column]
                load_tile_async(
                    k_desc, place, keys.ready.index(buffer), keys.k.index(HALVES * buffer + half), pred=n > 0
                )
                load_tile_async(
                    v_desc, place, keys.ready.index(buffer), keys.v.index(HALVES * buffer + half), pred=n > 0
                )
            head_stats_ptr = stats_ptr + head.to(gl.int64) * total + start
            for t in range(n):
                first_row = query_place(t, n, shift) * BLOCK_M
                place = [start + first_row, column]
                mbarrier.wait(queries.freed.index(slot), phase)
                mbarrier.expect(queries.ready.index(slot), 2 * BLOCK_M * D * 2)
                load_tile_async(q_desc, place, queries.ready.index(slot), queries.q.index(slot))
                load_tile_async(do_desc, place, queries.ready.index(slot), queries.do.index(slot))
                lse, delta = load_statistics(head_stats_ptr, sequences.heads, total, first_row + row, length)
                queries.lse.index(slot).store(lse)
                queries.delta.index(slot).store(delta)
                if t == 0:  # the last tile of queries; it alone may be partial
                    if first_row + BLOCK_M > length:
                        mbarrier.wait(queries.ready.index(slot), phase ^ 1)
                        zero_tile_past(queries.q.index(slot), length - first_row, GROUP_WARPS)
                        zero_tile_past(queries.do.index(slot), length - first_row, GROUP_WARPS)
                    if first_column + BLOCK_N > length:
                        mbarrier.wait(keys.ready.index(buffer), kv_phase ^ 1)
                        for half in gl.static_range(HALVES):
                            past = length - first_column - half * KEYS
                            zero_tile_past(keys.k.index(HALVES * buffer + half), past, GROUP_WARPS)
                barrier()
                mbarrier.arrive(queries.stats_ready.index(slot), count=1)
                slot, phase = advance_slot(slot, phase, STAGES)
            buffer, kv_phase = advance_slot(buffer, kv_phase, BUFFERS)
        else:
            skip_head(taken_ptr, tile, sequences.max_length, BLOCK_N)
        tile = claim_tile(taken_ptr)
    mbarrier.wait(keys.freed.index(buffer), kv_phase)
    publish_tile(-1, keys.number.index(buffer), GROUP_WARPS)
    mbarrier.arrive(keys.ready.index(buffer), count=1)


@gluon.jit
def sum_key_gradients(dk_ptr, dv_ptr, scale, scale_log2, sequences, keys, queries, gradients, HALF: gl.constexpr):
    """Compute dK and dV of one half of the keys, and the gradients of their scores."""
    STAGES: gl.constexpr = queries.q.shape[0]
    BLOCK_M: gl.constexpr = queries.q.shape[1]
    KEYS: gl.constexpr = keys.k.shape[1]
    BLOCK_N: gl.constexpr = HALVES * KEYS
    D: gl.constexpr = queries.q.shape[2]
    dtype: gl.constexpr = keys.k.dtype
    scores: gl.constexpr = product_layout(BLOCK_M, GROUP_WARPS)  # [N, M]
    sums: gl.constexpr = product_layout(D, GROUP_WARPS)  # [N, D]
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores)
    no_scores = gl.zeros([KEYS, BLOCK_M], gl.float32, scores)
    slot, phase = 0, 0
    buffer, kv_phase = 0, 0
    ds_buffer, ds_phase = 0, 0
    tile = await_tile(keys.number, keys.ready, buffer, kv_phase, GROUP_WARPS)
    while tile >= 0:
        head, _b, start, length, owned, first_column = owned_tile(tile, sequences, BLOCK_N)
        n, _shift = query_visits(first_column, length, sequences.max_length, BLOCK_M, BLOCK_N)
        first_column += HALF * KEYS
        partial, scored = first_column + KEYS > length, scored_keys(length)
        mbarrier.wait(queries.ready.index(slot), phase, pred=n > 0)
        mbarrier.wait(queries.stats_ready.index(slot), phase, pred=n > 0)
        # K and V stay in registers, which leaves the bandwidth of shared memory to the other operand
        k_a = keys.k.index(HALVES * buffer + HALF).load(gl.DotOperandLayout(0, scores, 2))
        v_a = keys.v.index(HALVES * buffer + HALF).load(gl.DotOperandLayout(0, scores, 2))
        dk = gl.zeros([KEYS, D], gl.float32, sums)
        dv = gl.zeros([KEYS, D], gl.float32, sums)
        s = warpgroup_mma(k_a, queries.q.index(slot).permute((1, 0)), no_scores, use_acc=False)
        for t in range(n):
            next_slot, next_phase = advance_slot(slot, phase, STAGES)
            q_tile = queries.q.index(slot)
            do_tile = queries.do.index(slot)
            dp = warpgroup_mma(v_a, do_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            p = gl.exp2(s * scale_log2 - queries.lse.index(slot).load(column_layout)[None, :]).to(dtype)
            p_a = gl.convert_layout(p, weights)
            minus_delta_M = queries.delta.index(slot).load(column_layout)[None, :]
            dp = warpgroup_mma_wait(0, deps=[dp])
            dv_next = warpgroup_mma(p_a, do_tile, dv, is_async=True)
            ds = packed_score_gradient(p, dp + minus_delta_M)
            ds_tile = gradients.ds.index(HALVES * ds_buffer + HALF)
            mbarrier.wait(gradients.freed.index(ds_buffer), ds_phase ^ 1)
            ds_tile.store(ds)
            if partial:
                zero_tile_past(ds_tile, scored - first_column, GROUP_WARPS)
            fence_async_shared()
            barrier()
            mbarrier.arrive(gradients.ready.index(ds_buffer), count=1)
            ds_a = gl.convert_layout(ds, weights)
            dk_next = warpgroup_mma(ds_a, q_tile, dk, is_async=True)
            mbarrier.wait(queries.ready.index(next_slot), next_phase, pred=t + 1 < n)
            mbarrier.wait(queries.stats_ready.index(next_slot), next_phase, pred=t + 1 < n)
            q_next = queries.q.index(next_slot).permute((1, 0))
            s_next = warpgroup_mma(k_a, q_next, no_scores, use_acc=False, is_async=True)
            dv, dk, p_a, ds_a = warpgroup_mma_wait(1, deps=[dv_next, dk_next, p_a, ds_a])
            barrier()
            mbarrier.arrive(queries.freed.index(slot), count=1)
            s = warpgroup_mma_wait(0, deps=[s_next])
            slot, phase = next_slot, next_phase
            ds_buffer, ds_phase = advance_slot(ds_buffer, ds_phase, BUFFERS)
        barrier()
        mbarrier.arrive(keys.freed.index(buffer), count=1)
        store_owned_tile(
            dk_ptr, dk * scale, first_column, start, scored, owned, sequences.heads, head, dtype, GROUP_WARPS
        )
        store_owned_tile(dv_ptr, dv, first_column, start, length, owned, sequences.heads, head, dtype, GROUP_WARPS)
        buffer, kv_phase = advance_slot(buffer, kv_phase, BUFFERS)
        tile = await_tile(keys.number, keys.ready, buffer, kv_phase, GROUP_WARPS)


@gluon.jit
def sum_query_gradients(dq_desc, dq_smem, sequences, keys, gradients):
    """Add the share of the keys to dQ."""
    BLOCK_M: gl.constexpr = dq_smem.shape[1]
    BLOCK_N: gl.constexpr = HALVES * keys.k.shape[1]
    D: gl.constexpr = dq_smem.shape[2]
    no_dq = gl.zeros([BLOCK_M, D], gl.float32, product_layout(D, GROUP_WARPS))
    buffer, kv_phase = 0, 0
    ds_buffer, ds_phase = 0, 0
    tile = await_tile(keys.number, keys.ready, buffer, kv_phase, GROUP_WARPS)
    while tile >= 0:
        head, _b, start, length, _owned, first_column = owned_tile(tile, sequences, BLOCK_N)
        n, shift = query_visits(first_column, length, sequences.max_length, BLOCK_M, BLOCK_N)
        for t in range(n):
            mbarrier.wait(gradients.ready.index(ds_buffer), ds_phase)
            dq = no_dq
            for half in gl.static_range(HALVES):
                ds_tile = gradients.ds.index(HALVES * ds_buffer + half).permute((1, 0))
                k_tile = keys.k.index(HALVES * buffer + half)
                dq = warpgroup_mma(ds_tile, k_tile, dq, use_acc=half > 0, is_async=True)
            tma.store_wait(BUFFERS - 1)
            dq = warpgroup_mma_wait(0, deps=[dq])
            barrier()
            mbarrier.arrive(gradients.freed.index(ds_buffer), count=1)
            dq_tile = dq_smem.index(ds_buffer)
            first_row = query_place(t, n, shift) * BLOCK_M
            if first_row + BLOCK_M > length:
                dq = zero_rows_past(dq, length - first_row)
            store_accumulator(dq_tile, dq)
            fence_async_shared()
            barrier()
            add_tile_async(dq_desc, [start + first_row, head * D], dq_tile)
            ds_buffer, ds_phase = advance_slot(ds_buffer, ds_phase, BUFFERS)
        barrier()
        mbarrier.arrive(keys.freed.index(buffer), count=1)
        buffer, kv_phase = advance_slot(buffer, kv_phase, BUFFERS)
        tile = await_tile(keys.number, keys.ready, buffer, kv_phase, GROUP_WARPS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles", "heads", "total", "max_length", "padded_length"])
def hopper_specialized_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, dk_ptr, dv_ptr, start_ptr, length_ptr, taken_ptr,
    tiles, heads, total, max_length, padded_length, scale, scale_log2,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, OVERLAP: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """`tiles` of keys are there in all; `taken_ptr` counts those that programs took beside their first, from zero."""
    if OVERLAP:
        gdc_wait()
    KEYS: gl.constexpr = BLOCK_N // HALVES
    gl.static_assert(num_warps == GROUP_WARPS and KEYS == 64)
    dtype: gl.constexpr = q_desc.dtype
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [BUFFERS * HALVES, KEYS, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [BUFFERS * HALVES, KEYS, D], v_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], do_desc.layout)
    ds_smem = gl.allocate_shared_memory(dtype, [BUFFERS * HALVES, KEYS, BLOCK_M], ds_layout)
    dq_smem = gl.allocate_shared_memory(gl.float32, [BUFFERS, BLOCK_M, D], dq_desc.layout)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], flat)
    number_smem = gl.allocate_shared_memory(gl.int32, [BUFFERS, 1], flat)
    keys = KeyBuffers(
        k_smem, v_smem, number_smem, ready=allocate_barriers(BUFFERS), freed=allocate_barriers(BUFFERS, HALVES + 1)
    )
    queries = QueryBuffers(
        q_smem, do_smem, lse_smem, delta_smem,
        ready=allocate_barriers(STAGES), stats_ready=allocate_barriers(STAGES), freed=allocate_barriers(STAGES, HALVES),
    )  # fmt: skip
    gradients = GradientBuffers(ds_smem, ready=allocate_barriers(BUFFERS, HALVES), freed=allocate_barriers(BUFFERS))
    sequences = Sequences(start_ptr, length_ptr, heads, max_length, padded_length)
    # registers of a thread in the second group and on; the first has what is left of 512: 208
    gl.warp_specialize(
        [
            (sum_key_gradients, (
                dk_ptr, dv_ptr, scale, scale_log2, sequences, keys, queries, gradients, gl.constexpr(0),
            )),
            (sum_key_gradients, (
                dk_ptr, dv_ptr, scale, scale_log2, sequences, keys, queries, gradients, gl.constexpr(1),
            )),
            (sum_query_gradients, (dq_desc, dq_smem, sequences, keys, gradients)),
            (fetch_backward_tiles, (
                q_desc, k_desc, v_desc, do_desc, stats_ptr, taken_ptr, tiles, total, sequences, keys, queries,
            )),
        ],
        [GROUP_WARPS, GROUP_WARPS, GROUP_WARPS], [208, 72, 24],
    )  # fmt: skip
