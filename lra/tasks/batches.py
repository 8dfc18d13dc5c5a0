"""Makes the batches of training and evaluation from a split: the rows of each rank, their order and shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lra.batch import IGNORED_LABEL, Batch
from lra.config.schema import RunConfig
from lra.data import order
from lra.data.collated import CollatedBatch
from lra.data.split import Examples, Pairs


@dataclass(frozen=True)
class Rank:
    """The share of a global batch that this process computes."""

    rank: int
    world: int
    device: torch.device


@dataclass(frozen=True)
class Collation:
    """What data must know of a run to make its batches.

    Args:
        rank: the share of this process.
        prefix: id of the token before each sequence. Default: None, no such token.
        few_shapes: whether packed batches are filled up to few shapes for a captured step, see `_multiple`.
        step: returns the number of the next training step, from 0.
    """

    rank: Rank
    prefix: int | None = None
    few_shapes: bool = False
    step: Callable[[], int] = lambda: 0


class TrainBatches:
    """The remaining training as one endless pass. Each item is an iterator over `stride` consecutive steps.

    A step is a list of this rank's micro-batches. They are collated on demand and stay on the host. The pass starts at
    the step that `current` returns, so a resumed run continues with the same sequences. With `few_shapes` packed
    batches are filled up, see `_multiple`.
    """

    def __init__(
        self, split: Examples, run: RunConfig, rank: Rank, options: Mapping[str, Any], current: Callable[[], int],
        few_shapes: bool = False,
    ):  # fmt: skip
        self.split, self.run, self.rank, self.options, self.current = split, run, rank, options, current
        self.share, self.micro = run.batch.divide(rank.world)
        if few_shapes:
            self.options = {**options, "multiple": _multiple(self.step(0)[0].rows, split, options)}

    def __iter__(self) -> Iterator[Iterator[list[CollatedBatch]]]:
        step, config = self.current(), self.run.trainer
        while step < config.steps:
            end = min(step - step % config.stride + config.stride, config.steps)
            yield map(self.step, range(step, end))
            step = end

    def __len__(self) -> int:
        return math.ceil(self.run.trainer.steps / self.run.trainer.stride)

    def step(self, step: int) -> list[CollatedBatch]:
        rows = order.step_rows(self.run.seed, step, self.run.batch.size, len(self.split))
        first = self.rank.rank * self.share
        places = np.arange(first, first + self.share)
        chunks = (places[i : i + self.micro] for i in range(0, self.share, self.micro))
        chunks = (chunk[_longest_first(self.split, rows[chunk], self.options)] for chunk in chunks)
        return [self.split.collate(rows[chunk], index=chunk, **self.options) for chunk in chunks]

    # Lightning asks a resumable loader for its state, which is only the step, and the checkpoint has that
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class EvalBatches:
    """Yields the batches of this rank's share of a split. All ranks together have each sequence once.

    With `few_shapes` batches are filled up as in training. The last one repeats its own sequences, and metrics ignore
    the labels of these.
    """

    def __init__(self, split: Examples, size: int, rank: Rank, options: Mapping[str, Any], few_shapes: bool = False):
        self.split, self.size, self.rank, self.options, self.few_shapes = split, size, rank, options, few_shapes
        self.rows = np.arange(rank.rank, len(split), rank.world)
        if few_shapes:
            self.options = {**options, "multiple": _multiple(self._collate(0).rows, split, options)}

    def __len__(self) -> int:
        return math.ceil(len(self.rows) / self.size)

    def __iter__(self) -> Iterator[Batch]:
        for first in range(0, len(self.rows), self.size):
            yield self._collate(first).to(self.rank.device)

    def _collate(self, first: int) -> CollatedBatch:
        """Returns the batch that begins at sequence `first` of the share."""
        rows = self.rows[first : first + self.size]
        rows = rows[_longest_first(self.split, rows, self.options)]
        count = len(rows)
        rows = np.resize(rows, self.size) if self.few_shapes else rows
        # the row itself is the index, because what a pretraining hides depends only on it
        batch = self.split.collate(rows, index=rows, **self.options)
        batch.label[count : len(rows)] = IGNORED_LABEL
        return batch


def _longest_first(split: Examples, rows: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    """Orders `rows` so that a GPU finishes soonest: no long sequence starts last.

    If tokens are left out, rows keep their order: lengths are not known yet, and attention is a small part then.
    """
    if options.get("threshold") is not None:
        return np.arange(len(rows))
    return np.argsort(-split.longest(rows), kind="stable")


def _multiple(rows: int, split: Examples, options: Mapping[str, Any]) -> int:
    """Returns the number of which a packed batch's row count becomes a multiple, so that there are few shapes.

    It is at most a twelfth of `rows`, the rows of one batch. It is 1 if all sequences of the split have one length,
    which gives one shape.
    """
    documents = split.documents if isinstance(split, Pairs) else split
    lengths = np.minimum(documents.lengths, options["max_length"])
    alike = options.get("threshold") is None and lengths.min() == lengths.max()
    if options.get("layout") == "padded" or alike:
        return 1
    return 1 << max(rows // 12, 1).bit_length() - 1
