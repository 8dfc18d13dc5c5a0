"""Block-sparse attention over a butterfly of blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lra.errors import UsageError
from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention
from lra.models.attention.options import BlockConfig, check_option_counts


@ATTENTIONS.register(
    "butterfly",
    exact=False,
    cost="N · block · (1 + factors + 2 local) + N · globals",
    causal=True,
    head_dims=(1, 128),
    paper="Dao et al. 2022, arXiv 2205.14135, Algorithm 5; Pixelated Butterfly, arXiv 2112.00029",
)
class ButterflyAttention(BlockSparseAttention):
    """Block-sparse FlashAttention: a butterfly of blocks, their neighbours and the first tokens are seen."""

    @dataclass(frozen=True)
    class Config(BlockConfig):
        factors: int | None = None  # of the butterfly; null: all
        local: int = 0  # blocks seen to either side
        globals: int = 0  # first tokens, which see all and are seen by all
        density: float | None = None  # largest share of pairs that is seen; picks the factors

        def __post_init__(self) -> None:
            super().__post_init__()
            check_option_counts(self, 0, "factors", "local", "globals")
            if self.density is not None and not 0 < self.density <= 1:
                raise UsageError(f"attn.density={self.density} must be above 0 and at most 1")
            if self.density is not None and self.factors is not None:
                raise UsageError("attn.density picks the factors: give it or attn.factors, not both")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """Two blocks a row, the block itself and one factor, of 16 tokens at least, as the kernels take them."""
        side = next((side for side in (128, 64, 32) if 2 * side <= keys), 16)
        return {"block": str(side), "factors": 1}

    @classmethod
    def make_layout(cls, config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
        n = spec.max_length
        rest = layouts.local(n, config.sides, config.local, globals=config.globals, causal=spec.causal)
        factors, most = config.factors, layouts.count_factors(n, config.sides)
        try:
            if config.density is not None:
                factors = layouts.fit_factors(n, config.sides, config.density, rest)
            layout = layouts.butterfly(n, config.sides, factors, causal=spec.causal) | rest
        except ValueError as error:
            raise UsageError(f"attn.{error}, with {n} tokens and attn.block={config.block}") from None
        return layout, f"{most if factors is None else factors} of {most} factors"
