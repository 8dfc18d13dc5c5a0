"""Backward for Hopper GPUs in Gluon: dK, dV and dQ in one pass over the scores, with products kept in flight.

As in flash/backward.py a program owns a tile of keys. Tiles of queries arrive by TMA, and TMA also adds shares of dQ to
memory. Scores are transposed, `[N, M]`. So the weights and their gradients lie in registers as the products with dO and
Q need them, which give dV and dK. The main kernel of a `hopper_specialized` pass is in backward_specialized.py.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lra.kernels import device
from lra.kernels.device import count_multiprocessors
from lra.kernels.flash.dispatch import KernelChoice
from lra.kernels.flash.hopper.backward_specialized import hopper_specialized_kernel
from lra.kernels.flash.hopper.extreme_rows import plan_finish_dq
from lra.kernels.flash.hopper.tiles import (
    draw_backward,
    dropout_key,
    load_statistics,
    packed_dropped_score_gradient,
    packed_score_gradient,
    query_place,
    query_shift,
    scored_keys,
    sequence_tile,
    spread_backward,
    store_owned_tile,
    visit_list,
    visited_tile,
)
from lra.kernels.flash.problem import BackwardPass, Problem, SequenceTensors
from lra.kernels.flash.tiles import LOG2_E, is_extreme
from lra.kernels.hopper import (
    add_tile_async,
    advance_slot,
    allocate_barriers,
    barrier,
    describe_tiles,
    drop_backward,
    invalidate_barriers,
    load_tile_async,
    product_layout,
    store_accumulator,
    zero_rows_past,
    zero_tile_past,
)
from lra.kernels.plans import RepeatedLaunch

PREPARED_ROWS = 64


@triton.jit(do_not_specialize=["heads", "total", "threshold"])
def prepare_backward_kernel(
    out_ptr, do_ptr, softmax_ptr, stats_ptr, dq_ptr, taken_ptr, do_row, do_head, heads, total, scale_log2, threshold,
    D: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Store zeros for the sum of dQ and the count of claimed tiles, and two statistics of each of the T * H rows.

    With the keep rate r of dropout the statistics are log-sum-exp + log2(r) and -r * delta, where
    delta = rowsum(dO * O). By the first, weights come out divided by r, and dP needs no factor. For extreme rows it is
    +inf, so that their weights are 0: `finish_dq` adds the contribution of these rows.
    """
    if OVERLAP:
        gdc_launch_dependents()
    flat = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row, head = flat // heads, flat % heads
    d = tl.arange(0, D)[None, :]
    real = row < total
    offset = flat[:, None] * D + d
    out = tl.load(out_ptr + offset, mask=real[:, None], other=0.0)
    do = tl.load(do_ptr + (row * do_row + head * do_head)[:, None] + d, mask=real[:, None], other=0.0)
    tl.store(dq_ptr + offset, tl.zeros([ROWS, D], tl.float32), mask=real[:, None])
    tl.store(taken_ptr, 0, mask=tl.program_id(0) == 0)
    rate = 1.0 - threshold / 256.0
    place = head * total + row
    second = heads.to(tl.int64) * total
    top = tl.load(softmax_ptr + place, mask=real)
    lse = top * scale_log2 + (tl.load(softmax_ptr + second + place, mask=real) + tl.log2(rate))
    tl.store(stats_ptr + place, tl.where(is_extreme(top, scale_log2), float("inf"), lse), mask=real)
    tl.store(stats_ptr + second + place, tl.sum(out.to(tl.float32) * do.to(tl.float32), 1) * -rate, mask=real)


@gluon.jit
def visited_row(list_ptr, t, n, last, shift, BLOCK_M: gl.constexpr, MAX_VISITS: gl.constexpr):
    """Where the tile begins that is visited as number `t`, from 0."""
    return gl.where(t == 0, last, visited_tile(list_ptr, query_place(t, n, shift), n, BLOCK_M, MAX_VISITS))


