"""One split of a prepared store, and how rows of it become a batch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lra.batch import Batch

Rows = np.ndarray | Sequence[int]
IGNORED = -100  # label of what fills a batch up: cross-entropy leaves it out


@dataclass(frozen=True, eq=False)
class Split:
    """`n` labelled sequences: sequence `i` is `tokens[starts[i] : starts[i] + lengths[i]]`."""

    tokens: np.ndarray  # uint8 or uint16 [sum of lengths], memory-mapped
    starts: np.ndarray  # int64 [n]
    lengths: np.ndarray  # int64 [n]
    labels: np.ndarray  # int64 [n]

    @classmethod
    def from_offsets(cls, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray | None = None) -> Split:
        """Sequences that lie end to end. `offsets`: int64 `[n + 1]`; without `labels` they are all 0."""
        return cls(
            tokens, offsets[:-1], np.diff(offsets), np.zeros(len(offsets) - 1, np.int64) if labels is None else labels
        )

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
        threshold: int | None = None,
        index: Rows | None = None,
        multiple: int = 1,
    ) -> Batch:
        """The batch of these rows (int `[B]`, any order, repeats allowed) on `device`.

        Of each sequence the first `max_length` tokens are kept, and with `threshold` only those of them whose id is at
        least that; these keep their positions, which the batch then carries. `prefix` is a token id put before every
        sequence (CLS): lengths, positions and the batch's `max_length` then grow by one. `layout="packed"` leaves no
        gaps and `max_length` of the batch is its longest sequence; `"padded"` gives every sequence the full
        `max_length` rows, zeros past its length. `index` is the place of each sequence in the global batch, by
        default 0, 1, ...

        With `multiple` a packed batch has a multiple of as many rows, so that batches have few shapes: an even number
        of sequences of zeros follow, with the label that a loss ignores, and `max_length` is not the longest one's.
        """
        device = torch.device(device)
        rows = np.asarray(rows, np.int64)
        head = int(prefix is not None)
        first, kept = self.starts[rows], np.minimum(self.lengths[rows], max_length)
        pieces = [
            self.tokens[start : start + count] for start, count in zip(first.tolist(), kept.tolist(), strict=True)
        ]
        places: list[np.ndarray] = []
        if threshold is not None:
            places = [np.flatnonzero(piece >= threshold) for piece in pieces]
            pieces = [piece[place] for piece, place in zip(pieces, places, strict=True)]
            kept = np.array([len(piece) for piece in pieces], np.int64)
        lengths, labels = kept + head, self.labels[rows]
        index = np.arange(len(rows)) if index is None else index
        if layout == "padded":
            longest = max_length + head
            starts, total = np.arange(len(rows)) * longest, len(rows) * longest
        elif layout == "packed":
            longest = int(lengths.max(initial=0))
            if multiple > 1:
                longest = max_length + head
                filling = _shares(-int(lengths.sum()) % multiple, 2 * math.ceil(multiple / longest))
                lengths, labels, index = (
                    np.concatenate([field, filler])
                    for field, filler in ((lengths, filling), (labels, 0 * filling + IGNORED), (index, 0 * filling))
                )
            total = int(lengths.sum())
            starts = np.minimum(np.cumsum(lengths) - lengths, max(total - 1, 0))  # of nothing at the end, a row, too
        else:
            raise ValueError(f"layout is packed or padded, not {layout}")

        # Few transfers: the tokens in their small dtype, and everything per sequence. Each field begins at a multiple
        # of 16 bytes, because Triton compiles a kernel anew for pointers that do not.
        pinned = device.type == "cuda"
        tokens = torch.zeros(total, dtype=_TORCH[self.tokens.dtype.str], pin_memory=pinned)
        _lay(tokens.numpy(), starts + head, pieces)
        positions: Tensor | None = None
        if threshold is not None:
            positions = torch.zeros(total, dtype=torch.int32, pin_memory=pinned)
            _lay(positions.numpy(), starts + head, [place + head for place in places])
            positions = positions.to(device, non_blocking=pinned)
        fields = torch.zeros(4, -(-len(lengths) // 4) * 4, dtype=torch.int32, pin_memory=pinned)
        for field, values in zip(fields.numpy(), (starts, lengths, index, labels), strict=True):
            field[: len(lengths)] = values

        ids: Tensor = tokens.to(device, non_blocking=pinned).to(torch.int32)
        start, length, index_b, label = fields.to(device, non_blocking=pinned)[:, : len(lengths)]
        if prefix is not None:
            ids.index_fill_(0, start[: len(rows)].long(), prefix)
        return Batch(ids, start, length, longest, label.long(), index_b, positions)


@dataclass(frozen=True, eq=False)
class Pairs:
    """`n` labelled pairs of sequences out of one collection, where each is stored once."""

    documents: Split
    pairs: np.ndarray  # int64 [n, 2], places in documents
    labels: np.ndarray  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens of the two sequences of a pair."""
        one, other = self.pairs[row]
        return self.documents[one], self.documents[other]

    def gather(self, rows: Rows, device: torch.device | str, *, index: Rows | None = None, **options: Any) -> Batch:
        """The batch of these pairs as twice as many sequences, the two of a pair side by side; else as `Split.gather`.

        `index` is the place of each pair in the global batch; its label stands once.
        """
        rows = np.asarray(rows, np.int64)
        place = np.arange(len(rows)) if index is None else np.asarray(index, np.int64)
        both = (2 * place[:, None] + (0, 1)).ravel()
        sequences = self.documents.subset(self.pairs[rows].ravel())
        labelled = dataclasses.replace(sequences, labels=self.labels[rows].repeat(2))
        batch = labelled.gather(np.arange(len(both)), device, index=both, **options)
        return dataclasses.replace(batch, label=batch.label[::2])


Examples = Split | Pairs


def _shares(total: int, count: int) -> np.ndarray:
    """`total` in `count` nearly equal parts, int64."""
    return np.diff(np.arange(count + 1) * total // count)


def _lay(target: np.ndarray, starts: np.ndarray, pieces: Sequence[np.ndarray]) -> None:
    for start, piece in zip(starts.tolist(), pieces, strict=False):  # what fills up has no pieces
        target[start : start + len(piece)] = piece


_TORCH = {"|u1": torch.uint8, "<u2": torch.uint16}
