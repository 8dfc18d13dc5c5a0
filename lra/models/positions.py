"""Learned, sinusoidal and rotary positions, on one axis or on the two axes of an image."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.errors import UsageError
from lra.models.embedding import Places, lookup


def token_coordinates(batch: Batch, axes: int, width: int | None, prefixed: bool) -> Tensor:
    """Returns the coordinates of each token, int64 `[T, axes]`.

    Args:
        axes: 1 for the position in the sequence, 2 for row and column of a pixel.
        width: width of the image, for two axes.
        prefixed: whether sequences begin with CLS. On one axis it has position 0; on two it shares that of pixel 0.
    """
    position_T = batch.token_positions()
    if axes == 1:
        return position_T[:, None]
    assert width is not None
    pixel_T = (position_T - int(prefixed)).clamp(min=0)
    return torch.stack((pixel_T // width, pixel_T % width), 1)


def position_angles(coordinates_TA: Tensor, dim: int, base: float = 10000.0) -> Tensor:
    """Returns the angles of `dim // 2` sine-cosine pairs, fp32 `[T, dim // 2]`. Each axis has an equal share.

    Frequencies base^(-i/pairs) of Vaswani et al. 2017 (section 3.5) and of RoPE (Su et al. 2021, eq. 15).
    """
    axes = coordinates_TA.shape[1]
    pairs = dim // 2 // axes
    frequency_P = base ** (-torch.arange(pairs, device=coordinates_TA.device, dtype=torch.float32) / pairs)
    return (coordinates_TA[:, :, None].float() * frequency_P).flatten(1)


def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates each pair `(x[p], x[p + D/2])` by its angle, in fp32 or float64. Returns the dtype of the input.

    Args:
        cos, sin: of the angles, `[T, D/2]` for all heads, or `[T, H, D/2]`.
    """
    a, b = x_THD.to(torch.promote_types(x_THD.dtype, cos.dtype)).chunk(2, -1)
    if cos.ndim == 2:
        cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x_THD.dtype)


class LearnedPositions(nn.Module):
    """A learned vector for each place, with `sizes` places on each axis. The vectors of the axes are added."""

    def __init__(self, sizes: tuple[int, ...], d_model: int, std: float):
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(std * torch.randn(size, d_model)) for size in sizes)

    def forward(self, coordinates_TA: Tensor) -> Tensor:
        axes = [*zip(coordinates_TA.unbind(1), self.tables, strict=True)]
        if len(axes) > 1:  # the sides of an image are as short as a vocabulary
            return torch.stack([lookup(table, place_T) for place_T, table in axes]).sum(0)
        # the table may be long; compiled on a GPU, its gradients are added in any order
        return F.embedding(coordinates_TA[:, 0], self.tables[0])

    def places(self, coordinates_TA: Tensor, batch: Batch) -> Places | None:
        """Returns what to look up, if the rows have the places 0, 1, … of their sequence; else None."""
        if len(self.tables) > 1 or batch.positions is not None:
            return None
        return Places(self.tables[0], coordinates_TA[:, 0], batch.start, batch.length, batch.padded_length)


class _ComputedPositions(nn.Module):
    """Positions computed from the coordinates times `scale`, a factor for each axis. It is 1 until a transfer.

    The factors are a buffer, so checkpoints contain them.
    """

    scale: Tensor

    def __init__(self, dim: int, axes: int, base: float = 10000.0):
        super().__init__()
        self.dim, self.base = dim, base
        self.register_buffer("scale", torch.ones(axes))

    def angles(self, coordinates_TA: Tensor) -> Tensor:
        return position_angles(coordinates_TA * self.scale, self.dim, self.base)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}scale", torch.ones_like(self.scale))  # older checkpoints have no factors
        super()._load_from_state_dict(state_dict, prefix, *args)


class SinusoidalPositions(_ComputedPositions):
    """Fixed sines and cosines of the coordinates, `[T, dim]`."""

    def forward(self, coordinates_TA: Tensor) -> Tensor:
        angle_TP = self.angles(coordinates_TA)
        return torch.cat((angle_TP.sin(), angle_TP.cos()), 1)


class RotaryPositions(_ComputedPositions):
    """Cosines and sines for `rotate`, each `[T, dim // 2]`, or `[T, bands, dim // 2]` if there are several bands.

    Args:
        dim: features of a head.
        axes: 1 or 2.
        base: of the frequencies.
        turned: pairs of a head that turn on each axis. The others keep the angle 0. The frequencies of the turned ones
            span the whole range, as in GPT-NeoX (Black et al. 2022, arXiv 2204.06745, section 2.1.1).
        bands: the number of heads over which the frequencies of each axis are laid, the highest in the first head
            (Miralles-González et al. 2025, arXiv 2501.14850: they turn features before they split them into heads). 1:
            all heads have the same angles.
    """

    def __init__(self, dim: int, axes: int, base: float = 10000.0, turned: int | None = None, bands: int = 1):
        self.pairs = dim // 2 // axes
        self.turned, self.bands = self.pairs if turned is None else turned, bands
        super().__init__(2 * axes * bands * self.turned, axes, base)

    def forward(self, coordinates_TA: Tensor) -> tuple[Tensor, Tensor]:
        angles = self.angles(coordinates_TA)
        if self.turned < self.pairs or self.bands > 1:
            of_axes_TAHP = angles.unflatten(1, (-1, self.bands, self.turned))
            angles = F.pad(of_axes_TAHP, (0, self.pairs - self.turned)).transpose(1, 2).flatten(2)
            angles = angles if self.bands > 1 else angles.squeeze(1)
        return angles.cos(), angles.sin()


def resize_table(
    table_ND: Tensor,
    old: tuple[int, int],
    new: tuple[int, int],
    how: Literal["gridwise", "bilinear", "bicubic"] = "bilinear",
) -> Tensor:
    """A learned table of an `old` grid (height, width; a sequence has height 1) for a `new` one, row-major, fp32.

    `gridwise` repeats rows and columns, as the positions of FlashAttention's Path-X and Path-256 (Dao et al. 2022,
    appendix E.3), and takes the mean of each block where the grid shrinks; UsageError unless ratios are integers. The
    others interpolate between the centres of pixels with PyTorch's antialiasing kernels: where the grid grows these
    are the plain ones, of bicubic that which keeps a ramp (a = -1/2). Past the edge there is nothing: the weights of
    what is inside are made to sum to 1.
    """
    x_DHW = table_ND.float().T.unflatten(1, old)
    if how == "gridwise":
        for axis, (before, after) in enumerate(zip(old, new, strict=True), 1):
            if after % before == 0:
                x_DHW = x_DHW.repeat_interleave(after // before, axis)
            elif before % after == 0:
                x_DHW = x_DHW.unflatten(axis, (after, -1)).mean(axis + 1)
            else:
                raise UsageError(
                    f"positions.resize=gridwise needs integer ratios, not {before} to {after}: use bilinear or bicubic"
                )
    else:
        x_DHW = F.interpolate(x_DHW[None], new, mode=how, antialias=True)[0]
    return x_DHW.flatten(1).T.contiguous()


def axis_sizes(axes: int, max_length: int, grid: tuple[int, int] | None) -> tuple[int, ...]:
    """Places on each axis; UsageError if two axes are asked of a task that has no image."""
    if axes == 1:
        return (max_length,)
    if grid is None:
        raise UsageError("model.axes=2 needs an image task: use model.axes=1 here")
    return grid
