"""Batches from a split, against the obvious loop."""

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from lra.data.split import Pairs, Split, shared_places


def make(dtype=np.uint8, high=256, count=40, longest=30):
    rng = np.random.default_rng(1)
    lengths = rng.integers(0, longest + 1, count)
    tokens = rng.integers(1, high, lengths.sum()).astype(dtype)
    return Split.from_offsets(tokens, np.concatenate([[0], np.cumsum(lengths)]), rng.integers(0, 10, count))


def naive(split, rows, max_length, prefix):
    head = [] if prefix is None else [prefix]
    return [head + split[row][:max_length].tolist() for row in rows]


@pytest.mark.parametrize("prefix", [None, 70_000])
@pytest.mark.parametrize("max_length", [1, 7, 30, 50])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gather_is_the_obvious_loop(layout, dtype, max_length, prefix):
    split = make(dtype, high=256 if dtype == np.uint8 else 65_536)
    rows = np.array([3, 3, 0, 39, 12, 7, 30])
    expected = naive(split, rows, max_length, prefix)
    batch = split.collate(rows, max_length=max_length, layout=layout, prefix=prefix).to("cpu")

    assert batch.tokens.dtype == torch.int32 and batch.label.dtype == torch.int64
    assert batch.start.dtype == batch.length.dtype == batch.index.dtype == torch.int32
    assert batch.positions is None and batch.seed is None
    assert batch.length.tolist() == [len(tokens) for tokens in expected]
    assert batch.label.tolist() == split.labels[rows].tolist() and batch.index.tolist() == list(range(7))
    for start, tokens in zip(batch.start.tolist(), expected, strict=True):
        assert batch.tokens[start : start + len(tokens)].tolist() == tokens
    if layout == "packed":
        assert batch.tokens.tolist() == list(chain(*expected))
        assert batch.max_length == max(len(tokens) for tokens in expected)
    else:
        assert batch.max_length == max_length + (prefix is not None) and batch.padded
        padded = [tokens + [0] * (batch.max_length - len(tokens)) for tokens in expected]
        assert batch.tokens.tolist() == list(chain(*padded))
        assert batch.start.tolist() == [b * batch.max_length for b in range(7)]


def test_packed_and_padded_are_the_same_sequences():
    split, rows = make(), [1, 5, 9, 2]
    packed = split.collate(rows, max_length=30).to("cpu")
    padded = split.collate(rows, max_length=packed.max_length, layout="padded").to("cpu")
    assert torch.equal(packed.pad(packed.tokens).flatten(), padded.tokens)


@pytest.mark.parametrize("prefix", [None, 300])
@pytest.mark.parametrize("multiple", [1, 2, 64, 100, 1000])
def test_filling_up_adds_sequences_that_no_loss_counts(multiple, prefix):
    split, rows = make(), np.array([5, 0, 31, 12, 12])
    plain = split.collate(rows, max_length=20, prefix=prefix).to("cpu")
    filled = split.collate(rows, max_length=20, prefix=prefix, multiple=multiple).to("cpu")
    total, size = plain.tokens.numel(), plain.size
    assert filled.tokens.numel() % multiple == 0 and filled.tokens.numel() - total < multiple
    assert torch.equal(filled.tokens[:total], plain.tokens) and not filled.tokens[total:].any()
    for name in ("start", "length", "label", "index"):
        assert torch.equal(getattr(filled, name)[:size], getattr(plain, name))
    assert int(filled.length.sum()) == filled.tokens.numel() and int(filled.length.max()) <= filled.max_length
    assert (filled.size - size) % 2 == 0 and (filled.label[size:] == -100).all()
    assert int(filled.start.max()) < filled.tokens.numel()
    if multiple > 1:
        other = split.collate(rows[::-1], max_length=20, prefix=prefix, multiple=multiple).to("cpu")
        assert filled.size > size and other.size == filled.size
        assert filled.max_length == other.max_length == 20 + (prefix is not None)


