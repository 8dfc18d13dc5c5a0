"""The arguments of attention other than q, k and v. The Triton path and the fallbacks share them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lra.kernels.flash.layout import ALL_TILES, Layout, Visits, find_layout

# what a pass reads of its sequences: start, length, seed, index
SequenceTensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
# (q, k, v, sequences) to (result, softmax); (q, k, v, result, softmax, do, sequences) to (dq, dk, dv)
ForwardPass = Callable[[Tensor, Tensor, Tensor, SequenceTensors], tuple[Tensor, Tensor]]
BackwardPass = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, SequenceTensors], tuple[Tensor, Tensor, Tensor]
]


@dataclass(frozen=True)
class Problem:
    """`B` sequences in `T` rows, and how attention treats them. Tensors are on the device of q."""

    start: Tensor  # int32 [B], first row of each sequence
    length: Tensor  # int32 [B]
    max_length: int  # at least max(length), on the host
    padded: bool  # whether a sequence owns max_length rows; else rows are packed, and it owns length rows
    causal: bool
    scale: float
    threshold: int  # dropout drops a weight whose random byte is below it; 0 means no dropout
    seed: Tensor | None = None  # int64, one element; only with dropout
    index: Tensor | None = None  # int32 [B], place in the global batch; only with dropout
    deterministic: bool = False  # gradients are bitwise equal over runs: no sum may change its order
    layout: int | None = None  # key of a `Layout`; without it every query sees every key

    @property
    def size(self) -> int:
        return self.start.numel()

    @property
    def sequences(self) -> SequenceTensors:
        return self.start, self.length, self.seed, self.index

    @property
    def numbers(self) -> tuple[Hashable, ...]:
        """All but the sequences."""
        return (
            self.max_length, self.padded, self.causal, self.scale, self.threshold, self.deterministic, self.layout
        )  # fmt: skip

    @property
    def padded_length(self) -> int:
        """The rows that a sequence owns at least, whatever its length."""
        return self.max_length if self.padded else 0

    @property
    def pattern(self) -> Layout | None:
        return None if self.layout is None else find_layout(self.layout)

    def visits(self, rows: int, columns: int, device: torch.device, by_key: bool = False) -> Visits:
        """The tiles that each tile of queries visits, or each tile of keys."""
        return ALL_TILES if self.pattern is None else self.pattern.visits(rows, columns, device, by_key)

    @property
    def rules(self) -> dict[str, Any]:
        """The constants of the kernels that decide on pairs of tokens in visited tiles."""
        if self.pattern is None:
            return dict(CAUSAL=self.causal, BAND=None, GLOBALS=0)
        return dict(CAUSAL=self.pattern.causal, BAND=self.pattern.band, GLOBALS=self.pattern.globals)

    @property
    def dropout(self) -> float:
        """The probability that the kernels use."""
        return self.threshold / 256
