"""Linformer: keys and values projected along the sequence, by learned matrices, to a fixed number of rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.options import check_option_counts


@ATTENTIONS.register("linformer", exact=False, cost="N · k", paper="Wang et al. 2020, arXiv 2006.04768")
class LinformerAttention(Attention):
    """Linformer: softmax attention over k learned projections of the keys and values."""

    @dataclass(frozen=True)
    class Config:
        k: int = 256  # rows that keys and values are projected to
        share: Literal["headwise", "kv"] = "headwise"  # a layer's heads share projections; kv: keys and values too

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "k")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        return {"k": keys}

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        # entries of variance 1/k, the paper's Johnson-Lindenstrauss projection; [max_length, k]
        count = 1 if config.share == "kv" else 2
        self.projections = nn.ParameterList(
            nn.Parameter(torch.randn(spec.max_length, config.k) * config.k**-0.5) for _ in range(count)
        )

    def resolve(self, device: torch.device, precision: str) -> str:
        return f"{super().resolve(device, precision)} of {self.spec.max_length} tokens projected to {self.config.k}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        past_BN11 = ~batch.mask()[:, :, None, None]
        q_BHND = batch.pad(q).transpose(1, 2)
        k_BNHD, v_BNHD = (batch.pad(x).masked_fill(past_BN11, 0) for x in (k, v))
        # where background is left out a token still has its place in the image
        place_BN = None if batch.positions is None else batch.pad(batch.positions.long())
        k_BHKD = self._project(k_BNHD, self.projections[0], place_BN)
        v_BHKD = self._project(v_BNHD, self.projections[-1], place_BN)
        p_BHNK = (q_BHND @ k_BHKD.transpose(2, 3) * self.spec.head_dim**-0.5).softmax(-1)
        p_BHNK = F.dropout(p_BHNK, self.dropout_rate)
        o_BNHD = (p_BHNK.to(v.dtype) @ v_BHKD).transpose(1, 2)
        return batch.unpad(o_BNHD.masked_fill(past_BN11, 0))

    def _project(self, x_BNHD: Tensor, projection: Tensor, place_BN: Tensor | None) -> Tensor:
        """Position i always meets row i, so the first rows serve shorter sequences."""
        if place_BN is None:
            return torch.einsum("bnhd,nk->bhkd", x_BNHD, projection[: x_BNHD.shape[1]].to(x_BNHD.dtype))
        return torch.einsum("bnhd,bnk->bhkd", x_BNHD, F.embedding(place_BN, projection).to(x_BNHD.dtype))
