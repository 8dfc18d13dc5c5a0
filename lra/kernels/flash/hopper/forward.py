"""Forward for Hopper GPUs in Gluon: the loop of flash/forward.py, with its tensor-core products kept in flight.

Tiles of K and V arrive by TMA. During the softmax of one tile, the tensor cores compute the scores of the next tile and
the product of the previous weights with V. FlashAttention-3 has this overlap within a warp group (arXiv 2407.08608,
section 3.2).

Weights are exp2(score - offset), and any offset that keeps them in range gives the same result. So the loop searches
for no maximum and rescales nothing: the offset is a row's maximum in its first tile. The sum of weights then lies
between 1/2 and a bound, unless later scores lie far above those of the first tile, or scores are so large that rounding
the offset matters. If a sum is out of range, the program visits all keys again, with Algorithm 1's running maximum.

Sequences that are no longer than a tile of keys have a kernel without the loop. It needs fewer registers and less
shared memory, so more programs run at a time: these sequences wait for memory.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from lra.kernels.flash.dispatch import KernelChoice
from lra.kernels.flash.hopper.tiles import (
    draw_forward,
    dropout_key,
    is_extreme,
    sequence_tile,
    store_owned_tile,
    visit_list,
    visited_tile,
)
from lra.kernels.flash.problem import ForwardPass, Problem, SequenceTensors
from lra.kernels.flash.tiles import LOG2_E
from lra.kernels.hopper import (
    advance_slot,
    allocate_barriers,
    describe_tiles,
    drop_forward,
    invalidate_barriers,
    load_tile_async,
    product_layout,
    zero_tile_past,
)
from lra.kernels.plans import RepeatedLaunch


@gluon.jit
def fetch_tile(descriptor, row, column, ready, buffer, slot, wanted):
    """Start to copy the tile at (row, column) into `buffer[slot]`. `ready[slot]` completes when the copy is done."""
    BYTES: gl.constexpr = buffer.shape[1] * buffer.shape[2] * 2
    mbarrier.expect(ready.index(slot), BYTES, pred=wanted)
    load_tile_async(descriptor, [row, column], ready.index(slot), buffer.index(slot), pred=wanted)


@gluon.jit
def hide_keys_past(s, first_column, length):
    """The scores of the tile at `first_column`, with minus infinity for keys past the length."""
    columns = first_column + gl.arange(0, s.shape[1], gl.SliceLayout(0, s.type.layout))
    return gl.where((columns < length)[None, :], s, float("-inf"))


@gluon.jit
def compute_weights(s, offset, scale_log2, ANY_SCORES: gl.constexpr):
    """The fp32 weights of scores with these offsets. ANY_SCORES: scores may be huge, and an offset may be -inf."""
    if ANY_SCORES:
        return gl.exp2((s - finite_offset(offset)[:, None]) * scale_log2)
    return gl.exp2(s * scale_log2 - (offset * scale_log2)[:, None])


@gluon.jit
def finite_offset(offset):
    """The offset, or 0 where all scores so far are -inf: their weights are then 0."""
    return gl.where(offset == float("-inf"), 0.0, offset)


@gluon.jit
def thread_sums(p):
    """`[M, 4]`: the partial sums of the four threads that share a row of scores. So the loop needs no shuffles."""
    return gl.sum(gl.sum(p.reshape(p.shape[0], p.shape[1] // 8, 4, 2), 3), 1)


@gluon.jit
def drop_tile_weights(p, key, first_row, first_column, threshold, num_warps: gl.constexpr):
    """The weights of the tile at (first_row, first_column) after dropout."""
    M: gl.constexpr = p.shape[0]
    N: gl.constexpr = p.shape[1]
    scores: gl.constexpr = product_layout(N, num_warps)
    return drop_forward(p, draw_forward(key, first_row, first_column, scores, M, N, num_warps), threshold)


@gluon.jit
def attend_all_keys(
    q_tile, q_ready, k_desc, v_desc, k_smem, v_smem, visits_ptr, n, start, length, head, first_row,
    key, scale_log2, threshold,
    STAGES: gl.constexpr, MAX_VISITS: gl.constexpr, DROPOUT: gl.constexpr, RUNNING: gl.constexpr,
    ONE_TILE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """(Sums of weights times V, sums of weights, offset of each row) over the n tiles of keys.

    The offset is the maximum of all scores if RUNNING, and otherwise that of the first tile. ONE_TILE: n is 1.
    """
    dtype: gl.constexpr = q_tile.dtype
    BLOCK_M: gl.constexpr = q_tile.shape[0]
    D: gl.constexpr = q_tile.shape[1]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    scores: gl.constexpr = product_layout(BLOCK_N, num_warps)
    outputs: gl.constexpr = product_layout(D, num_warps)
    weights: gl.constexpr = gl.DotOperandLayout(0, outputs, 2)
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    acc = gl.zeros([BLOCK_M, D], gl.float32, outputs)

    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)

    # The last tile comes first, because it alone may be partial: so the loop masks nothing. The others follow in order.
    column = head * D
    last = visited_tile(visits_ptr, n - 1, n, BLOCK_N, MAX_VISITS)
    for i in gl.static_range(STAGES):
        row = start + (last if i == 0 else visited_tile(visits_ptr, i - 1, n, BLOCK_N, MAX_VISITS))
        fetch_tile(k_desc, row, column, k_ready, k_smem, i, i < n)
        fetch_tile(v_desc, row, column, v_ready, v_smem, i, i < n)
    if ONE_TILE:
        mbarrier.wait(q_ready.index(0), 0)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(q_tile, k_smem.index(0).permute((1, 0)), nothing, use_acc=False)
    if not ONE_TILE:
        v_row = start + visited_tile(visits_ptr, STAGES - 1, n, BLOCK_N, MAX_VISITS)
        fetch_tile(k_desc, v_row, column, k_ready, k_smem, 0, n > STAGES)
    partial = last + BLOCK_N > length
    if partial:
        s = hide_keys_past(s, last, length)
    top = gl.max(s, 1)
    p32 = compute_weights(s, top, scale_log2, RUNNING)
    sums = thread_sums(p32)
    p = p32.to(dtype)
    mbarrier.wait(v_ready.index(0), 0)
    if partial:
        zero_tile_past(v_smem.index(0), length - last, num_warps)

    slot, phase, first = 0, 0, last
    if not ONE_TILE:
        for t in range(1, n):  # the weights `p` are those of tile t - 1, whose V is in `slot`
            next_slot, next_phase = advance_slot(slot, phase, STAGES)
            k_row = start + visited_tile(visits_ptr, t - 1 + STAGES, n, BLOCK_N, MAX_VISITS)
            mbarrier.wait(k_ready.index(next_slot), next_phase)
            next_s = warpgroup_mma(
                q_tile, k_smem.index(next_slot).permute((1, 0)), nothing, use_acc=False, is_async=True
            )
            if DROPOUT:
                p = drop_tile_weights(p, key, first_row, first, threshold, num_warps)
            p = gl.convert_layout(p, weights)
            mbarrier.wait(v_ready.index(slot), phase)
            out = warpgroup_mma(p, v_smem.index(slot), acc, is_async=True)
            s = warpgroup_mma_wait(1, deps=[next_s])
            fetch_tile(k_desc, k_row, column, k_ready, k_smem, next_slot, t + STAGES < n)
            if RUNNING:
                new_top = gl.maximum(top, gl.max(s, 1))
                shrink = gl.exp2((top - finite_offset(new_top)) * scale_log2)
                sums *= gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None]
                top = new_top
            p32 = compute_weights(s, top, scale_log2, RUNNING)
            sums += thread_sums(p32)
            p_next = p32.to(dtype)
            acc, _ = warpgroup_mma_wait(0, deps=[out, p])
            fetch_tile(v_desc, v_row, column, v_ready, v_smem, slot, t - 1 + STAGES < n)
            if RUNNING:
                acc *= gl.convert_layout(shrink, gl.SliceLayout(1, outputs))[:, None]
            p, first = p_next, visited_tile(visits_ptr, t - 1, n, BLOCK_N, MAX_VISITS)
            slot, phase, v_row = next_slot, next_phase, k_row
    if DROPOUT:
        p = drop_tile_weights(p, key, first_row, first, threshold, num_warps)
    mbarrier.wait(v_ready.index(slot), phase)
    acc = warpgroup_mma(gl.convert_layout(p, weights), v_smem.index(slot), acc)
    invalidate_barriers(k_ready)
    invalidate_barriers(v_ready)
    return acc, gl.convert_layout(gl.sum(sums, 1), top.type.layout), top


@gluon.constexpr_function
def overflow_limit(dtype):
    """The largest sum of weights for which the maximum of the first tile was a good offset.

    Up to it no weight overflows its dtype. In bf16, fp32 then holds weights times values up to 2^63.
    """
    return 2.0**15 if dtype == gl.float16 else 2.0**64


@gluon.jit
def is_offset_wrong(sums, offset, scale_log2, dtype: gl.constexpr):
    """1 for rows for which the maximum of the first tile was a bad offset; else 0. NaN is bad, too.

    The largest weight of the first tile is 1, but for the rounding of the offset.
    """
    fit = (sums >= 0.5) & (sums <= overflow_limit(dtype)) & (is_extreme(offset, scale_log2) == 0)
    return gl.where(fit, 0, 1)


@gluon.jit
def store_result(
    out_ptr, softmax_ptr, acc, sums, offset, rows, first_row, start, length, owned, heads, head, total, threshold,
    dtype: gl.constexpr, DROPOUT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The rows of the result, and what `tiles.store_softmax` stores of them."""
    sums = gl.maximum(sums, 1e-30)
    norm = 1.0 / sums
    if DROPOUT:
        norm = norm * (256.0 / (256 - threshold))
    offset = gl.where(offset == float("-inf"), float("inf"), offset)
    softmax_ptr += head.to(gl.int64) * total + start
    gl.store(softmax_ptr + rows, offset, mask=rows < length)
    gl.store(softmax_ptr + heads.to(gl.int64) * total + rows, gl.log2(sums), mask=rows < length)
    acc = acc * gl.convert_layout(norm, gl.SliceLayout(1, acc.type.layout))[:, None]
    store_owned_tile(out_ptr, acc, first_row, start, length, owned, heads, head, dtype, num_warps)


