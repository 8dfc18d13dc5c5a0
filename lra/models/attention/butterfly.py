"""Block-sparse attention over a butterfly of blocks: Triton on a GPU, plain PyTorch elsewhere."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lra.batch import Batch
from lra.errors import UsageError
from lra.kernels import block_sparse_attention
from lra.kernels.block_sparse import layouts
from lra.kernels.flash import resolve_impl
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec


@ATTENTIONS.register(
    "butterfly",
    exact=False,
    head_dims=(16, 128),
    paper="Dao et al. 2022, arXiv 2205.14135, Algorithm 5; Pixelated Butterfly, arXiv 2112.00029",
)
class ButterflyAttention(Attention):
    """Block-sparse FlashAttention: a butterfly of blocks, their neighbours and the first tokens are seen."""

    @dataclass(frozen=True)
    class Config:
        block: str = "128"  # tokens of a square block, or "16x256": queries by keys
        factors: int | None = None  # of the butterfly; all by default
        local: int = 0  # blocks seen to either side
        globals: int = 0  # the first tokens, which see all and are seen by all
        density: float | None = None  # share of pairs seen, at most: picks the factors
        impl: Literal["auto", "triton", "gather"] = "auto"  # auto: triton on a GPU, gather elsewhere
        deterministic: bool = False  # gradients bitwise equal over runs, at some cost in speed

        @property
        def sides(self) -> tuple[int, int]:
            """Queries and keys of a block."""
            rows, _, columns = self.block.partition("x")
            return int(rows), int(columns or rows)

        def __post_init__(self) -> None:
            if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*)?", self.block):
                raise UsageError(f"attn.block={self.block} is no block: give a side, 128, or queries by keys, 16x256")
            if max(self.sides) % min(self.sides):
                raise UsageError(f"attn.block={self.block}: one side must divide the other")
            for name in ("factors", "local", "globals"):
                if (getattr(self, name) or 0) < 0:
                    raise UsageError(f"attn.{name}={getattr(self, name)} must be at least 0")
            if self.density is not None and not 0 < self.density <= 1:
                raise UsageError(f"attn.density={self.density} must be above 0 and at most 1")
            if self.density is not None and self.factors is not None:
                raise UsageError("attn.density picks the factors: give it or attn.factors, not both")

    def __init__(self, config: Any, spec: AttentionSpec):
        super().__init__(config, spec)
        self.layout, self._built = _build(config, spec.max_length)

    def resolve(self, device: torch.device, precision: str) -> str:
        name = super().resolve(device, precision)
        try:
            impl = resolve_impl(self.config.impl, device, self.config.deterministic, "gather")
        except ValueError as error:
            raise UsageError(f"attn.{error}") from None
        if impl == "triton" and any(side % 16 for side in self.config.sides):
            raise UsageError(
                f"attn.block={self.config.block}: Triton takes multiples of 16; give one, or attn.impl=gather"
            )
        return f"{name} by {impl}, {self._built}"

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        seed = self.dropout_seed(batch)
        assert self.layout is not None
        return block_sparse_attention(
            q, k, v, self.layout, start=batch.start, length=batch.length, max_length=batch.max_length,
            index=batch.index, dropout=0.0 if seed is None else self.spec.dropout, seed=seed, impl=self.config.impl,
            deterministic=self.config.deterministic,
        )  # fmt: skip


@functools.cache
def _build(config: ButterflyAttention.Config, n: int) -> tuple[Layout, str]:
    """The layout of sequences of at most n tokens, one for all layers, and what it is, for the user."""
    rest = layouts.local(n, config.sides, config.local, globals=config.globals)
    factors, most = config.factors, layouts.count_factors(n, config.sides)
    try:
        if config.density is not None:
            factors = layouts.fit_factors(n, config.sides, config.density, rest)
        layout = layouts.butterfly(n, config.sides, factors) | rest
    except ValueError as error:
        raise UsageError(f"attn.{error}, with {n} tokens and attn.block={config.block}") from None
    count = most if factors is None else factors
    block = "x".join(map(str, config.sides))
    return layout, f"{count} of {most} factors in blocks of {block}, density {layout.density(n):.4f}"
