"""A ragged batch of token sequences: data makes it, models read it, and attention relies on it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED_LABEL = -100  # label of what fills a batch up: cross-entropy leaves it out


@dataclass(frozen=True)
class Batch:
    """`B` sequences of different lengths, laid end to end in `T` token rows.

    Sequence `b` owns the rows `start[b] : start[b] + length[b]`. There are two layouts, and all code reads both through
    the same fields. *Packed* has no gaps (`T = sum(length)`). *Padded* gives every sequence `max_length` rows
    (`start = b * max_length`, `T = B * max_length`). Rows past a length hold arbitrary ids and influence nothing.
    """

    tokens: Tensor  # int [T]
    start: Tensor  # int32 [B]
    length: Tensor  # int32 [B]
    max_length: int  # on the host, so that kernels launch without a synchronisation; at least max(length), and 1
    label: Tensor  # int64 [examples]: [B], or [B / 2] where two sequences in a row are one example
    index: Tensor  # int32 [B], place of each sequence in the global batch: dropout depends on it, not on the rank
    positions: Tensor | None = None  # int [T]; None means 0, 1, ... within the sequence
    seed: Tensor | None = None  # int64 scalar, source of this step's attention dropout; None at evaluation

    @property
    def size(self) -> int:
        return self.start.numel()

    @property
    def padded(self) -> bool:
        """Whether every sequence owns `max_length` rows."""
        return self.tokens.numel() == self.size * self.max_length

    @property
    def padded_length(self) -> int:
        """The least number of rows that each sequence owns: 0 in the packed layout."""
        return self.max_length if self.padded else 0

    @property
    def cu_seqlens(self) -> Tensor:
        """The row at which each sequence begins, and T, int32 `[B + 1]`.

        Layers such as those of flash-linear-attention take it: sequence `b` owns the rows from `cu_seqlens[b]` to
        before `cu_seqlens[b + 1]`. In the packed layout these are its tokens alone. A packed batch of training may end
        in sequences that only fill its rows up, and they count as others do. In the padded layout a sequence owns
        `max_length` rows, so a layer that looks ahead also reads those past its length.
        """
        ends = self.start + self.max_length if self.padded else self.length.cumsum(0, dtype=torch.int32)
        return torch.nn.functional.pad(ends, (1, 0))

    def with_seed(self, seed: Tensor) -> Batch:
        return dataclasses.replace(self, seed=seed)

    def token_positions(self) -> Tensor:
        """The position of every row within its sequence, int64 `[T]`."""
        if self.positions is not None:
            return self.positions.long()
        rows = torch.arange(self.tokens.numel(), device=self.tokens.device)
        return rows % self.max_length if self.padded else rows - self.per_row(self.start.long())

    def per_row(self, values: Tensor) -> Tensor:
        """Each sequence's value `[B]`, repeated for each of its rows, `[T]`."""
        if self.padded:
            return values.repeat_interleave(self.max_length)
        return values.repeat_interleave(self.length.long(), output_size=self.tokens.numel())

    def mask(self) -> Tensor:
        """True for real tokens of the padded form, bool `[B, max_length]`."""
        return torch.arange(self.max_length, device=self.length.device) < self.length[:, None]

    def real_rows(self) -> Tensor:
        """Which rows are tokens of an example, bool `[T]`: not padding, nor what fills a packed batch up."""
        wanted_B = self.label.repeat_interleave(self.size // self.label.numel()) != IGNORED_LABEL
        rows_T = self.per_row(wanted_B)
        return rows_T & self.mask().flatten() if self.padded else rows_T

    def pad(self, rows: Tensor) -> Tensor:
        """Token rows `[T, ...]` in the padded form `[B, max_length, ...]`. If packed, there are zeros past each
        length.
        """
        shape = (self.size, self.max_length, *rows.shape[1:])
        if self.padded:
            return rows.reshape(shape)
        zeros = rows.new_zeros(self.size * self.max_length, *rows.shape[1:])
        return zeros.index_copy(0, self._slots, rows).view(shape)

    def unpad(self, padded: Tensor) -> Tensor:
        """The inverse of `pad`: `[B, max_length, ...]` to `[T, ...]`."""
        flat = padded.flatten(0, 1)
        return flat if self.padded else flat.index_select(0, self._slots)

    def to_padded(self) -> Batch:
        """The same sequences in the padded layout."""
        if self.padded:
            return self
        start = torch.arange(self.size, device=self.start.device, dtype=torch.int32) * self.max_length
        positions = None if self.positions is None else self.pad(self.positions).flatten()
        return dataclasses.replace(self, tokens=self.pad(self.tokens).flatten(), start=start, positions=positions)

    @property
    def _slots(self) -> Tensor:
        """The row of each packed token in the padded form, int64 `[T]`.

        It is kept, as an attention that needs the padded form asks four times in every layer. cached_property has a
        lock that torch.compile does not enter.
        """
        if "_kept" not in self.__dict__:
            total = self.tokens.numel()
            base = torch.arange(self.size, device=self.start.device) * self.max_length - self.start.long()
            rows = torch.arange(total, device=self.start.device)
            slots = rows + self.per_row(base)
            if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
                return slots  # autograd could not use it later
            object.__setattr__(self, "_kept", slots)
        return self.__dict__["_kept"]
