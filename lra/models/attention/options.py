"""What checks options of attentions, and what several share: without PyTorch, which is imported after such checks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from lra.config.options import parse_options
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS

LARGEST_COUNT = 1 << 16  # largest number of tokens, blocks or features in an option: a sequence of Path-256


def check_option_counts(config: Any, least: int, *names: str) -> None:
    """Raises a UsageError if an option of `attn.*` is below `least` or above LARGEST_COUNT. null is allowed."""
    for name in names:
        if (value := getattr(config, name)) is not None and not least <= value <= LARGEST_COUNT:
            raise UsageError(f"attn.{name}={value} must be at least {least} and at most {LARGEST_COUNT}")


@dataclass(frozen=True)
class BlockSparseConfig:
    """Options of every attention on the block-sparse kernels."""

    impl: Literal["auto", "triton", "gather"] = "auto"  # auto: triton on a GPU, gather elsewhere
    deterministic: bool = False  # gradients bitwise equal over runs, at some cost in speed


@dataclass(frozen=True)
class BlockConfig(BlockSparseConfig):
    """Options of a pattern whose blocks the user sizes."""

    block: str = "128"  # tokens of a square block, or "16x256": queries by keys

    @property
    def sides(self) -> tuple[int, int]:
        """Queries and keys of a block."""
        rows, _, columns = self.block.partition("x")
        return int(rows), int(columns or rows)

    def __post_init__(self) -> None:
        if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*)?", self.block):
            raise UsageError(f"attn.block={self.block} is no block: give a side, 128, or queries by keys, 16x256")
        if max(self.sides) > LARGEST_COUNT:
            raise UsageError(f"attn.block={self.block}: a side is at most {LARGEST_COUNT}")
        if max(self.sides) % min(self.sides):
            raise UsageError(f"attn.block={self.block}: one side must divide the other")


def parse_inner_attention(inner: str) -> tuple[str, Any]:
    """Returns the name and the options of the attention inside. UsageError for a name or option that can't be."""
    name, *options = inner.split() or [""]
    label = f"attn.inner={name}: "
    try:
        ATTENTIONS.find_usable(name)
        declared = ATTENTIONS.get_declared(name)
    except UsageError as error:
        raise UsageError(f"{label}{error}") from None
    facts = declared.facts
    if facts.mixes or facts.shared_qk or facts.rotates:
        why = "is a mixer" if facts.mixes else "makes keys of queries" if facts.shared_qk else "turns features itself"
        raise UsageError(f"{label}it {why}, and takes no queries, keys and values as they are: use another, as flash")
    return name, parse_options(declared.Config, options, label)
