"""Forward: Algorithms 1 and 2 of FlashAttention (arXiv 2205.14135) in the loop order of FlashAttention-2 (2307.08691).

A program owns a tile of queries of one head and runs over the keys, so that nothing is written twice.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lra.kernels.flash import hopper, tuning
from lra.kernels.flash.hopper_forward import launch_hopper_forward
from lra.kernels.flash.hopper_shared import launch_hopper_shared
from lra.kernels.flash.problem import Problem
from lra.kernels.flash.tiles import (
    LOG2_E,
    attend,
    dropout_key,
    head_pointer,
    keep_tile,
    load_rows,
    load_softmax,
    sequence_tile,
    store_rows,
    store_softmax,
    sum_type,
    unfit,
    visible,
    visit_list,
    visited,
)


@triton.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, softmax_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    q_row, q_head, q_d, k_row, k_head, k_d, v_row, v_head, v_d,
    heads, total, max_length, padded_length, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, LONGEST: tl.constexpr, DROPOUT: tl.constexpr,
    ANY: tl.constexpr, AGAIN: tl.constexpr,
):  # fmt: skip
    """ANY as in `attend`: without it, rows whose softmax is wrong get a maximum of NaN. AGAIN: tiles that have such."""
    head, b, start, length, owned, first_row = sequence_tile(  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        tl.program_id(0), start_ptr, length_ptr, max_length, padded_length, heads, BLOCK_M
    )
    if first_row >= owned:
        return

    rows_M = first_row + tl.arange(0, BLOCK_M)
    if AGAIN:
        top_M, _ = load_softmax(softmax_ptr, start, head, heads, total, rows_M, length)
        if tl.max((top_M != top_M).to(tl.int32), 0) == 0:
            return
    q_MD = load_rows(head_pointer(q_ptr, start, head, q_row, q_head), rows_M, length, q_row, q_d, D, BLOCK_D)
    k_ptr = head_pointer(k_ptr, start, head, k_row, k_head)
    v_ptr = head_pointer(v_ptr, start, head, v_row, v_head)
    key = start
    if DROPOUT:
        key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)

    end = length
    if CAUSAL:
        end = tl.minimum(length, first_row + BLOCK_M)
    end = tl.where(first_row < length, end, 0)  # a tile of padding has nothing to compute, only zeros to store
    if LONGEST:
        visits_ptr, end = visit_list(visits_ptr, layouts, tiles, head, first_row // BLOCK_M, end, BLOCK_N, LONGEST)
    SUM: tl.constexpr = sum_type(q_MD.dtype)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], SUM)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], SUM)
    for place in range(0, end, BLOCK_N):
        first_column, whole = visited(visits_ptr, place, BLOCK_N, LONGEST)
        columns_N = first_column + tl.arange(0, BLOCK_N)
        k_ND = load_rows(k_ptr, columns_N, length, k_row, k_d, D, BLOCK_D)
        v_ND = load_rows(v_ptr, columns_N, length, v_row, v_d, D, BLOCK_D)
        seen_MN = visible(rows_M[:, None], columns_N[None, :], length, whole, CAUSAL, BAND, GLOBALS)
        keep_MN = seen_MN
        if DROPOUT:
            keep_MN = keep_tile(key, first_row, first_column, threshold, BLOCK_M, BLOCK_N, False)
        top_M, total_M, acc_MD = attend(
            q_MD, k_ND, v_ND, top_M, total_M, acc_MD, seen_MN, keep_MN, scale_log2, DROPOUT, LONGEST > 0, ANY
        )

    if not ANY:
        top_M = tl.where(unfit(top_M, total_M, scale_log2), float("nan"), top_M)
    total_M = tl.maximum(total_M, 1e-30)  # in a row of padding nothing was summed
    norm_M = 1.0 / total_M
    if DROPOUT:
        norm_M = norm_M * (256.0 / (256 - threshold))
    out_row = heads * D
    out_ptr = head_pointer(out_ptr, start, head, out_row, D)
    store_rows(out_ptr, acc_MD * norm_M[:, None], rows_M, length, owned, out_row, D, BLOCK_D)
    store_softmax(softmax_ptr, top_M, total_M, start, head, heads, total, rows_M, length, q_MD.dtype)


def launch_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem) -> tuple[Tensor, Tensor]:
    """The result, contiguous `[T, H, D]`, and two statistics of the softmax of each score row, fp32 `[2, H, T]`.

    The latter are those of `tiles.store_softmax`: the maximum of the raw scores, and what normalises the weights
    relative to it. One log-sum-exp would lose the sum behind a large maximum. Rows past a length are never read.
    """
    if hopper.takes(problem, q, k, v):
        with torch.cuda.device_of(q):
            shared = tuning.shared_forward(
                q.dtype, q.shape[2], problem.threshold > 0, problem.pattern, problem.max_length,
                q.shape[0] * q.shape[1], q.device,
            )  # fmt: skip
        return launch_hopper_shared(q, k, v, problem, shared) if shared else launch_hopper_forward(q, k, v, problem)
    total, heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    softmax = torch.empty(2, heads, total, dtype=torch.float32, device=q.device)
    block_d, dropout = tuning.block_dim(head_dim), problem.threshold > 0
    with torch.cuda.device_of(q):
        tile = tuning.tile("forward", q.dtype, block_d, dropout, problem.pattern)
        *visits, longest = problem.visits(tile.rows, tile.columns, q.device)
        # in fp32 other operations bound the time: there one launch does it for any scores
        for again in (False,) if q.dtype == torch.float32 else (False, True):
            forward_kernel[(triton.cdiv(problem.max_length, tile.rows) * heads * problem.size,)](
                q, k, v, out, softmax,
                problem.start, problem.length, problem.seed, problem.index, *visits,
                *q.stride(), *k.stride(), *v.stride(),
                heads, total, problem.max_length, problem.padded_length, problem.scale * LOG2_E, problem.threshold,
                D=head_dim, BLOCK_D=block_d, LONGEST=longest, DROPOUT=dropout, **problem.rules, **tile.options(),
                ANY=again or q.dtype == torch.float32, AGAIN=again,
            )  # fmt: skip
    return out, softmax
