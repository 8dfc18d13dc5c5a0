"""One split of a prepared store, and how rows of it become a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from lra.batch import Batch

Rows = np.ndarray | Sequence[int]


@dataclass(frozen=True, eq=False)
class Split:
    """`n` labelled sequences: sequence `i` is `tokens[starts[i] : starts[i] + lengths[i]]`."""

    tokens: np.ndarray  # uint8 or uint16 [sum of lengths], memory-mapped
    starts: np.ndarray  # int64 [n]
    lengths: np.ndarray  # int64 [n]
    labels: np.ndarray  # int64 [n]

    @classmethod
    def from_offsets(cls, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray) -> Split:
        """Sequences that lie end to end. `offsets`: int64 `[n + 1]`."""
        # np.asarray: the same mapped memory, without the cost of np.memmap at every slice
        return cls(np.asarray(tokens), np.asarray(offsets[:-1]), np.diff(np.asarray(offsets)), np.asarray(labels))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> np.ndarray:
        """Tokens of one sequence, `[length]`, read-only."""
        start = self.starts[row]
        return self.tokens[start : start + self.lengths[row]]

    def subset(self, rows: Rows) -> Split:
        """Only these rows, in this order, of the same mapped tokens."""
        return Split(self.tokens, self.starts[rows], self.lengths[rows], self.labels[rows])

    def gather(
        self,
        rows: Rows,
        device: torch.device | str,
        *,
        max_length: int,
        layout: Literal["packed", "padded"] = "packed",
        prefix: int | None = None,
        index: Rows | None = None,
    ) -> Batch:
        """The batch of these rows (int `[B]`, any order, repeats allowed) on `device`.

        Of each sequence the first `max_length` tokens are kept. `prefix` is a token id put before every sequence
        (CLS): lengths and the batch's `max_length` then grow by one. `layout="packed"` leaves no gaps and
        `max_length` of the batch is its longest sequence; `"padded"` gives every sequence the full
        `max_length` rows, zeros past its length. `index` is the place of each sequence in the global batch, by
        default 0, 1, ...
        """
        device = torch.device(device)
        rows = np.asarray(rows, np.int64)
        head = int(prefix is not None)
        kept = np.minimum(self.lengths[rows], max_length)
        lengths = kept + head
        if layout == "padded":
            longest = max_length + head
            starts, total = np.arange(len(rows)) * longest, len(rows) * longest
        elif layout == "packed":
            longest = int(lengths.max(initial=0))
            starts, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        else:
            raise ValueError(f"layout is packed or padded, not {layout}")

        # Two transfers: the tokens in their small dtype, and everything per sequence. Each field begins at a multiple
        # of 16 bytes, because Triton compiles a kernel anew for pointers that do not.
        pinned = device.type == "cuda"
        tokens = torch.zeros(total, dtype=_TORCH[self.tokens.dtype.str], pin_memory=pinned)
        target = tokens.numpy()
        copies = np.stack([starts + head, self.starts[rows], kept], axis=1)
        for place, source, count in copies.tolist():
            target[place : place + count] = self.tokens[source : source + count]
        fields = torch.zeros(4, -(-len(rows) // 4) * 4, dtype=torch.int32, pin_memory=pinned)
        index = np.arange(len(rows)) if index is None else index
        for field, values in zip(fields.numpy(), (starts, lengths, index, self.labels[rows]), strict=True):
            field[: len(rows)] = values

        ids: Tensor = tokens.to(device, non_blocking=pinned).to(torch.int32)
        start, length, index_b, label = fields.to(device, non_blocking=pinned)[:, : len(rows)]
        if prefix is not None:
            ids.index_fill_(0, start.long(), prefix)
        return Batch(ids, start, length, longest, label.long(), index_b)


_TORCH = {"|u1": torch.uint8, "<u2": torch.uint16}
