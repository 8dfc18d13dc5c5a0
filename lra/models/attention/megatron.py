"""The kernels of `lra.kernels.softmax` as an attention: Triton on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lra.batch import Batch
from lra.kernels.softmax.materialized_attention import softmax_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention


@ATTENTIONS.register(
    "megatron",
    exact=True,
    cost="N², and so in memory",
    causal=True,
    ragged=False,
    paper="Shoeybi et al. 2019, arXiv 1909.08053",
)
class MegatronAttention(Attention):
    """Softmax attention that materialises the N x N scores; scale, mask, softmax and dropout are one kernel."""

    fallback = "torch"

    @dataclass(frozen=True)
    class Config:
        impl: Literal["auto", "triton", "torch"] = "auto"  # auto: triton on a GPU, torch elsewhere

    def resolve(self, device: torch.device, precision: str) -> str:
        return f"{super().resolve(device, precision)} by {self.choose_impl(device)}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        seed = self.dropout_seed(batch)
        out = softmax_attention(
            *(batch.pad(x) for x in (q, k, v)), length=batch.length, causal=self.spec.causal, index=batch.index,
            dropout=0.0 if seed is None else self.spec.dropout, seed=seed, impl=self.config.impl,
        )  # fmt: skip
        return out.flatten(0, 1)
