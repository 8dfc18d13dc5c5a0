"""PyTorch's `scaled_dot_product_attention`, for comparison: FlashAttention-2 on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels import flash_attention
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention

# (q, k, v [T, H, D], bounds int32 [B + 1], max_length) -> [T, H, D]: sequence b is the rows bounds[b] : bounds[b + 1]
VarlenFunction = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


@ATTENTIONS.register("sdpa", exact=True, cost="N²", causal=True, head_dims=(1, 256), paper="Dao 2023, arXiv 2307.08691")
class SdpaAttention(Attention):
    """PyTorch's scaled_dot_product_attention: FlashAttention-2 on a GPU.

    On a GPU it takes bf16 alone, and head dimensions that are multiples of 8.
    """

    @dataclass(frozen=True)
    class Config:
        """It has no options."""

    def resolve(self, device: torch.device, precision: str) -> str:
        super().resolve(device, precision)
        if device.type != "cuda":
            return "sdpa by PyTorch's CPU kernels"
        if precision == "fp32":
            raise UsageError("attn=sdpa is FlashAttention-2 on a GPU, which has no fp32: set trainer.precision=bf16")
        if self.spec.head_dim % 8:
            raise UsageError(
                f"attn=sdpa supports head dimensions that are multiples of 8 on a GPU, not {self.spec.head_dim}"
            )
        return "sdpa by FlashAttention-2"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        if q.is_cuda:
            return attend_packed(self._varlen, q, k, v, batch)
        sequences = {"start": batch.start, "length": batch.length, "max_length": batch.max_length}
        return flash_attention(q, k, v, **sequences, causal=self.spec.causal, dropout=self.dropout_rate, impl="sdpa")

    def dense(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention of sequences that all have N tokens, `[B, N, H, D]` to the same: no mask, no copy."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        options: dict[str, Any] = {"dropout_p": self.dropout_rate, "is_causal": self.spec.causal}
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION) if q.is_cuda else nullcontext():
            return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    def _varlen(self, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int) -> Tensor:
        q, k, v = (last_dim_contiguous(x) for x in (q, k, v))
        # what PyTorch's nested tensors call; its public varlen_attn has no dropout
        return torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, max_length, max_length, self.dropout_rate, self.spec.causal, False,
            scale=q.shape[-1] ** -0.5,
        )[0]  # fmt: skip


def last_dim_contiguous(x: Tensor) -> Tensor:
    """`x`, copied only if its last dimension is strided: FlashAttention takes every other stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def attend_packed(varlen: VarlenFunction, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
    """`varlen` of a batch in either layout, `[T, H, D]` to `[T, H, D]`. Waits for no device.

    The rows of a padded batch are moved together, and back. `varlen` sees T rows also then: what it returns for
    those past the last sequence, and their gradients, are never read.
    """
    bounds = F.pad(batch.length.cumsum(0, dtype=torch.int32), (1, 0))
    if not batch.padded:
        return varlen(q, k, v, bounds, batch.max_length)
    total = len(q)
    position = torch.arange(batch.max_length, device=q.device)
    # the packed row of each padded one, `total` of padding
    slot = torch.where(position < batch.length[:, None], bounds[:-1, None] + position, total).flatten()
    q, k, v = (x.new_zeros(total + 1, *x.shape[1:]).index_copy(0, slot, x)[:total] for x in (q, k, v))
    out = varlen(q, k, v, bounds, batch.max_length)
    return torch.cat([out, out.new_zeros(1, *out.shape[1:])]).index_select(0, slot)
