"""Forward: Algorithms 1 and 2 of FlashAttention (arXiv 2205.14135) in the loop order of FlashAttention-2 (2307.08691).

A program owns a tile of queries of one head and loops over the keys, so that it writes each result once.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lra.kernels import device
from lra.kernels.flash.dispatch import KernelChoice
from lra.kernels.flash.problem import ForwardPass, Problem, SequenceTensors
from lra.kernels.flash.tiles import (
    LOG2_E,
    accumulator_type,
    dropout_key,
    head_pointer,
    is_softmax_wrong,
    keep_tile,
    load_rows,
    sequence_tile,
    store_rows,
    store_softmax,
    update_softmax,
    visible_mask,
    visit_list,
    visited_tile,
)
from lra.kernels.flash.tuning import block_dim
from lra.kernels.plans import RepeatedLaunch

NAN_SCAN_ROWS = 4096  # rows that `any_nan` reads at a time


@triton.jit
def forward_tile(
    q_ptr, k_ptr, v_ptr, out_ptr, softmax_ptr, visits_ptr, layouts, tiles, key,
    head, start, length, owned, first_row, q_row, q_d, k_row, k_d, v_row, v_d, heads, total, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
    ANY_SCORES: tl.constexpr,
):  # fmt: skip
    """Compute and store the result of a tile of queries, and its softmax statistics.

    The pointers are those of the tile's head and sequence. `update_softmax` explains ANY_SCORES. Without it, rows whose
    softmax is wrong get the maximum NaN.
    """
    rows_M = first_row + tl.arange(0, BLOCK_M)
    q_MD = load_rows(q_ptr, rows_M, length, q_row, q_d, D, BLOCK_D)
    end = length
    if CAUSAL:
        end = tl.minimum(length, first_row + BLOCK_M)
    end = tl.where(first_row < length, end, 0)  # a tile of padding computes nothing and only stores zeros
    if MAX_VISITS:
        visits_ptr, end = visit_list(visits_ptr, layouts, tiles, head, first_row // BLOCK_M, end, BLOCK_N, MAX_VISITS)
    SUM: tl.constexpr = accumulator_type(q_MD.dtype)
    top_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total_M = tl.zeros([BLOCK_M], SUM)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], SUM)
    for place in range(0, end, BLOCK_N):
        first_column, is_full_tile = visited_tile(visits_ptr, place, BLOCK_N, MAX_VISITS)
        columns_N = first_column + tl.arange(0, BLOCK_N)
        k_ND = load_rows(k_ptr, columns_N, length, k_row, k_d, D, BLOCK_D)
        v_ND = load_rows(v_ptr, columns_N, length, v_row, v_d, D, BLOCK_D)
        seen_MN = visible_mask(rows_M[:, None], columns_N[None, :], length, is_full_tile, CAUSAL, BAND, GLOBALS)
        keep_MN = seen_MN
        if DROPOUT:
            keep_MN = keep_tile(key, first_row, first_column, threshold, BLOCK_M, BLOCK_N, False)
        top_M, total_M, acc_MD = update_softmax(
            q_MD, k_ND, v_ND, top_M, total_M, acc_MD, seen_MN, keep_MN, scale_log2, DROPOUT, MAX_VISITS > 0, ANY_SCORES
        )

    if not ANY_SCORES:
        top_M = tl.where(is_softmax_wrong(top_M, total_M, scale_log2), float("nan"), top_M)
    total_M = tl.maximum(total_M, 1e-30)  # a row of padding has summed nothing
    norm_M = 1.0 / total_M
    if DROPOUT:
        norm_M = norm_M * (256.0 / (256 - threshold))
    store_rows(out_ptr, acc_MD * norm_M[:, None], rows_M, length, owned, heads * D, D, BLOCK_D)
    store_softmax(softmax_ptr, top_M, total_M, start, head, heads, total, rows_M, length, q_MD.dtype)


@triton.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "max_length", "padded_length", "threshold"])
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, softmax_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    q_row, q_head, q_d, k_row, k_head, k_d, v_row, v_head, v_d,
    heads, total, max_length, padded_length, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    head, b, start, length, owned, first_row = sequence_tile(  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
        tl.program_id(0), start_ptr, length_ptr, max_length, padded_length, heads, BLOCK_M
    )
    if OVERLAP:
        gdc_launch_dependents()
    if first_row >= owned:
        return
    key = start
    if DROPOUT:
        key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)
    forward_tile(
        head_pointer(q_ptr, start, head, q_row, q_head), head_pointer(k_ptr, start, head, k_row, k_head),
        head_pointer(v_ptr, start, head, v_row, v_head), head_pointer(out_ptr, start, head, heads * D, D),
        softmax_ptr, visits_ptr, layouts, tiles, key,
        head, start, length, owned, first_row, q_row, q_d, k_row, k_d, v_row, v_d, heads, total, scale_log2, threshold,
        D, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, BAND, GLOBALS, MAX_VISITS, DROPOUT,
        q_ptr.dtype.element_ty == tl.float32,  # in fp32 other operations bound the time
    )  # fmt: skip


@triton.jit(do_not_specialize=["layouts", "tiles", "heads", "total", "threshold"])
def forward_rescan_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, softmax_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, layouts, tiles,
    q_row, q_head, q_d, k_row, k_head, k_d, v_row, v_head, v_d,
    heads, total, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Recompute the tiles of a head of a sequence that have rows whose softmax `forward_kernel` got wrong. Few have."""
    head, b = tl.program_id(0) % heads, tl.program_id(0) // heads
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    top_ptr = head_pointer(softmax_ptr, start, head, 1, total)
    if OVERLAP:
        gdc_wait()
    if any_nan(top_ptr, 0, length, ROWS):
        key = start
        if DROPOUT:
            key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)
        for first_row in range(0, length, BLOCK_M):
            if any_nan(top_ptr, first_row, tl.minimum(length, first_row + BLOCK_M), BLOCK_M):
                forward_tile(
                    head_pointer(q_ptr, start, head, q_row, q_head), head_pointer(k_ptr, start, head, k_row, k_head),
                    head_pointer(v_ptr, start, head, v_row, v_head), head_pointer(out_ptr, start, head, heads * D, D),
                    softmax_ptr, visits_ptr, layouts, tiles, key, head, start, length, length, first_row,
                    q_row, q_d, k_row, k_d, v_row, v_d, heads, total, scale_log2, threshold,
                    D, BLOCK_D, BLOCK_M, BLOCK_N, CAUSAL, BAND, GLOBALS, MAX_VISITS, DROPOUT, True,
                )  # fmt: skip


