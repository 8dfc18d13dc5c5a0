"""The end of the backward on Hopper: dQ in its own dtype, and the contribution of rows with extreme scores.

The main pass knows one number of a row, its log-sum-exp in fp32. If scores lie beyond `tiles.EXTREME`, that number has
lost the sum of weights: if scores of -1e30 hide all n keys, each key would weigh 1, not 1 / n. So the main pass leaves
such rows out. The kernels here compute them from the maximum and the sum. Most calls have no such row, and only look
for one.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from lra.kernels import device
from lra.kernels.flash.gradients import sum_over_keys, sum_over_queries
from lra.kernels.flash.problem import Problem, SequenceTensors
from lra.kernels.flash.tiles import (
    LOG2_E,
    dropout_key,
    head_pointer,
    is_extreme,
    load_delta,
    load_rows,
    load_softmax,
    store_rows,
    visit_list,
)
from lra.kernels.plans import RepeatedLaunch

TILE_SIDE = 64  # rows and columns of a tile of scores
EXTREME_SCAN_ROWS = 4096  # rows that `any_extreme` reads at a time
CONVERTED_ELEMENTS = 4096  # elements of dQ that a program converts


@triton.jit
def any_extreme(softmax_ptr, start, head, total, length, scale_log2, ROWS: tl.constexpr):
    """Whether a head of a sequence has a row with extreme scores. It reads ROWS rows at a time."""
    top_ptr = head_pointer(softmax_ptr, start, head, 1, total)
    found = 0
    for first in range(0, length, ROWS):
        rows = first + tl.arange(0, ROWS)
        top = tl.load(top_ptr + rows, mask=rows < length, other=0.0)
        found = tl.maximum(found, tl.max(is_extreme(top, scale_log2).to(tl.int32), 0))
    return found > 0


@triton.jit
def convert_dq_kernel(sum_ptr, dq_ptr, scale, elements, ELEMENTS: tl.constexpr, OVERLAP: tl.constexpr):
    """Convert the fp32 sum of dQ to its own dtype."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    i = tl.program_id(0).to(tl.int64) * ELEMENTS + tl.arange(0, ELEMENTS)
    tl.store(
        dq_ptr + i, (tl.load(sum_ptr + i, mask=i < elements) * scale).to(dq_ptr.dtype.element_ty), mask=i < elements
    )


