"""Launches of the kernels: the operators of ops.py on a GPU."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lra.kernels.device import multiprocessors
from lra.kernels.hopper import GLUON, describe
from lra.kernels.layers import feed_forward, pooling, projection, table, weights

SUMMING = {64: (132, 128, 4), 128: (132, 128, 3)}  # by the model's width: programs that sum, rows at a time, stages
ONES = 16  # columns of a bias's gradient, which are equal: what a product on tensor cores has at least
FOLDED, UNFOLDED = 8, 2  # rows of a tile of a weight that a program has: of sums it reads many parts, all at once
SHARES, SUMMED = 16, 8192  # of a sequence, whose rows are summed apart; elements of a tile of them
# by the model's width: groups, residents, and registers of a thread, which several groups share as the kernel says
FEED_FORWARD = {64: (1, 3, 168), 128: (2, 1, None)}
GROUP = 4  # warps that take a tile of rows together
SECOND, ALL = 0b010, 0b111  # which of three layers follow the norm


def launch_feed_forward(o: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    y = torch.empty_like(x)
    return y, *feed_forward_rows(y, None, 0.0, o, x, *rest)


def launch_pooled_feed_forward(o: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *layers, start, length, padded_length, eps, final_eps, scale, threshold, keys, site = rest
    final, final_rstd = torch.empty_like(o), x.new_empty(len(x))
    numbers = eps, scale, threshold, keys, site
    kept = feed_forward_rows(final, final_rstd, final_eps, o, x, *layers, *numbers)
    return *launch_pool(final, start, length, padded_length), final, final_rstd, *kept


def launch_pool(x: Tensor, start: Tensor, length: Tensor, padded_length: int) -> tuple[Tensor, Tensor]:
    d, of_row = x.shape[1], start.new_empty(len(x))
    sums = x.new_empty(SHARES, len(start), d, dtype=torch.float32)
    with torch.cuda.device_of(x):
        pooling.pool_kernel[sums.shape[:2]](
            x, start, length, sums, of_row, padded_length, D=d, M=SUMMED // d, num_warps=4
        )
    return sums.sum(0), of_row


def feed_forward_rows(
    y: Tensor, final_rstd: Tensor | None, final_eps: float, o: Tensor, x: Tensor,
    out: Tensor, out_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, eps: float, scale: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Fills in y, normalised with `final_rstd`; what the backward needs."""
    (rows, d), f = x.shape, len(up)
    unit, rstd = torch.empty_like(o), x.new_empty(rows)
    halves, biases = fold((out, up, down), (out_bias, up_bias, down_bias), gain, shift, o.dtype, scale, SECOND)
    folded = [tensor for pair in zip(halves, biases, strict=True) for tensor in pair]
    groups, residents, registers = FEED_FORWARD[d]
    with torch.cuda.device_of(x):
        feed_forward.feed_forward_kernel[programs(x, residents)](
            o, tiles_of(x), y, unit, rstd, keys, final_rstd, *folded, rows, eps, final_eps, site, threshold,
            D=d, F=f, C=64 if d == 64 else 32, DROPOUT=keys is not None, POOLED=final_rstd is not None,
            GROUPS=groups, num_warps=GROUP, maxnreg=registers,
        )  # fmt: skip
    return unit, rstd, *halves, biases[1]


def launch_feed_forward_backward(dy: Tensor, *kept: Any) -> tuple[Tensor, ...]:
    return feed_forward_rows_backward(tiles_of(dy), (None, None, None, None), *kept)


def launch_pooled_feed_forward_backward(
    dsums: Tensor, o: Tensor, of_row: Tensor, final: Tensor, final_rstd: Tensor, *kept: Any
) -> tuple[Tensor, ...]:
    return feed_forward_rows_backward(None, (dsums, of_row, final, final_rstd), o, *kept)


