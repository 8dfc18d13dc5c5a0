"""What every rank and step sees of a split."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from lra.batch import IGNORED_LABEL, Batch
from lra.data import order
from lra.data.split import Pairs, Split
from lra.tasks.batches import EvalBatches, Rank, TrainBatches
from tests.tasks.test_data import CPU, SHORT, run_of

WHOLE: dict[str, Any] = {"max_length": 4096}


def numbered(count: int) -> Split:
    """Sequence i is [i] and its label i % 10, so that a batch shows which rows it holds."""
    return Split.from_offsets(np.arange(count, dtype=np.uint8), np.arange(count + 1), np.arange(count) % 10)


def train_batches(rank: int, world: int, first: int = 0, **batch: int) -> list[list[Batch]]:
    fields = {"size": 12} | batch
    run = run_of("task=listops", *SHORT, "trainer.steps=40", "seed=5", *(f"batch.{k}={v}" for k, v in fields.items()),
                 "trainer.eval_every=40", "trainer.log_every=40")  # fmt: skip
    batches = TrainBatches(numbered(50), run, Rank(rank, world, CPU), WHOLE, lambda: first)
    return [[batch.to(CPU) for batch in step] for stride in batches for step in stride]


@pytest.mark.parametrize(("world", "micro"), [(1, 12), (1, 5), (2, 6), (2, 4), (3, 1), (3, 9)])
def test_micro_batches_and_ranks_partition_a_step_in_order(world, micro):
    ranks = [train_batches(rank, world, micro=micro) for rank in range(world)]
    assert all(len(batches) == 40 for batches in ranks)
    for step, shares in enumerate(zip(*ranks, strict=True)):
        parts = list(itertools.chain(*shares))
        assert all(1 <= part.size <= min(micro, 12 // world) for part in parts)
        assert all(len(share) == len(shares[0]) for share in shares)  # or some rank would wait for a gradient
        rows = order.step_rows(5, step, 12, 50)
        assert torch.cat([part.tokens for part in parts]).tolist() == rows.tolist()
        assert torch.cat([part.label for part in parts]).tolist() == (rows % 10).tolist()
        assert torch.cat([part.index for part in parts]).tolist() == list(range(12))


def test_an_epoch_holds_every_row_once():
    seen = torch.cat([batch.tokens for step in train_batches(0, 1, size=10) for batch in step]).tolist()
    for epoch in range(8):
        assert sorted(seen[50 * epoch : 50 * epoch + 50]) == list(range(50))


@pytest.mark.parametrize("first", [0, 3, 4, 5, 39, 40])
def test_starting_at_a_step_goes_on_with_the_same_batches(first):
    unbroken = train_batches(1, 2, micro=4)[first:]
    resumed = train_batches(1, 2, first, micro=4)
    assert len(resumed) == len(unbroken) == 40 - first
    for ours, theirs in zip(resumed, unbroken, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.tokens, b.tokens) and torch.equal(a.index, b.index) and torch.equal(a.label, b.label)


@pytest.mark.parametrize(("count", "size"), [(20, 4), (19, 4), (3, 4), (2, 4)])
def test_evaluation_over_three_ranks_covers_each_row_once(count, size):
    ranks = [EvalBatches(numbered(count), size, Rank(rank, 3, CPU), WHOLE) for rank in range(3)]
    batches = [list(rank) for rank in ranks]
    assert [len(rank) for rank in ranks] == [len(some) for some in batches]
    assert all(1 <= batch.size <= size for some in batches for batch in some)
    seen = [token for some in batches for batch in some for token in batch.tokens.tolist()]
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("count", "size"), [(20, 4), (19, 4), (2, 4)])
def test_filled_up_batches_of_evaluation_have_one_size_and_count_each_row_once(count, size, layout):
    """What is compiled for one of them serves all."""
    gather = {**WHOLE, "layout": layout}
    batches = list(EvalBatches(numbered(count), size, Rank(0, 1, CPU), gather, few_shapes=True))
    assert len({batch.size for batch in batches}) == 1
    counted = [batch.start[batch.label != IGNORED_LABEL].long() for batch in batches]
    rows = [token for batch, start in zip(batches, counted, strict=True) for token in batch.tokens[start].tolist()]
    assert sorted(rows) == list(range(count))


def test_long_sequences_and_pairs_with_one_come_first():
    """Each with its label and its place; where tokens are left out, rows stay as they are."""
    lengths = np.array([3, 9, 1, 7, 5])
    tokens = np.repeat(np.arange(5), lengths).astype(np.uint8)
    documents = Split.from_offsets(tokens, np.concatenate(([0], lengths.cumsum())), 10 + np.arange(5))
    pairs = Pairs(documents, np.array([[0, 2], [4, 3], [1, 0]]), np.array([20, 21, 22]))

    def laid(split: Split | Pairs, **gather: int) -> tuple[list[int], ...]:
        (batch,) = EvalBatches(split, 5, Rank(0, 1, CPU), {"max_length": 8, **gather})
        found = batch.length, batch.index, batch.label, batch.tokens[batch.start.long()]
        return tuple(field.tolist() for field in found)

    assert laid(documents) == ([8, 7, 5, 3, 1], [1, 3, 4, 0, 2], [11, 13, 14, 10, 12], [1, 3, 4, 0, 2])
    assert laid(pairs) == ([8, 3, 5, 7, 3, 1], [4, 5, 2, 3, 0, 1], [22, 21, 20], [1, 0, 4, 3, 0, 2])
    assert laid(documents, threshold=0)[1] == [0, 1, 2, 3, 4]


def test_shapes_are_few_although_the_first_batch_has_no_gap():
    lengths = np.array([256, *range(100, 250)])
    offsets = np.concatenate(([0], lengths.cumsum()))
    split = Split.from_offsets(np.zeros(offsets[-1], np.uint8), offsets)
    batches = EvalBatches(split, 1, Rank(0, 1, CPU), {"max_length": 256}, few_shapes=True)
    assert {batch.tokens.numel() % 16 for batch in batches} == {0}
    run = run_of("task=listops", *SHORT, "batch.size=1")
    steps = TrainBatches(split, run, Rank(0, 1, CPU), {"max_length": 256}, lambda: 0, few_shapes=True)
    assert {batch.rows % 8 for step in range(20) for batch in steps.step(step)} == {0}
    nothing = EvalBatches(numbered(2), 1, Rank(0, 1, CPU), {"max_length": 2}, few_shapes=True)
    assert [batch.tokens.numel() for batch in nothing] == [1, 1]


def test_shapes_are_few_although_images_have_one_size():
    """Not so many of their pixels are lit."""
    pixels = np.random.default_rng(0).integers(0, 16, (12, 256)).astype(np.uint8)
    split = Split.from_offsets(pixels.ravel(), 256 * np.arange(13))
    batches = EvalBatches(split, 1, Rank(0, 1, CPU), {"max_length": 256, "threshold": 8}, few_shapes=True)
    assert {batch.tokens.numel() % 8 for batch in batches} == {0}