@gluon.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, softmax_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    heads, total, max_length, padded_length, scale_log2, threshold,
    D: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, MAX_VISITS: gl.constexpr,
    DROPOUT: gl.constexpr, ONE_TILE: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    head, b, start, length, owned, first_row = sequence_tile(
        gl.program_id(0), start_ptr, length_ptr, max_length, padded_length, heads, BLOCK_M
    )
    # these loads come before the return, which waits for the length, so that they do not wait for one another
    n = gl.where(first_row < length, gl.cdiv(length, BLOCK_N), 0)
    if MAX_VISITS:
        visits_ptr, n = visit_list(visits_ptr, layouts, tiles, head, first_row // BLOCK_M, n, MAX_VISITS, num_warps)
    if DROPOUT:
        seed = gl.load(seed_ptr)
        index = gl.load(index_ptr + b)
    if first_row >= owned:
        return
    key = dropout_key(seed, index, head) if DROPOUT else 0

    dtype: gl.constexpr = q_desc.dtype
    scores: gl.constexpr = product_layout(BLOCK_N, num_warps)
    outputs: gl.constexpr = product_layout(D, num_warps)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores)

    q_smem = gl.allocate_shared_memory(dtype, [1, BLOCK_M, D], q_desc.layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k_desc.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v_desc.layout)
    q_ready = allocate_barriers(1)

    rows = first_row + gl.arange(0, BLOCK_M, row_layout)
    top = gl.full([BLOCK_M], float("-inf"), gl.float32, row_layout)
    sums = gl.zeros([BLOCK_M], gl.float32, row_layout)
    acc = gl.zeros([BLOCK_M, D], gl.float32, outputs)
    if n > 0:
        fetch_tile(q_desc, start + first_row, head * D, q_ready, q_smem, 0, True)
        if not ONE_TILE:
            mbarrier.wait(q_ready.index(0), 0)
        acc, sums, top = attend_all_keys(
            q_smem.index(0), q_ready, k_desc, v_desc, k_smem, v_smem, visits_ptr, n, start, length, head, first_row,
            key, scale_log2, threshold, STAGES, MAX_VISITS, DROPOUT, RUNNING=ONE_TILE, ONE_TILE=ONE_TILE,
            num_warps=num_warps,
        )  # fmt: skip
        if not ONE_TILE:
            wrong = is_offset_wrong(sums, top, scale_log2, dtype)
            if gl.max(gl.where(rows < length, wrong, 0), 0) > 0:
                acc, sums, top = attend_all_keys(
                    q_smem.index(0), q_ready, k_desc, v_desc, k_smem, v_smem, visits_ptr, n, start, length, head,
                    first_row, key, scale_log2, threshold, STAGES, MAX_VISITS, DROPOUT, RUNNING=True,
                    ONE_TILE=False, num_warps=num_warps,
                )  # fmt: skip

    store_result(
        out_ptr, softmax_ptr, acc, sums, top, rows, first_row, start, length, owned, heads, head, total, threshold,
        dtype, DROPOUT, num_warps,
    )  # fmt: skip
    invalidate_barriers(q_ready)


