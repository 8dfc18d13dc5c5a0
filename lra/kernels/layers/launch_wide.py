"""Launches of the kernels of wide.py. launch_layers.py prepares the weights and sums their gradients."""

# pyright: reportCallIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from lra.kernels.layers import wide
from lra.kernels.layers.reference import SavedForBackward


class RowTile(NamedTuple):
    """How a kernel works: on so many rows, with chunks of so many features or summands, `c` and `k`."""

    rows: int
    c: int  # of rows that are operands
    k: int  # of rows that are sums
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, Any]:
        """The options of a launch."""
        return dict(num_warps=self.warps, num_stages=self.stages)


LIGHT_ROWS = 8  # of a program of a kernel without products
TILES: dict[int, dict[str, RowTile]] = {
    256: {
        "project": RowTile(64, 64, 0, 8, 3),
        "project_backward": RowTile(64, 0, 64, 4, 2),
        "out": RowTile(64, 0, 64, 8, 2),
        "up": RowTile(128, 128, 64, 8, 3),
        "down": RowTile(64, 128, 64, 4, 3),
        "pooled_down": RowTile(64, 256, 64, 8, 2),
        "hidden_backward": RowTile(64, 128, 0, 8, 1),
        "out_backward": RowTile(64, 64, 64, 4, 2),
    },
    512: {
        "project": RowTile(64, 64, 0, 8, 2),
        "project_backward": RowTile(64, 0, 64, 8, 2),
        "out": RowTile(64, 0, 64, 8, 2),
        "up": RowTile(128, 128, 64, 8, 3),
        "down": RowTile(128, 256, 64, 8, 3),
        "pooled_down": RowTile(64, 512, 64, 8, 2),
        "hidden_backward": RowTile(64, 128, 0, 8, 1),
        "out_backward": RowTile(64, 64, 64, 8, 2),
    },
}  # by model width


def launch_project(
    x: Tensor, half_weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float,
    q: Tensor, k: Tensor, v: Tensor, xhat: Tensor, rstd: Tensor,
) -> None:  # fmt: skip
    """Fill q, k, v, xhat and rstd."""
    rows, d = x.shape
    tile = TILES[d]["project"]
    parts = (as_tiles(each, tile.rows, tile.c) for each in (q, k, v))
    with torch.cuda.device_of(x):
        wide.project_kernel[row_grid(rows, tile)](
            as_tiles(x, tile.rows), *parts, q, k, as_tiles(xhat, tile.rows), rstd,
            as_tiles(half_weight, tile.c), half_weight, bias, cos, sin, rows, eps,
            D=d, P=0 if cos is None else cos.shape[1], M=tile.rows, C=tile.c, **tile.options,
        )  # fmt: skip


