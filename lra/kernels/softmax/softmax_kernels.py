"""Scale, mask, softmax and dropout of score rows, and their derivative (fused as in Megatron-LM, arXiv 1909.08053).

A program owns 16 rows of one head and loops over their columns twice, so that rows of any length fit: first for the
sums of the softmax or of its derivative, then to write. Both kernels work in place. With dropout they write P after
dropout to a second tensor, for the product with v or dO. Sums are in fp32.

Shape suffixes: M rows, N columns of a tile. Scores are `[B, H, size, size]`, size a multiple of 16.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from lra.kernels.flash.tiles import LOG2_E, dropout_key, keep_tile, program_tile

TILE_ROWS = tl.constexpr(16)  # the fewest rows that use complete draws
MAX_COLUMNS = 256  # more registers for each thread would leave fewer programs to hide loads


@triton.jit
def locate_rows(length_ptr, heads, size):
    """(Head, sequence, its length, first row, offset of each row, which rows are real, the end of their columns).

    The end is rounded up to 16, so that loads up to it are wide. It is 0 if no row is real.
    """
    tile, head, b = program_tile(tl.program_id(0), size // TILE_ROWS, heads)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    length = tl.load(length_ptr + b)
    first_row = tile * TILE_ROWS
    rows_M = first_row + tl.arange(0, TILE_ROWS)
    offset_M = (tl.cast(b * heads + head, tl.int64) * size + rows_M) * size  # a batch can have more than 2^31 scores
    end = tl.where(first_row < length, tl.cdiv(length, 16) * 16, 0)
    return head, b, length, first_row, offset_M, rows_M < length, end


@triton.jit
def load_scores(pointer, offset_M, columns_N, end, seen_MN, unseen):
    """A tile in fp32, with `unseen` where `seen_MN` is false."""
    x_MN = tl.load(pointer + offset_M[:, None] + columns_N[None, :], mask=(columns_N < end)[None, :], other=0.0)
    return tl.where(seen_MN, x_MN.to(tl.float32), unseen)


@triton.jit
def store_scores(pointer, x_MN, offset_M, columns_N, size):
    values = x_MN.to(pointer.dtype.element_ty)
    tl.store(pointer + offset_M[:, None] + columns_N[None, :], values, mask=(columns_N < size)[None, :])


@triton.jit(do_not_specialize=["heads", "threshold"])
def softmax_forward_kernel(
    p_ptr, dropped_ptr, length_ptr, seed_ptr, index_ptr, heads, size, scale_log2, threshold,
    COLUMNS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Turn the scores at `p_ptr` into P."""
    head, b, length, first_row, offset_M, real_M, end = locate_rows(length_ptr, heads, size)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    if DROPOUT:
        key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)

    top_M = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total_M = tl.zeros([TILE_ROWS], tl.float32)
    for first_column in range(0, end, COLUMNS):
        columns_N = first_column + tl.arange(0, COLUMNS)
        s_MN = load_scores(p_ptr, offset_M, columns_N, end, (columns_N < length)[None, :], float("-inf"))
        new_top_M = tl.maximum(top_M, tl.max(s_MN, 1) * scale_log2)
        total_M = total_M * tl.exp2(top_M - new_top_M) + tl.sum(tl.exp2(s_MN * scale_log2 - new_top_M[:, None]), 1)
        top_M = new_top_M

    top_M = tl.where(real_M, top_M, 0.0)
    norm_M = 1.0 / tl.where(real_M, total_M, 1.0)
    for first_column in range(0, size, COLUMNS):
        columns_N = first_column + tl.arange(0, COLUMNS)
        seen_MN = real_M[:, None] & (columns_N < length)[None, :]
        s_MN = load_scores(p_ptr, offset_M, columns_N, end, seen_MN, float("-inf"))
        p_MN = tl.exp2(s_MN * scale_log2 - top_M[:, None]) * norm_M[:, None]
        store_scores(p_ptr, p_MN, offset_M, columns_N, size)
        if DROPOUT:
            keep_MN = keep_tile(key, first_row, first_column, threshold, TILE_ROWS, COLUMNS, False)
            p_MN = tl.where(keep_MN, p_MN * (256.0 / (256 - threshold)), 0.0)
            store_scores(dropped_ptr, p_MN, offset_M, columns_N, size)


