"""Sums of moving averages, and their derivatives, by the recurrence h = q h + x of each feature and dimension.

A program owns 32 features of a chunk of one sequence and one side of it, what comes from earlier or from later tokens.
It has one warp: a thread owns a feature and holds its dimensions in registers, and goes through the tokens. Each side
reads x and writes rows of its own, and no other tensor has a row for each token. A Fourier transform reads and writes
several times as much. What a chunk does to the state after it is computed first, and a program begins by adding up the
chunks before its own.

Shape suffixes: E dimensions of a feature's average, C features of a program, R rows of a tile. A tile has as many rows
as there are dimensions, rounded up to a power of two, so that both have one layout: a thread has all rows of a feature,
and to pick one costs nothing. Sums are in fp32.
"""

# pyright: reportOperatorIssue=false, reportArgumentType=false, reportIndexIssue=false, reportCallIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

FEATURES = 32  # of a program: one for each thread of its warp
SHORTEST_CHUNK = 128
PROGRAMS = 1024  # chunks are cut until there are as many, or until they are the shortest


@triton.jit
def locate_chunk(
    start_ptr, length_ptr, chunks, WIDTH: tl.constexpr, CHUNK: tl.constexpr, DIMS: tl.constexpr, C: tl.constexpr
):  # fmt: skip
    """(Chunk, its first and end token, the sequence's first row and length, features, which are real, dimensions).

    Triton must not know that features begin at a multiple of 16 bytes: a thread would read several at once, and the
    rows of a feature would lie in several threads.
    """
    which = tl.program_id(0)
    b, chunk = which // chunks, which % chunks
    start, length = tl.load(start_ptr + b), tl.load(length_ptr + b)
    columns_C = tl.multiple_of(tl.program_id(1) * C + tl.arange(0, C), 1)
    first = chunk * CHUNK
    end = tl.minimum(first + CHUNK, length)
    return chunk, first, end, start, length, columns_C, columns_C < WIDTH, tl.arange(0, DIMS)


@triton.jit
def owns_side(side: tl.constexpr, PAST: tl.constexpr, FUTURE: tl.constexpr):
    """Whether this program computes what comes from earlier tokens (side 0) or from later ones (side 1)."""
    if side == 0:
        return tl.program_id(2) == 0 if PAST >= 0 else False
    return tl.program_id(2) == (1 if PAST >= 0 else 0) if FUTURE >= 0 else False


@triton.jit
def load_coefficients(ptr, direction: tl.constexpr, dims_E, columns_C, real_C, dims, WIDTH: tl.constexpr):
    """`[E, C]` of a tensor `[directions, dims, width]`, zeros past its dimensions and features."""
    offset_EC = (direction * dims + dims_E[:, None]) * WIDTH + columns_C[None, :]
    return tl.load(ptr + offset_EC, mask=(dims_E < dims)[:, None] & real_C[None, :], other=0.0)


@triton.jit
def tile_pointers(ptr, row, rows_R, columns_C, WIDTH: tl.constexpr):
    """The tile whose first row is this one. A thread has one address, and the distances of its rows are constants."""
    return (ptr + row.to(tl.int64) * WIDTH + columns_C)[None, :] + (rows_R * WIDTH)[:, None]


@triton.jit
def load_rows(ptr, start, token, length, rows_R, columns_C, real_C, WIDTH: tl.constexpr):
    """The tile of tokens from `token` on, fp32, with zeros past the length."""
    tokens_R = token + rows_R
    real_RC = (tokens_R >= 0)[:, None] & (tokens_R < length)[:, None] & real_C[None, :]
    tile_RC = tile_pointers(ptr, start + token, rows_R, columns_C, WIDTH)
    return tl.load(tile_RC, mask=real_RC, other=0.0).to(tl.float32)


