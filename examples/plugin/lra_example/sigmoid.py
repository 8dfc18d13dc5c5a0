"""An attention: sigmoids instead of the softmax."""

from dataclasses import dataclass

import torch

from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention


@ATTENTIONS.register(
    "sigmoid", exact=False, cost="N²", dropout=False, ragged=False, paper="Ramapuram et al. 2024, arXiv 2409.04431"
)
class SigmoidAttention(Attention):
    """Each score passes a sigmoid of its own. A bias of -log N keeps the sum of the weights near 1 (section 3)."""

    @dataclass(frozen=True)
    class Config:
        scale: float = 1.0  # factor of the scores, beside 1/√d

    def forward(self, q, k, v, batch):
        q, k, v = (batch.pad(x).transpose(1, 2) for x in (q, k, v))  # [T, H, D] to [B, H, N, D]
        bias = -batch.length.clamp(min=1).log()[:, None, None, None]
        scores = (q @ k.mT).float() * self.config.scale * self.spec.head_dim**-0.5 + bias
        real = batch.mask()[:, None]  # [B, 1, N]: True where a token is no padding
        weights = scores.sigmoid().where(real[:, :, None], 0)
        out = (weights.to(v.dtype) @ v).where(real[..., None], torch.zeros((), dtype=v.dtype, device=v.device))
        return out.transpose(1, 2).flatten(0, 1)  # back to [T, H, D]
