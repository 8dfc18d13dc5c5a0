"""Longformer's attention: a sliding window and global tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention
from lra.models.attention.options import BlockSparseConfig, check_option_counts


@ATTENTIONS.register(
    "longformer",
    exact=False,
    cost="N · (window + globals)",
    causal=True,
    head_dims=(1, 128),
    paper="Beltagy et al. 2020, arXiv 2004.05150",
)
class LongformerAttention(BlockSparseAttention):
    """Longformer: a sliding window is seen, and the first tokens see all and are seen by all.

    A token sees itself and `window // 2` tokens to either side. The window of 512 is the paper's, and that of the Long
    Range Arena; the one global token is the paper's choice for classification, where it is CLS. Its second projections,
    for global attention alone, and its dilated windows are left out.
    """

    @dataclass(frozen=True)
    class Config(BlockSparseConfig):
        window: int = 512  # tokens, in all: half of them to either side
        globals: int = 1  # first tokens, which see all and are seen by all

        def __post_init__(self) -> None:
            check_option_counts(self, 1, "window")
            check_option_counts(self, 0, "globals")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """The global token and the token itself are keys too."""
        return {"window": max(1, keys - 2), "globals": 1}

    @classmethod
    def make_layout(cls, config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
        n = spec.max_length
        rules = {"globals": min(config.globals, n), "causal": spec.causal}
        layout = layouts.window(n, band=min(config.window // 2, n), **rules)
        return layout, f"window {config.window}, globals {config.globals}"
