"""Embedding of token ids. Its gradient is a matrix product."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lra.kernels.dropout import dropout_threshold
from lra.kernels.layers.fused_layers import (
    embed,
    product_dtype,
    supports_embedding,
    supports_table_gradient,
    table_gradient,
)
from lra.models.dropout import drop, keep_scale

EMBEDDING_SITE = 0  # of dropout, the model's first


class Embedding(nn.Embedding):
    """`nn.Embedding` with an added term and dropout. On a GPU its gradient is a product with the one-hot ids.

    PyTorch adds the rows of the gradient one by one, in any order. These tasks have few ids, so thousands of rows add
    to one: most pixels of Pathfinder are black, and this addition alone took a tenth of its training step.
    """

    fused = True  # use the fused kernels of lookup and gradient where they support the case

    def forward(
        self,
        input: Tensor,
        added: Tensor | None = None,
        rate: float = 0.0,
        keys_T: Tensor | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """Maps ids `[T]` to vectors `[T, D]`. It adds `added` or the vectors of `places` before dropout."""
        return lookup(self.weight, input, added, rate, keys_T, places, self.fused)


class Places(NamedTuple):
    """A table of vectors for the places 0, 1, … of each sequence."""

    table_ND: Tensor
    place_T: Tensor
    start_B: Tensor
    length_B: Tensor
    owned: int  # rows of each sequence of a padded batch, else 0

    def vectors(self) -> Tensor:
        """Returns the vector of each row, `[T, D]`. On a GPU its gradient is `sums`, the same every time."""
        if self.table_ND.is_cuda:
            return _PlaceLookup.apply(*self)  # type: ignore[return-value]
        return nn.functional.embedding(self.place_T, self.table_ND)

    def sums(self, grad_TD: Tensor) -> Tensor:
        """Returns the gradient of the table: the gradients of all rows, summed over the sequences in order."""
        places = len(self.table_ND)
        if not len(grad_TD):
            return grad_TD.new_zeros(places, grad_TD.shape[1])
        place_N = torch.arange(self.owned or places, device=grad_TD.device)
        real_BN1 = (place_N < self.length_B[:, None])[:, :, None]
        if self.owned:  # views let a compiler fuse this gradient with the sum
            sum_ND = grad_TD.unflatten(0, (-1, self.owned)).where(real_BN1, 0).sum(0)
            return nn.functional.pad(sum_ND, (0, 0, 0, places - self.owned))
        row_BN = (self.start_B.long()[:, None] + place_N).clamp(max=len(grad_TD) - 1)
        return grad_TD[row_BN].where(real_BN1, 0).sum(0)


class _PlaceLookup(torch.autograd.Function):
    """Its arguments are the fields of `Places`."""

    @staticmethod
    def forward(ctx: Any, table_ND: Tensor, *of_places: Any) -> Tensor:
        place_T, start_B, length_B, ctx.owned = of_places
        ctx.save_for_backward(table_ND, place_T, start_B, length_B)
        return nn.functional.embedding(place_T, table_ND)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        table_ND, place_T, start_B, length_B = ctx.saved_tensors
        places = Places(table_ND, place_T, start_B, length_B, ctx.owned)
        return places.sums(grads[0]), None, None, None, None


NO_PLACES = (None, None, None, None, 0)  # the fields of no places


def lookup(
    table_VD: Tensor,
    ids_T: Tensor,
    added_TD: Tensor | None = None,
    rate: float = 0.0,
    keys_T: Tensor | None = None,
    places: Places | None = None,
    fused: bool = True,
) -> Tensor:
    """Returns `drop(table[ids] + added)`, `[T, D]`, for a short table. On a GPU its gradient is a matrix product."""
    if table_VD.is_cuda:
        of_places = places or NO_PLACES
        return _Lookup.apply(table_VD, added_TD, ids_T, rate, keys_T, fused, *of_places)  # type: ignore[return-value]
    if places is not None:
        added_TD = places.vectors()
    return _dropped_sum(table_VD, added_TD, ids_T, rate, keys_T)


def _dropped_sum(
    table_VD: Tensor, added_TD: Tensor | None, ids_T: Tensor, rate: float, keys_T: Tensor | None
) -> Tensor:
    found_TD = nn.functional.embedding(ids_T, table_VD)
    return drop(found_TD if added_TD is None else found_TD + added_TD, rate, keys_T, EMBEDDING_SITE)


class _Lookup(torch.autograd.Function):
    """Computes products in the dtype of autocast. The last arguments are the fields of `Places`, or `NO_PLACES`."""

    @staticmethod
    def forward(
        ctx: Any,
        table_VD: Tensor,
        added_TD: Tensor | None,
        ids_T: Tensor,
        rate: float,
        keys_T: Tensor | None,
        fused: bool,
        places_ND: Tensor | None,
        *of_places: Any,
    ) -> Tensor:
        place_T, start_B, length_B, ctx.owned = of_places
        ctx.save_for_backward(ids_T, keys_T, places_ND, place_T, start_B, length_B)
        ctx.dtype = product_dtype(table_VD)
        ctx.vocabulary, ctx.rate, ctx.fused = len(table_VD), rate, fused
        dropped = dropout_threshold(rate)
        if fused and added_TD is None and supports_embedding(table_VD, dropped):
            dropout: Any = dict(scale=keep_scale(dropped), threshold=dropped, keys=keys_T, site=EMBEDDING_SITE)
            return embed(table_VD, ids_T, places_ND, place_T, **dropout)
        if places_ND is not None:
            added_TD = nn.functional.embedding(place_T, places_ND)
        return _dropped_sum(table_VD, added_TD, ids_T, rate, keys_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_TD,), (ids_T, keys_T, places_ND, *of_places) = grads, ctx.saved_tensors
        place_T, start_B, length_B = of_places
        places = None if places_ND is None else Places(places_ND, place_T, start_B, length_B, ctx.owned)
        wants_added, dropped = ctx.needs_input_grad[1], dropout_threshold(ctx.rate)
        if ctx.fused and supports_table_gradient(grad_TD, ctx.dtype, dropped):
            count = 0 if places is None else len(places.table_ND)
            sums = table_gradient(
                grad_TD, ids_T, ctx.vocabulary, ctx.dtype, start_B, length_B, count,
                threshold=dropped, keys=keys_T, site=EMBEDDING_SITE,
            )  # fmt: skip
            product_VD, sums_ND = (each * keep_scale(dropped) if keys_T is not None else each for each in sums)
            added_TD = drop(grad_TD, ctx.rate, keys_T, EMBEDDING_SITE) if wants_added else None
        else:
            kept_TD = drop(grad_TD, ctx.rate, keys_T, EMBEDDING_SITE)
            one_hot_TV = (ids_T[:, None] == torch.arange(ctx.vocabulary, device=ids_T.device)).to(ctx.dtype)
            product_VD = (one_hot_TV.t() @ kept_TD.to(ctx.dtype)).to(grad_TD.dtype)
            added_TD = kept_TD if wants_added else None
            sums_ND = None if places is None else places.sums(kept_TD)
        return product_VD, added_TD, None, None, None, None, sums_ND if places else None, None, None, None, None
