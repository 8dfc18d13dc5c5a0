"""What attentions that are a layout on the block-sparse kernels share. Triton on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels import block_sparse_attention
from lra.kernels.flash.layout import Layout
from lra.models.attention.base import Attention, AttentionSpec
from lra.models.attention.options import BlockConfig, BlockSparseConfig

MOST_BLOCKS = 1 << 24  # of a layout, which is made from a table of them: 65,536 tokens in blocks of 16


class BlockSparseAttention(Attention):
    """Base class: an heir declares its options and gives `make_layout`."""

    layout: Layout
    fallback = "gather"
    sized_by: ClassVar[str] = "block"  # the option that sets the sides of the blocks
    by_layer: ClassVar[bool] = False  # whether layers see different keys

    class Config(BlockSparseConfig):
        """An heir adds its own."""

    @classmethod
    def make_layout(cls, config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
        """What is seen in sequences of at most `spec.max_length` tokens, and by which options, for the user."""
        raise NotImplementedError

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        spec = spec if self.by_layer else dataclasses.replace(spec, layer=0)
        self.layout, self._built = _build(type(self), config, spec)

    def resolve(self, device: torch.device, precision: str) -> str:
        name, impl = super().resolve(device, precision), self.choose_impl(device)
        if impl == "triton" and any(side % 16 for side in self.layout.block):
            size = f"attn.{self.sized_by}={getattr(self.config, self.sized_by)}"
            raise UsageError(f"{size}: Triton takes multiples of 16; give one, or attn.impl=gather")
        return f"{name} by {impl}, {self._built}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        seed = self.dropout_seed(batch)
        return block_sparse_attention(
            q, k, v, self.layout, start=batch.start, length=batch.length, max_length=batch.max_length,
            index=batch.index, dropout=0.0 if seed is None else self.spec.dropout, seed=seed, impl=self.config.impl,
            deterministic=self.config.deterministic,
        )  # fmt: skip


def check_blocks(given: str, tokens: int, sides: tuple[int, int]) -> None:
    """UsageError if so many tokens are more blocks than a layout can be made of."""
    rows, columns = (math.ceil(tokens / side) for side in sides)
    if rows * columns > MOST_BLOCKS:
        raise UsageError(f"{given}: {tokens} tokens would be {rows} x {columns} blocks, choose larger")


@functools.cache
def _build(cls: type[BlockSparseAttention], config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
    """The layout, one for all layers that see the same, and what it is, for the user."""
    if isinstance(config, BlockConfig):
        check_blocks(f"attn.block={config.block}", spec.max_length, config.sides)
    layout, options = cls.make_layout(config, spec)
    block = "x".join(map(str, layout.block))
    return layout, f"{options} in blocks of {block}, density {layout.density(spec.max_length):.4f}"
