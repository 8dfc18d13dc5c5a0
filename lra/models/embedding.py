"""Vectors of token ids, with a gradient that is a matrix product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lra.kernels.layers.api import table_gradient, takes_table


class Embedding(nn.Embedding):
    """`nn.Embedding` whose gradient on a GPU is the one-hot ids times the output's, in autocast's dtype.

    PyTorch adds the rows one by one, in any order. With the few ids of these tasks thousands of rows meet in one: most
    pixels of Pathfinder are black, and that addition alone took a tenth of its training step.
    """

    fused = True  # by one kernel that makes the one-hot ids itself, where that takes it

    def forward(self, input: Tensor) -> Tensor:
        """Ids `[T]` to vectors `[T, D]`."""
        return lookup(self.weight, input, self.fused)


def lookup(table_VD: Tensor, ids_T: Tensor, fused: bool = True) -> Tensor:
    """Rows of a short table, `[T, D]`, whose gradient on a GPU is a matrix product."""
    return _Lookup.apply(table_VD, ids_T, fused) if table_VD.is_cuda else nn.functional.embedding(ids_T, table_VD)  # type: ignore[return-value]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, ids_T: Tensor, fused: bool) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.fused = fused
        ctx.vocabulary, device = len(table_VD), table_VD.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else table_VD.dtype
        return nn.functional.embedding(ids_T, table_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad_TD,), (ids_T,) = grads, ctx.saved_tensors
        if ctx.fused and takes_table(grad_TD, ctx.dtype):
            return table_gradient(grad_TD, ids_T, ctx.vocabulary, ctx.dtype), None, None
        one_hot_TV = (ids_T[:, None] == torch.arange(ctx.vocabulary, device=ids_T.device)).to(ctx.dtype)
        return (one_hot_TV.t() @ grad_TD.to(ctx.dtype)).to(grad_TD.dtype), None, None