def plan_hopper_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, choice: KernelChoice) -> ForwardPass:
    """Hopper's kernel for `launch_attention.launch_flash_forward`."""
    total, heads, head_dim = q.shape
    rows, columns, warps, stages = choice.tile
    visits, *visit_sizes, max_visits = problem.visits(rows, columns, q.device)
    q_tiles, k_tiles, v_tiles = describe_tiles(q, rows), describe_tiles(k, columns), describe_tiles(v, columns)
    one_tile = not max_visits and problem.max_length <= columns
    # registers of a thread, so that four or three programs run on a multiprocessor
    registers = None if head_dim > 64 else 128 if one_tile else 168
    attend = RepeatedLaunch(
        hopper_forward_kernel, triton.cdiv(problem.max_length, rows) * heads * problem.size,
        *visit_sizes, heads, total, problem.max_length, problem.padded_length, problem.scale * LOG2_E,
        problem.threshold,
        D=head_dim, BLOCK_M=rows, BLOCK_N=columns, STAGES=1 if one_tile else stages, MAX_VISITS=max_visits,
        DROPOUT=problem.threshold > 0, ONE_TILE=one_tile, num_warps=min(warps, rows // 16), maxnreg=registers,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceTensors) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        softmax = torch.empty(2, heads, total, dtype=torch.float32, device=q.device)
        attend(q_tiles(q), k_tiles(k), v_tiles(v), out, softmax, *sequences, visits)
        return out, softmax

    return run
