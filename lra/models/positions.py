"""Where a token stands: learned, sinusoidal and rotary positions, on one axis or on the two of an image."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lra.batch import Batch
from lra.errors import UsageError


def coordinates(batch: Batch, axes: int, width: int | None, prefixed: bool) -> Tensor:
    """Coordinates of every token, int64 `[T, axes]`: its position, or its row and column in an image `width` wide.

    A prefixed CLS token has position 0 on one axis and shares the first pixel's place on two.
    """
    position_T = batch.token_positions()
    if axes == 1:
        return position_T[:, None]
    assert width is not None
    pixel_T = (position_T - int(prefixed)).clamp(min=0)
    return torch.stack((pixel_T // width, pixel_T % width), 1)


def angles(coordinates_TA: Tensor, dim: int) -> Tensor:
    """Angles of `dim // 2` sine-cosine pairs, fp32 `[T, dim // 2]`, shared equally between the axes.

    Frequencies 10000^(-i/pairs) of Vaswani et al. 2017 (section 3.5) and of RoPE (Su et al. 2021, eq. 15).
    """
    axes = coordinates_TA.shape[1]
    pairs = dim // 2 // axes
    frequency_P = 10000.0 ** (-torch.arange(pairs, device=coordinates_TA.device, dtype=torch.float32) / pairs)
    return (coordinates_TA[:, :, None].float() * frequency_P).flatten(1)


def rotate(x_THD: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Rotary embedding: turns each pair `(x[p], x[p + D/2])` by its angle, in fp32, back in the input's dtype."""
    a, b = x_THD.float().chunk(2, -1)
    cos, sin = cos_TP[:, None], sin_TP[:, None]
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x_THD.dtype)


class LearnedPositions(nn.Module):
    """A learned vector per place, `sizes` places on each axis; the axes' vectors are added."""

    def __init__(self, sizes: tuple[int, ...], d_model: int, std: float):
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(std * torch.randn(size, d_model)) for size in sizes)

    def forward(self, coordinates_TA: Tensor) -> Tensor:
        axes = zip(coordinates_TA.unbind(1), self.tables, strict=True)
        return torch.stack([nn.functional.embedding(place, table) for place, table in axes]).sum(0)


class SinusoidalPositions(nn.Module):
    """Fixed sines and cosines of the coordinates."""

    def __init__(self, d_model: int):
        super().__init__()
        self.d_model = d_model

    def forward(self, coordinates_TA: Tensor) -> Tensor:
        angle_TP = angles(coordinates_TA, self.d_model)
        return torch.cat((angle_TP.sin(), angle_TP.cos()), 1)


def axis_sizes(axes: int, max_length: int, grid: tuple[int, int] | None) -> tuple[int, ...]:
    """Places on each axis; UsageError if two axes are asked of a task that has no image."""
    if axes == 1:
        return (max_length,)
    if grid is None:
        raise UsageError("model.axes=2 needs an image task: use model.axes=1 here")
    return grid
