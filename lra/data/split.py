"""One split of a prepared store, and how its rows become a batch."""

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

from lra.batch import IGNORED_LABEL
from lra.data.collated import CollatedBatch

RowIndices = np.ndarray | Sequence[int]


@dataclass(frozen=True, eq=False)
class Split:
    """`n` labelled sequences: sequence `i` is `tokens[starts[i] : starts[i] + lengths[i]]`.

    `lra.data.resident` has a subclass whose tokens lie on a device. It replaces `cut`, `lay` and `read`.
    """

    tokens: np.ndarray  # uint8 or uint16 [sum of lengths], memory-mapped
    starts: np.ndarray  # int64 [n]
    lengths: np.ndarray  # int64 [n]
    labels: np.ndarray  # int64 [n]
    positions: np.ndarray | None = None  # int32, of every token in its sequence; None means 0, 1, ...

    @classmethod
    def from_offsets(cls, tokens: np.ndarray, offsets: np.ndarray, labels: np.ndarray | None = None) -> Split:
        """Sequences that lie end to end. `offsets`: int64 `[n + 1]`. Without `labels` all labels are 0."""
        return cls(
            tokens, offsets[:-1], np.diff(offsets), np.zeros(len(offsets) - 1, np.int64) if labels is None else labels
        )

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> np.ndarray:
        """The tokens of one sequence, `[length]`, read-only."""
        start = self.starts[row]
        return self.tokens[start : start + self.lengths[row]]

    def longest(self, rows: RowIndices) -> np.ndarray:
        """The length of each of these rows, int64."""
        return self.lengths[rows]

    def subset(self, rows: RowIndices) -> Split:
        """These rows alone, in this order. The tokens are the same mapped ones."""
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
        """The batch of these rows, not yet on a device.

        Args:
            rows: int `[B]`, in any order, repeats allowed.
            max_length: tokens of a sequence that are kept, from its beginning.
            layout: "packed" leaves no gaps, and the batch's `max_length` is its longest sequence. "padded" gives every
                sequence `max_length` rows, zeros past its length.
            prefix: token id that is put before every sequence (CLS). Lengths, positions and the batch's `max_length`
                grow by 1.
            threshold: of the first `max_length` tokens only ids of at least this are kept. The batch carries their
                positions.
            share: with a threshold, all tokens at this share of the places are kept, too (`shared_places`).
            index: place of each sequence in the global batch, by default 0, 1, ...
            multiple: a packed batch gets a multiple of so many rows, so that batches have few shapes. An even number of
                sequences of zeros follow, with the label that a loss ignores. The batch's `max_length` is then the
                given one; with a threshold it is the power of two at or above its longest sequence.
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
                lengths, index = np.concatenate([lengths, filling]), np.concatenate([index, 0 * filling])
                labels = np.concatenate([labels, np.full_like(filling, IGNORED_LABEL)])
            begins, total = np.cumsum(lengths) - lengths, int(lengths.sum())
        else:
            raise ValueError(f"layout is packed or padded, not {layout}")

        starts = np.minimum(begins, max(total - 1, 0))  # of nothing at the end, a row, too
        start, length, place = (np.ascontiguousarray(field, np.int32) for field in (starts, lengths, index))
        label, laid = np.ascontiguousarray(labels, np.int64), chosen.lay(begins[:count] + head, total)
        return CollatedBatch(chosen.read, start, length, place, label, laid, total, longest, prefix, count)

    def cut(self, max_length: int, head: int, threshold: int | None = None, share: float = 0.0) -> Split:
        """The first `max_length` tokens of each sequence, or with `threshold` those of them that pass.

        A token passes if its id is at least the threshold, or if it stands in one of the `shared_places`. Such tokens
        are copied, with their positions, which begin at `head`.
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
        """What `read` needs on the device to make `total` rows, if the sequences' tokens begin at `begins`."""
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
    """`n` labelled pairs of sequences out of one collection, in which each sequence is stored once."""

    documents: Split
    pairs: np.ndarray  # int64 [n, 2], places in documents
    labels: np.ndarray  # int64 [n]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """The tokens of the two sequences of a pair."""
        one, other = self.pairs[row]
        return self.documents[one], self.documents[other]

    def longest(self, rows: RowIndices) -> np.ndarray:
        """The length of the longer sequence of each of these pairs, int64."""
        return self.documents.lengths[self.pairs[rows]].max(1)

    def subset(self, rows: RowIndices) -> Pairs:
        """These pairs alone, in this order. The documents are the same."""
        return dataclasses.replace(self, pairs=self.pairs[rows], labels=self.labels[rows])

    def collate(self, rows: RowIndices, *, index: RowIndices | None = None, **options: Any) -> CollatedBatch:
        """The batch of these pairs as twice as many sequences, the two of a pair side by side.

        Args:
            index: place of each pair in the global batch.
            options: those of `Split.collate`.
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
    """The places of a sequence at which every token is kept, bool `[length]`: about a `share` of them.

    They are the same in every sequence, and are among those of any larger share. The array is cached: do not write to
    it.
    """
    return np.random.default_rng(0).random(length) < share


def _split_evenly(total: int, count: int) -> np.ndarray:
    """`total` in `count` nearly equal parts, int64."""
    ends = np.arange(count + 1) * total // count
    return ends[1:] - ends[:-1]
