"""What attention computes, apart from q, k and v: shared by the Triton and the SDPA path."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lra.kernels.flash.layout import ALL_TILES, Layout, Visits, find_layout


@dataclass(frozen=True)
class Problem:
    """`B` sequences in `T` rows, and what to do with them. Tensors are on the device of q."""

    start: Tensor  # int32 [B], first row of each sequence
    length: Tensor  # int32 [B]
    max_length: int  # at least max(length), on the host
    padded: bool  # every sequence owns max_length rows; else the layout is packed and it owns length rows
    causal: bool
    scale: float
    threshold: int  # a score is dropped when its random byte is below this; 0 is no dropout
    seed: Tensor | None = None  # int64, one element; with dropout only
    index: Tensor | None = None  # int32 [B], place in the global batch; with dropout only
    deterministic: bool = False  # gradients bitwise equal over runs: no sum whose order may change
    layout: int | None = None  # key of a `Layout`; without it every query sees every key

    @property
    def size(self) -> int:
        return self.start.numel()

    @property
    def padded_length(self) -> int:
        """Rows that a sequence owns whatever its length."""
        return self.max_length if self.padded else 0

    @property
    def pattern(self) -> Layout | None:
        return None if self.layout is None else find_layout(self.layout)

    def visits(self, rows: int, columns: int, device: torch.device, by_key: bool = False) -> Visits:
        """The tiles that each tile of queries visits, or each tile of keys."""
        return ALL_TILES if self.pattern is None else self.pattern.visits(rows, columns, device, by_key)

    @property
    def rules(self) -> dict[str, Any]:
        """What is compiled into the kernels about pairs of tokens in visited tiles."""
        if self.pattern is None:
            return dict(CAUSAL=self.causal, BAND=None, GLOBALS=0)
        return dict(CAUSAL=self.pattern.causal, BAND=self.pattern.band, GLOBALS=self.pattern.globals)

    @property
    def dropout(self) -> float:
        """The probability actually used."""
        return self.threshold / 256