@pytest.mark.parametrize("prefix", [None, 300])
def test_filled_up_sequences_above_a_threshold_are_not_as_long_as_all_may_be(prefix):
    split, rows, seen = make(), np.array([5, 0, 31, 12, 7]), set()
    for threshold in (1, 100, 150, 200, 230, 250):
        options: dict[str, Any] = {"max_length": 20, "prefix": prefix, "threshold": threshold}
        plain, filled = (split.collate(rows, **options, multiple=multiple).to("cpu") for multiple in (1, 64))
        most = next(size for size in (1, 2, 4, 8, 16, 20 + (prefix is not None)) if size >= plain.max_length)
        assert filled.max_length == most and int(filled.length.max()) <= most
        assert torch.equal(filled.tokens[: plain.tokens.numel()], plain.tokens)
        seen.add(most)
    assert len(seen) > 2


def test_index_is_the_place_in_the_global_batch():
    batch = make().collate(np.array([4, 2]), max_length=5, index=[9, 11]).to("cpu")
    assert batch.index.tolist() == [9, 11]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_empty_batches_and_empty_sequences(layout):
    blank = Split.from_offsets(np.empty(0, np.uint8), np.zeros(4, np.int64), np.arange(3))
    batch = blank.collate([2, 0], max_length=4, layout=layout).to("cpu")
    assert batch.length.tolist() == [0, 0] and batch.label.tolist() == [2, 0]
    assert blank.collate([2], max_length=4, layout=layout, prefix=3).to("cpu").tokens[0] == 3
    assert blank.collate([], max_length=4, layout=layout).to("cpu").size == 0


def test_subset_gathers_its_own_rows():
    split = make()
    part = split.subset([8, 3, 5])
    got, expected = part.collate([2, 0], max_length=9).to("cpu"), split.collate([5, 8], max_length=9).to("cpu")
    assert torch.equal(got.tokens, expected.tokens) and torch.equal(got.label, expected.label)


def test_rows_outside_unknown_layouts_and_missing_places_are_errors():
    with pytest.raises(IndexError):
        make().collate([40], max_length=4).to("cpu")
    with pytest.raises(ValueError, match="packed or padded"):
        make().collate([0], max_length=4, layout="ragged").to("cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 places in the global batch for 2 sequences"):
        make().collate([0, 1], max_length=4, index=[7]).to("cpu")


@pytest.mark.parametrize("prefix", [None, 300])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_threshold_keeps_the_bright_tokens_with_their_positions(layout, prefix):
    split, rows, head = make(), [3, 0, 39, 3], int(prefix is not None)
    batch = split.collate(rows, max_length=20, layout=layout, prefix=prefix, threshold=100).to("cpu")
    assert batch.positions is not None and batch.positions.dtype == torch.int32
    lengths = []
    for b, row in enumerate(rows):
        kept = [(place, token) for place, token in enumerate(split[row][:20].tolist()) if token >= 100]
        lengths.append(len(kept) + head)
        own = slice(int(batch.start[b]), int(batch.start[b]) + lengths[-1])
        expected = [(0, prefix)] * head + [(place + head, token) for place, token in kept]
        assert list(zip(batch.positions[own].tolist(), batch.tokens[own].tolist(), strict=True)) == expected
    assert batch.length.tolist() == lengths and len(set(lengths)) > 1
    assert batch.max_length == (20 + head if layout == "padded" else max(lengths))
    assert len(batch.positions) == len(batch.tokens) == (4 * (20 + head) if layout == "padded" else sum(lengths))


