"""How a split becomes the batches of training and of evaluation: whose rows, in what order, of which shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data import order
from lra.data.collated import CollatedBatch
from lra.data.split import IGNORED_LABEL, Examples, Pairs


@dataclass(frozen=True)
class Rank:
    """Which share of a global batch this process works on."""

    rank: int
    world: int
    device: torch.device


@dataclass(frozen=True)
class Collation:
    """What data has to know of a run to make its batches.

    Args:
        prefix: id of the token that the model wants before each sequence.
        few_shapes: whether packed batches are filled up, as a captured step wants them: see `_multiple`.
        step: number, from 0, of the next training step.
    """

    rank: Rank
    prefix: int | None = None
    few_shapes: bool = False
    step: Callable[[], int] = lambda: 0


class TrainBatches:
    """The rest of training as one endless pass, whose items are `stride` steps in a row.

    A step is this rank's micro-batches of it, collated when they are asked for and sent to no device yet. The pass
    starts at the step that `current` names, so a resumed run goes on with the same sequences. With `few_shapes` packed
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

    # Lightning asks a resumable loader for its state; the step is the whole of it and the checkpoint has it
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class EvalBatches:
    """This rank's share of a split, batch by batch; every sequence once over all ranks.

    With `few_shapes` batches are filled up as in training, the last one with its own sequences, too: metrics ignore
    their labels.
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
        """The batch that begins with this one of the share's sequences."""
        rows = self.rows[first : first + self.size]
        rows = rows[_longest_first(self.split, rows, self.options)]
        count = len(rows)
        rows = np.resize(rows, self.size) if self.few_shapes else rows
        # their own places: what a pretraining hides depends on nothing else
        batch = self.split.collate(rows, index=rows, **self.options)
        batch.label[count : len(rows)] = IGNORED_LABEL
        return batch


def _longest_first(split: Examples, rows: np.ndarray, options: Mapping[str, Any]) -> np.ndarray:
    """The order of `rows` in which a GPU is done soonest: no long sequence begins when the others are at their end.

    Where tokens are left out, rows stay as they are: attention is a small part then, and lengths are known later.
    """
    if options.get("threshold") is not None:
        return np.arange(len(rows))
    return np.argsort(-split.longest(rows), kind="stable")


def _multiple(rows: int, split: Examples, options: Mapping[str, Any]) -> int:
    """Of what a packed batch's rows are made a multiple so that shapes are few: below a twelfth of some batch's `rows`.

    Where all sequences of the split, not just of this batch, have one length, there is one shape.
    """
    documents = split.documents if isinstance(split, Pairs) else split
    lengths = np.minimum(documents.lengths, options["max_length"])
    alike = options.get("threshold") is None and lengths.min() == lengths.max()
    if options.get("layout") == "padded" or alike:
        return 1
    return 1 << max(rows // 12, 1).bit_length() - 1
