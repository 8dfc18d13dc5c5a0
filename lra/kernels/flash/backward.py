"""Backward: Algorithm 4 of FlashAttention (arXiv 2205.14135).

The first kernel computes delta = rowsum(dO * O) (the paper's D_i, appendix B.2). Then a program for each tile of keys
loops over the queries. It sums its dK and dV, and adds its share of dQ to memory, in any order. If the gradients must
be deterministic, it does not touch dQ. Another program for each tile of queries then loops over the keys, so that every
score is computed twice. Both recompute the softmax from q, k and the saved statistics of the rows.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lra.kernels.flash import tuning
from lra.kernels.flash.dispatch import KernelChoice
from lra.kernels.flash.gradients import sum_over_keys, sum_over_queries
from lra.kernels.flash.problem import BackwardPass, Problem, SequenceTensors
from lra.kernels.flash.tiles import (
    LOG2_E,
    accumulator_type,
    dropout_key,
    head_pointer,
    load_delta,
    load_rows,
    load_softmax,
    program_tile,
    sequence_tile,
    store_rows,
    visit_list,
)
from lra.kernels.flash.tuning import block_dim
from lra.kernels.plans import RepeatedLaunch

DELTA_ROWS = 64


@triton.jit(do_not_specialize=["heads", "total"])
def delta_kernel(
    out_ptr, do_ptr, delta_ptr, do_row, do_head, do_d, heads, total,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, _ = program_tile(tl.program_id(0), tl.cdiv(total, ROWS), heads)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    rows_M = tile * ROWS + tl.arange(0, ROWS)
    out_row = heads * D
    out_MD = load_rows(head_pointer(out_ptr, 0, head, out_row, D), rows_M, total, out_row, 1, D, BLOCK_D)
    do_MD = load_rows(head_pointer(do_ptr, 0, head, do_row, do_head), rows_M, total, do_row, do_d, D, BLOCK_D)
    SUM: tl.constexpr = accumulator_type(out_MD.dtype)
    delta_M = tl.sum(out_MD.to(SUM) * do_MD.to(SUM), 1).to(tl.float32)
    tl.store(head_pointer(delta_ptr, 0, head, 1, total) + rows_M, delta_M, mask=rows_M < total)


@triton.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, softmax_ptr, delta_ptr, dk_ptr, dv_ptr, dq_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    q_row, q_head, q_d, k_row, k_head, k_d, v_row, v_head, v_d, do_row, do_head, do_d,
    heads, total, max_length, padded_length, scale, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
    ADD_DQ: tl.constexpr,
):  # fmt: skip
    head, b, start, length, owned, first_column = sequence_tile(  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        tl.program_id(0), start_ptr, length_ptr, max_length, padded_length, heads, BLOCK_N
    )
    if first_column >= owned:
        return

    columns_N = first_column + tl.arange(0, BLOCK_N)
    k_ND = load_rows(head_pointer(k_ptr, start, head, k_row, k_head), columns_N, length, k_row, k_d, D, BLOCK_D)
    v_ND = load_rows(head_pointer(v_ptr, start, head, v_row, v_head), columns_N, length, v_row, v_d, D, BLOCK_D)
    q_ptr = head_pointer(q_ptr, start, head, q_row, q_head)
    do_ptr = head_pointer(do_ptr, start, head, do_row, do_head)
    key = start
    if DROPOUT:
        key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)

    begin = first_column if CAUSAL and not MAX_VISITS else 0
    end = length
    if MAX_VISITS:
        visits_ptr, end = visit_list(
            visits_ptr, layouts, tiles, head, first_column // BLOCK_N, length, BLOCK_M, MAX_VISITS
        )
    begin = tl.where(first_column < length, begin, end)  # a tile of padding only stores zeros
    row = heads * D
    if ADD_DQ:
        dq_ptr = head_pointer(dq_ptr, start, head, row, D)
    dk_ND, dv_ND = sum_over_queries(  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        k_ND, v_ND, q_ptr, do_ptr, softmax_ptr, delta_ptr, dq_ptr, visits_ptr, key, first_column, begin, end,
        start, length, head, heads, total, q_row, q_d, do_row, do_d, scale, scale_log2, 1.0, threshold,
        D, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, BAND, GLOBALS, MAX_VISITS, DROPOUT, ADD_DQ, False,
    )  # fmt: skip

    store_rows(head_pointer(dk_ptr, start, head, row, D), dk_ND * scale, columns_N, length, owned, row, D, BLOCK_D)
    dv_ND = dv_ND * (256.0 / (256 - threshold))
    store_rows(head_pointer(dv_ptr, start, head, row, D), dv_ND, columns_N, length, owned, row, D, BLOCK_D)


@triton.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, softmax_ptr, delta_ptr, dq_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    q_row, q_head, q_d, k_row, k_head, k_d, v_row, v_head, v_d, do_row, do_head, do_d,
    heads, total, max_length, padded_length, scale, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    head, b, start, length, owned, first_row = sequence_tile(  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        tl.program_id(0), start_ptr, length_ptr, max_length, padded_length, heads, BLOCK_M
    )
    if first_row >= owned:
        return

    rows_M = first_row + tl.arange(0, BLOCK_M)
    q_MD = load_rows(head_pointer(q_ptr, start, head, q_row, q_head), rows_M, length, q_row, q_d, D, BLOCK_D)
    do_MD = load_rows(head_pointer(do_ptr, start, head, do_row, do_head), rows_M, length, do_row, do_d, D, BLOCK_D)
    top_M, norm_M = load_softmax(softmax_ptr, start, head, heads, total, rows_M, length)
    delta_M = load_delta(delta_ptr, start, head, total, rows_M, length)
    k_ptr = head_pointer(k_ptr, start, head, k_row, k_head)
    v_ptr = head_pointer(v_ptr, start, head, v_row, v_head)
    key = start
    if DROPOUT:
        key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)

    end = length
    if CAUSAL:
        end = tl.minimum(length, first_row + BLOCK_M)
    end = tl.where(first_row < length, end, 0)
    if MAX_VISITS:
        visits_ptr, end = visit_list(visits_ptr, layouts, tiles, head, first_row // BLOCK_M, end, BLOCK_N, MAX_VISITS)
    dq_MD = sum_over_keys(
        q_MD, do_MD, top_M, norm_M, delta_M, k_ptr, v_ptr, visits_ptr, key, first_row, end, length,
        k_row, k_d, v_row, v_d, scale_log2, threshold,
        D, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, BAND, GLOBALS, MAX_VISITS, DROPOUT,
    )  # fmt: skip
    row = heads * D
    store_rows(head_pointer(dq_ptr, start, head, row, D), dq_MD * scale, rows_M, length, owned, row, D, BLOCK_D)


def plan_plain_backward(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem, choice: KernelChoice
) -> BackwardPass:
    """The plain kernels for `launch_attention.launch_flash_backward`."""
    total, heads, head_dim = q.shape
    block_d, dropout, adds = block_dim(head_dim), problem.threshold > 0, choice.kernel == "dkdv_dq"
    strides = (*q.stride(), *k.stride(), *v.stride(), *do.stride())
    scalars = (
        heads, total, problem.max_length, problem.padded_length,
        problem.scale, problem.scale * LOG2_E, problem.threshold,
    )  # fmt: skip
    shared = dict(D=head_dim, BLOCK_D=block_d, DROPOUT=dropout, **problem.rules)
    sum_rows = RepeatedLaunch(
        delta_kernel, triton.cdiv(total, DELTA_ROWS) * heads, *do.stride(), heads, total,
        D=head_dim, BLOCK_D=block_d, ROWS=DELTA_ROWS, enable_fp_fusion=True,
    )  # fmt: skip
    tile = choice.tile
    key_visits, *key_visit_sizes, max_visits = problem.visits(tile.rows, tile.columns, q.device, by_key=True)
    sum_keys = RepeatedLaunch(
        dkdv_kernel, triton.cdiv(problem.max_length, tile.columns) * heads * problem.size,
        *key_visit_sizes, *strides, *scalars, **shared, MAX_VISITS=max_visits, ADD_DQ=adds, **tile.options(),
    )  # fmt: skip
    sum_queries, visits = None, None
    if not adds:
        tile = tuning.find_tile("dq", q.dtype, block_d, dropout, problem.pattern)
        visits, *visit_sizes, max_visits = problem.visits(tile.rows, tile.columns, q.device)
        sum_queries = RepeatedLaunch(
            dq_kernel, triton.cdiv(problem.max_length, tile.rows) * heads * problem.size,
            *visit_sizes, *strides, *scalars, **shared, MAX_VISITS=max_visits, **tile.options(),
        )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax: Tensor, do: Tensor, sequences: SequenceTensors
    ) -> tuple[Tensor, Tensor, Tensor]:
        dk, dv = torch.empty_like(out), torch.empty_like(out)
        dq_sum = torch.zeros(q.shape, dtype=torch.float32, device=q.device) if adds else None
        delta = torch.empty(heads, total, dtype=torch.float32, device=q.device)
        sum_rows(out, do, delta)
        sum_keys(q, k, v, do, softmax, delta, dk, dv, dq_sum, *sequences, key_visits)
        if dq_sum is not None:
            return dq_sum.to(q.dtype), dk, dv
        assert sum_queries is not None
        dq = torch.empty_like(out)
        sum_queries(q, k, v, do, softmax, delta, dq, *sequences, visits)
        return dq, dk, dv

    return run