def test_a_share_of_the_places_is_kept_whatever_stands_there():
    split = make()
    places = [set(np.flatnonzero(shared_places(20, share))) for share in (0.0, 0.2, 0.5, 1.0)]
    assert [len(kept) for kept in places] == [0, 5, 8, 20] and places[1] < places[2]  # nested
    batch = split.collate([3, 0], max_length=20, threshold=100, share=0.2, prefix=300).to("cpu")
    for b, row in enumerate([3, 0]):
        own = slice(int(batch.start[b]) + 1, int(batch.start[b] + batch.length[b]))
        kept = [p for p, token in enumerate(split[row][:20].tolist()) if token >= 100 or p in places[1]]
        assert batch.positions is not None and (batch.positions[own] - 1).tolist() == kept
        assert batch.tokens[own].tolist() == split[row][kept].tolist()


def test_of_a_subset_positions_go_with_their_tokens():
    split = make().cut(20, 1, 100)
    assert split.positions is not None and split.positions.dtype == np.int32 and split.tokens.dtype == np.uint8
    rows, tokens, positions = [8, 3, 5], [], []
    batch = split.subset(rows).collate([2, 0], max_length=20).to("cpu")
    for row in (5, 8):
        own = slice(split.starts[row], split.starts[row] + split.lengths[row])
        tokens += split.tokens[own].tolist()
        positions += split.positions[own].tolist()
    assert batch.tokens.tolist() == tokens and batch.positions is not None and batch.positions.tolist() == positions


def test_a_threshold_that_keeps_nothing_leaves_empty_sequences():
    batch = make().collate([1, 2], max_length=20, threshold=256).to("cpu")
    assert batch.length.tolist() == [0, 0] and batch.tokens.numel() == 0 and batch.max_length == 1


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_pairs_are_two_sequences_side_by_side(layout):
    documents = make()
    pairs = Pairs(documents, np.array([[3, 9], [9, 9], [0, 3]]), np.array([1, 0, 2]))
    batch = pairs.collate([2, 0], max_length=9, layout=layout, prefix=300, index=[7, 4]).to("cpu")
    expected = documents.collate([0, 3, 3, 9], max_length=9, layout=layout, prefix=300, index=[14, 15, 8, 9]).to("cpu")
    for name in ("tokens", "start", "length", "index"):
        assert torch.equal(getattr(batch, name), getattr(expected, name))
    assert batch.label.tolist() == [2, 1] and batch.label.dtype == torch.int64 and len(pairs) == 3
    assert [part.tolist() for part in pairs[2]] == [documents[0].tolist(), documents[3].tolist()]
    assert pairs.collate([0, 1], max_length=9).to("cpu").index.tolist() == [0, 1, 2, 3]


def test_the_longest_of_a_pair_is_the_longer_one():
    """By which batches put long sequences first."""
    split = make()
    assert split.longest([4, 2]).tolist() == [len(split[4]), len(split[2])]
    pairs = Pairs(split, np.array([[3, 9], [9, 3], [5, 5]]), np.zeros(3, np.int64))
    three, nine = len(split[3]), len(split[9])
    assert three != nine and pairs.longest([1, 2, 0]).tolist() == [max(three, nine), len(split[5]), max(three, nine)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_gather_on_the_gpu_is_gather_on_the_cpu(layout, dtype):
    split, rows = make(dtype), np.array([3, 0, 39])
    there, here = (split.collate(rows, max_length=7, layout=layout, prefix=500).to(d) for d in ("cuda", "cpu"))
    for name in ("tokens", "start", "length", "label", "index"):
        assert torch.equal(getattr(there, name).cpu(), getattr(here, name))
        assert getattr(there, name).dtype == getattr(here, name).dtype and getattr(there, name).data_ptr() % 16 == 0


def test_a_threshold_is_the_least_id_that_stays():
    tokens = np.array([7, 8, 9, 0, 8, 200, 3], np.uint8)
    short = Split.from_offsets(tokens, np.array([0, 6, 7]), np.array([1, 0])).cut(5, threshold=8, head=1)
    assert [short[row].tolist() for row in range(2)] == [[8, 9, 8], []]
    assert short.positions is not None and short.positions.tolist() == [2, 3, 5]