@triton.jit
def state_offset(which, side: tl.constexpr, kind: tl.constexpr, dims_E, columns_C, dims, WIDTH: tl.constexpr):
    """Where a chunk's states lie in `[chunks of all sequences, 2 sides, 2 kinds, dims, width]`."""
    return ((which * 4 + side * 2 + kind).to(tl.int64) * dims + dims_E[:, None]) * WIDTH + columns_C[None, :]


@triton.jit
def first_state(
    states_ptr, q_EC, chunk, length, dims_E, columns_C, real_C, dims, WIDTH: tl.constexpr,
    SIDE: tl.constexpr, SECOND: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The state h before a chunk, and its derivative with respect to q, of the chunks on one side of it."""
    h_EC = tl.zeros_like(q_EC)
    p_EC = tl.zeros_like(q_EC)
    # q to the power of a chunk's tokens, which is a power of two; in fp32 an error of q would grow as many times
    power_EC = q_EC.to(tl.float64)
    for i in tl.static_range(24):
        if (1 << i) < CHUNK:
            power_EC = power_EC * power_EC
    whole_EC = power_EC.to(tl.float32)
    slope_EC = (CHUNK * power_EC / tl.maximum(q_EC, 1e-30)).to(tl.float32)
    mask_EC = (dims_E < dims)[:, None] & real_C[None, :]
    begun = tl.program_id(0) - chunk
    others = chunk if SIDE == 0 else tl.cdiv(length, CHUNK) - 1 - chunk
    for i in range(0, others):
        other = begun + (i if SIDE == 0 else tl.cdiv(length, CHUNK) - 1 - i)
        if SECOND:
            offset_EC = state_offset(other, SIDE, 1, dims_E, columns_C, dims, WIDTH)
            p_EC = p_EC * whole_EC + slope_EC * h_EC + tl.load(states_ptr + offset_EC, mask=mask_EC, other=0.0)
        offset_EC = state_offset(other, SIDE, 0, dims_E, columns_C, dims, WIDTH)
        h_EC = h_EC * whole_EC + tl.load(states_ptr + offset_EC, mask=mask_EC, other=0.0)
    return h_EC, p_EC


@triton.jit
def pick_row(tile_RC, rows_R, r: tl.constexpr):
    return tl.sum(tl.where((rows_R == r)[:, None], tile_RC, 0.0), 0)


@triton.jit
def tile_of(i, first, end, SIDE: tl.constexpr, R: tl.constexpr):
    """The first token of the i-th tile of a chunk: in order, or from its end."""
    return first + (i if SIDE == 0 else tl.cdiv(end - first, R) - 1 - i) * R


@triton.jit
def write_state(
    x_ptr, q_ptr, states_ptr, first, end, start, length, columns_C, real_C, dims_E, dims, WIDTH: tl.constexpr,
    SIDE: tl.constexpr, DIRECTION: tl.constexpr, SECOND: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The state of one side that a chunk's tokens leave, and with SECOND its derivative with respect to q."""
    q_EC = load_coefficients(q_ptr, DIRECTION, dims_E, columns_C, real_C, dims, WIDTH)
    h_EC = tl.zeros([R, C], tl.float32)
    p_EC = tl.zeros([R, C], tl.float32)
    x_RC = load_rows(x_ptr, start, tile_of(0, first, end, SIDE, R), length, dims_E, columns_C, real_C, WIDTH)
    for i in range(0, tl.cdiv(end - first, R)):
        token = tile_of(i + 1, first, end, SIDE, R)
        next_RC = load_rows(x_ptr, start, token, length, dims_E, columns_C, real_C, WIDTH)
        for step in tl.static_range(R):
            if SECOND:
                p_EC = p_EC * q_EC + h_EC
            h_EC = h_EC * q_EC + pick_row(x_RC, dims_E, step if SIDE == 0 else R - 1 - step)[None, :]
        x_RC = next_RC
    mask_EC = (dims_E < dims)[:, None] & real_C[None, :]
    which = tl.program_id(0)
    tl.store(states_ptr + state_offset(which, SIDE, 0, dims_E, columns_C, dims, WIDTH), h_EC, mask=mask_EC)
    if SECOND:
        tl.store(states_ptr + state_offset(which, SIDE, 1, dims_E, columns_C, dims, WIDTH), p_EC, mask=mask_EC)


@triton.jit(do_not_specialize=["chunks"])
def chunk_state_kernel(
    x_ptr, start_ptr, length_ptr, q_ptr, states_ptr, chunks, dims, WIDTH: tl.constexpr,
    PAST: tl.constexpr, FUTURE: tl.constexpr, SECOND: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """The state that a chunk's tokens leave after them, and before them, if nothing else was there.

    PAST and FUTURE are the directions of the coefficients for what comes from earlier and from later tokens; -1: none.
    """
    located = locate_chunk(start_ptr, length_ptr, chunks, WIDTH, CHUNK, R, C)
    _, first, end, start, length, columns_C, real_C, dims_E = located
    if owns_side(0, PAST, FUTURE):
        write_state(
            x_ptr, q_ptr, states_ptr, first, end, start, length, columns_C, real_C, dims_E, dims, WIDTH,
            0, PAST, SECOND, R, C,
        )  # fmt: skip
    if owns_side(1, PAST, FUTURE):
        write_state(
            x_ptr, q_ptr, states_ptr, first, end, start, length, columns_C, real_C, dims_E, dims, WIDTH,
            1, FUTURE, SECOND, R, C,
        )  # fmt: skip


@triton.jit
def write_average(
    x_ptr, q_ptr, weight_ptr, states_ptr, y_ptr, chunk, first, end, start, length, columns_C, real_C, dims_E,
    dims, WIDTH: tl.constexpr,
    SIDE: tl.constexpr, DIRECTION: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The weighted sum of the states of one side, as y."""
    q_EC = load_coefficients(q_ptr, DIRECTION, dims_E, columns_C, real_C, dims, WIDTH)
    weight_EC = load_coefficients(weight_ptr, DIRECTION, dims_E, columns_C, real_C, dims, WIDTH)
    h_EC, _ = first_state(states_ptr, q_EC, chunk, length, dims_E, columns_C, real_C, dims, WIDTH, SIDE, False, CHUNK)
    x_RC = load_rows(x_ptr, start, tile_of(0, first, end, SIDE, R), length, dims_E, columns_C, real_C, WIDTH)
    for i in range(0, tl.cdiv(end - first, R)):
        here = tile_of(i, first, end, SIDE, R)
        token = tile_of(i + 1, first, end, SIDE, R)
        next_RC = load_rows(x_ptr, start, token, length, dims_E, columns_C, real_C, WIDTH)
        y_RC = tl.zeros([R, C], tl.float32)
        for step in tl.static_range(R):
            h_EC = h_EC * q_EC + pick_row(x_RC, dims_E, step if SIDE == 0 else R - 1 - step)[None, :]
            here_R = dims_E == (step if SIDE == 0 else R - 1 - step)
            y_RC += tl.where(here_R[:, None], tl.sum(h_EC * weight_EC, 0)[None, :], 0.0)
        mask_RC = (here + dims_E < length)[:, None] & real_C[None, :]
        tl.store(tile_pointers(y_ptr, start + here, dims_E, columns_C, WIDTH), y_RC, mask=mask_RC)
        x_RC = next_RC


@triton.jit(do_not_specialize=["chunks", "size"])
def average_kernel(
    x_ptr, start_ptr, length_ptr, q_ptr, weight_ptr, states_ptr, y_ptr, chunks, dims, WIDTH: tl.constexpr, size,
    PAST: tl.constexpr, FUTURE: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """y of a chunk and a side: the weighted sum of its states. A side of y has `size` numbers."""
    located = locate_chunk(start_ptr, length_ptr, chunks, WIDTH, CHUNK, R, C)
    chunk, first, end, start, length, columns_C, real_C, dims_E = located
    y_ptr += tl.program_id(2).to(tl.int64) * size
    if owns_side(0, PAST, FUTURE):
        write_average(
            x_ptr, q_ptr, weight_ptr, states_ptr, y_ptr, chunk, first, end, start, length, columns_C, real_C, dims_E,
            dims, WIDTH, 0, PAST, CHUNK, R, C,
        )  # fmt: skip
    if owns_side(1, PAST, FUTURE):
        write_average(
            x_ptr, q_ptr, weight_ptr, states_ptr, y_ptr, chunk, first, end, start, length, columns_C, real_C, dims_E,
            dims, WIDTH, 1, FUTURE, CHUNK, R, C,
        )  # fmt: skip


@triton.jit
def write_sums(
    x_ptr, dy_ptr, q_ptr, states_ptr, sums_ptr, chunk, first, end, start, length, columns_C, real_C, dims_E,
    dims, WIDTH: tl.constexpr,
    SIDE: tl.constexpr, DIRECTION: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The sums of dy h and of dy dh/dq of one side. dh/dq is a recurrence, too: p = q p + h, with h before x."""
    q_EC = load_coefficients(q_ptr, DIRECTION, dims_E, columns_C, real_C, dims, WIDTH)
    h_EC, p_EC = first_state(states_ptr, q_EC, chunk, length, dims_E, columns_C, real_C, dims, WIDTH, SIDE, True, CHUNK)
    of_weight_EC = tl.zeros([R, C], tl.float32)
    of_q_EC = tl.zeros([R, C], tl.float32)
    token = tile_of(0, first, end, SIDE, R)
    x_RC = load_rows(x_ptr, start, token, length, dims_E, columns_C, real_C, WIDTH)
    dy_RC = load_rows(dy_ptr, start, token, length, dims_E, columns_C, real_C, WIDTH)
    for i in range(0, tl.cdiv(end - first, R)):
        token = tile_of(i + 1, first, end, SIDE, R)
        next_x_RC = load_rows(x_ptr, start, token, length, dims_E, columns_C, real_C, WIDTH)
        next_dy_RC = load_rows(dy_ptr, start, token, length, dims_E, columns_C, real_C, WIDTH)
        for step in tl.static_range(R):
            dy_1C = pick_row(dy_RC, dims_E, step if SIDE == 0 else R - 1 - step)[None, :]
            p_EC = p_EC * q_EC + h_EC
            h_EC = h_EC * q_EC + pick_row(x_RC, dims_E, step if SIDE == 0 else R - 1 - step)[None, :]
            of_weight_EC += h_EC * dy_1C
            of_q_EC += p_EC * dy_1C
        x_RC = next_x_RC
        dy_RC = next_dy_RC
    mask_EC = (dims_E < dims)[:, None] & real_C[None, :]
    which = tl.program_id(0)
    tl.store(sums_ptr + state_offset(which, DIRECTION, 0, dims_E, columns_C, dims, WIDTH), of_weight_EC, mask=mask_EC)
    tl.store(sums_ptr + state_offset(which, DIRECTION, 1, dims_E, columns_C, dims, WIDTH), of_q_EC, mask=mask_EC)


@triton.jit(do_not_specialize=["chunks"])
def coefficient_gradient_kernel(
    x_ptr, dy_ptr, start_ptr, length_ptr, q_ptr, states_ptr, sums_ptr, chunks, dims, WIDTH: tl.constexpr,
    PAST: tl.constexpr, FUTURE: tl.constexpr, CHUNK: tl.constexpr, R: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """A chunk's sums of dy h, the gradient of the weights, and of dy dh/dq, that of q divided by the weights."""
    located = locate_chunk(start_ptr, length_ptr, chunks, WIDTH, CHUNK, R, C)
    chunk, first, end, start, length, columns_C, real_C, dims_E = located
    if owns_side(0, PAST, FUTURE):
        write_sums(
            x_ptr, dy_ptr, q_ptr, states_ptr, sums_ptr, chunk, first, end, start, length, columns_C, real_C, dims_E,
            dims, WIDTH, 0, PAST, CHUNK, R, C,
        )  # fmt: skip
    if owns_side(1, PAST, FUTURE):
        write_sums(
            x_ptr, dy_ptr, q_ptr, states_ptr, sums_ptr, chunk, first, end, start, length, columns_C, real_C, dims_E,
            dims, WIDTH, 1, FUTURE, CHUNK, R, C,
        )  # fmt: skip


def launch_average(
    x: Tensor, start: Tensor, length: Tensor, q: Tensor, weight: Tensor, max_length: int, past: int, future: int,
    y: Tensor,
) -> None:  # fmt: skip
    """Writes the weighted sum of averages of each side into y, for the rows of each sequence.

    Args:
        x: contiguous `[T, D]`.
        q, weight: contiguous fp32 `[directions, E, D]`.
        past, future: the direction of q and weight for what comes from earlier and from later tokens; -1: none.
        y: contiguous `[sides, T, D]`: the past, if there is any, then the future.
    """
    grid, chunks, options = _geometry(x, start, q, max_length, past, future)
    if not grid[0]:
        return
    with torch.cuda.device_of(x):
        states = _launch_states(x, start, length, q, grid, chunks, options, False)
        average_kernel[grid](
            x, start, length, q, weight, states, y, chunks, q.shape[1], q.shape[2], x.numel(), **options
        )


def launch_coefficient_gradient(
    x: Tensor, dy: Tensor, start: Tensor, length: Tensor, q: Tensor, max_length: int, future: int
) -> Tensor:
    """Returns the sums of dy h and of dy dh/dq for each direction, fp32 `[directions, 2, E, D]`."""
    grid, chunks, options = _geometry(x, start, q, max_length, 0, future)
    sums = x.new_zeros(grid[0], 2, 2, *q.shape[1:], dtype=torch.float32)
    if grid[0]:
        with torch.cuda.device_of(x):
            states = _launch_states(x, start, length, q, grid, chunks, options, True)
            coefficient_gradient_kernel[grid](
                x, dy, start, length, q, states, sums, chunks, q.shape[1], q.shape[2], maxnreg=232, **options
            )
    return sums.sum(0)[: len(q)]


def choose_chunk(sequences: int, max_length: int, blocks: int) -> int:
    """Returns the tokens of a chunk: a power of two."""
    chunk = max(SHORTEST_CHUNK, 1 << max(max_length - 1, 0).bit_length())
    while chunk > SHORTEST_CHUNK and sequences * math.ceil(max_length / chunk) * blocks < PROGRAMS:
        chunk //= 2
    return chunk


def _geometry(
    x: Tensor, start: Tensor, q: Tensor, max_length: int, past: int, future: int
) -> tuple[tuple[int, int, int], int, dict[str, Any]]:
    """The grid, the chunks of a sequence, and constants of the kernels."""
    blocks = math.ceil(x.shape[1] / FEATURES)
    chunk = choose_chunk(len(start), max_length, blocks)
    chunks = math.ceil(max_length / chunk) if len(x) else 0
    options = dict(PAST=past, FUTURE=future, CHUNK=chunk, R=triton.next_power_of_2(q.shape[1]), C=FEATURES, num_warps=1)
    return (len(start) * chunks, blocks, (past >= 0) + (future >= 0)), chunks, options


def _launch_states(
    x: Tensor, start: Tensor, length: Tensor, q: Tensor, grid: tuple[int, int, int], chunks: int,
    options: dict[str, Any], second: bool,
) -> Tensor:  # fmt: skip
    """What each chunk does to the state; nothing is computed if a sequence is one chunk."""
    if chunks == 1:
        return q  # no program reads it
    states = x.new_empty(grid[0], 2, 2, *q.shape[1:], dtype=torch.float32)
    chunk_state_kernel[grid](x, start, length, q, states, chunks, q.shape[1], q.shape[2], SECOND=second, **options)
    return states
