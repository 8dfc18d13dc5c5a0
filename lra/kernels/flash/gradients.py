"""Device functions of the backward: gradients of one tile of scores, and their sums over queries or keys.

This is Algorithm 4 of FlashAttention (arXiv 2205.14135). tiles.py explains shape suffixes and scores.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from lra.kernels.flash.tiles import (
    accumulator_type,
    add_dot,
    add_rows,
    is_extreme,
    keep_tile,
    load_delta,
    load_rows,
    load_softmax,
    score_products,
    sees_single_key,
    visible_mask,
    visited_tile,
)


@triton.jit
def score_gradient(a, b, a_v, b_v, top, norm, delta, seen, single, keep, scale_log2, keep_scale, DROPOUT: tl.constexpr):
    """(P with dropout, dS) of one tile, from the recomputed softmax P (Algorithm 4, lines 11 to 20).

    With (a, b) = (q, k) and (a_v, b_v) = (do, v) the tile is `[M, N]`. With (k, q) and (v, do) it is `[N, M]`. The row
    statistics `top` and `norm` (of `tiles.store_softmax`) and `delta` broadcast over the columns. The kept entries of P
    lack the factor `keep_scale`, and dS lacks the scale: the caller multiplies its sums once, at the end.
    """
    s = (score_products(a, b) - top) * scale_log2
    p = tl.exp2(s) * norm if a.dtype == tl.float32 else tl.exp2(s - norm)
    p = tl.where(seen, p, 0.0)
    dp = score_products(a_v, b_v)
    if DROPOUT:
        kept = tl.where(keep, p, 0.0)
        dp = tl.where(keep, dp * keep_scale, 0.0)
    else:
        kept = p
    return kept, tl.where(single, 0.0, p * (dp - delta))


@triton.jit
def sum_over_queries(
    k_ND, v_ND, q_ptr, do_ptr, softmax_ptr, delta_ptr, dq_ptr, visits_ptr, key, first_column, begin, end,
    start, length, head, heads, total, q_row, q_d, do_row, do_d, scale, scale_log2, delta_factor, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
    ADD_DQ: tl.constexpr, EXTREME_ROWS: tl.constexpr,
):  # fmt: skip
    """(dK without the scale, dV without dropout's factor) of a tile of keys, over the queries from `begin` to `end`.

    ADD_DQ: the tile's share of dQ is added to memory. EXTREME_ROWS: only the rows of `is_extreme` count. `delta_ptr`
    times `delta_factor` is rowsum(dO * O).
    """
    keep_scale = 256.0 / (256 - threshold)
    columns_N = first_column + tl.arange(0, BLOCK_N)
    row = heads * D
    SUM: tl.constexpr = accumulator_type(k_ND.dtype)
    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], SUM)
    dv_ND = tl.zeros([BLOCK_N, BLOCK_D], SUM)
    for place in range(begin, end, BLOCK_M):
        first_row, is_full_tile = visited_tile(visits_ptr, place, BLOCK_M, MAX_VISITS)
        rows_M = first_row + tl.arange(0, BLOCK_M)
        q_MD = load_rows(q_ptr, rows_M, length, q_row, q_d, D, BLOCK_D)
        do_MD = load_rows(do_ptr, rows_M, length, do_row, do_d, D, BLOCK_D)
        top_M, norm_M = load_softmax(softmax_ptr, start, head, heads, total, rows_M, length)
        if EXTREME_ROWS:
            top_M = tl.where(is_extreme(top_M, scale_log2), top_M, float("inf"))
        delta_M = load_delta(delta_ptr, start, head, total, rows_M, length) * delta_factor
        seen_NM = visible_mask(rows_M[None, :], columns_N[:, None], length, is_full_tile, CAUSAL, BAND, GLOBALS)
        keep_NM = seen_NM
        if DROPOUT:
            keep_NM = keep_tile(key, first_row, first_column, threshold, BLOCK_M, BLOCK_N, True)
        p_NM, ds_NM = score_gradient(
            k_ND, q_MD, v_ND, do_MD, top_M[None, :], norm_M[None, :], delta_M[None, :],
            seen_NM, sees_single_key(rows_M, length, CAUSAL)[None, :], keep_NM, scale_log2, keep_scale, DROPOUT,
        )  # fmt: skip
        dv_ND = add_dot(dv_ND, p_NM.to(do_MD.dtype), do_MD)
        dk_ND = add_dot(dk_ND, ds_NM.to(q_MD.dtype), q_MD)
        if ADD_DQ:
            share_MD = tl.dot(tl.trans(ds_NM.to(k_ND.dtype)), k_ND, input_precision="ieee") * scale
            add_rows(dq_ptr, share_MD, rows_M, length, row, D, BLOCK_D)
    return dk_ND, dv_ND


@triton.jit
def sum_over_keys(
    q_MD, do_MD, top_M, norm_M, delta_M, k_ptr, v_ptr, visits_ptr, key, first_row, end, length,
    k_row, k_d, v_row, v_d, scale_log2, threshold,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, BAND: tl.constexpr, GLOBALS: tl.constexpr, MAX_VISITS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries without the scale, over the keys to `end`."""
    keep_scale = 256.0 / (256 - threshold)
    rows_M = first_row + tl.arange(0, BLOCK_M)
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], accumulator_type(q_MD.dtype))
    for place in range(0, end, BLOCK_N):
        first_column, is_full_tile = visited_tile(visits_ptr, place, BLOCK_N, MAX_VISITS)
        columns_N = first_column + tl.arange(0, BLOCK_N)
        k_ND = load_rows(k_ptr, columns_N, length, k_row, k_d, D, BLOCK_D)
        v_ND = load_rows(v_ptr, columns_N, length, v_row, v_d, D, BLOCK_D)
        seen_MN = visible_mask(rows_M[:, None], columns_N[None, :], length, is_full_tile, CAUSAL, BAND, GLOBALS)
        keep_MN = seen_MN
        if DROPOUT:
            keep_MN = keep_tile(key, first_row, first_column, threshold, BLOCK_M, BLOCK_N, False)
        _, ds_MN = score_gradient(
            q_MD, k_ND, do_MD, v_ND, top_M[:, None], norm_M[:, None], delta_M[:, None],
            seen_MN, sees_single_key(rows_M, length, CAUSAL)[:, None], keep_MN, scale_log2, keep_scale, DROPOUT,
        )  # fmt: skip
        dq_MD = add_dot(dq_MD, ds_MN.to(k_ND.dtype), k_ND)
    return dq_MD
