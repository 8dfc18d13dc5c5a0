"""One attention at one size, built by name and called as the model calls it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.bench.sparse import PEERS
from lra.config.options import parse_options
from lra.config.sources import split_reference
from lra.errors import UsageError
from lra.kernels.flash.layout import Layout
from lra.models.attention import ATTENTIONS
from lra.models.attention.base import Attention, AttentionSpec

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class BenchmarkCase:
    """What is measured, apart from the pass."""

    attention: str  # name[:field=value…]
    dtype: str  # one of DTYPES
    head_dim: int
    dropout: float
    lengths: tuple[int, ...]
    heads: int
    span: int = 0  # tokens that a layout covers, if more than the longest sequence has

    @property
    def full(self) -> bool:
        """Whether all sequences have one length, so that no mask is needed."""
        return len(set(self.lengths)) == 1

    @property
    def padded_length(self) -> int:
        """N: the longest length, or with a padding mask the length to which each sequence is padded."""
        return self.span or max(self.lengths)

    @property
    def flops(self) -> int:
        """FLOPs of the dense forward pass: two products of 2 N^2 D for each sequence and head."""
        return 4 * self.heads * self.head_dim * sum(n * n for n in self.lengths)

    def density(self, layout: Layout | None) -> float:
        """The share of these FLOPs whose pairs are seen."""
        if layout is None:
            return 1.0
        seen = {n: layout.density(n) * n * n for n in set(self.lengths) - {0}} | {0: 0.0}
        return sum(seen[n] for n in self.lengths) / sum(n * n for n in self.lengths)

    def small(self, layout: Layout | None = None) -> BenchmarkCase:
        """A case of the same kind with a few hundred rows, where all heads and sequences can be checked.

        With a layout it has its first four rows of blocks and a part of the fifth, as a small butterfly would see
        everything.
        """
        n = 200 if layout is None else 4 * max(layout.block) + 72
        lengths = (n, n) if self.full else (n, 0, 67, n - 70)
        return dataclasses.replace(self, lengths=lengths, heads=2, span=0 if layout is None else max(self.lengths))

    def build(self, device: torch.device) -> Attention:
        """The attention in training mode. UsageError if it does not support the case on the device."""
        name, cls = attention_class(self.attention)
        config = parse_options(cls.Config, self.attention.split(":")[1:], f"attns={name}: ")
        spec = AttentionSpec(self.heads, self.head_dim, max(self.span, *self.lengths), self.dropout)
        attention = cls(config, spec)
        attention.resolve(device, "fp32" if self.dtype == "fp32" else "bf16")  # what takes bf16 takes fp16
        return attention.to(device, TORCH_DTYPES[self.dtype]).train()


def attention_class(attention: str) -> tuple[str, Any]:
    """The name in `name[:field=value…]` and its class. UsageError if it is unknown, not installed or a mixer."""
    name = attention.partition(":")[0]
    cls = (PEERS if "@" in name else ATTENTIONS).get(name)
    if cls.facts.mixes:
        raise UsageError(
            f"{name} is a mixer, which has no queries, keys and values to time: use lra bench step task=… attn={name}"
        )
    return name, cls


def attention_names() -> tuple[str, ...]:
    """All names of the catalogue that `lra bench attention` measures: those of attentions, without mixers."""
    return tuple(name for name, entry in ATTENTIONS.catalogue().items() if not ATTENTIONS.facts_of(entry).mixes)


def import_named(attention: str) -> str:
    """Imports an attention that `attn=` would take as a module or file, and returns `name[:field=value…]`."""
    parts = attention.split(":")
    reference = ":".join(itertools.takewhile(lambda part: "=" not in part, parts))
    if parts[0] in ATTENTIONS.catalogue() or not split_reference(reference)[0] or "@" in parts[0]:
        return attention
    return ATTENTIONS.get(reference).name + attention.removeprefix(reference)


def has_reference_dropout(attention: Attention, device: torch.device) -> bool:
    """Whether the dropout mask of an attention is the one that the reference defines."""
    # every kernel of Triton draws that mask
    return bool(attention.fallback) and attention.choose_impl(device) == "triton"


def make_batch(
    lengths: Sequence[int], padded: bool, device: torch.device, index: Tensor | None = None, seed: Tensor | None = None
) -> Batch:
    """A batch of these lengths without tokens. `index` is 0, 1, ... by default."""
    length = torch.tensor(lengths, dtype=torch.int32)
    start = torch.arange(len(lengths)) * max(lengths) if padded else length.cumsum(0) - length
    total = len(lengths) * max(lengths) if padded else sum(lengths)
    return Batch(
        tokens=torch.zeros(1, dtype=torch.int32, device=device).expand(total),
        start=start.int().to(device),
        length=length.to(device),
        max_length=max(lengths),
        label=torch.zeros(len(lengths), dtype=torch.int64, device=device),
        index=torch.arange(len(lengths), dtype=torch.int32, device=device) if index is None else index,
        seed=torch.tensor(1234, device=device) if seed is None else seed,
    )


def call_attention(attention: Attention, q: Tensor, k: Tensor, v: Tensor, batch: Batch, full: bool) -> Tensor:
    """`[T, H, D]` to the same.

    Args:
        full: every length is max_length, so an attention with a `dense` form gets no mask.
    """
    dense: Any = getattr(attention, "dense", None)
    if full and dense:
        return dense(*(x.unflatten(0, (batch.size, batch.max_length)) for x in (q, k, v))).flatten(0, 1)
    return attention.attend(q, k, v, batch)
