"""The Sparse Transformer's attention, in blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from lra.errors import UsageError
from lra.kernels.block_sparse import layouts
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import AttentionSpec
from lra.models.attention.block_sparse import BlockSparseAttention
from lra.models.attention.options import BlockConfig, check_option_counts


@ATTENTIONS.register(
    "openai_sparse",
    exact=False,
    cost="N · (stride + N / stride · summary)",
    causal=True,
    head_dims=(1, 128),
    paper="Child et al. 2019, arXiv 1904.10509",
)
class OpenAISparseAttention(BlockSparseAttention):
    """Sparse Transformer: a neighbourhood, and the ends of all segments or every stride-th block.

    `fixed`: the segment of `stride` tokens and the last `summary` of every segment. `strided`: `stride` tokens to
    either side and every `stride`-th position. Both are over blocks, as in the paper's kernels, and every head sees
    the union of the two parts, which the paper calls merged heads. The paper's are causal
    (`model.causal`), those of FlashAttention's benchmarks are not. The defaults of pattern, stride and summary are the
    paper's for text (enwik8). The Long Range Arena took segments of 50 tokens with 10 at their ends, but no block that
    is a multiple of 16 divides those.
    """

    @dataclass(frozen=True)
    class Config(BlockConfig):
        block: str = "32"  # tokens of a square block, or "16x256": queries by keys
        # what is seen beside the neighbourhood; fixed: ends of segments; strided: every stride-th position
        pattern: Literal["fixed", "strided"] = "fixed"
        stride: int = 128  # tokens, a multiple of the block's longer side
        summary: int | None = None  # tokens at the end of a segment, of pattern=fixed; null: the block's longer side

        def __post_init__(self) -> None:
            super().__post_init__()
            check_option_counts(self, 1, "stride", "summary")
            for name in ("stride", "summary"):
                if (getattr(self, name) or 0) % max(self.sides):
                    raise UsageError(
                        f"attn.{name}={getattr(self, name)} must be a multiple of {max(self.sides)}, as "
                        f"attn.block={self.block} has that side"
                    )
            if self.summary is not None and self.pattern != "fixed":
                raise UsageError("attn.summary is an option of attn.pattern=fixed: leave it out, or choose that")
            if (self.summary or 0) > self.stride:
                raise UsageError(f"attn.summary={self.summary} must be at most attn.stride={self.stride}")

    @classmethod
    def budget(cls, keys: int) -> dict[str, Any]:
        """A segment of `keys` tokens, at least 64, and of every other one the last eighth, at least 16.

        The ends come on top, as no stride does without: in sequences of 8 keys they are about as many again.
        """
        side = next((side for side in (128, 64, 32) if 8 * side <= keys), 16)
        return {"block": str(side), "stride": max(4 * side, keys // side * side), "summary": side}

    @classmethod
    def make_layout(cls, config: Any, spec: AttentionSpec) -> tuple[Layout, str]:
        n, side = spec.max_length, max(config.sides)
        stride, summary = config.stride // side, (config.summary or side) // side
        if config.pattern == "strided":
            return layouts.strided(n, config.sides, stride, causal=spec.causal), f"strided, stride {config.stride}"
        layout = layouts.fixed(n, config.sides, stride, summary, causal=spec.causal)
        return layout, f"fixed, stride {config.stride}, summary {summary * side}"
