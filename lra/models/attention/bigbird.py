"""BigBird's attention: a window, global and random blocks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from lra.config.checks import check_at_least
from lra.errors import UsageError
from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention
from lra.models.attention.options import BlockConfig, check_option_counts


@ATTENTIONS.register(
    "bigbird",
    exact=False,
    cost="N · block · (window + globals + random)",
    causal=True,
    head_dims=(1, 128),
    paper="Zaheer et al. 2020, arXiv 2007.14062",
)
class BigBirdAttention(BlockSparseAttention):
    """BigBird: each block sees a window of blocks, the first ones, which see all, and random ones.

    The internal construction (BigBird-ITC), with the sizes of the paper, which are those of the Long Range Arena. The
    global blocks are the first ones, not the first and the last: sequences are ragged, and the last one is seldom full.
    Each head and layer has random blocks of its own. They are a function of `seed`, the layer, the number of heads and
    the longest sequence, so a checkpoint need not hold them.
    """

    by_layer = True

    @dataclass(frozen=True)
    class Config(BlockConfig):
        block: str = "64"  # tokens of a square block, or "16x256": queries by keys
        window: int = 3  # blocks that a block sees around it, itself included
        globals: int = 2  # first blocks, which see all and are seen by all
        random: int = 3  # other blocks that each block sees
        seed: int = 0  # of the random blocks

        def __post_init__(self) -> None:
            super().__post_init__()
            check_option_counts(self, 1, "window")
            check_option_counts(self, 0, "globals", "random")
            check_at_least(0, "attn", self, "seed")
            if self.window % 2 == 0:
                raise UsageError(f"attn.window={self.window} must be odd: a block and as many to either side")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """Four blocks, or three of 16 if keys are few: the block itself, a global one, the others random."""
        side = next((side for side in (64, 32) if 4 * side <= keys), 16)
        return {"block": str(side), "window": 1, "globals": 1, "random": max(1, keys // side - 2)}

    @classmethod
    def make_layout(cls, config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
        digest = hashlib.sha256(f"{config.seed}/{spec.layer}".encode()).digest()
        layout = layouts.bigbird(
            spec.max_length, config.sides, config.window // 2, config.globals, config.random,
            heads=spec.heads, seed=int.from_bytes(digest[:7], "big"), causal=spec.causal,
        )  # fmt: skip
        return layout, f"window {config.window}, globals {config.globals}, random {config.random}"
