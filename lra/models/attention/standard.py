"""Algorithm 0 of the FlashAttention paper: S = QK^T, P = softmax(S), O = PV, each in memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.batch import Batch
from lra.kernels.softmax.softmax_ops import later_column_mask
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention


@ATTENTIONS.register(
    "standard",
    exact=True,
    cost="N², and so in memory",
    causal=True,
    ragged=False,
    paper="Vaswani et al. 2017, arXiv 1706.03762",
)
class StandardAttention(Attention):
    """Softmax attention that materialises the N x N scores: the baseline of Table 3."""

    @dataclass(frozen=True)
    class Config:
        """It has no options."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
        real_BN = batch.mask()
        scores_BHNN = (q_BHND @ k_BHND.transpose(2, 3)) * self.spec.head_dim**-0.5
        hidden = ~real_BN[:, None, None, :]
        if self.spec.causal:
            hidden = hidden | later_column_mask(scores_BHNN)
        # the smallest finite number, not -inf: a sequence of length 0 must not make NaN
        scores_BHNN = scores_BHNN.masked_fill(hidden, torch.finfo(scores_BHNN.dtype).min)
        p_BHNN = scores_BHNN.softmax(-1)
        p_BHNN = F.dropout(p_BHNN, self.dropout_rate)
        o_BHND = p_BHNN.to(v.dtype) @ v_BHND
        o_BHND = o_BHND.masked_fill(~real_BN[:, None, :, None], 0)
        return o_BHND.transpose(1, 2).flatten(0, 1)
