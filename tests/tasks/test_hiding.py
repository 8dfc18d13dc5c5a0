"""Hidden tokens: which are hidden, what the encoder sees instead, and that only the place decides it."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from lra.batch import IGNORED_LABEL, Batch
from lra.data.split import Pairs, Split
from lra.errors import UsageError
from lra.tasks.hiding import Hiding, hidden_rows

SEED = torch.tensor(3 << 33 | 5)
LAYOUTS: dict[str, dict[str, Any]] = {"packed": {}, "padded": {"layout": "padded"}, "filled": {"multiple": 64}}


def split(count: int = 12, longest: int = 40, vocabulary: int = 15) -> Split:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, longest + 1, count)
    offsets = np.concatenate([[0], lengths.cumsum()])
    return Split.from_offsets(rng.integers(0, vocabulary, offsets[-1]).astype(np.uint8), offsets)


def pairs(count: int = 6) -> Pairs:
    return Pairs(split(), np.random.default_rng(1).integers(0, 12, (count, 2)), np.zeros(count, np.int64))


def gathered(examples: Any, rows: Any = None, **options: Any) -> Batch:
    rows = np.arange(len(examples)) if rows is None else np.asarray(rows)
    return examples.collate(rows, index=rows, **{"max_length": 32, **options}).to("cpu").with_seed(SEED)


def made_hiding(prefix: int | None = None, **fields: Any) -> Hiding:
    """Hiding of a vocabulary of 15 tokens."""
    defaults = {
        "mask": 0.4, "mask_random": 0.0, "mask_span": 1, "mask_patch": 1, "mask_loss": "hidden",
        "pixel_loss": "cross_entropy",
    }  # fmt: skip
    encoder = SimpleNamespace(mask=15 + (prefix is not None), prefix=prefix, grid=(5, 8))
    return Hiding(SimpleNamespace(**defaults | fields), 0.4, encoder)  # type: ignore[arg-type]


def places(batch: Batch, hiding: Hiding) -> set[tuple[int, int, int, int]]:
    """Sequence in the global batch, position, token and what the encoder sees of all that is hidden."""
    shown, hidden = hiding.hide(batch)
    rows = batch.per_row(batch.index), batch.token_positions(), batch.tokens, shown.tokens
    assert torch.equal(batch.tokens[~hidden], shown.tokens[~hidden]) and shown.tokens.dtype == batch.tokens.dtype
    return set(zip(*(each[hidden].tolist() for each in rows), strict=True))


@pytest.mark.parametrize(
    "fields", [{}, {"mask_random": 0.4}, {"mask_span": 3}, {"mask_patch": 3}],
    ids=["tokens", "random", "spans", "squares"],
)  # fmt: skip
@pytest.mark.parametrize("options", [{}, {"prefix": 15}, {"threshold": 4}], ids=["plain", "cls", "lit"])
@pytest.mark.parametrize("examples", [split(), pairs()], ids=["sequences", "pairs"])
def test_what_is_hidden_depends_on_the_place_alone(examples, options, fields):
    hiding = made_hiding(options.get("prefix"), **fields)
    whole = places(gathered(examples, **options), hiding)
    assert whole
    for layout in LAYOUTS.values():
        assert places(gathered(examples, **options, **layout), hiding) == whole
        for size in (1, 4, len(examples) // 2):  # micro-batches; two ranks
            parts = (range(i, min(i + size, len(examples))) for i in range(0, len(examples), size))
            found = [places(gathered(examples, part, **options, **layout), hiding) for part in parts]
            assert set.union(*found) == whole and sum(map(len, found)) == len(whole)


def test_golden_places():
    """What a seed hides must stay: a run that is resumed relies on it."""
    made = Split.from_offsets(np.zeros(60, np.uint8), np.array([0, 7, 8, 40, 60]))
    batch = gathered(made)
    trained, evaluated = (
        hidden_rows(each, 0.2, None).nonzero().flatten().tolist()
        for each in (batch, dataclasses.replace(batch, seed=None))
    )
    assert trained == [9, 11, 15, 24, 30, 32, 33, 39, 47, 53, 55, 59]
    assert evaluated == [
        1,
        10,
        13,
        15,
        19,
        26,
        30,
        34,
        40,
        47,
        52,
        56,
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("examples", [split(), pairs()], ids=["sequences", "pairs"])
def test_cls_padding_and_filling_are_never_hidden(examples, layout):
    batch = gathered(examples, prefix=15, **LAYOUTS[layout])
    rows = hidden_rows(batch, 1 - 2**-24, 15)  # as good as all
    ends = (batch.start + batch.length).tolist()
    wanted = [
        label != IGNORED_LABEL for label in batch.label.repeat_interleave(batch.size // len(batch.label)).tolist()
    ]
    real = torch.zeros_like(rows)
    for start, end, counts in zip(batch.start.tolist(), ends, wanted, strict=True):
        real[start + 1 : end] = counts
    assert torch.equal(rows, real) and all(wanted) == (layout != "filled")


def test_the_share_is_that_asked_for_and_every_step_draws_anew():
    offsets = np.arange(51) * 2000
    long = Split.from_offsets(np.zeros(offsets[-1], np.uint8), offsets)
    batch = long.collate(np.arange(50), max_length=2000).to("cpu")
    n = batch.tokens.numel()
    for share in (0.1, 0.15, 0.5):
        one, other = (hidden_rows(batch.with_seed(torch.tensor(seed)), share, None) for seed in (1, 2))
        for drawn, expected in (
            (one, share), (other, share), (one & other, share**2), (one[1:] & one[:-1], share**2),
        ):  # fmt: skip
            assert abs(drawn.float().mean() - expected) < 5 * (expected * (1 - expected) / n) ** 0.5
    fixed = hidden_rows(batch, 0.5, None)  # in evaluation
    assert torch.equal(fixed, hidden_rows(batch, 0.5, None)) and not torch.equal(fixed, one)


def test_a_share_of_hidden_tokens_is_replaced_by_any_token_alike():
    long = Split.from_offsets(np.zeros(100_000, np.uint8), np.arange(51) * 2000)
    batch = long.collate(np.arange(50), max_length=2000).to("cpu").with_seed(SEED)
    shown, hidden = made_hiding(mask=0.5, mask_random=0.3).hide(batch)
    tokens, n = shown.tokens[hidden], int(hidden.sum())
    counts = torch.bincount(tokens, minlength=16)
    assert torch.equal(hidden, hidden_rows(batch, 0.5, None)) and not shown.tokens[~hidden].any() and len(counts) == 16
    assert abs(counts[15] / n - 0.7) < 5 * (0.21 / n) ** 0.5
    assert ((counts[:15] / n - 0.02).abs() < 5 * (0.02 / n) ** 0.5).all()
    assert (made_hiding(mask=0.5, mask_random=1.0).hide(batch)[0].tokens < 15).all()


def test_spans_are_hidden_whole_and_begin_anywhere():
    long = Split.from_offsets(np.zeros(100_000, np.uint8), np.arange(51) * 2000)
    batch = long.collate(np.arange(50), max_length=2000).to("cpu").with_seed(SEED)
    hidden = hidden_rows(batch, 0.2, None, 5).view(50, 2000)
    assert abs(hidden.float().mean() - 0.2) < 5 * (5 * 0.16 / 100_000) ** 0.5
    begins = set()
    for row in hidden.int():
        edges = (row.diff() != 0).nonzero().flatten() + 1  # where a span begins or has ended
        assert len(set((edges % 5).tolist())) == 1
        begins.add(int(edges[0]) % 5)
    assert begins == set(range(5))
    assert torch.equal(hidden_rows(batch, 0.2, None, 1), hidden_rows(batch, 0.2, None))


def test_squares_are_hidden_whole_and_begin_anywhere():
    images = Split.from_offsets(np.zeros(200 * 20 * 16, np.uint8), np.arange(201) * 320)
    for prefix in (None, 15):
        batch = gathered(images, max_length=320, prefix=prefix)
        hidden = hidden_rows(batch, 0.5, prefix, 4, 16).view(200, -1)[:, int(prefix is not None) :]
        hidden = hidden.reshape(200, 20, 16)
        assert abs(hidden.float().mean() - 0.5) < 5 * (16 * 0.25 / hidden.numel()) ** 0.5
        begins = set()
        for image in hidden.int():
            down, across = ((image.diff(dim=axis) != 0).nonzero()[:, axis] + 1 for axis in (0, 1))
            assert len(set((down % 4).tolist())) <= 1 and len(set((across % 4).tolist())) <= 1
            begins.add((int(down[0]) % 4, int(across[0]) % 4))
        assert len(begins) == 16


def test_squares_need_an_image():
    made = SimpleNamespace(mask=15, prefix=None, grid=None)
    run = SimpleNamespace(mask=0.4, mask_random=0.0, mask_span=1, mask_patch=2, mask_loss="all", pixel_loss="l1")
    with pytest.raises(UsageError, match="mask_patch=2 hides squares of pixels: this task has no images, leave it out"):
        Hiding(run, 0.4, made)  # type: ignore[arg-type]


def test_golden_options():
    """What a seed replaces, and the spans and squares that it hides, must stay."""
    batch = gathered(Split.from_offsets(np.zeros(24, np.uint8), np.array([0, 24])))
    shown = made_hiding(mask_random=0.5).hide(batch)[0].tokens.tolist()
    assert shown == [0, 0, 7, 0, 0, 0, 13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 15, 6, 12, 0, 0, 15, 15, 0]
    assert hidden_rows(batch, 0.4, None, 2, 6).nonzero().flatten().tolist() == [3, 4, 9, 10, 13, 14, 19, 20]
    assert hidden_rows(batch, 0.4, None, 4).nonzero().flatten().tolist() == [7, 8, 9, 10, 23]