def launch_project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, xhat: Tensor, rstd: Tensor, half_weight: Tensor,
    cos: Tensor | None, sin: Tensor | None, dx: Tensor, back_q: Tensor, back_k: Tensor,
) -> None:  # fmt: skip
    """Fill dx and, with rotary positions, `back_q` and `back_k`. Without them these are dq and dk."""
    rows, d = dy.shape
    tile = TILES[d]["project_backward"]
    with torch.cuda.device_of(dy):
        if cos is not None:
            wide.rotate_back_kernel[(-(-rows // LIGHT_ROWS),)](
                dq, dk, cos, sin, back_q, back_k, rows, D=d, P=cos.shape[1], M=LIGHT_ROWS
            )
        wide.project_backward_kernel[row_grid(rows, tile)](
            *(as_tiles(each, tile.rows, tile.k) for each in (back_q, back_k, dv)), as_tiles(dy, tile.rows),
            as_tiles(xhat, tile.rows), rstd, as_tiles(half_weight, tile.k), as_tiles(dx, tile.rows), rows,
            D=d, M=tile.rows, K=tile.k, **tile.options,
        )  # fmt: skip


def launch_feed_forward(
    o: Tensor, x: Tensor, kept: SavedForBackward, out_bias: Tensor, down_bias: Tensor, eps: float,
    threshold: int, keys: Tensor | None, site: int, y: Tensor, final_rstd: Tensor | None, final_eps: float,
) -> None:  # fmt: skip
    """Fill y and the rows of `kept`. With `final_rstd`, y gets normalised rows, and `final_rstd` is filled as well."""
    (rows, d), f, pooled = x.shape, len(kept.half_up), final_rstd is not None
    z = torch.empty_like(x) if pooled else y
    dropout: dict[str, Any] = dict(site=site, threshold=threshold, DROPOUT=keys is not None)
    with torch.cuda.device_of(x):
        tile = TILES[d]["out"]
        wide.out_kernel[row_grid(rows, tile)](
            as_tiles(o, tile.rows, tile.k), *(as_tiles(each, tile.rows) for each in (x, z, kept.xhat)), kept.rstd, keys,
            as_tiles(kept.half_out, d, tile.k), out_bias, rows, eps,
            D=d, M=tile.rows, K=tile.k, **dropout, **tile.options,
        )  # fmt: skip
        tile = TILES[d]["up"]
        wide.up_kernel[row_grid(rows, tile, f // tile.c)](
            as_tiles(kept.xhat, tile.rows, tile.k), as_tiles(kept.h, tile.rows, tile.c),
            as_tiles(kept.slope, tile.rows, tile.c), keys, as_tiles(kept.half_up, tile.c, tile.k), kept.folded_bias,
            rows, D=d, F=f, M=tile.rows, C=tile.c, K=tile.k, **dropout, **tile.options,
        )  # fmt: skip
        tile = TILES[d]["pooled_down" if pooled else "down"]
        wide.down_kernel[row_grid(rows, tile, d // tile.c)](
            as_tiles(kept.h, tile.rows, tile.k), as_tiles(z, tile.rows, tile.c), as_tiles(y, tile.rows, tile.c),
            final_rstd, keys, as_tiles(kept.half_down, tile.c, tile.k), down_bias, rows, final_eps,
            D=d, F=f, POOLED=pooled, M=tile.rows, C=tile.c, K=tile.k, **dropout, **tile.options,
        )  # fmt: skip


def launch_feed_forward_backward(
    dy: Tensor, kept: SavedForBackward, threshold: int, keys: Tensor | None, site: int,
    dx: Tensor, do: Tensor, dout: Tensor, du: Tensor, ddown: Tensor,
) -> None:  # fmt: skip
    """Fill the last five. dx may be dy."""
    (rows, d), f = dx.shape, len(kept.half_up)
    dropout: dict[str, Any] = dict(site=site, threshold=threshold, DROPOUT=keys is not None)
    with torch.cuda.device_of(dx):
        tile = TILES[d]["hidden_backward"]
        wide.hidden_backward_kernel[row_grid(rows, tile)](
            as_tiles(dy, tile.rows), as_tiles(kept.slope, tile.rows, tile.c), keys, as_tiles(kept.half_down, d, tile.c),
            as_tiles(du, tile.rows, tile.c), as_tiles(ddown, tile.rows), rows,
            D=d, F=f, M=tile.rows, C=tile.c, **dropout, **tile.options,
        )  # fmt: skip
        tile = TILES[d]["out_backward"]
        wide.out_backward_kernel[row_grid(rows, tile)](
            as_tiles(dy, tile.rows), as_tiles(du, tile.rows, tile.k), as_tiles(kept.xhat, tile.rows), kept.rstd, keys,
            as_tiles(kept.half_up, tile.k), as_tiles(kept.half_out, d, tile.c),
            as_tiles(dx, tile.rows), as_tiles(dout, tile.rows), as_tiles(do, tile.rows, tile.c), rows,
            D=d, F=f, M=tile.rows, C=tile.c, K=tile.k, **dropout, **tile.options,
        )  # fmt: skip


def launch_pooled_gradient(dsums: Tensor, of_row: Tensor, final: Tensor, final_rstd: Tensor, dy: Tensor) -> None:
    """Fill dy, the gradients of rows, from those of the sums over sequences."""
    rows, d = dy.shape
    with torch.cuda.device_of(dy):
        wide.pooled_gradient_kernel[(-(-rows // LIGHT_ROWS),)](
            dsums, of_row, final, final_rstd, dy, rows, D=d, M=LIGHT_ROWS
        )


def row_grid(rows: int, tile: RowTile, chunks: int = 1) -> tuple[int]:
    """A program for each tile of rows, or for each of so many chunks of its features."""
    return (-(-rows // tile.rows) * chunks,)


def as_tiles(x: Tensor, rows: int, columns: int | None = None) -> TensorDescriptor:
    """The TMA descriptor of a matrix, for tiles of so many rows and, by default, of all columns.

    TMA needs at least one row, even if x has none.
    """
    some = x if len(x) else x.new_empty(1, x.shape[1])
    return TensorDescriptor.from_tensor(some, [rows, x.shape[1] if columns is None else columns])
