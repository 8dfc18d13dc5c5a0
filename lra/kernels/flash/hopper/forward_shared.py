"""Forward for Hopper GPUs where every query sees every key: groups of warps share the tiles that another warp fetches.

A program works on one tile of queries after another. Each group of four warps has 64 queries of it, and computes like a
program of forward.py. Tiles of keys arrive for all groups, as far ahead as there is room. So keys travel a third or a
quarter as often, and no group waits for the first keys.
"""
# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lra.kernels.device import count_multiprocessors
from lra.kernels.flash.dispatch import KernelChoice
from lra.kernels.flash.hopper.forward import attend_all_keys as sweep_alone
from lra.kernels.flash.hopper.forward import (
    compute_weights,
    drop_tile_weights,
    fetch_tile,
    hide_keys_past,
    is_offset_wrong,
    store_result,
    thread_sums,
)
from lra.kernels.flash.hopper.tiles import Sequences, dropout_key, owned_tile, sequence_tile
from lra.kernels.flash.problem import ForwardPass, Problem, SequenceTensors
from lra.kernels.flash.tiles import LOG2_E
from lra.kernels.hopper import (
    advance_slot,
    allocate_barriers,
    await_tile,
    barrier,
    claim_tile,
    describe_tiles,
    invalidate_barriers,
    load_tile_async,
    product_layout,
    publish_tile,
    skip_head,
    zero_tile_past,
)
from lra.kernels.plans import RepeatedLaunch

GROUP_WARPS = gl.constexpr(4)
GROUP_QUERIES = gl.constexpr(64)
QUERY_BUFFERS = gl.constexpr(2)
FETCH_REGISTERS = gl.constexpr(24)  # registers of a thread that fetches
SCANNED_NOTES = gl.constexpr(128)  # entries of `rescan_ptr` that a program reads


