"""What the layers compute, in plain PyTorch: the definition, and the path for what the kernels don't take.

Dropout is a function of the place: a hash for each row, the site in the model, the feature. So a run drops the same
whatever the layout of its batches, the micro-batches and the devices, and a captured step what an eager one drops.
PyTorch's generator counts calls and elements instead. The hash is a few integer operations for each element, which
torch.compile fuses with what is next to them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

BITS = 24  # of a hash that decide: the rate is exact to 2^-24


def project(x: Tensor, gain: Tensor, shift: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    d = x.shape[1]
    return F.linear(F.layer_norm(x, (d,), gain, shift), w, b).unflatten(1, (-1, d)).unbind(1)  # one product, views


def project_out(x: Tensor, o: Tensor, w: Tensor, b: Tensor, rate: float, keys: Tensor | None, site: int) -> Tensor:
    return x + drop(F.linear(o, w, b), rate, keys, site)


def feed_forward(
    x: Tensor, gain: Tensor, shift: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, rate: float,
    keys: Tensor | None, site: int,
) -> Tensor:  # fmt: skip
    xhat = F.layer_norm(x, (x.shape[1],), gain, shift)
    hidden = drop(F.gelu(F.linear(xhat, w1, b1)), rate, keys, site)
    return x + drop(F.linear(hidden, w2, b2), rate, keys, site + 1)


def drop(x: Tensor, rate: float, keys: Tensor | None, site: int) -> Tensor:
    """`x` with a share `rate` of its elements zeroed and the others divided by 1 - rate; itself without keys."""
    if keys is None or not rate:
        return x
    feature = torch.arange(x.shape[1], device=x.device, dtype=torch.int32)
    kept = (mix(mix(keys + site)[:, None] + feature) & (1 << BITS) - 1) >= round(rate * (1 << BITS))
    return torch.where(kept, x * (1 / (1 - rate)), 0.0)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 whose every output bit depends on every input bit: xor-shifts and odd factors that wrap."""
    x = (x ^ _shift(x, 16)) * 0x7FEB352D
    x = (x ^ _shift(x, 15)) * -0x7B935975  # 0x846CA68B
    return x ^ _shift(x, 16)


def _shift(x: Tensor, by: int) -> Tensor:
    """Right by so many bits, zeros from the left: PyTorch's copies the sign."""
    return (x >> by) & (1 << 32 - by) - 1
