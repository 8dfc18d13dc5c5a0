"""Launches of the layers' kernels: the operators of layer_ops.py on a GPU."""

# pyright: reportCallIssue=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from lra.kernels.device import count_multiprocessors
from lra.kernels.hopper import GLUON_DTYPES, make_descriptor
from lra.kernels.layers import embedding, feed_forward, pooling, projection, weights
from lra.kernels.layers.reference import SavedForBackward

SUM_SETTINGS = {
    64: (132, 128, 4),
    128: (132, 128, 3),
}  # by model width: programs, rows at a time, stages
ONES_COLUMNS = 16  # equal columns of a bias's gradient: the fewest of a product on tensor cores
FOLD_ROWS, UNFOLD_ROWS = 8, 2  # rows of a weight's tile in a program; unfolding reads many parts of sums at once
POOL_SHARES, POOL_ELEMENTS = 16, 8192  # shares of a sequence that are summed apart; elements of a tile of rows
# by model width: groups, programs on a multiprocessor, registers of a thread (None: the kernel divides them)
FEED_FORWARD_SETTINGS = {64: (1, 3, 168), 128: (2, 1, None)}
GROUP_WARPS = 4  # warps that work on a tile of rows together
NORM_BEFORE_SECOND, NORM_BEFORE_ALL = 0b010, 0b111  # a bit for each of three layers: does it follow the norm?