@triton.jit(do_not_specialize=["heads", "threshold"])
def softmax_backward_kernel(
    p_ptr, ds_ptr, dropped_ptr, length_ptr, seed_ptr, index_ptr, heads, size, scale, threshold,
    COLUMNS: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Turn the gradient of P after dropout, at `ds_ptr`, into that of the scores: scale * P * (dP - rowsum(P * dP))."""
    head, b, length, first_row, offset_M, real_M, end = locate_rows(length_ptr, heads, size)  # pyright: ignore[reportGeneralTypeIssues] - typed as NoReturn
    keep_scale = 256.0 / (256 - threshold)
    if DROPOUT:
        key = dropout_key(tl.load(seed_ptr), tl.load(index_ptr + b), head)

    delta_M = tl.zeros([TILE_ROWS], tl.float32)
    for first_column in range(0, end, COLUMNS):
        columns_N = first_column + tl.arange(0, COLUMNS)
        seen_MN = real_M[:, None] & (columns_N < length)[None, :]
        p_MN = load_scores(p_ptr, offset_M, columns_N, end, seen_MN, 0.0)
        dp_MN = load_scores(ds_ptr, offset_M, columns_N, end, seen_MN, 0.0)
        if DROPOUT:
            keep_MN = keep_tile(key, first_row, first_column, threshold, TILE_ROWS, COLUMNS, False)
            dp_MN = tl.where(keep_MN, dp_MN * keep_scale, 0.0)
        delta_M += tl.sum(p_MN * dp_MN, 1)

    for first_column in range(0, size, COLUMNS):
        columns_N = first_column + tl.arange(0, COLUMNS)
        seen_MN = real_M[:, None] & (columns_N < length)[None, :]
        p_MN = load_scores(p_ptr, offset_M, columns_N, end, seen_MN, 0.0)
        dp_MN = load_scores(ds_ptr, offset_M, columns_N, end, seen_MN, 0.0)
        if DROPOUT:
            keep_MN = keep_tile(key, first_row, first_column, threshold, TILE_ROWS, COLUMNS, False)
            dp_MN = tl.where(keep_MN, dp_MN * keep_scale, 0.0)
            store_scores(dropped_ptr, tl.where(keep_MN, p_MN * keep_scale, 0.0), offset_M, columns_N, size)
        store_scores(ds_ptr, p_MN * (dp_MN - delta_M[:, None]) * scale, offset_M, columns_N, size)


def launch_softmax_forward(
    scores: Tensor, length: Tensor, scale: float, threshold: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Turn contiguous scores `[B, H, size, size]` into P in place. Return P after dropout, or P itself without it."""
    dropped = torch.empty_like(scores) if threshold else None
    with torch.cuda.device_of(scores):
        softmax_forward_kernel[_grid(scores)](
            scores, dropped, length, seed, index, scores.shape[1], scores.shape[2], scale * LOG2_E, threshold,
            **_options(scores, threshold),
        )  # fmt: skip
    return scores if dropped is None else dropped


def launch_softmax_backward(
    p: Tensor, dp: Tensor, length: Tensor, scale: float, threshold: int, seed: Tensor | None, index: Tensor | None
) -> Tensor:
    """Turn the gradient of P after dropout into that of the scores, in place. Return P after dropout."""
    dropped = torch.empty_like(p) if threshold else None
    with torch.cuda.device_of(p):
        softmax_backward_kernel[_grid(p)](
            p, dp, dropped, length, seed, index, p.shape[1], p.shape[2], scale, threshold, **_options(p, threshold)
        )
    return p if dropped is None else dropped


def _grid(scores: Tensor) -> tuple[int]:
    return (scores.shape[:3].numel() // TILE_ROWS.value,)


def _options(scores: Tensor, threshold: int) -> dict[str, Any]:
    columns = min(MAX_COLUMNS, max(32, triton.next_power_of_2(scores.shape[-1])))
    return dict(COLUMNS=columns, DROPOUT=threshold > 0, num_warps=8 if columns > 128 else 4)