@gluon.constexpr_function
def group_registers(groups):
    """Registers of a thread in an attending group. All threads start with equally many, a multiple of 8."""
    fours = groups + 1  # of warps
    return (65536 // (128 * fours) // 8 * 8 * fours - FETCH_REGISTERS) // groups // 8 * 8


class Ring(NamedTuple):
    """Shared memory for tiles that one warp fetches and several groups read, with the barriers of each slot."""

    smem: Any  # [slots, rows, D]
    ready: Any  # completes when the slot is filled
    freed: Any  # completes when every group has read it


class SharedTiles(NamedTuple):
    """The shared memory of a program."""

    q: Ring  # a group has the tile `GROUPS * buffer + group`; barriers belong to buffers
    number: Any  # [QUERY_BUFFERS, 1]: the number of the tile in a buffer
    k: Ring
    v: Ring
    last_ready: Any  # completes when a partial tile of V has arrived
    last_freed: Any  # completes when group 0 has zeroed the rows of other sequences in it


@gluon.jit
def fetch_forward_tiles(q_desc, k_desc, v_desc, taken_ptr, tiles, sequences, shared):
    """Fetch tiles of queries that no program has claimed, and the keys that they see, as far ahead as there is room."""
    q, k, v = shared.q, shared.k, shared.v
    GROUPS: gl.constexpr = q.smem.shape[0] // QUERY_BUFFERS
    STAGES: gl.constexpr = k.smem.shape[0]
    BLOCK_N: gl.constexpr = k.smem.shape[1]
    D: gl.constexpr = k.smem.shape[2]
    ROWS: gl.constexpr = GROUPS * GROUP_QUERIES
    slot, phase = 0, 1
    buffer, q_phase = 0, 1
    last_phase = 1
    tile = gl.program_id(0)
    while tile < tiles:
        head, _b, start, length, owned, first_row = owned_tile(tile, sequences, ROWS)
        if first_row < owned:  # else it is empty
            n = gl.where(first_row < length, gl.cdiv(length, BLOCK_N), 0)
            column = head * D
            mbarrier.wait(q.freed.index(buffer), q_phase)
            publish_tile(tile, shared.number.index(buffer), 1)
            mbarrier.expect(q.ready.index(buffer), ROWS * D * 2, pred=n > 0)
            mbarrier.arrive(q.ready.index(buffer), count=1, pred=n == 0)
            for group in gl.static_range(GROUPS):
                place = [start + first_row + group * GROUP_QUERIES, column]
                load_tile_async(q_desc, place, q.ready.index(buffer), q.smem.index(GROUPS * buffer + group), pred=n > 0)
            for t in range(n):
                # The last tile comes first, because it alone may be partial: so a group's loop masks nothing.
                first = gl.where(t == 0, n - 1, t - 1) * BLOCK_N
                mbarrier.wait(k.freed.index(slot), phase)
                fetch_tile(k_desc, start + first, column, k.ready, k.smem, slot, True)
                mbarrier.wait(v.freed.index(slot), phase)
                if first + BLOCK_N > length:  # not ready before a group has zeroed the rows of other sequences
                    mbarrier.wait(shared.last_freed.index(0), last_phase)
                    last_phase ^= 1
                    mbarrier.expect(shared.last_ready.index(0), BLOCK_N * D * 2)
                    load_tile_async(v_desc, [start + first, column], shared.last_ready.index(0), v.smem.index(slot))
                else:
                    fetch_tile(v_desc, start + first, column, v.ready, v.smem, slot, True)
                slot, phase = advance_slot(slot, phase, STAGES)
            buffer, q_phase = advance_slot(buffer, q_phase, QUERY_BUFFERS)
        else:
            skip_head(taken_ptr, tile, sequences.max_length, ROWS)
        tile = claim_tile(taken_ptr)
    mbarrier.wait(q.freed.index(buffer), q_phase)
    publish_tile(-1, shared.number.index(buffer), 1)
    mbarrier.arrive(q.ready.index(buffer), count=1)


@gluon.jit
def attend_shared_keys(
    q_tile, q_freed, shared, slot, phase, last_phase, n, length, first_row, key, scale_log2, threshold,
    INDEX: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """(Sums of weights times V, sums of weights, maximum of each row in the first tile, …) over the n tiles of keys."""
    k, v = shared.k, shared.v
    dtype: gl.constexpr = q_tile.dtype
    D: gl.constexpr = q_tile.shape[1]
    STAGES: gl.constexpr = k.smem.shape[0]
    BLOCK_N: gl.constexpr = k.smem.shape[1]
    scores: gl.constexpr = product_layout(BLOCK_N, GROUP_WARPS)
    outputs: gl.constexpr = product_layout(D, GROUP_WARPS)
    weights: gl.constexpr = gl.DotOperandLayout(0, outputs, 2)
    nothing = gl.zeros([GROUP_QUERIES, BLOCK_N], gl.float32, scores)
    acc = gl.zeros([GROUP_QUERIES, D], gl.float32, outputs)

    first = (n - 1) * BLOCK_N
    mbarrier.wait(k.ready.index(slot), phase)
    s = warpgroup_mma(q_tile, k.smem.index(slot).permute((1, 0)), nothing, use_acc=False)
    barrier()
    mbarrier.arrive(k.freed.index(slot), count=1)
    if first + BLOCK_N > length:
        s = hide_keys_past(s, first, length)
        if INDEX == 0:
            mbarrier.wait(shared.last_ready.index(0), last_phase)
            last_phase ^= 1
            zero_tile_past(v.smem.index(slot), length - first, GROUP_WARPS)
            barrier()
            mbarrier.arrive(shared.last_freed.index(0), count=1)
            mbarrier.arrive(v.ready.index(slot), count=1)
    top = gl.max(s, 1)
    p32 = compute_weights(s, top, scale_log2, False)
    sums = thread_sums(p32)
    p = p32.to(dtype)
    for t in range(1, n):  # the weights `p` are those of tile t - 1, whose V is in `slot`
        next_slot, next_phase = advance_slot(slot, phase, STAGES)
        mbarrier.wait(k.ready.index(next_slot), next_phase)
        next_s = warpgroup_mma(q_tile, k.smem.index(next_slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
        if DROPOUT:
            p = drop_tile_weights(p, key, first_row, first, threshold, GROUP_WARPS)
        p = gl.convert_layout(p, weights)
        mbarrier.wait(v.ready.index(slot), phase)
        out = warpgroup_mma(p, v.smem.index(slot), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[next_s])
        barrier()
        mbarrier.arrive(k.freed.index(next_slot), count=1)
        p32 = compute_weights(s, top, scale_log2, False)
        sums += thread_sums(p32)
        p_next = p32.to(dtype)
        acc, _ = warpgroup_mma_wait(0, deps=[out, p])
        barrier()
        mbarrier.arrive(v.freed.index(slot), count=1)
        p, first = p_next, (t - 1) * BLOCK_N
        slot, phase = next_slot, next_phase
    barrier()
    mbarrier.arrive(q_freed, count=1)
    if DROPOUT:
        p = drop_tile_weights(p, key, first_row, first, threshold, GROUP_WARPS)
    mbarrier.wait(v.ready.index(slot), phase)
    acc = warpgroup_mma(gl.convert_layout(p, weights), v.smem.index(slot), acc)
    barrier()
    mbarrier.arrive(v.freed.index(slot), count=1)
    slot, phase = advance_slot(slot, phase, STAGES)
    return acc, sums, top, slot, phase, last_phase


@gluon.jit
def skip_tiles(k, v, slot, phase, n):
    """Leave the n tiles of keys to the other groups; for a group without queries."""
    for _t in range(n):
        mbarrier.wait(k.ready.index(slot), phase)
        mbarrier.wait(v.ready.index(slot), phase)
        barrier()
        mbarrier.arrive(k.freed.index(slot), count=1)
        mbarrier.arrive(v.freed.index(slot), count=1)
        slot, phase = advance_slot(slot, phase, k.smem.shape[0])
    return slot, phase


@gluon.jit
def attend_group(
    out_ptr, softmax_ptr, rescan_ptr, seed_ptr, index_ptr, total, scale_log2, threshold, sequences, shared,
    INDEX: gl.constexpr, DROPOUT: gl.constexpr,
):  # fmt: skip
    """The work of group INDEX of a program: its 64 queries of each tile."""
    q = shared.q
    GROUPS: gl.constexpr = q.smem.shape[0] // QUERY_BUFFERS
    BLOCK_N: gl.constexpr = shared.k.smem.shape[1]
    D: gl.constexpr = shared.k.smem.shape[2]
    dtype: gl.constexpr = q.smem.dtype
    scores: gl.constexpr = product_layout(BLOCK_N, GROUP_WARPS)
    outputs: gl.constexpr = product_layout(D, GROUP_WARPS)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)
    slot, phase = 0, 0
    buffer, q_phase = 0, 0
    last_phase = 0
    tile = await_tile(shared.number, q.ready, buffer, q_phase, GROUP_WARPS)
    while tile >= 0:
        head, b, start, length, owned, first_row = owned_tile(tile, sequences, GROUPS * GROUP_QUERIES)
        n = gl.where(first_row < length, gl.cdiv(length, BLOCK_N), 0)
        first_row += INDEX * GROUP_QUERIES
        key = dropout_key(gl.load(seed_ptr), gl.load(index_ptr + b), head) if DROPOUT else 0
        top = gl.full([GROUP_QUERIES], float("-inf"), gl.float32, row_layout)
        sums = thread_sums(gl.zeros([GROUP_QUERIES, BLOCK_N], gl.float32, scores))
        acc = gl.zeros([GROUP_QUERIES, D], gl.float32, outputs)
        if first_row < length:
            q_tile = q.smem.index(GROUPS * buffer + INDEX)
            acc, sums, top, slot, phase, last_phase = attend_shared_keys(
                q_tile, q.freed.index(buffer), shared, slot, phase, last_phase, n, length, first_row,
                key, scale_log2, threshold, INDEX, DROPOUT,
            )  # fmt: skip
        else:
            barrier()
            mbarrier.arrive(q.freed.index(buffer), count=1)
            slot, phase = skip_tiles(shared.k, shared.v, slot, phase, n)

        rows = first_row + gl.arange(0, GROUP_QUERIES, row_layout)
        row_sums = gl.convert_layout(gl.sum(sums, 1), row_layout)
        store_result(
            out_ptr, softmax_ptr, acc, row_sums, top, rows, first_row, start, length, owned, sequences.heads, head,
            total, threshold, dtype, DROPOUT, GROUP_WARPS,
        )  # fmt: skip
        place = gl.full([GROUP_QUERIES], GROUPS * tile + INDEX, gl.int32, row_layout)
        gl.store(rescan_ptr + place, 1, mask=(is_offset_wrong(row_sums, top, scale_log2, dtype) > 0) & (rows < length))
        buffer, q_phase = advance_slot(buffer, q_phase, QUERY_BUFFERS)
        tile = await_tile(shared.number, q.ready, buffer, q_phase, GROUP_WARPS)


@gluon.jit(do_not_specialize=["tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def hopper_shared_kernel(
    q_desc, k_desc, v_desc, out_ptr, softmax_ptr, rescan_ptr, start_ptr, length_ptr, seed_ptr, index_ptr, taken_ptr,
    tiles, heads, total, max_length, padded_length, scale_log2, threshold,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, DROPOUT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """`tiles` is the number of all tiles of queries. `taken_ptr`, zero at first, counts the claimed tiles.

    `rescan_ptr`: `[tiles, GROUPS]`, zeros at first. It becomes 1 where a group must visit all keys again.
    """
    gl.static_assert(num_warps == GROUP_WARPS and GROUPS <= 4)
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [QUERY_BUFFERS * GROUPS, GROUP_QUERIES, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    number_smem = gl.allocate_shared_memory(gl.int32, [QUERY_BUFFERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q = Ring(q_smem, ready=allocate_barriers(QUERY_BUFFERS), freed=allocate_barriers(QUERY_BUFFERS, GROUPS))
    k = Ring(k_smem, ready=allocate_barriers(STAGES), freed=allocate_barriers(STAGES, GROUPS))
    v = Ring(v_smem, ready=allocate_barriers(STAGES), freed=allocate_barriers(STAGES, GROUPS))
    shared = SharedTiles(
        q=q, number=number_smem, k=k, v=v, last_ready=allocate_barriers(1), last_freed=allocate_barriers(1)
    )
    sequences = Sequences(start_ptr, length_ptr, heads, max_length, padded_length)
    gl.warp_specialize(
        [  # no sum of two lists: Triton 3.6 forgets the names in the second one
            (attend_group, (
                out_ptr, softmax_ptr, rescan_ptr, seed_ptr, index_ptr, total, scale_log2, threshold, sequences, shared,
                gl.constexpr(i), DROPOUT,
            )) if i < GROUPS else (fetch_forward_tiles, (q_desc, k_desc, v_desc, taken_ptr, tiles, sequences, shared))
            for i in (0, 1, 2, 3, 4)[: GROUPS + 1]
        ],
        [GROUP_WARPS for _ in (1, 2, 3)[: GROUPS - 1]] + [1],
        [group_registers(GROUPS) for _ in (1, 2, 3)[: GROUPS - 1]] + [FETCH_REGISTERS],
    )  # fmt: skip


@gluon.jit(do_not_specialize=["count", "heads", "total", "max_length", "padded_length", "threshold"])
def hopper_rescan_kernel(
    q_desc, k_desc, v_desc, out_ptr, softmax_ptr, rescan_ptr, start_ptr, length_ptr, seed_ptr, index_ptr,
    count, heads, total, max_length, padded_length, scale_log2, threshold,
    D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUPS: gl.constexpr, DROPOUT: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    """Recompute the tiles that `hopper_shared_kernel` noted in `rescan_ptr[:count]`, with the maximum of all scores."""
    begin = gl.program_id(0) * SCANNED_NOTES
    i = begin + gl.arange(
        0, SCANNED_NOTES, gl.BlockedLayout([SCANNED_NOTES // (32 * GROUP_WARPS)], [32], [GROUP_WARPS], [0])
    )
    if gl.max(gl.load(rescan_ptr + i, mask=i < count, other=0), 0) == 0:
        return
    dtype: gl.constexpr = q_desc.dtype
    q_smem = gl.allocate_shared_memory(dtype, [1, GROUP_QUERIES, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_ready = allocate_barriers(1)
    phase = 0
    for place in range(begin, gl.minimum(begin + SCANNED_NOTES, count)):
        if gl.load(rescan_ptr + place) != 0:
            head, b, start, length, owned, first_row = sequence_tile(
                place // GROUPS, start_ptr, length_ptr, max_length, padded_length, heads, GROUPS * GROUP_QUERIES
            )
            first_row += place % GROUPS * GROUP_QUERIES
            key = dropout_key(gl.load(seed_ptr), gl.load(index_ptr + b), head) if DROPOUT else 0
            barrier()
            fetch_tile(q_desc, start + first_row, head * D, q_ready, q_smem, 0, True)
            mbarrier.wait(q_ready.index(0), phase)
            phase ^= 1
            acc, sums, top = sweep_alone(
                q_smem.index(0), q_ready, k_desc, v_desc, k_smem, v_smem, start_ptr, gl.cdiv(length, BLOCK_N), start,
                length, head, first_row, key, scale_log2, threshold,
                STAGES, MAX_VISITS=False, DROPOUT=DROPOUT, RUNNING=True, ONE_TILE=False, num_warps=GROUP_WARPS,
            )  # fmt: skip
            rows = first_row + gl.arange(0, GROUP_QUERIES, top.type.layout)
            store_result(
                out_ptr, softmax_ptr, acc, sums, top, rows, first_row, start, length, owned, heads, head, total,
                threshold, dtype, DROPOUT, GROUP_WARPS,
            )  # fmt: skip
    invalidate_barriers(q_ready)


def plan_hopper_shared(q: Tensor, k: Tensor, v: Tensor, problem: Problem, choice: KernelChoice) -> ForwardPass:
    """Hopper's shared-key kernels for `launch_attention.launch_flash_forward`."""
    total, heads, head_dim = q.shape
    rows, columns, _, stages = choice.tile
    tiles, groups = triton.cdiv(problem.max_length, rows) * heads * problem.size, rows // GROUP_QUERIES.value
    notes = tiles * groups
    numbers = heads, total, problem.max_length, problem.padded_length, problem.scale * LOG2_E, problem.threshold
    constants = dict(
        D=head_dim, BLOCK_N=columns, GROUPS=groups, DROPOUT=problem.threshold > 0, num_warps=GROUP_WARPS.value
    )
    q_tiles, k_tiles, v_tiles = (
        describe_tiles(x, side) for x, side in ((q, GROUP_QUERIES.value), (k, columns), (v, columns))
    )
    attend = RepeatedLaunch(
        hopper_shared_kernel, min(tiles, count_multiprocessors(q.device)), tiles, *numbers, STAGES=stages, **constants
    )
    rescan = RepeatedLaunch(
        hopper_rescan_kernel, triton.cdiv(notes, SCANNED_NOTES.value), notes, *numbers, STAGES=2, **constants
    )

    def run(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceTensors) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        softmax = torch.empty(2, heads, total, dtype=torch.float32, device=q.device)
        state = torch.zeros(4 + notes, dtype=torch.int32, device=q.device)  # the notes begin after 16 bytes
        tensors = (q_tiles(q), k_tiles(k), v_tiles(v), out, softmax, state[4:], *sequences)
        attend(*tensors, state)
        rescan(*tensors)
        return out, softmax

    return run
