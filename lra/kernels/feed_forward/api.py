"""`feed_forward`: what follows attention in a block, by the fused kernels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lra.kernels.feed_forward.ops import FeedForward
from lra.kernels.flash import tuning

WIDTHS = (16, 32, 64, 128)  # of the model: a row of it is in registers whole
CHUNK = 64  # hidden features that the kernels take at a time, at most


def takes(o: Tensor, x: Tensor, up: nn.Linear) -> bool:
    """Whether the kernels compute this: in 16 bits, of widths that divide into tiles, on a GPU they are faster on."""
    if not (o.is_cuda and o.dtype in (torch.float16, torch.bfloat16) and x.dtype == torch.float32):
        return False
    return up.in_features in WIDTHS and up.out_features % CHUNK == 0 and on_hopper()


@torch.compiler.assume_constant_result
def on_hopper() -> bool:
    """Whether this is a Hopper GPU, on which they were measured, and a ptxas that compiles its products rightly."""
    return tuning.hopper_refusal(tuning.capability()) is None


def feed_forward(
    o: Tensor,
    x: Tensor,
    out: nn.Linear,
    norm: nn.LayerNorm,
    up: nn.Linear,
    down: nn.Linear,
    *,
    scale: float = 1.0,
    threshold: int = 0,
    keys: Tensor | None = None,
    site: int = 0,
) -> Tensor:
    """`z + drop(down(drop(gelu(up(norm(z))))))` with `z = x + drop(out(o))`, `[T, D]` in fp32; differentiable once.

    Args:
        o: what attention returns, `[T, D]` of 16 bits, the dtype of the matrix products.
        x: what the block was given, `[T, D]` in fp32.
        scale, threshold, keys: what is kept is multiplied by, how many of 2^16 elements are dropped, and a key for
            each row, int32 `[T]`; nothing is dropped without keys. See `lra.models.dropout`, whose sites are `site`
            to `site` + 2 here.
    """
    layers = (out.weight, out.bias, norm.weight, norm.bias, up.weight, up.bias, down.weight, down.bias)
    return FeedForward.apply(o.contiguous(), x.contiguous(), *layers, norm.eps, scale, threshold, keys, site)  # type: ignore[no-any-return]
