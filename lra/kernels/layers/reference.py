"""The definition of the operators, in plain PyTorch for any device: every kernel is compared with this file.

Arguments and results as in ops.py. Arithmetic is in the dtype of the residual; what has the dtype of the weights is
rounded to it, as in the kernels. With float64 throughout nothing is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BITS = 16  # of a hash that decide: dropout's rate is exact to 2^-16, and one hash serves two features
ONES = 16  # columns behind those of a weight's gradient, each the bias's: what a product on tensor cores has at least


def feed_forward(
    o: Tensor, x: Tensor, out: Tensor, out_bias: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor,
    eps: float, threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    half, wide = o.dtype, x.dtype
    z = x + kept(F.linear(o.to(wide), out.to(wide), out_bias), keys, site, threshold)
    unit, rstd = normalise(z, eps, half)
    h = kept(F.gelu(F.linear(unit.to(wide), up.to(wide), up_bias)), keys, site + 1, threshold).to(half)
    return z + kept(F.linear(h.to(wide), down.to(wide), down_bias), keys, site + 2, threshold), unit, rstd


def feed_forward_backward(
    dy: Tensor, o: Tensor, unit: Tensor, rstd: Tensor, out: Tensor, up: Tensor, up_bias: Tensor, down: Tensor,
    threshold: int, keys: Tensor | None, site: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    half, wide = o.dtype, dy.dtype
    ddown = kept(dy, keys, site + 2, threshold).to(half)
    u = F.linear(unit.to(wide), up.to(wide), up_bias)
    below, density = torch.special.ndtr(u), torch.exp(-u * u / 2) * (2 * torch.pi) ** -0.5
    h = kept(u * below, keys, site + 1, threshold).to(half)
    dh = kept(ddown.to(wide) @ down.to(wide), keys, site + 1, threshold)
    du = (dh * (below + u * density)).to(half)
    dx = dy + normalise_backward(du.to(wide) @ up.to(wide), unit, rstd)
    dout = kept(dx, keys, site, threshold).to(half)
    do = (dout.to(wide) @ out.to(wide)).to(half)
    return do, dx, gradients(wide, dout, o, du, unit, ddown, h)


def project(
    x: Tensor, weight: Tensor, bias: Tensor, cos: Tensor | None, sin: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    unit, rstd = normalise(x, eps, weight.dtype)
    parts = F.linear(unit.to(x.dtype), weight.to(x.dtype), bias).chunk(3, 1)
    q, k, v = (turn(part, cos, sin) if i < 2 else part for i, part in enumerate(parts))
    q, k, v = (part.to(weight.dtype).clone(memory_format=torch.contiguous_format) for part in (q, k, v))
    return q, k, v, unit, rstd


def project_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, dy: Tensor, unit: Tensor, rstd: Tensor, weight: Tensor,
    cos: Tensor | None, sin: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if cos is not None and sin is not None:
        dq, dk = (turn(part.to(dy.dtype), cos, -sin).to(part.dtype) for part in (dq, dk))
    dunit = torch.cat((dq, dk, dv), 1).to(dy.dtype) @ weight.to(dy.dtype)
    dx = dy + normalise_backward(dunit, unit, rstd)
    return dx, gradients(dy.dtype, dq, unit, dk, unit, dv, unit)


def table_gradient(
    dy: Tensor, ids: Tensor, vocabulary: int, half: torch.dtype, threshold: int, keys: Tensor | None, site: int
) -> Tensor:
    one_hot = (ids[:, None] == torch.arange(vocabulary, device=ids.device)).to(dy.dtype)
    return one_hot.T @ kept(dy, keys, site, threshold).to(half).to(dy.dtype)


def normalise(x: Tensor, eps: float, half: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x less its mean over its deviation, that deviation's inverse)."""
    centred = x - x.mean(1, keepdim=True)
    rstd = (centred.square().mean(1) + eps).rsqrt()
    return (centred * rstd[:, None]).to(half), rstd


def normalise_backward(dunit: Tensor, unit: Tensor, rstd: Tensor) -> Tensor:
    unit = unit.to(dunit.dtype)
    along = (dunit * unit).mean(1, keepdim=True)
    return (dunit - dunit.mean(1, keepdim=True) - unit * along) * rstd[:, None]


def turn(x: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
    """Each pair `(x[p], x[p + P])` of each head by its angle, `[T, P]`, as `lra.models.positions.rotate`."""
    if cos is None or sin is None:
        return x
    a, b = x.unflatten(1, (-1, 2, cos.shape[1])).unbind(2)
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.stack((a * cos - b * sin, a * sin + b * cos), 2).flatten(1)


def gradients(dtype: torch.dtype, *pairs: Tensor) -> Tensor:
    """`[tiles, D, D + ONES]` of three pairs (dy, x) as `launch.launch_gradients`: of each dyᵀ x and dyᵀ 1 in tiles."""
    d, found = pairs[0].shape[1], []
    for dy, x in zip(pairs[::2], pairs[1::2], strict=True):
        dy, x = dy.to(dtype), x.to(dtype)
        weight = (dy.T @ x).view(dy.shape[1] // d, d, x.shape[1] // d, d).transpose(1, 2)
        bias = dy.sum(0).view(-1, 1, d, 1).expand(*weight.shape[:3], ONES)
        found.append(torch.cat((weight, bias), 3).flatten(0, 1))
    return torch.cat(found)


def kept(x: Tensor, keys: Tensor | None, site: int, threshold: int) -> Tensor:
    """`x`, `[T, D]`, with zeros where dropout drops: a function of the row's key, the site in the model and feature."""
    if keys is None or not threshold:
        return x
    feature = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
    hashed = mix(mix(keys + site)[:, None] + (feature >> 1)) >> BITS * (feature & 1)
    return torch.where((hashed & (1 << BITS) - 1) >= threshold, x, 0.0)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 whose every output bit depends on every input bit: xor-shifts and odd factors that wrap."""
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * -0x7B935975  # 0x846CA68B
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left: PyTorch's copies the sign."""
    return (x >> by) & (1 << 32 - by) - 1
