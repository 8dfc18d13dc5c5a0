"""Linear attention: a product of feature maps in place of the softmax, so that keys and values are summed once."""

from __future__ import annotations

import torch
from torch import Tensor

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention

EPS = 1e-6  # the normaliser is at least this, so that a query whose features are all 0 gives zeros


@ATTENTIONS.register(
    "linear",
    exact=False,
    cost="N",
    dropout=False,  # no probabilities
    paper="Katharopoulos et al. 2020, arXiv 2006.16236",
)
class LinearAttention(Attention):
    """Linear attention with the feature map elu(x) + 1."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        past_BN = ~batch.mask()
        q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
        # the products with v are in its dtype, also under autocast; features and normaliser are in fp32
        with torch.autocast(q.device.type, enabled=False):
            q_BHND, k_BHND = elu_plus_1(q_BHND), elu_plus_1(k_BHND).masked_fill(past_BN[:, None, :, None], 0)
            total_BHN1 = q_BHND @ k_BHND.sum(2)[..., None]
            weighted_BHND = q_BHND.to(v.dtype) @ (k_BHND.to(v.dtype).transpose(2, 3) @ v_BHND)
            o_BNHD = (weighted_BHND / total_BHN1.clamp(min=EPS)).to(v.dtype).transpose(1, 2)
        return batch.unpad(o_BNHD.masked_fill(past_BN[:, :, None, None], 0))


def elu_plus_1(x: Tensor) -> Tensor:
    """elu(x) + 1 in fp32, without the cancellation that makes it 0 below -17."""
    x = x.float()
    return x.clamp(max=0).exp() + x.relu()
