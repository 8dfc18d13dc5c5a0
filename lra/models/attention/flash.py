"""The kernels of `lra.kernels.flash` as an attention: Triton on a GPU, PyTorch's SDPA elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lra.batch import Batch
from lra.kernels import flash_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention


@ATTENTIONS.register(
    "flash",
    exact=True,
    cost="N²",
    causal=True,
    head_dims=(1, 128),
    paper="Dao et al. 2022, arXiv 2205.14135",
)
class FlashAttention(Attention):
    """FlashAttention: exact attention in tiles, without the N x N scores in memory."""

    fallback = "sdpa"

    @dataclass(frozen=True)
    class Config:
        impl: Literal["auto", "triton", "sdpa"] = "auto"  # auto: triton on a GPU, sdpa elsewhere
        deterministic: bool = False  # gradients bitwise equal over runs, at some cost in speed

    def resolve(self, device: torch.device, precision: str) -> str:
        return f"{super().resolve(device, precision)} by {self.choose_impl(device)}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        seed = self.dropout_seed(batch)
        return flash_attention(
            q, k, v, start=batch.start, length=batch.length, max_length=batch.max_length, index=batch.index,
            causal=self.spec.causal, dropout=0.0 if seed is None else self.spec.dropout, seed=seed,
            impl=self.config.impl, deterministic=self.config.deterministic,
        )  # fmt: skip
