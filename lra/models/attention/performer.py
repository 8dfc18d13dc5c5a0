"""Performer: FAVOR+, an unbiased estimate of the softmax kernel by positive orthogonal random features."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.config.checks import check_at_least
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.options import check_option_counts


@ATTENTIONS.register(
    "performer",
    exact=False,
    cost="N · features",
    dropout=False,  # no probabilities
    paper="Choromanski et al. 2021, arXiv 2009.14794",
)
class PerformerAttention(Attention):
    """Performer: softmax attention estimated by positive orthogonal random features (FAVOR+)."""

    projection: Tensor  # [features, head_dim], of all heads
    steps: Tensor  # training steps begun
    seed: Tensor  # the last one's

    @dataclass(frozen=True)
    class Config:
        features: int | None = None  # random features; null: d log d for heads of d dimensions
        redraw: int | None = None  # training steps between new features; null: they stay

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "features")
            check_at_least(1, "attn", self, "redraw")  # steps, as many as there may be

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        return {"features": keys}

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        features = config.features or max(round(spec.head_dim * math.log(spec.head_dim)), 1)
        self.register_buffer("projection", orthogonal_features(features, spec.head_dim))
        if config.redraw:
            self.decides_on_host = "attn.redraw draws features on the host"
            self.register_buffer("steps", torch.tensor(0))
            self.register_buffer("seed", torch.tensor(-1))

    def resolve(self, device: torch.device, precision: str) -> str:
        return f"{super().resolve(device, precision)} with {len(self.projection)} features"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Features exp(w·x - |x|²/2), one for each row w of the projection, of x = D^-1/4 q and x = D^-1/4 k.

        With these, sum_r q_r sum_j k_jr v_j / sum_r q_r sum_j k_jr is a softmax over the keys for each feature r, which
        averages v, and one over the features for each query. Nothing overflows, so no constant is added, which would
        be a bias; |q|² cancels.
        """
        if self.training and self.config.redraw:
            self._redraw(batch)  # type: ignore[call-arg]
        past_BN = ~batch.mask()
        q_BHND, k_BHND, v_BHND = (batch.pad(x).transpose(1, 2) for x in (q, k, v))
        with torch.autocast(q.device.type, enabled=False):  # exponents are in fp32, the averages in the dtype of v
            scale = self.spec.head_dim**-0.25
            q_BHND, k_BHND, w_DM = scale * q_BHND.float(), scale * k_BHND.float(), self.projection.float().T
            k_BHNM = k_BHND @ w_DM - k_BHND.square().sum(-1, keepdim=True) / 2
            # the smallest finite number, not -inf: a sequence of length 0 must not make NaN
            k_BHNM = k_BHNM.masked_fill(past_BN[:, None, :, None], torch.finfo(k_BHNM.dtype).min)
            q_BHNM = q_BHND @ w_DM + k_BHNM.logsumexp(2, keepdim=True)
            averages_BHMD = k_BHNM.softmax(2).to(v.dtype).transpose(2, 3) @ v_BHND
            o_BNHD = (q_BHNM.softmax(3).to(v.dtype) @ averages_BHMD).transpose(1, 2)
        return batch.unpad(o_BNHD.masked_fill(past_BN[:, :, None, None], 0))

    @torch.compiler.disable  # decides on the host
    def _redraw(self, batch: Batch) -> None:
        """New features every `redraw` steps, a function of the step's seed alone: micro-batches and ranks share it."""
        assert batch.seed is not None, "a training batch carries its step's seed"
        begins = batch.seed != self.seed
        due = begins & (self.steps > 0) & (self.steps % self.config.redraw == 0)
        self.steps += begins
        self.seed.copy_(batch.seed)
        if due:
            count, dim = self.projection.shape
            generator = torch.Generator().manual_seed(int(batch.seed) + self.spec.layer)
            self.projection.copy_(orthogonal_features(count, dim, generator))


def orthogonal_features(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """`[count, dim]` Gaussian vectors of which each `dim` in a row are orthogonal (Section 3.1 of the paper)."""
    gaussian = torch.randn(-(-count // dim), dim, dim, generator=generator)
    norms = torch.randn(count, dim, generator=generator).norm(dim=1, keepdim=True)
    q, r = torch.linalg.qr(gaussian)
    signs = r.diagonal(dim1=1, dim2=2).sign()  # QR's own choice of them is not uniform
    return norms * (q * signs[:, None]).transpose(1, 2).flatten(0, 1)[:count]
