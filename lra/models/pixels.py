"""Pixels as numbers instead of ids: a grey value goes through a linear layer (Amos et al. 2024, arXiv 2310.02980)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lra.models.dropout import drop
from lra.models.embedding import EMBEDDING_SITE, Places


def grey_values(ids_T: Tensor, levels: int) -> Tensor:
    """Maps the ids 0 to `levels - 1` to grey values from -1 to 1, fp32: (id / 255 - 0.5) / 0.5 for 256 levels."""
    return (ids_T.float() / (levels - 1) - 0.5) / 0.5


def nearest_ids(grey: Tensor, levels: int) -> Tensor:
    """Returns the ids whose grey values are nearest, int64."""
    return ((grey * 0.5 + 0.5) * (levels - 1)).round().clamp(0, levels - 1).long()


class PixelEmbedding(nn.Linear):
    """A linear layer of a pixel's grey value, in place of a table of ids. Neighbouring grey values have near vectors.

    While pixels are hidden it has a second input. It is 1 for a hidden pixel, whose first input is 0, and 0 for the
    others. A CLS token has a learned vector of its own.

    Weights and biases begin as PyTorch's, as in the paper. Both are of one size, and that matters: without a bias the
    first LayerNorm would see the sign of a grey value and nothing else of it.

    Args:
        levels: number of grey values. Their ids are 0 to `levels - 1`.
        d_model: width of the vectors.
        std: standard deviation of the initial vector of CLS.
        prefix: id of the CLS token. None: there is no such token.
        mask: id that stands for a hidden pixel. None: no pixel is hidden.
    """

    def __init__(self, levels: int, d_model: int, std: float, prefix: int | None, mask: int | None):
        super().__init__(1 if mask is None else 2, d_model)
        self.levels, self.prefix, self.mask = levels, prefix, mask
        self.cls = None if prefix is None else nn.Parameter(std * torch.randn(d_model))

    def forward(
        self,
        input: Tensor,
        added: Tensor | None = None,
        rate: float = 0.0,
        keys_T: Tensor | None = None,
        places: Places | None = None,
    ) -> Tensor:
        """Maps ids `[T]` to vectors `[T, D]`. It adds `added` or the vectors of `places` before dropout."""
        # products by element, not of matrices: they stay in fp32 under autocast, as rows of a table do
        value_T = grey_values(input, self.levels)
        if self.mask is None:
            x_TD = value_T[:, None] * self.weight[:, 0] + self.bias
        else:
            hidden_T = input == self.mask
            value_T = value_T.where(~hidden_T, 0)
            x_TD = value_T[:, None] * self.weight[:, 0] + hidden_T[:, None] * self.weight[:, 1] + self.bias
        if self.cls is not None:
            x_TD = self.cls.where((input == self.prefix)[:, None], x_TD)
        if places is not None:
            added = places.vectors()
        return drop(x_TD if added is None else x_TD + added, rate, keys_T, EMBEDDING_SITE)
