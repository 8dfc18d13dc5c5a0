"""One split of a prepared store, and how rows of it become a batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lra.data.collated import CollatedBatch

RowIndices = np.ndarray | Sequence[int]
IGNORED_LABEL = -100  # label of what fills a batch up: cross-entropy leaves it out


@dataclass(frozen=True, eq=False)
class Split:
    """`n` labelled sequences: sequence `i` is `tokens[starts[i] : starts[i] + lengths[i]]`.

    `lra.data.resident` has those whose tokens lie on a device; `cut`, `lay` and `read` are what differs.
    """

    tokens: np.ndarray  # uint8 or uint16 [sum of lengths], memory-mapped
    starts: np.ndarray  # int64 [n]
    lengths: np.ndarray  # int64 [n]
    labels: np.ndarray  # int64 [n]
    positions: np.ndarray | None = None  # int32, of every token in its sequence; None means 0, 1, ...

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

    def longest(self, rows: RowIndices) -> np.ndarray:
        """The length of each of these rows, int64."""
        return self.lengths[rows]

    def subset(self, rows: RowIndices) -> Split:
        """Only these rows, in this order, of the same mapped tokens."""
        return dataclasses.replace(self, starts=self.starts[rows], lengths=self.lengths[rows], labels=self.labels[rows])

    def collate(
        self,
        rows: RowIndices,
        *,
        max_length: int,
        layout: Literal["packed", "padded"] = "packed",
        prefix: int | None = None,
        threshold: int | None = None,
        share: float = 0.0,
        index: RowIndices | None = None,
        multiple: int = 1,
    ) -> CollatedBatch:
        """The batch of these rows (int `[B]`, any order, repeats allowed), not yet on a device.

        Of each sequence the first `max_length` tokens are kept, and with `threshold` only those of them whose id is at
        least that and those in a `share` of the places (`shared_places`); these keep their positions, which the batch
        then carries. `prefix` is a token id put before every
        sequence (CLS): lengths, positions and the batch's `max_length` then grow by one. `layout="packed"` leaves no
        gaps and `max_length` of the batch is its longest sequence; `"padded"` gives every sequence the full
        `max_length` rows, zeros past its length. `index` is the place of each sequence in the global batch, by
        default 0, 1, ...

        With `multiple` a packed batch has a multiple of as many rows, so that batches have few shapes: an even number
        of sequences of zeros follow, with the label that a loss ignores, and the batch's `max_length` is the given one,
        with a `threshold` the power of two at or above its longest sequence.
        """
        head = int(prefix is not None)
        chosen = self.subset(np.asarray(rows, np.int64)).cut(max_length, head, threshold, share)
        count, lengths, labels = len(chosen), chosen.lengths + head, chosen.labels
        index = np.arange(count) if index is None else index
        if len(index) != count:
            raise ValueError(f"{len(index)} places in the global batch for {count} sequences")
        if layout == "padded":
            longest = max_length + head
            begins, total = np.arange(count) * longest, count * longest
        elif layout == "packed":
            longest = int(lengths.max(initial=1))  # of empty ones alone, too: no dimension is 0
            if multiple > 1:
                # few values. What passes a threshold is a small part of a sequence, in all of them about as much
                most = max_length + head
                longest = most if threshold is None else min(most, 1 << (longest - 1).bit_length())
                filling = _split_evenly(-int(lengths.sum()) % multiple, 2 * math.ceil(multiple / longest))
                lengths, labels, index = (
                    np.concatenate([field, filler])
                    for field, filler in (
                        (lengths, filling),
                        (labels, 0 * filling + IGNORED_LABEL),
                        (index, 0 * filling),
                    )
                )
            begins, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        else:
            raise ValueError(f"layout is packed or padded, not {layout}")

        starts = np.minimum(begins, max(total - 1, 0))  # of nothing at the end, a row, too
        start, length, place = (np.ascontiguousarray(field, np.int32) for field in (starts, lengths, index))
        label, laid = np.ascontiguousarray(labels, np.int64), chosen.lay(begins[:count] + head, total)
        return CollatedBatch(chosen.read, start, length, place, label, laid, total, longest, prefix, count)

    def cut(self, max_length: int, head: int, threshold: int | None = None, share: float = 0.0) -> Split:
        """Of each sequence the first `max_length` tokens, or with `threshold` those of them of at least that id.

        The latter are copied, with their positions, which begin at `head`; and so is, whatever its id, what stands in
        `shared_places`.
        """
        short = dataclasses.replace(self, lengths=np.minimum(self.lengths, max_length))
        if threshold is None:
            return short
        shared = shared_places(int(short.lengths.max(initial=0)), share)
        pieces = [short[row] for row in range(len(short))]
        places = [np.flatnonzero((piece >= threshold) | shared[: len(piece)]).astype(np.int32) for piece in pieces]
        kept = [piece[place] for piece, place in zip(pieces, places, strict=True)]
        offsets = np.cumsum([0, *(len(place) for place in places)])
        positions = np.concatenate([np.empty(0, np.int32), *places])
        positions += head  # in place: of a whole split these are many
        tokens = np.concatenate([self.tokens[:0], *kept])
        return dataclasses.replace(Split.from_offsets(tokens, offsets, self.labels), positions=positions)

    def lay(self, begins: np.ndarray, total: int) -> list[np.ndarray]:
        """What `read` needs on the device to make `total` rows, where the sequences' tokens begin at `begins`."""
        sources = [self.tokens] if self.positions is None else [self.tokens, self.positions]
        rows = [np.zeros(total, source.dtype) for source in sources]
        places = list(zip(begins.tolist(), self.starts.tolist(), self.lengths.tolist(), strict=True))
        for target, source in zip(rows, sources, strict=True):
            for begin, start, length in places:
                target[begin : begin + length] = source[start : start + length]
        return rows

    def read(self, laid: list[Tensor], total: int) -> tuple[Tensor, Tensor | None]:
        """Ids and positions of all rows, int32 `[total]`, zeros between the sequences."""
        tokens, *positions = laid
        return tokens.to(torch.int32), positions[0] if positions else None


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

    def longest(self, rows: RowIndices) -> np.ndarray:
        """The length of the longer one of each of these pairs, int64."""
        return self.documents.lengths[self.pairs[rows]].max(1)

    def collate(self, rows: RowIndices, *, index: RowIndices | None = None, **options: Any) -> CollatedBatch:
        """The batch of these pairs as twice as many sequences, the two of a pair side by side; else as `Split.collate`.

        `index` is the place of each pair in the global batch; its label stands once.
        """
        rows = np.asarray(rows, np.int64)
        place = np.arange(len(rows)) if index is None else np.asarray(index, np.int64)
        both = (2 * place[:, None] + (0, 1)).ravel()
        sequences = self.documents.subset(self.pairs[rows].ravel())
        labelled = dataclasses.replace(sequences, labels=self.labels[rows].repeat(2))
        batch = labelled.collate(np.arange(len(both)), index=both, **options)
        return dataclasses.replace(batch, label=np.ascontiguousarray(batch.label[::2]))


Examples = Split | Pairs


@functools.cache
def shared_places(length: int, share: float) -> np.ndarray:
    """Which places of a sequence are kept whatever stands there, bool `[length]`: about a `share` of them.

    They are drawn once and for all: the same in every sequence, and among those of any larger share. Not to be written.
    """
    return np.random.default_rng(0).random(length) < share


def _split_evenly(total: int, count: int) -> np.ndarray:
    """`total` in `count` nearly equal parts, int64."""
    ends = np.arange(count + 1) * total // count
    return ends[1:] - ends[:-1]
