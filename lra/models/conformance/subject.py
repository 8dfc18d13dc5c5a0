"""A component as the checks see it: built on a device, given random rows, and called as the model calls it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.config.options import parse_options
from lra.config.override import Override
from lra.errors import UsageError
from lra.models.attention import ATTENTIONS, Capabilities
from lra.models.attention.base import AttentionSpec, Mixer

HEADS = 2
LENGTHS = (5, 0, 17, 1, 16)
LONG = (130, 0, 64, 33)  # more than one tile or block
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03}  # a difference that rounding explains, as `expect_near` has it
LAYOUTS = ("packed", "padded")


@dataclass(frozen=True)
class Subject:
    """An attention or mixer on a device, with its options. What differs between the two is in here alone."""

    name: str
    device: str = "cpu"
    options: tuple[str | Override, ...] = ()  # field=value of its Config

    @property
    def facts(self) -> Capabilities:
        return ATTENTIONS.get(self.name).facts

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """fp32, or bf16 if it has no fp32 on this device. UsageError if it has neither."""
        attention = self.build()
        try:
            attention.resolve(torch.device(self.device), "fp32")
        except UsageError:
            attention.resolve(torch.device(self.device), "bf16")
            return torch.bfloat16
        return torch.float32

    @property
    def head_dim(self) -> int:
        """The dimension next to 16 that it supports."""
        (low, high), multiple = self.facts.head_dims or (1, 1024), self.facts.head_dim_multiple
        return min(-(-max(low, 16) // multiple) * multiple, high // multiple * multiple)

    def build(self, seed: int = 0, **changes: Any) -> Mixer:
        """Returns the module of one layer, in training mode, with weights drawn from a seed.

        Args:
            changes: fields of AttentionSpec. The default max_length is that of LONG.
        """
        cls = ATTENTIONS.get(self.name)
        config = parse_options(cls.Config, self.options, f"attn={self.name}: ")
        spec = {"heads": HEADS, "head_dim": self.head_dim, "max_length": max(LONG), **changes}
        torch.manual_seed(seed)
        return cls(config, AttentionSpec(**spec)).to(self.device)

    def batch(self, lengths: Sequence[int] = LENGTHS) -> Batch:
        """Returns a packed batch of a training step."""
        length = torch.tensor(lengths, dtype=torch.int32, device=self.device)
        start, total = (length.cumsum(0) - length).int(), sum(lengths)
        index = torch.arange(len(lengths), dtype=torch.int32, device=self.device)
        tokens, label = length.new_zeros(total), length.new_zeros(len(lengths)).long()
        seed = torch.tensor(7, device=self.device)
        return Batch(tokens, start, length, max(*lengths, 1), label, index, seed=seed)

    def inputs(self, lengths: Sequence[int] = LENGTHS) -> list[Tensor]:
        """Returns random rows of a packed batch: q, k and v, `[T, H, D]` each, or those of a mixer, `[T, d_model]`.

        A mixer has x, and the residual if it reads it. The result has the shape of the last one.
        """
        generator = torch.Generator().manual_seed(0)
        total, width = sum(lengths), HEADS * self.head_dim
        mixed = 1 + self.facts.reads_residual
        shape = (mixed, total, width) if self.facts.mixes else (3, total, HEADS, self.head_dim)
        return list(torch.randn(shape, generator=generator).to(self.device, self.dtype))

    def call(self, module: Any, batch: Batch, *rows: Tensor) -> Tensor:
        """Returns the module's result for the rows of a batch."""
        if module.facts.mixes:
            x, *residual = rows
            return module.mix_ragged(x, batch, *residual)
        return module.attend(*rows, batch)

    def autocast_rows(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """Returns the rows as they come in a step with trainer.precision=bf16.

        A projection has made bf16 of queries, keys and values. What a norm hands to a mixer is fp32.
        """
        return [x if self.facts.mixes else x.bfloat16() for x in rows]


def rows_of(batch: Batch, sequence: int) -> slice:
    """Returns the rows of a sequence."""
    first = int(batch.start[sequence])
    return slice(first, first + int(batch.length[sequence]))


def mask_rows(batch: Batch, like: Tensor) -> Tensor:
    """Returns which rows of a padded batch are tokens, bool, broadcastable to `like` `[T, ...]`."""
    return batch.mask().flatten().view(-1, *[1] * (like.ndim - 1))


def in_layout(batch: Batch, layout: str, *tensors: Tensor, fill: float = 7.0) -> tuple[Batch, list[Tensor]]:
    """Returns a packed batch and its rows in a layout of LAYOUTS. Rows past a length are `fill`."""
    if layout == "packed":
        return batch, list(tensors)
    padded = batch.to_padded()
    rows = (batch.pad(x).flatten(0, 1) for x in tensors)
    return padded, [x.where(mask_rows(padded, x), fill) for x in rows]