def feed_forward_rows_backward(
    dy: TensorDescriptor | None, pooled: Sequence[Tensor | None],
    o: Tensor, unit: Tensor, rstd: Tensor, half_out: Tensor, half_up: Tensor, half_down: Tensor,
    folded: Tensor, gain: Tensor, shift: Tensor, up: Tensor,
    scale: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Of the rows' gradient, or what it is made of where they are pooled."""
    (rows, d), f = o.shape, len(up)
    dx, (do, dout, ddown) = rstd.new_empty(rows, d), (torch.empty_like(o) for _ in range(3))
    du, h = o.new_empty(rows, f), o.new_empty(rows, f)
    groups, residents, registers = FEED_FORWARD[d]
    with torch.cuda.device_of(o):
        feed_forward.feed_forward_backward_kernel[programs(o, residents)](
            dy, *pooled, unit, rstd, keys, half_out, half_up, folded, half_down, dx, do, dout, du, h, ddown,
            rows, site, threshold, D=d, F=f, C=32, DROPOUT=keys is not None, POOLED=dy is None,
            GROUPS=groups, num_warps=GROUP, maxnreg=registers,
        )  # fmt: skip
    shapes = (half_out, half_up, half_down)
    gradients = [torch.empty_like(half, dtype=torch.float32) for half in shapes]
    biases = [rstd.new_empty(len(half)) for half in shapes]
    pairs = (dout, o), (du, unit), (ddown, h)
    dnorm = unfold(pairs, (up, up, up), gain, shift, scale, SECOND, gradients, biases)
    return do, dx, *gradients, *biases, dnorm


def launch_project(
    x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None,
    eps: float, half: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, d = x.shape
    q, k, v, unit = (torch.empty_like(x, dtype=half) for _ in range(4))
    rstd = x.new_empty(rows)
    folded, biases = torch.empty_like(weight, dtype=half), torch.empty_like(bias)
    fold(weight.chunk(3), bias.chunk(3), gain, shift, half, 1.0, ALL, folded.chunk(3), biases.chunk(3))
    groups, residents, registers = (1, 4, 128) if d == 64 else (4, 1, None)
    with torch.cuda.device_of(x):
        projection.project_kernel[programs(x, residents)](
            tiles_of(x), q, k, v, unit, rstd, folded, biases, cos, sin, rows, eps,
            D=d, C=64, P=0 if cos is None else cos.shape[1], GROUPS=groups, num_warps=GROUP, maxnreg=registers,
        )  # fmt: skip
    return q, k, v, unit, rstd, folded


def launch_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, unit: Tensor, rstd: Tensor, folded: Tensor,
    gain: Tensor, shift: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, d = dy.shape
    dx = torch.empty_like(dy)
    back_q, back_k = (dq, dk) if cos is None else (torch.empty_like(dq), torch.empty_like(dk))
    groups, residents, registers = (1, 4, 128) if d == 64 else (2, 1, None)
    with torch.cuda.device_of(dy):
        projection.project_backward_kernel[programs(dy, residents)](
            tiles_of(dq), tiles_of(dk), tiles_of(dv), dy, unit, rstd, folded, cos, sin, dx, back_q, back_k, rows,
            D=d, P=0 if cos is None else cos.shape[1], GROUPS=groups, num_warps=GROUP, maxnreg=registers,
        )  # fmt: skip
    dweight, dbias = torch.empty_like(weight), weight.new_empty(len(weight))
    pairs = (back_q, unit), (back_k, unit), (dv, unit)
    dnorm = unfold(pairs, weight.chunk(3), gain, shift, 1.0, ALL, dweight.chunk(3), dbias.chunk(3))
    return dx, dweight, dbias, dnorm


def fold(
    layers: Sequence[Tensor], biases: Sequence[Tensor], gain: Tensor, shift: Tensor, half: torch.dtype, scale: float,
    normed: int, halves: Sequence[Tensor] | None = None, folded: Sequence[Tensor] | None = None,
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:  # fmt: skip
    """Three layers' weights and biases as `weights.fold_kernel` gives them, in new tensors unless some are given."""
    halves = halves or [torch.empty_like(weight, dtype=half) for weight in layers]
    folded = folded or [torch.empty_like(bias) for bias in biases]
    d = len(gain)
    with torch.cuda.device_of(gain):
        weights.fold_kernel[(d // FOLDED, tiles(layers, d))](
            *layers, *biases, gain, shift, *halves, *folded, scale, *sides(layers), SIDE=d, R=FOLDED, NORMED=normed
        )
    return halves, folded


def unfold(
    pairs: Sequence[tuple[Tensor, Tensor]], layers: Sequence[Tensor], gain: Tensor, shift: Tensor, scale: float,
    normed: int, gradients: Sequence[Tensor], biases: Sequence[Tensor],
) -> Tensor:  # fmt: skip
    """Fills in the gradients of three layers, of each pair the sum over all rows of dyᵀ x; those of gain and shift.

    Args:
        pairs: the gradient of what a layer returns, and what it is given.
        layers: the weights in fp32; only those of layers in `normed` are read.
    """
    (rows, _), d, count = pairs[0][0].shape, len(gain), tiles(gradients, len(gain))
    programs, together, stages = SUMMING[d]
    shape, parts = sides(gradients), max(1, programs // count)
    sums = gain.new_empty(parts, count, d, d + ONES)
    norms = gain.new_empty(2, d, count * d // UNFOLDED)
    with torch.cuda.device_of(gain):
        weights.sum_kernel[(parts, count)](
            *(tensor for pair in pairs for tensor in pair), sums, rows, *shape, SIDE=d, M=together, ONES=ONES,
            num_warps=d // 16, num_stages=stages,
        )  # fmt: skip
        weights.unfold_kernel[(d // UNFOLDED, count)](
            sums, *layers, gain, shift, *gradients, *biases, norms, parts, scale, *shape,
            SIDE=d, ONES=ONES, R=UNFOLDED, P=2048 // d, NORMED=normed,
        )  # fmt: skip
    return norms.sum(2)


def sides(layers: Sequence[Tensor]) -> list[int]:
    """N and K of each."""
    return [side for weight in layers for side in weight.shape]


def tiles(layers: Sequence[Tensor], d: int) -> int:
    return sum(weight.numel() for weight in layers) // d**2


def launch_embed(
    vectors: Tensor, ids: Tensor, of_places: Tensor | None, place: Tensor | None,
    scale: float, threshold: int, keys: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    (vocabulary, d), rows = vectors.shape, len(ids)
    x, places = vectors.new_empty(rows, d), 0 if of_places is None else len(of_places)
    if rows:
        with torch.cuda.device_of(x):
            table.embed_kernel[(-(-rows // (16 * GROUP)),)](
                vectors, ids, of_places, place, keys, x, rows, vocabulary, places, scale, site, threshold,
                D=d, PLACES=places > 0, DROPOUT=keys is not None, num_warps=GROUP,
            )  # fmt: skip
    return x


def launch_table_gradient(
    dy: Tensor, ids: Tensor, vocabulary: int, half: torch.dtype, start: Tensor | None, length: Tensor | None,
    places: int, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (rows, d), sequences = dy.shape, 0 if start is None else len(start)
    v, warps, registers, residents = (64, 4, 168, 3) if vocabulary <= 64 else (256, 8, 255, 1)  # v: rows of a table
    m, slices = 16 * warps, d // table.SIDE.value
    tables, tiles_of_places = -(-vocabulary // v), -(-places // m)
    parts = max(1, multiprocessors(dy.device) * residents // (tables * slices))
    if tiles_of_places:
        parts = max(1, min(parts // tiles_of_places, sequences)) * tiles_of_places
    sums = dy.new_empty(parts, tables, v, d)
    place_sums = dy.new_empty(parts // tiles_of_places if tiles_of_places else 0, tiles_of_places * m, d)
    with torch.cuda.device_of(dy):
        table.table_gradient_kernel[(parts * tables * slices,)](
            dy, ids, keys, start, length, sums, place_sums, rows, sequences, parts, site, threshold,
            D=d, V=v, TABLES=tables, TILES=tiles_of_places, HALF=GLUON[half], DROPOUT=keys is not None,
            num_warps=warps, maxnreg=registers,
        )  # fmt: skip
    return sums.sum(0).flatten(0, 1)[:vocabulary], place_sums.sum(0)[:places]


def tiles_of(x: Tensor) -> TensorDescriptor:
    """Of a group of warps, for TMA, which wants a row even where there is none to fetch."""
    return describe((x if len(x) else x.new_empty(1, x.shape[1]))[:, None], 16 * GROUP)


def programs(x: Tensor, residents: int) -> tuple[int]:
    """As many as run at once, `residents` on each multiprocessor: each takes one tile of rows after another."""
    return (multiprocessors(x.device) * residents,)