def launch_feed_forward(o: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    y = torch.empty_like(x)
    return y, *launch_feed_forward_rows(o, x, *rest, y=y)


def launch_pooled_feed_forward(o: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *layers, start, length, padded_length, eps, final_eps, scale, threshold, keys, site = rest
    final, final_rstd = torch.empty_like(o), x.new_empty(len(x))
    kept = launch_feed_forward_rows(
        o, x, *layers, eps, scale, threshold, keys, site, y=final, final_rstd=final_rstd, final_eps=final_eps
    )
    return *launch_pool(final, start, length, padded_length), final, final_rstd, *kept


def launch_pool(x: Tensor, start: Tensor, length: Tensor, padded_length: int) -> tuple[Tensor, Tensor]:
    d, of_row = x.shape[1], start.new_empty(len(x))
    sums = x.new_empty(POOL_SHARES, len(start), d, dtype=torch.float32)
    with torch.cuda.device_of(x):
        pooling.pool_kernel[sums.shape[:2]](
            x, start, length, sums, of_row, padded_length, D=d, M=POOL_ELEMENTS // d, num_warps=4
        )
    return sums.sum(0), of_row


def launch_feed_forward_rows(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, gain: Tensor, shift: Tensor, up: Tensor, up_bias: Tensor,
    down: Tensor, down_bias: Tensor, eps: float, scale: float, threshold: int, keys: Tensor | None, site: int,
    *, y: Tensor, final_rstd: Tensor | None = None, final_eps: float = 0.0,
) -> SavedForBackward:  # fmt: skip
    """Fill `y`. With `final_rstd`, `y` gets normalised rows, and `final_rstd` is filled as well."""
    (rows, d), f = x.shape, len(up)
    xhat, rstd = torch.empty_like(o), x.new_empty(rows)
    half_out, half_up, half_down = (torch.empty_like(weight, dtype=o.dtype) for weight in (out, up, down))
    scaled_out_bias, folded_bias, scaled_down_bias = (torch.empty_like(bias) for bias in (out_bias, up_bias, down_bias))
    fold_layers(
        (out, up, down), (out_bias, up_bias, down_bias), gain, shift, (half_out, half_up, half_down),
        (scaled_out_bias, folded_bias, scaled_down_bias), scale=scale, normed=NORM_BEFORE_SECOND,
    )  # fmt: skip
    groups, residents, registers = FEED_FORWARD_SETTINGS[d]
    with torch.cuda.device_of(x):
        feed_forward.feed_forward_kernel[persistent_grid(x, residents)](
            o, row_descriptor(x), y, xhat, rstd, keys, final_rstd, half_out, scaled_out_bias, half_up, folded_bias,
            half_down, scaled_down_bias, rows, eps, final_eps, site, threshold,
            D=d, F=f, C=64 if d == 64 else 32, DROPOUT=keys is not None, POOLED=final_rstd is not None,
            GROUPS=groups, num_warps=GROUP_WARPS, maxnreg=registers,
        )  # fmt: skip
    return SavedForBackward(xhat, rstd, half_out, half_up, half_down, folded_bias)


def launch_feed_forward_backward(dy: Tensor, o: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return launch_feed_forward_rows_backward(o, *rest, dy=row_descriptor(dy))


def launch_pooled_feed_forward_backward(
    dsums: Tensor, o: Tensor, of_row: Tensor, final: Tensor, final_rstd: Tensor, *rest: Any
) -> tuple[Tensor, ...]:
    return launch_feed_forward_rows_backward(o, *rest, dsums=dsums, of_row=of_row, final=final, final_rstd=final_rstd)


def launch_feed_forward_rows_backward(
    o: Tensor, xhat: Tensor, rstd: Tensor, half_out: Tensor, half_up: Tensor, half_down: Tensor, folded_bias: Tensor,
    gain: Tensor, shift: Tensor, up: Tensor, scale: float, threshold: int, keys: Tensor | None, site: int,
    *, dy: TensorDescriptor | None = None, dsums: Tensor | None = None, of_row: Tensor | None = None,
    final: Tensor | None = None, final_rstd: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients, from `dy`, that of the rows. If rows are pooled, `dy` is None and the next four are given."""
    (rows, d), f = o.shape, len(up)
    dx, (do, dout, ddown) = rstd.new_empty(rows, d), (torch.empty_like(o) for _ in range(3))
    du, h = o.new_empty(rows, f), o.new_empty(rows, f)
    groups, residents, registers = FEED_FORWARD_SETTINGS[d]
    with torch.cuda.device_of(o):
        feed_forward.feed_forward_backward_kernel[persistent_grid(o, residents)](
            dy, dsums, of_row, final, final_rstd, xhat, rstd, keys, half_out, half_up, folded_bias, half_down,
            dx, do, dout, du, h, ddown, rows, site, threshold,
            D=d, F=f, C=32, DROPOUT=keys is not None, POOLED=dy is None,
            GROUPS=groups, num_warps=GROUP_WARPS, maxnreg=registers,
        )  # fmt: skip
    shapes = (half_out, half_up, half_down)
    gradients = [torch.empty_like(half, dtype=torch.float32) for half in shapes]
    biases = [rstd.new_empty(len(half)) for half in shapes]
    pairs = (dout, o), (du, xhat), (ddown, h)
    dnorm = sum_gradients(pairs, (up, up, up), gain, shift, gradients, biases, scale=scale, normed=NORM_BEFORE_SECOND)
    return do, dx, *gradients, *biases, dnorm


def launch_project(
    x: Tensor, gain: Tensor, shift: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None,
    eps: float, half: torch.dtype,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, d = x.shape
    q, k, v, xhat = (torch.empty_like(x, dtype=half) for _ in range(4))
    rstd = x.new_empty(rows)
    half_weight, folded_bias = torch.empty_like(weight, dtype=half), torch.empty_like(bias)
    fold_layers(
        weight.chunk(3),
        bias.chunk(3),
        gain,
        shift,
        half_weight.chunk(3),
        folded_bias.chunk(3),
        scale=1.0,
        normed=NORM_BEFORE_ALL,
    )
    groups, residents, registers = (1, 4, 128) if d == 64 else (4, 1, None)
    with torch.cuda.device_of(x):
        projection.project_kernel[persistent_grid(x, residents)](
            row_descriptor(x), q, k, v, xhat, rstd, half_weight, folded_bias, cos, sin, rows, eps,
            D=d, C=64, P=0 if cos is None else cos.shape[1], GROUPS=groups, num_warps=GROUP_WARPS, maxnreg=registers,
        )  # fmt: skip
    return q, k, v, xhat, rstd, half_weight


def launch_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, xhat: Tensor, rstd: Tensor, half_weight: Tensor,
    gain: Tensor, shift: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    rows, d = dy.shape
    dx = torch.empty_like(dy)
    back_q, back_k = (dq, dk) if cos is None else (torch.empty_like(dq), torch.empty_like(dk))
    groups, residents, registers = (1, 4, 128) if d == 64 else (2, 1, None)
    with torch.cuda.device_of(dy):
        projection.project_backward_kernel[persistent_grid(dy, residents)](
            row_descriptor(dq), row_descriptor(dk), row_descriptor(dv), dy, xhat, rstd, half_weight, cos, sin,
            dx, back_q, back_k, rows,
            D=d, P=0 if cos is None else cos.shape[1], GROUPS=groups, num_warps=GROUP_WARPS, maxnreg=registers,
        )  # fmt: skip
    dweight, dbias = torch.empty_like(weight), weight.new_empty(len(weight))
    pairs = (back_q, xhat), (back_k, xhat), (dv, xhat)
    dnorm = sum_gradients(
        pairs, weight.chunk(3), gain, shift, dweight.chunk(3), dbias.chunk(3), scale=1.0, normed=NORM_BEFORE_ALL
    )
    return dx, dweight, dbias, dnorm


def fold_layers(
    layers: Sequence[Tensor], biases: Sequence[Tensor], gain: Tensor, shift: Tensor,
    halves: Sequence[Tensor], folded: Sequence[Tensor], *, scale: float, normed: int,
) -> None:  # fmt: skip
    """Fill `halves` and `folded` with the weights and biases of three layers, as `weights.fold_kernel` makes them.

    Args:
        scale: dropout's factor of kept elements.
        normed: a bit for each layer that follows the norm.
    """
    d = len(gain)
    with torch.cuda.device_of(gain):
        weights.fold_kernel[(d // FOLD_ROWS, count_square_tiles(layers, d))](
            *layers,
            *biases,
            gain,
            shift,
            *halves,
            *folded,
            scale,
            *flatten_shapes(layers),
            SIDE=d,
            R=FOLD_ROWS,
            NORMED=normed,
        )


def sum_gradients(
    pairs: Sequence[tuple[Tensor, Tensor]], layers: Sequence[Tensor], gain: Tensor, shift: Tensor,
    gradients: Sequence[Tensor], biases: Sequence[Tensor], *, scale: float, normed: int,
) -> Tensor:  # fmt: skip
    """Fill the gradients of three layers, the sums of dyᵀ x over all rows. It returns those of gain and shift.

    Args:
        pairs: for each layer the gradient of its output, and its input.
        layers: the weights in fp32. Only those of layers in `normed` are read.
        gradients: the gradients of the weights.
        biases: the gradients of the biases.
        scale: as in `fold_layers`.
        normed: as in `fold_layers`.
    """
    (rows, _), d, count = pairs[0][0].shape, len(gain), count_square_tiles(gradients, len(gain))
    programs, together, stages = SUM_SETTINGS[d]
    shape, parts = flatten_shapes(gradients), max(1, programs // count)
    sums = gain.new_empty(parts, count, d, d + ONES_COLUMNS)
    norms = gain.new_empty(2, d, count * d // UNFOLD_ROWS)
    with torch.cuda.device_of(gain):
        weights.sum_kernel[(parts, count)](
            *(tensor for pair in pairs for tensor in pair), sums, rows, *shape, SIDE=d, M=together, ONES=ONES_COLUMNS,
            num_warps=d // 16, num_stages=stages,
        )  # fmt: skip
        weights.unfold_kernel[(d // UNFOLD_ROWS, count)](
            sums, *layers, gain, shift, *gradients, *biases, norms, parts, scale, *shape,
            SIDE=d, ONES=ONES_COLUMNS, R=UNFOLD_ROWS, P=2048 // d, NORMED=normed,
        )  # fmt: skip
    return norms.sum(2)


def flatten_shapes(layers: Sequence[Tensor]) -> list[int]:
    """N and K of each weight, in one list."""
    return [side for weight in layers for side in weight.shape]


def count_square_tiles(layers: Sequence[Tensor], d: int) -> int:
    """The number of tiles `[d, d]` of all weights together."""
    return sum(weight.numel() for weight in layers) // d**2


def launch_embed(
    vectors: Tensor, ids: Tensor, of_places: Tensor | None, place: Tensor | None,
    scale: float, threshold: int, keys: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    (vocabulary, d), rows = vectors.shape, len(ids)
    x, places = vectors.new_empty(rows, d), 0 if of_places is None else len(of_places)
    if rows:
        with torch.cuda.device_of(x):
            embedding.embed_kernel[(-(-rows // (16 * GROUP_WARPS)),)](
                vectors, ids, of_places, place, keys, x, rows, vocabulary, places, scale, site, threshold,
                D=d, PLACES=places > 0, DROPOUT=keys is not None, num_warps=GROUP_WARPS,
            )  # fmt: skip
    return x


def launch_table_gradient(
    dy: Tensor, ids: Tensor, vocabulary: int, half: torch.dtype, start: Tensor | None, length: Tensor | None,
    places: int, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    (rows, d), sequences = dy.shape, 0 if start is None else len(start)
    v, warps, registers, residents = (64, 4, 168, 3) if vocabulary <= 64 else (256, 8, 255, 1)  # v: rows of a table
    m, slices = 16 * warps, d // embedding.FEATURE_SLICE.value
    tables, tiles_of_places = -(-vocabulary // v), -(-places // m)
    parts = max(1, count_multiprocessors(dy.device) * residents // (tables * slices))
    if tiles_of_places:
        parts = max(1, min(parts // tiles_of_places, sequences)) * tiles_of_places
    sums = dy.new_empty(parts, tables, v, d)
    place_sums = dy.new_empty(parts // tiles_of_places if tiles_of_places else 0, tiles_of_places * m, d)
    with torch.cuda.device_of(dy):
        embedding.table_gradient_kernel[(parts * tables * slices,)](
            dy, ids, keys, start, length, sums, place_sums, rows, sequences, parts, site, threshold,
            D=d, V=v, TABLES=tables, TILES=tiles_of_places, HALF=GLUON_DTYPES[half], DROPOUT=keys is not None,
            num_warps=warps, maxnreg=registers,
        )  # fmt: skip
    return sums.sum(0).flatten(0, 1)[:vocabulary], place_sums.sum(0)[:places]


def row_descriptor(x: Tensor) -> TensorDescriptor:
    """The TMA descriptor of x for tiles of a group's rows. TMA needs at least one row, even if x has none."""
    return make_descriptor((x if len(x) else x.new_empty(1, x.shape[1]))[:, None], 16 * GROUP_WARPS)


def persistent_grid(x: Tensor, residents: int) -> tuple[int]:
    """The grid of persistent programs, `residents` on each multiprocessor. Each works on one tile after another."""
    return (count_multiprocessors(x.device) * residents,)
