"""cuDNN's fused attention through PyTorch, for comparison."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention


@ATTENTIONS.register(
    "cudnn",
    exact=True,
    cost="N²",
    causal=True,
    dropout=False,  # only probabilities that are multiples of 1/16
    ragged=False,
    head_dims=(8, 128),
    head_dim_multiple=8,
    dtypes=("bf16",),
    needs_gpu=True,
    paper="NVIDIA cuDNN, fused attention",
)
class CudnnAttention(Attention):
    """cuDNN's fused attention, through PyTorch."""

    @dataclass(frozen=True)
    class Config:
        """It has no options."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        # a sequence of length 0 sees one column, as a softmax over nothing is NaN; its rows are zeroed like all padding
        if batch.max_length == 1:  # cuDNN takes two tokens or more; the weight of the only one is 1
            return v.masked_fill(~batch.mask().flatten()[:, None, None], 0)
        seen = None  # what is past a length is later than all that is not
        if not self.spec.causal:
            seen = (batch.mask() | (batch.length == 0)[:, None])[:, None, None, :]
        out = self.dense(batch.pad(q), batch.pad(k), batch.pad(v), seen)
        return out.masked_fill(~batch.mask()[:, :, None, None], 0).flatten(0, 1)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        """Attention of sequences that all have N tokens, `[B, N, H, D]` to the same; a mask costs half the speed."""
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            causal = self.spec.causal
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, is_causal=causal).transpose(1, 2)
