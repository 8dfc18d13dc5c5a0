"""Local attention: a window of tokens, sliding along or cut into blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention, check_blocks
from lra.models.attention.options import BlockSparseConfig, check_option_counts


@ATTENTIONS.register(
    "local",
    exact=False,
    cost="N · window",
    causal=True,
    head_dims=(1, 128),
    paper="Dao et al. 2022, arXiv 2205.14135, Table 3; Tay et al. 2021, arXiv 2011.04006",
)
class LocalAttention(BlockSparseAttention):
    """Local attention: each token sees the window around it, or the block of tokens that it lies in.

    `sliding` is the Local Attention of FlashAttention's baselines (github.com/HazyResearch/fly): `window // 2` tokens
    to either side. There a query with an even window sees one token less after itself, so `window` keys; here it sees
    `window + 1`. Their windows are 64 on Text, Image and Pathfinder, 128 on ListOps and 256 on Retrieval. `blocks` is
    the one of Tay et al.: blocks of `window` tokens, which do not overlap. A CLS token would see its window only, so
    pool by the mean.
    """

    sized_by = "window"

    @dataclass(frozen=True)
    class Config(BlockSparseConfig):
        window: int = 64  # tokens that a query sees, on both sides together
        # sliding: around each token; blocks: the block that a token lies in
        pattern: Literal["sliding", "blocks"] = "sliding"

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "window")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        return {"window": keys}

    @classmethod
    def make_layout(cls, config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
        n = spec.max_length
        if config.pattern == "sliding":
            layout = layouts.window(n, band=min(config.window // 2, n), causal=spec.causal)
        else:
            check_blocks(f"attn.window={config.window}", n, (config.window, config.window))
            longest = -(-n // 128) * 128  # a longer block would show no more
            layout = layouts.local(n, min(config.window, longest), width=0, causal=spec.causal)
        return layout, f"{config.pattern}, window {config.window}"