@triton.jit(do_not_specialize=["layouts", "tiles", "by_key_layouts", "by_key_tiles", "heads", "total", "threshold"])
def extreme_rows_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, softmax_ptr, stats_ptr, dq_ptr, dk_ptr, dv_ptr,
    start_ptr, length_ptr, seed_ptr, index_ptr, visits_ptr, by_key_ptr,
    layouts, tiles, by_key_layouts, by_key_tiles,
    q_row, q_head, k_row, k_head, v_row, v_head, do_row, do_head,
    heads, total, scale, scale_log2, delta_factor, threshold,
    D: tl.constexpr, SIDE: tl.constexpr, MAX_VISITS: tl.constexpr, MAX_VISITS_BY_KEY: tl.constexpr,
    DROPOUT: tl.constexpr, SCAN_ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Add the contribution of extreme rows. There is one program for each head of a sequence."""
    program = tl.program_id(0)
    head, b = program % heads, program // heads
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    extreme = any_extreme(softmax_ptr, start, head, total, length, scale_log2, SCAN_ROWS)
    if OVERLAP:
        gdc_wait()
    if extreme:
        key = start
        if DROPOUT:
            key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)
        q_ptr = head_pointer(q_ptr, start, head, q_row, q_head)
        k_ptr = head_pointer(k_ptr, start, head, k_row, k_head)
        v_ptr = head_pointer(v_ptr, start, head, v_row, v_head)
        do_ptr = head_pointer(do_ptr, start, head, do_row, do_head)
        delta_ptr = stats_ptr + heads.to(tl.int64) * total  # `prepare_backward_kernel` stores it as the second part
        row = heads * D
        dk_ptr = head_pointer(dk_ptr, start, head, row, D)
        dv_ptr = head_pointer(dv_ptr, start, head, row, D)
        dq_ptr = head_pointer(dq_ptr, start, head, row, D)
        for first in range(0, length, SIDE):
            rows = first + tl.arange(0, SIDE)
            list_ptr, end = by_key_ptr, length
            if MAX_VISITS_BY_KEY:
                list_ptr, end = visit_list(
                    by_key_ptr, by_key_layouts, by_key_tiles, head, first // SIDE, length, SIDE, MAX_VISITS_BY_KEY
                )
            dk, dv = sum_over_queries(  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
                load_rows(k_ptr, rows, length, k_row, 1, D, D), load_rows(v_ptr, rows, length, v_row, 1, D, D),
                q_ptr, do_ptr, softmax_ptr, delta_ptr, dq_ptr, list_ptr, key, first, 0, end,
                start, length, head, heads, total, q_row, 1, do_row, 1, scale, scale_log2, delta_factor, threshold,
                D, D, SIDE, SIDE, False, None, 0, MAX_VISITS_BY_KEY, DROPOUT, False, True,
            )  # fmt: skip
            dk = load_rows(dk_ptr, rows, length, row, 1, D, D) + dk * scale
            dv = load_rows(dv_ptr, rows, length, row, 1, D, D) + dv * (256.0 / (256 - threshold))
            store_rows(dk_ptr, dk, rows, length, length, row, D, D)
            store_rows(dv_ptr, dv, rows, length, length, row, D, D)

            top, norm = load_softmax(softmax_ptr, start, head, heads, total, rows, length)
            list_ptr, end = visits_ptr, length
            if MAX_VISITS:
                list_ptr, end = visit_list(visits_ptr, layouts, tiles, head, first // SIDE, length, SIDE, MAX_VISITS)
            dq = sum_over_keys(
                load_rows(q_ptr, rows, length, q_row, 1, D, D), load_rows(do_ptr, rows, length, do_row, 1, D, D),
                top, norm, load_delta(delta_ptr, start, head, total, rows, length) * delta_factor,
                k_ptr, v_ptr, list_ptr, key, first, end, length, k_row, 1, v_row, 1, scale_log2, threshold,
                D, D, SIDE, SIDE, False, None, 0, MAX_VISITS, DROPOUT,
            )  # fmt: skip
            offset = rows.to(tl.int64)[:, None] * row + tl.arange(0, D)[None, :]
            own = (rows < length) & is_extreme(top, scale_log2)
            tl.store(dq_ptr + offset, (dq * scale).to(dq_ptr.dtype.element_ty), mask=own[:, None])


def plan_finish_dq(q: Tensor, k: Tensor, v: Tensor, do: Tensor, problem: Problem) -> Callable[..., Tensor]:
    """Computes dQ, `[T, H, D]`, from its fp32 sum. It adds the contribution of extreme rows to dq, dk and dv.

    `stats` comes from `backward.prepare_backward_kernel`. Its second part is -r * delta with the keep rate r of
    dropout.
    """
    total, heads, head_dim = q.shape
    visits, *visit_sizes, max_visits = problem.visits(TILE_SIDE, TILE_SIDE, q.device)
    by_key, *by_key_sizes, max_visits_by_key = problem.visits(TILE_SIDE, TILE_SIDE, q.device, by_key=True)
    strides = (stride for x in (q, k, v, do) for stride in x.stride()[:2])
    overlap = device.overlap_options(q.device)
    convert = RepeatedLaunch(
        convert_dq_kernel, triton.cdiv(q.numel(), CONVERTED_ELEMENTS), problem.scale, q.numel(),
        ELEMENTS=CONVERTED_ELEMENTS, **overlap,
    )  # fmt: skip
    add_extreme_rows = RepeatedLaunch(
        extreme_rows_kernel, heads * problem.size, *visit_sizes, *by_key_sizes, *strides,
        heads, total, problem.scale, problem.scale * LOG2_E, -256.0 / (256 - problem.threshold), problem.threshold,
        D=head_dim, SIDE=TILE_SIDE, MAX_VISITS=max_visits, MAX_VISITS_BY_KEY=max_visits_by_key,
        DROPOUT=problem.threshold > 0, SCAN_ROWS=EXTREME_SCAN_ROWS, **overlap,
        num_warps=4 if head_dim <= 64 else 8, num_stages=1, enable_fp_fusion=True,
    )  # fmt: skip

    def run(
        q: Tensor, k: Tensor, v: Tensor, do: Tensor, softmax: Tensor, stats: Tensor, dq_sum: Tensor,
        dk: Tensor, dv: Tensor, sequences: SequenceTensors,
    ) -> Tensor:  # fmt: skip
        dq = torch.empty_like(dk)
        convert(dq_sum, dq)
        add_extreme_rows(q, k, v, do, softmax, stats, dq, dk, dv, *sequences, visits, by_key)
        return dq

    return run