@triton.jit
def any_nan(pointer, begin, end, ROWS: tl.constexpr):
    """Whether one of the numbers from `begin` to `end` is NaN. It reads ROWS of them at a time."""
    found = 0
    for first in range(begin, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        x = tl.load(pointer + rows, mask=rows < end, other=0.0)
        found = tl.maximum(found, tl.max((x != x).to(tl.int32), 0))
    return found > 0


def plan_plain_forward(q: Tensor, k: Tensor, v: Tensor, problem: Problem, choice: KernelChoice) -> ForwardPass:
    """The plain kernels for `launch_attention.launch_flash_forward`."""
    total, heads, head_dim = q.shape
    tile, overlap, rescans = choice.tile, device.overlap_options(q.device), q.dtype != torch.float32
    visits, *visit_sizes, max_visits = problem.visits(tile.rows, tile.columns, q.device)
    strides, scale_log2 = (*q.stride(), *k.stride(), *v.stride()), problem.scale * LOG2_E
    constants = dict(
        D=head_dim, BLOCK_D=block_dim(head_dim), MAX_VISITS=max_visits, DROPOUT=problem.threshold > 0, **problem.rules,
        **tile.options(),
    )  # fmt: skip
    attend = RepeatedLaunch(
        forward_kernel, triton.cdiv(problem.max_length, tile.rows) * heads * problem.size,
        *visit_sizes, *strides, heads, total, problem.max_length, problem.padded_length, scale_log2, problem.threshold,
        **constants, OVERLAP=overlap["OVERLAP"],
    )  # fmt: skip
    rescan = RepeatedLaunch(
        forward_rescan_kernel, heads * problem.size,
        *visit_sizes, *strides, heads, total, scale_log2, problem.threshold,
        **constants, ROWS=NAN_SCAN_ROWS, **overlap,
    )  # fmt: skip

    def run(q: Tensor, k: Tensor, v: Tensor, sequences: SequenceTensors) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        softmax = torch.empty(2, heads, total, dtype=torch.float32, device=q.device)
        tensors = (q, k, v, out, softmax, *sequences, visits)
        attend(*tensors)
        if rescans:
            rescan(*tensors)
        return out, softmax

    return run
