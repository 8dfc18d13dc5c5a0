"""PyTorch's FlexAttention, compiled, for comparison."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from lra.batch import Batch
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention

MASK_BLOCK = 128  # rows and columns that a BlockMask skips or computes together


@ATTENTIONS.register(
    "flex",
    exact=True,
    cost="N²",
    causal=True,
    dropout=False,
    ragged=False,
    head_dims=(16, 256),
    needs_gpu=True,  # PyTorch has no backward of it on the CPU
    paper="Dong et al. 2024, arXiv 2412.05496",
)
class FlexAttention(Attention):
    """PyTorch's FlexAttention, compiled to Triton."""

    @dataclass(frozen=True)
    class Config:
        mode: Literal["default", "max-autotune-no-cudagraphs"] = "default"  # of torch.compile

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        mask = length_mask(batch.length, batch.max_length, self.spec.causal)
        out = self.dense(batch.pad(q), batch.pad(k), batch.pad(v), mask)
        return out.masked_fill(~batch.mask()[:, :, None, None], 0).flatten(0, 1)

    def dense(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask | None = None) -> Tensor:
        """Attention of sequences that all have N tokens, `[B, N, H, D]` to the same."""
        attend: Any = _compiled(self.config.mode) if q.is_cuda else flex_attention
        return attend(*(x.transpose(1, 2) for x in (q, k, v)), block_mask=mask).transpose(1, 2)


@functools.cache
def _compiled(mode: str) -> Any:
    return torch.compile(flex_attention, mode=mode)


def length_mask(length: Tensor, max_length: int, causal: bool = False) -> BlockMask:
    """The mask that hides the columns past each length, and skips the rows of blocks with none before it.

    A causal mask hides the columns after each row instead: of a row before the length they include those past it.
    Both are those that `create_block_mask` makes from all B * N * N entries, without making those.
    """
    blocks = -(-max_length // MASK_BLOCK)
    block = torch.arange(blocks, dtype=torch.int32, device=length.device)
    # of each row of blocks: how many are wholly visible, and whether the next one is in part
    whole, rest = (length // MASK_BLOCK)[:, None], (length % MASK_BLOCK > 0)[:, None]  # [B, 1]
    if causal:
        whole, rest = block[None], torch.ones_like(block, dtype=torch.bool)[None]  # [1, blocks]
    has_rows = block * MASK_BLOCK < length[:, None]  # [B, blocks]
    shape = (len(length), 1, blocks, blocks)
    return BlockMask.from_kv_blocks(
        (rest & has_rows).int()[:, None],  # partly visible: the block at `whole`
        whole[:, None, :, None].expand(shape).clamp(max=blocks - 1).int().contiguous(),
        (whole * has_rows).int()[:, None],  # wholly visible: the blocks before it
        block.expand(shape).contiguous(),
        BLOCK_SIZE=MASK_BLOCK,
        mask_mod=(lambda b, h, i, j: j <= i) if causal else (lambda b, h, i, j: j < length[b]),
        seq_lengths=(max_length, max_length),
    )
