"""Linear attention: a product of feature maps in place of the softmax, so that keys and values are summed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention
from lra.models.positions import rotate

LEAST_NORMALISER = 1e-6  # the normaliser is at least this, so that a query whose features are all 0 gives zeros


@ATTENTIONS.register(
    "linear",
    exact=False,
    cost="N",
    dropout=False,  # no probabilities
    rotates=True,
    paper="Katharopoulos et al. 2020, arXiv 2006.16236",
)
class LinearAttention(Attention):
    """Linear attention with the feature map elu(x) + 1."""

    @dataclass(frozen=True)
    class Config:
        """It has no options."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """With rotary positions, `(cos, sin)` of each token, features are turned where they weigh v, and not in the
        normaliser (Su et al. 2021, arXiv 2104.09864, equation 19): of turned queries and keys the features' products
        would not depend on the distance alone.
        """
        past_B1N1 = ~batch.mask()[:, None, :, None]

        def padded(x_THD: Tensor) -> Tensor:
            return batch.pad(x_THD).transpose(1, 2)

        # the products with v are in its dtype, also under autocast; features and normaliser are in fp32
        with torch.autocast(q.device.type, enabled=False):
            q_THD, k_THD = elu_plus_1(q), elu_plus_1(k)
            total_BHN1 = padded(q_THD) @ padded(k_THD).masked_fill(past_B1N1, 0).sum(2)[..., None]
            if rotary is not None:
                q_THD, k_THD = rotate(q_THD, *rotary), rotate(k_THD, *rotary)
            keys_BHND = padded(k_THD).masked_fill(past_B1N1, 0).to(v.dtype)
            weighted_BHND = padded(q_THD).to(v.dtype) @ (keys_BHND.transpose(2, 3) @ padded(v))
            o_BHND = (weighted_BHND / total_BHN1.clamp(min=LEAST_NORMALISER)).to(v.dtype).masked_fill(past_B1N1, 0)
        return batch.unpad(o_BHND.transpose(1, 2))


def elu_plus_1(x: Tensor) -> Tensor:
    """elu(x) + 1 in fp32, without the cancellation that makes it 0 below -17."""
    x = x.float()
    return x.clamp(max=0).exp() + x.relu()
