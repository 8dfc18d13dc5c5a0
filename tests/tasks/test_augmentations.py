"""What augmentation makes of images and expressions, and that only seed, sequence and place decide it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from lra.batch import IGNORED_LABEL, Batch
from lra.config.augment import LIMITS, AugmentConfig
from lra.data import listops
from lra.data.split import Split
from lra.models.dropout import sequence_keys
from lra.tasks import augmented
from lra.tasks.augmented import (
    UNIT,
    change_grey_values,
    draw_inverse_maps,
    mirror_places,
    permute_operands,
    sample_images,
    shift_levels,
    transform_images,
)
from tests.tasks.test_hiding import LAYOUTS, SEED, gathered

GRID = (6, 8)
KEYS = sequence_keys(torch.arange(4000, dtype=torch.int32), SEED)
ALL_OF_IMAGES = AugmentConfig("both", 10, 0.1, 0.1, 10, 0.3, 0.3)


def images(count: int = 12) -> Split:
    pixels = np.random.default_rng(0).integers(0, 256, count * GRID[0] * GRID[1])
    return Split.from_offsets(pixels.astype(np.uint8), np.arange(count + 1) * GRID[0] * GRID[1])


def expressions(count: int = 12, max_length: int = 60) -> tuple[Split, list[int]]:
    sequences, values = listops.generate_expressions(count, seed=1, workers=1, min_length=3, max_length=max_length)
    offsets = np.cumsum([0, *map(len, sequences)])
    return Split.from_offsets(np.concatenate(sequences), offsets, values), values.tolist()


def split_of(*texts: str) -> Split:
    sequences = [listops.tokenize(text) for text in texts]
    return Split.from_offsets(np.concatenate(sequences), np.cumsum([0, *map(len, sequences)]))


def by_index(batch: Batch, tokens: torch.Tensor, head: int) -> dict[int, list[int]]:
    """The tokens of each sequence by its place in the global batch, without a CLS token."""
    parts = zip(*(each.tolist() for each in (batch.index, batch.start, batch.length, batch.label)), strict=True)
    return {
        index: tokens[start + head : start + length].tolist()
        for index, start, length, label in parts
        if label != IGNORED_LABEL
    }


def permuted(examples: Split, rows: Any = None, **options: Any) -> dict[int, list[int]]:
    options = {"max_length": 60, **options}
    batch = gathered(examples, rows, **options)
    return by_index(batch, permute_operands(batch, options["max_length"]), int("prefix" in options))


def transformed(examples: Split, rows: Any = None, **options: Any) -> dict[int, list[int]]:
    batch = gathered(examples, rows, **{"max_length": GRID[0] * GRID[1], **options})
    tokens = transform_images(batch, ALL_OF_IMAGES, GRID, 255)
    assert tokens.dtype == batch.tokens.dtype and int(tokens.min()) >= 0 and int(tokens.max()) <= 256
    return by_index(batch, tokens, int("prefix" in options))


@pytest.mark.parametrize("options", [{}, {"prefix": 256}], ids=["plain", "cls"])
@pytest.mark.parametrize("kind", ["images", "expressions"])
def test_it_depends_on_the_place_alone(kind, options):
    act, examples = (transformed, images()) if kind == "images" else (permuted, expressions()[0])
    whole = act(examples, **options)
    changed = [whole[row] != examples[row].tolist() for row in range(len(examples))]
    assert sum(changed) > len(changed) // 2
    for name, layout in LAYOUTS.items():
        if kind == "images" and name == "filled":  # images are all of one length: nothing is filled up
            continue
        assert act(examples, **options, **layout) == whole
        for size in (1, 4, len(examples) // 2):  # micro-batches; two ranks
            parts = (range(i, min(i + size, len(examples))) for i in range(0, len(examples), size))
            assert {k: v for part in parts for k, v in act(examples, part, **options, **layout).items()} == whole


def test_every_step_draws_anew():
    batch = gathered(expressions()[0], max_length=60)
    one, other = (permute_operands(batch.with_seed(torch.tensor(seed)), 60) for seed in (1, 2))
    assert not torch.equal(one, other)
    batch = gathered(images(), max_length=48)
    one, other = (transform_images(batch.with_seed(torch.tensor(seed)), ALL_OF_IMAGES, GRID, 255) for seed in (1, 2))
    assert not torch.equal(one, other)


def test_golden_draws():
    """What a seed changes must stay: a run that is resumed relies on it."""
    drawn = permuted(split_of("[MAX 1 2 3 [MIN 4 5 6 ] 7 ]", "[SM 1 2 [MED 3 4 5 ] 6 [MIN 7 8 ] ]"))
    assert [listops.decode(tokens) for tokens in drawn.values()] == [
        "[MAX 2 3 1 7 [MIN 6 4 5 ] ]",
        "[SM [MIN 7 8 ] 2 [MED 3 5 4 ] 1 6 ]",
    ]
    matrix, summand = draw_inverse_maps(ALL_OF_IMAGES, KEYS[:1], GRID)
    assert matrix.flatten().tolist() == pytest.approx([-0.896603, -0.283555, -0.14284, 0.918486], abs=1e-6)
    assert summand.flatten().tolist() == pytest.approx([-0.461501, -0.026711], abs=1e-6)
    assert transformed(images(1))[0][:12] == [136, 136, 65, 74, 77, 96, 121, 130, 130, 210, 164, 127]


# expressions


def tree(tokens: list[int], at: int = 0) -> tuple[Any, int]:
    """An expression without the order of its operands, and where it ends."""
    if tokens[at] < 10:
        return tokens[at], at + 1
    operator, operands, at = tokens[at], [], at + 1
    while tokens[at] != 14:
        operand, at = tree(tokens, at)
        operands.append(operand)
    return (operator, sorted(operands, key=str)), at + 1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prefix", [None, 15])
def test_operands_are_permuted_and_the_value_is_the_label(layout, prefix):
    examples, labels = expressions(100, max_length=300)
    drawn = permuted(examples, max_length=300, **LAYOUTS[layout], **({} if prefix is None else {"prefix": prefix}))
    sequences = [np.array(drawn[row], np.uint8) for row in range(100)]
    assert listops.evaluate_expressions(sequences) == labels
    assert all(tree(drawn[row]) == tree(examples[row].tolist()) for row in range(100))


def test_deep_expressions_are_permuted_on_every_level():
    depth = 200
    text = "[MAX 1 " * depth + "2" + " ]" * depth
    drawn = permuted(split_of(text), max_length=3 * depth + 1)[0]
    assert listops.evaluate_expressions([np.array(drawn, np.uint8)]) == [2]
    first = [drawn[at + 1] == 1 for at, token in enumerate(drawn) if token == 10]
    assert 0.3 < np.mean(first) < 0.7  # each operator has its digit first or last, by its own draw


def test_all_orders_are_alike_and_independent():
    count = 3000
    drawn = permuted(split_of(*["[MIN 1 2 3 [MAX 4 5 ] ]"] * count))
    orders = Counter(tuple(token for token in tokens if token in (1, 2, 3, 11, 10)) for tokens in drawn.values())
    assert len(orders) == 24 and max(abs(each - count / 24) for each in orders.values()) < 5 * (count / 24) ** 0.5
    inner = np.mean([tokens.index(4) < tokens.index(5) for tokens in drawn.values()])
    assert abs(inner - 0.5) < 5 * (0.25 / count) ** 0.5


def test_what_is_not_whole_stays_as_it_is():
    whole, cut, extra = "[MAX 1 2 3 4 5 6 7 8 9 ]", "[MAX 1 2 3 4 [MIN 5 6 7", "[MAX 1 2 3 ] ] [MIN 4 5 6"
    examples = split_of(cut, whole, extra, "7", "[SM ]")
    for layout in LAYOUTS.values():
        drawn = permuted(examples, **layout)
        assert drawn[1] != examples[1].tolist() and tree(drawn[1]) == tree(examples[1].tolist())
        assert all(drawn[row] == examples[row].tolist() for row in (0, 2, 3, 4))


def test_rows_past_a_length_influence_nothing():
    examples = expressions()[0]
    batch = gathered(examples, max_length=60, layout="padded")
    past = ~batch.mask().flatten()
    noise = torch.randint(0, 15, batch.tokens.shape, dtype=torch.int32)
    noisy = Batch(**{**vars(batch), "tokens": torch.where(past, noise, batch.tokens)})
    one, other = permute_operands(batch, 60), permute_operands(noisy, 60)
    assert torch.equal(one[~past], other[~past]) and torch.equal(other[past], noise[past])


# images


def sampled(image: torch.Tensor, matrix: Any, summand: Any = (0.0, 0.0)) -> torch.Tensor:
    """An image `[H, W]` by one map from places in the new image to places in the old one."""
    maps = torch.tensor(matrix, dtype=torch.float64)[None], torch.tensor(summand, dtype=torch.float64)[None]
    height, width = image.shape
    return sample_images(image.reshape(1, -1) * UNIT, *maps, (height, width)).view(height, width)


@pytest.mark.parametrize("shape", [(6, 6), (7, 7), (6, 9)])
def test_maps_onto_the_grid_are_exact(shape):
    image = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(sampled(image, [[1, 0], [0, 1]]), image)
    assert torch.equal(sampled(image, [[-1, 0], [0, 1]]), image.flip(1))
    assert torch.equal(sampled(image, [[1, 0], [0, -1]]), image.flip(0))
    moved = torch.zeros_like(image)
    moved[1:, :-2] = image[:-1, 2:]  # down by a row, left by two columns
    assert torch.equal(sampled(image, [[1, 0], [0, 1]], [2, -1]), moved)
    half = torch.zeros_like(image)
    half[:, :-1] = (image[:, :-1] + image[:, 1:] + 1) // 2
    half[:, -1] = (image[:, -1] + 1) // 2  # what is outside is 0
    assert torch.equal(sampled(image, [[1, 0], [0, 1]], [0.5, 0]), half)
    if shape[0] == shape[1]:
        turn = np.pi / 2
        matrix = [[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]
        assert torch.equal(sampled(image, matrix), image.rot90(-1))  # rows run downwards: clockwise


def test_flips_alone_are_exact_and_half_of_the_images():
    examples, count = images(400), 400
    batch = gathered(examples, max_length=48)
    for flip, flips in (("horizontal", (False, True)), ("both", (False, True))):
        tokens = transform_images(batch, AugmentConfig(flip), GRID, 255)  # type: ignore[arg-type]
        found: Counter[tuple[bool, bool]] = Counter()
        for new, old in zip(tokens.view(-1, *GRID), batch.tokens.view(-1, *GRID), strict=True):
            kinds = {(h, v): old.flip([1] * h + [0] * v) for h in (False, True) for v in flips}
            found[next(kind for kind, image in kinds.items() if torch.equal(new, image))] += 1
        kinds = 2 if flip == "horizontal" else 4
        assert len(found) == kinds
        assert all(abs(n - count / kinds) < 5 * (count / kinds) ** 0.5 for n in found.values())


def test_a_first_token_stays():
    batch = gathered(images(), max_length=48, prefix=256)
    tokens = transform_images(batch, ALL_OF_IMAGES, GRID, 255).view(-1, 49)
    assert (tokens[:, 0] == 256).all() and int(tokens[:, 1:].max()) < 256


def covers(values: torch.Tensor, least: float, most: float) -> bool:
    """Whether values are evenly between two limits."""
    share = (values.double() - least) / (most - least)
    between = -1e-6 <= float(share.min()) < 0.01 and 0.99 < float(share.max()) <= 1 + 1e-6
    return between and abs(float(share.mean()) - 0.5) < 5 * (1 / 12 / len(values)) ** 0.5


def test_the_drawn_maps_are_those_asked_for():
    matrix, summand = draw_inverse_maps(AugmentConfig(rotate=10), KEYS, GRID)
    angle = torch.atan2(matrix[:, 0, 1], matrix[:, 0, 0]).rad2deg()
    assert covers(angle, -10, 10) and not summand.any()
    assert torch.allclose(matrix @ matrix.mT, torch.eye(2, dtype=torch.float64).expand_as(matrix))
    matrix, summand = draw_inverse_maps(AugmentConfig(scale=0.1), KEYS, GRID)
    assert covers(1 / matrix[:, 0, 0], 0.9, 1.1) and torch.equal(matrix[:, 0, 0], matrix[:, 1, 1])
    assert not matrix[:, 0, 1].any() and not matrix[:, 1, 0].any()
    matrix, summand = draw_inverse_maps(AugmentConfig(shear=10), KEYS, GRID)
    assert covers(matrix[:, 0, 1].atan().rad2deg(), -10, 10)
    assert (matrix[:, 0, 0] == 1).all() and (matrix[:, 1, 1] == 1).all() and not matrix[:, 1, 0].any()
    matrix, summand = draw_inverse_maps(AugmentConfig(shift=0.25), KEYS, GRID)
    assert covers(summand[:, 0], -2, 2) and covers(summand[:, 1], -1.5, 1.5)  # of 8 columns and 6 rows
    assert abs(float(summand.T.corrcoef()[0, 1])) < 0.1
    assert (matrix == torch.eye(2)).all()


def test_all_together_is_mirrored_scaled_sheared_turned_and_shifted():
    config = AugmentConfig("both", 30, 0.2, 0.3, 20)
    inverse, summand = draw_inverse_maps(config, KEYS, GRID)
    turned = draw_inverse_maps(AugmentConfig(rotate=30), KEYS, GRID)[0].inverse()
    slanted = draw_inverse_maps(AugmentConfig(shear=20), KEYS, GRID)[0].inverse()
    scaled = draw_inverse_maps(AugmentConfig(scale=0.3), KEYS, GRID)[0].inverse()
    mirrored = draw_inverse_maps(AugmentConfig("both"), KEYS, GRID)[0]
    shift = -draw_inverse_maps(AugmentConfig(shift=0.2), KEYS, GRID)[1]
    assert torch.allclose(inverse.inverse(), turned @ slanted @ scaled @ mirrored)
    assert torch.allclose((inverse @ shift[:, :, None])[:, :, 0], -summand)


def test_brightness_and_contrast():
    image = torch.tensor([[0, 100, 200, 255]]).expand(len(KEYS), 4)
    mean = 555 / 4
    brighter = change_grey_values(image, AugmentConfig(brightness=0.25), KEYS, 255) / UNIT
    assert covers(brighter[:, 1] / 100, 0.75, 1.25) and not brighter[:, 0].any() and int(brighter.max()) == 255
    contrasted = change_grey_values(image, AugmentConfig(contrast=0.2), KEYS, 255) / UNIT
    assert covers((contrasted[:, 1] - mean) / (100 - mean), 0.8, 1.2) and int(contrasted.min()) == 0
    same = change_grey_values(image, AugmentConfig("both", 10), KEYS, 255)
    assert torch.equal(same, image * UNIT)
    both = change_grey_values(image, AugmentConfig(brightness=0.25, contrast=0.2), KEYS, 255) / UNIT
    wanted = brighter[:, 1, None] / 100 * (contrasted[:, 1, None])
    assert torch.allclose(both[:, 1, None], wanted.clamp(0, 255), atol=0.01)


def test_draws_are_independent():
    sites = [value for name, value in vars(augmented).items() if name.endswith("_SITE")]
    assert len(set(sites)) == len(sites) == 11 and max(sites) == -4  # tasks/hiding.py has -1 to -3
    drawn = torch.stack([augmented._draw(KEYS, site) for site in sites])
    assert float((drawn.corrcoef() - torch.eye(len(sites))).abs().max()) < 5 / len(KEYS) ** 0.5
    assert set(LIMITS) == {"rotate", "shift", "scale", "shear", "brightness", "contrast", "levels"}


def test_the_largest_values_give_pixels():
    config = AugmentConfig("both", *LIMITS.values())
    batch = gathered(images(400), max_length=48)
    tokens = transform_images(batch, config, GRID, 255)
    assert int(tokens.min()) == 0 and int(tokens.max()) <= 255


@pytest.mark.parametrize("flip", ["none", "horizontal", "both"])
@pytest.mark.parametrize("options", [{}, {"prefix": 256}], ids=["plain", "cls"])
def test_some_pixels_are_mirrored_as_whole_images_are(flip, options):
    config, prefixed = AugmentConfig(flip), "prefix" in options
    whole = gathered(images(), max_length=48, **options)
    wanted = transform_images(whole, config, GRID, 255).view(12, -1)
    for layout in LAYOUTS.values():
        some = gathered(images(), max_length=48, threshold=100, **options, **layout)
        mirrored = mirror_places(some, config, GRID, prefixed)
        assert mirrored.tokens.dtype == some.tokens.dtype and mirrored.positions.dtype == some.positions.dtype  # type: ignore
        tokens = by_index(some, mirrored.tokens, 0)
        for index, places in by_index(some, mirrored.positions, 0).items():  # type: ignore[arg-type]
            kept = (wanted[index] >= 100).nonzero().flatten()
            assert places == kept.tolist() and tokens[index] == wanted[index][kept].tolist()


@pytest.mark.parametrize("options", [{}, {"prefix": 256}, {"threshold": 9}], ids=["plain", "cls", "lit"])
def test_grey_levels_change_by_a_few_and_the_place_alone_decides(options):
    whole, head = gathered(images(), **options, max_length=48), int("prefix" in options)
    moved = shift_levels(whole, 2, 255)
    assert moved.dtype == whole.tokens.dtype
    for layout in LAYOUTS.values():
        batch = gathered(images(), **options, **layout, max_length=48)
        assert by_index(batch, shift_levels(batch, 2, 255), head) == by_index(whole, moved, head)
    change = moved.long() - whole.tokens.long()
    free = (whole.tokens > 1) & (whole.tokens < 254)
    counts = torch.bincount(change[free] + 2, minlength=5) / free.sum()
    assert len(counts) == 5 and ((counts - 0.2).abs() < 0.1).all()
    assert int(moved.max()) == (256 if head else 255) and torch.equal(moved == 256, whole.tokens == 256)
    assert int(moved.min()) >= 0 and torch.equal(shift_levels(whole, 0, 255), whole.tokens)
