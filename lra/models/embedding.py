"""Vectors of token ids, with a gradient that is a matrix product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Embedding(nn.Embedding):
    """`nn.Embedding` whose gradient on a GPU is the one-hot ids times the output's, in autocast's dtype.

    PyTorch adds the rows one by one, in any order. With the few ids of these tasks thousands of rows meet in one: most
    pixels of Pathfinder are black, and that addition alone took a tenth of its training step.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Ids `[T]` to vectors `[T, D]`."""
        return lookup(self.weight, input)


def lookup(table_VD: Tensor, ids_T: Tensor) -> Tensor:
    """Rows of a short table, `[T, D]`, whose gradient on a GPU is a matrix product."""
    return _Lookup.apply(table_VD, ids_T) if table_VD.is_cuda else nn.functional.embedding(ids_T, table_VD)  # type: ignore[return-value]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table_VD: Tensor, ids_T: Tensor) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.vocabulary, device = len(table_VD), table_VD.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else table_VD.dtype
        return nn.functional.embedding(ids_T, table_VD)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad_TD,), (ids_T,) = grads, ctx.saved_tensors
        one_hot_TV = (ids_T[:, None] == torch.arange(ctx.vocabulary, device=ids_T.device)).to(ctx.dtype)
        return (one_hot_TV.t() @ grad_TD.to(ctx.dtype)).to(grad_TD.dtype), None
