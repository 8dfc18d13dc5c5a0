"""Vectors of token ids, with a gradient that is a matrix product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lra.kernels.flash.problem import dropout_threshold
from lra.kernels.layers.api import product_dtype, table_gradient, takes_table
from lra.models.dropout import drop, keep_scale

SITE = 0  # of dropout, the model's first


class Embedding(nn.Embedding):
    """`nn.Embedding`, what is added to it and dropout, whose gradient on a GPU is a product of the one-hot ids.

    PyTorch adds the rows one by one, in any order. With the few ids of these tasks thousands of rows meet in one: most
    pixels of Pathfinder are black, and that addition alone took a tenth of its training step.
    """

    fused = True  # by one kernel that makes the one-hot ids itself, where that takes it

    def forward(
        self, input: Tensor, added: Tensor | None = None, rate: float = 0.0, keys_T: Tensor | None = None
    ) -> Tensor:
        """Ids `[T]` to vectors `[T, D]`; `added`, such as positions, is added before dropout."""
        return lookup(self.weight, input, added, rate, keys_T, self.fused)


def lookup(
    table_VD: Tensor,
    ids_T: Tensor,
    added_TD: Tensor | None = None,
    rate: float = 0.0,
    keys_T: Tensor | None = None,
    fused: bool = True,
) -> Tensor:
    """`drop(table[ids] + added)`, `[T, D]`, of a short table, whose gradient on a GPU is a matrix product."""
    if table_VD.is_cuda:
        return _Lookup.apply(table_VD, added_TD, ids_T, rate, keys_T, fused)  # type: ignore[return-value]
    return _dropped_sum(table_VD, added_TD, ids_T, rate, keys_T)


def _dropped_sum(
    table_VD: Tensor, added_TD: Tensor | None, ids_T: Tensor, rate: float, keys_T: Tensor | None
) -> Tensor:
    found_TD = nn.functional.embedding(ids_T, table_VD)
    return drop(found_TD if added_TD is None else found_TD + added_TD, rate, keys_T, SITE)


class _Lookup(torch.autograd.Function):
    """Products are in the dtype of autocast."""

    @staticmethod
    def forward(
        ctx: Any,
        table_VD: Tensor,
        added_TD: Tensor | None,
        ids_T: Tensor,
        rate: float,
        keys_T: Tensor | None,
        fused: bool,
    ) -> Tensor:
        ctx.save_for_backward(ids_T, keys_T)
        ctx.dtype = product_dtype(table_VD)
        ctx.vocabulary, ctx.rate, ctx.fused = len(table_VD), rate, fused
        return _dropped_sum(table_VD, added_TD, ids_T, rate, keys_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TD,), (ids_T, keys_T) = grads, ctx.saved_tensors
        if ctx.fused and takes_table(grad_TD, ctx.dtype):
            dropped = dropout_threshold(ctx.rate)
            dropout: dict[str, Any] = {"threshold": dropped, "keys": keys_T, "site": SITE}
            product_VD = table_gradient(grad_TD, ids_T, ctx.vocabulary, ctx.dtype, **dropout)
            if keys_T is not None:
                product_VD = product_VD * keep_scale(dropped)
            added_TD = drop(grad_TD, ctx.rate, keys_T, SITE) if ctx.needs_input_grad[1] else None
        else:
            kept_TD = drop(grad_TD, ctx.rate, keys_T, SITE)
            one_hot_TV = (ids_T[:, None] == torch.arange(ctx.vocabulary, device=ids_T.device)).to(ctx.dtype)
            product_VD = (one_hot_TV.t() @ kept_TD.to(ctx.dtype)).to(grad_TD.dtype)
            added_TD = kept_TD if ctx.needs_input_grad[1] else None
        return product_VD, added_TD, None, None, None, None