@gluon.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, do_desc, stats_ptr, dq_desc, dk_ptr, dv_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    heads, total, max_length, padded_length, scale, scale_log2, threshold,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MAX_VISITS: gl.constexpr,
    DROPOUT: gl.constexpr, OVERLAP: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    head, b, start, length, owned, first_column = sequence_tile(
        gl.program_id(0), start_ptr, length_ptr, max_length, padded_length, heads, BLOCK_N
    )
    # these loads come before the return, which waits for the length, so that they do not wait for one another
    n = gl.where(first_column < length, gl.cdiv(length, BLOCK_M), 0)
    if MAX_VISITS:
        visits_ptr, n = visit_list(visits_ptr, layouts, tiles, head, first_column // BLOCK_N, n, MAX_VISITS, num_warps)
    if DROPOUT:
        seed = gl.load(seed_ptr)
        index = gl.load(index_ptr + b)
    if OVERLAP:
        gdc_wait()
    if first_column >= owned:
        return
    if DROPOUT:
        key = dropout_key(seed, index, head)

    gl.static_assert(STAGES == 2 or STAGES == 3)  # one tile of queries is fetched while the previous one is still read
    dtype: gl.constexpr = q_desc.dtype
    scores: gl.constexpr = product_layout(BLOCK_M, num_warps)  # [N, M]
    sums: gl.constexpr = product_layout(D, num_warps)  # [N, D]
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, num_warps // 4], [16, D // (num_warps // 4), 16]
    )  # [M, D]
    weights: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores)
    BYTES: gl.constexpr = 2 * BLOCK_M * D * 2  # of a tile of Q and one of dO, which arrive together
    # Three uses of registers, where they have room. HOLD_KV: K and V, which leaves the bandwidth of shared memory to
    # the other operand. AHEAD: the next tile's scores while this tile's dQ is stored; without it the next tile's
    # statistics come as late. LSE_AHEAD: the next tile's log-sum-exps while products of this tile are in flight.
    HOLD_KV: gl.constexpr = D == 64 or (D == 32 and not DROPOUT)
    AHEAD: gl.constexpr = D == 64 or (D == 32 and DROPOUT)
    LSE_AHEAD: gl.constexpr = D != 64
    row_layout: gl.constexpr = gl.BlockedLayout([1], [32], [num_warps], [0])
    lse_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    DELTA: gl.constexpr = dtype if DROPOUT else gl.float32
    delta_smem = gl.allocate_shared_memory(DELTA, [BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    k_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, D], k_desc.layout)
    v_tile = gl.allocate_shared_memory(dtype, [BLOCK_N, D], v_desc.layout)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], q_desc.layout)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], do_desc.layout)
    ds_smem = gl.allocate_shared_memory(
        dtype, [BLOCK_N, BLOCK_M], gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)
    )
    dq_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M, D], dq_desc.layout)
    k_ready, ready = allocate_barriers(1), allocate_barriers(STAGES)

    column = head * D
    scored = scored_keys(length)
    dk = gl.zeros([BLOCK_N, D], gl.float32, sums)
    dv = gl.zeros([BLOCK_N, D], gl.float32, sums)
    if n > 0:
        # The last tile of queries comes first, because it alone may be partial. The others follow in order.
        mbarrier.expect(k_ready.index(0), 2 * BLOCK_N * D * 2)
        load_tile_async(k_desc, [start + first_column, column], k_ready.index(0), k_tile)
        load_tile_async(v_desc, [start + first_column, column], k_ready.index(0), v_tile)
        last = visited_tile(visits_ptr, n - 1, n, BLOCK_M, MAX_VISITS)
        shift = query_shift(first_column, n, max_length, BLOCK_N)
        for i in gl.static_range(STAGES):
            from_row = start + visited_row(visits_ptr, i, n, last, shift, BLOCK_M, MAX_VISITS)
            mbarrier.expect(ready.index(i), BYTES, pred=i < n)
            load_tile_async(q_desc, [from_row, column], ready.index(i), q_smem.index(i), pred=i < n)
            load_tile_async(do_desc, [from_row, column], ready.index(i), do_smem.index(i), pred=i < n)
        stats_ptr += head.to(gl.int64) * total + start
        row = gl.arange(0, BLOCK_M, row_layout)
        lse, delta = load_statistics(stats_ptr, heads, total, last + row, length)
        mbarrier.wait(k_ready.index(0), 0)
        partial = first_column + BLOCK_N > length
        if partial:
            zero_tile_past(k_tile, length - first_column, num_warps)
        mbarrier.wait(ready.index(0), 0)
        if last + BLOCK_M > length:
            zero_tile_past(q_smem.index(0), length - last, num_warps)
            zero_tile_past(do_smem.index(0), length - last, num_warps)
        if HOLD_KV:
            k_a = k_tile.load(gl.DotOperandLayout(0, scores, 2))
            v_a = v_tile.load(gl.DotOperandLayout(0, scores, 2))
        else:
            k_a = k_tile
            v_a = v_tile

        no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)
        no_dq = gl.zeros([BLOCK_M, D], gl.float32, dq_layout)
        lse_smem.store(lse)
        delta_smem.store(delta.to(DELTA))
        drawn = 0
        if DROPOUT:
            drawn = draw_backward(key, last, first_column, BLOCK_M, BLOCK_N, num_warps)
        s = warpgroup_mma(k_a, q_smem.index(0).permute((1, 0)), no_scores, use_acc=False)
        slot, phase, before = 0, 0, STAGES - 1
        barrier()  # without it the compiler would put one into the loop
        if LSE_AHEAD:
            lse_M = lse_smem.load(column_layout)[None, :]
        first_row, next_row = last, visited_row(visits_ptr, 1, n, last, shift, BLOCK_M, MAX_VISITS)
        for t in range(n):
            next_slot, next_phase = advance_slot(slot, phase, STAGES)
            if AHEAD:
                next_lse, next_delta = load_statistics(stats_ptr, heads, total, next_row + row, length)
            q_tile = q_smem.index(slot)
            do_tile = do_smem.index(slot)
            q_next = q_smem.index(next_slot)
            if DROPOUT:
                dp = warpgroup_mma(v_a, do_tile.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            else:  # the accumulator starts with -delta, so that the subtraction costs nothing
                minus_delta = delta_smem.load(column_layout)[None, :].broadcast_to([BLOCK_N, BLOCK_M])
                dp = warpgroup_mma(v_a, do_tile.permute((1, 0)), minus_delta, is_async=True)
            if not LSE_AHEAD:
                lse_M = lse_smem.load(column_layout)[None, :]
            p = gl.exp2(s * scale_log2 - lse_M).to(dtype)
            kept = p
            if DROPOUT:
                kept = drop_backward(p, spread_backward(drawn, scores), threshold)
            minus_delta_M = delta_smem.load(column_layout)[None, :] if DROPOUT else lse_M
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds = packed_dropped_score_gradient(kept, p, dp, minus_delta_M) if DROPOUT else packed_score_gradient(p, dp)
            ds_smem.store(ds)  # before dV's product begins, because the fence waits for it
            p_a = gl.convert_layout(kept, weights)
            dv_next = warpgroup_mma(p_a, do_tile, dv, is_async=True)
            if partial:
                zero_tile_past(ds_smem, scored - first_column, num_warps)
            fence_async_shared()
            tma.store_wait(0)
            mbarrier.expect(ready.index(slot), BYTES, pred=t + STAGES < n)  # for the refill in the next round
            dq = warpgroup_mma(ds_smem.permute((1, 0)), k_tile, no_dq, use_acc=False, is_async=True)
            if not AHEAD:
                next_lse, next_delta = load_statistics(stats_ptr, heads, total, next_row + row, length)
            ds_a = gl.convert_layout(ds, weights)
            dk_next = warpgroup_mma(ds_a, q_tile, dk, is_async=True)
            refill = (t > 0) & (t - 1 + STAGES < n)  # the previous tile is no longer needed
            after_row = visited_row(visits_ptr, t + 2, n, last, shift, BLOCK_M, MAX_VISITS)
            refill_row = start + (next_row if STAGES == 2 else after_row)
            load_tile_async(q_desc, [refill_row, column], ready.index(before), q_smem.index(before), pred=refill)
            load_tile_async(do_desc, [refill_row, column], ready.index(before), do_smem.index(before), pred=refill)
            if AHEAD:
                mbarrier.wait(ready.index(next_slot), next_phase, pred=t + 1 < n)
                s_next = warpgroup_mma(k_a, q_next.permute((1, 0)), no_scores, use_acc=False, is_async=True)
                dq = warpgroup_mma_wait(2, deps=[dq])
            else:
                dq = warpgroup_mma_wait(1, deps=[dq])
            if first_row + BLOCK_M > length:
                dq = zero_rows_past(dq, length - first_row)
            store_accumulator(dq_smem, dq)
            lse_smem.store(next_lse)
            delta_smem.store(next_delta.to(DELTA))
            fence_async_shared()
            add_tile_async(dq_desc, [start + first_row, column], dq_smem)
            if LSE_AHEAD:
                lse_M = lse_smem.load(column_layout)[None, :]
            if not AHEAD:
                dv_next, dk_next, p_a, ds_a = warpgroup_mma_wait(0, deps=[dv_next, dk_next, p_a, ds_a])
                mbarrier.wait(ready.index(next_slot), next_phase, pred=t + 1 < n)
                s_next = warpgroup_mma(k_a, q_next.permute((1, 0)), no_scores, use_acc=False, is_async=True)
            if DROPOUT:
                drawn = draw_backward(key, next_row, first_column, BLOCK_M, BLOCK_N, num_warps)
            s, dv, dk, p_a, ds_a = warpgroup_mma_wait(0, deps=[s_next, dv_next, dk_next, p_a, ds_a])
            before, slot, phase = slot, next_slot, next_phase
            first_row, next_row = next_row, after_row
        tma.store_wait(0)

    store_owned_tile(dk_ptr, dk * scale, first_column, start, scored, owned, heads, head, dtype, num_warps)
    store_owned_tile(dv_ptr, dv, first_column, start, length, owned, heads, head, dtype, num_warps)
    invalidate_barriers(k_ready)
    invalidate_barriers(ready)


def plan_hopper_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem, choice: KernelChoice
) -> BackwardPass:
    """Hopper's kernels for `launch_attention.launch_flash_backward`. They sum dQ in fp32, in any order."""
    total, heads, head_dim = q.shape
    dropout, overlap = problem.threshold > 0, device.overlap_options(q.device)
    rows, columns, warps, stages = choice.tile
    specialized = choice.kernel == "hopper_specialized"
    side = columns // 2 if specialized else columns
    q_tiles, k_tiles, v_tiles = describe_tiles(q, rows), describe_tiles(k, side), describe_tiles(v, side)
    do_tiles = describe_tiles(do, rows)
    dq_tiles = describe_tiles(torch.empty(q.shape, dtype=torch.float32, device="meta"), rows)
    prepare = RepeatedLaunch(
        prepare_backward_kernel, triton.cdiv(total * heads, PREPARED_ROWS),
        do.stride(0), do.stride(1), heads, total, problem.scale * LOG2_E, problem.threshold,
        D=head_dim, ROWS=PREPARED_ROWS, OVERLAP=overlap["OVERLAP"],
    )  # fmt: skip
    tiles = triton.cdiv(problem.max_length, columns) * heads * problem.size
    numbers = heads, total, problem.max_length, problem.padded_length, problem.scale, problem.scale * LOG2_E
    constants = dict(D=head_dim, BLOCK_M=rows, BLOCK_N=columns, STAGES=stages, **overlap)
    visits, *visit_sizes, max_visits = problem.visits(rows, columns, q.device, by_key=True)
    if specialized:
        sum_keys = RepeatedLaunch(
            hopper_specialized_kernel, min(tiles, count_multiprocessors(q.device)), tiles, *numbers,
            **constants, num_warps=warps,
        )  # fmt: skip
    else:
        sum_keys = RepeatedLaunch(
            hopper_backward_kernel, tiles, *visit_sizes, *numbers, problem.threshold,
            **constants, MAX_VISITS=max_visits, DROPOUT=dropout, num_warps=min(warps, columns // 16),
            maxnreg=(168 if dropout else 128) if head_dim == 32 else None,  # three or four programs on a multiprocessor
        )  # fmt: skip
    finish = plan_finish_dq(q, k, v, do, problem)

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, sequences: SequenceTensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        stats = torch.empty_like(softmax)
        taken = torch.empty(1, dtype=torch.int32, device=q.device)
        dq_sum = torch.empty_like(out, dtype=torch.float32)
        dk, dv = torch.empty_like(out), torch.empty_like(out)
        prepare(out, do, softmax, stats, dq_sum, taken)
        tensors = (q_tiles(q), k_tiles(k), v_tiles(v), do_tiles(do), stats, dq_tiles(dq_sum), dk, dv)
        if specialized:
            sum_keys(*tensors, *sequences[:2], taken)
        else:
            sum_keys(*tensors, *sequences, visits)
        return finish(q, k, v, do, softmax, stats, dq_sum, dk, dv, sequences), dk, dv

    return run
