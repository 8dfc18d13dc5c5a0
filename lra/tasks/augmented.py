"""Augmentation: training batches are changed at random on the device, before the objective sees them.

Images are mirrored, turned, shifted, scaled, sheared and made brighter or darker. The operands of ListOps' operators
are permuted, which leaves the value. Miralles-González et al. 2025 (arXiv 2501.14850) train with such changes. Grey
levels change by a few, so that a model does not rely on how another program rounds them.

What is drawn is a function of (seed of the step, index of the sequence), and for operands and grey levels of the place,
too, like dropout. So layouts of batches, micro-batches, devices and resumed runs change nothing. Images are computed
with integers, so that a compiled step and an eager one see the same pixels.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from lra.batch import Batch
from lra.config.augment import AugmentConfig
from lra.config.fields import format_value
from lra.config.schema import RunConfig
from lra.data import listops
from lra.errors import UsageError
from lra.kernels.operators import define_operator
from lra.models.attention.lsh import stable_order
from lra.models.dropout import (
    BRIGHTNESS_SITE,
    COLUMN_SITE,
    CONTRAST_SITE,
    HORIZONTAL_SITE,
    LEVEL_SITE,
    OPERANDS_SITE,
    ROTATE_SITE,
    ROW_SITE,
    SCALE_SITE,
    SHEAR_SITE,
    VERTICAL_SITE,
    mix_keys,
    row_keys,
    sequence_keys,
)
from lra.models.positions import token_coordinates
from lra.tasks.base import OptimisationStep, TaskModule

UNIT_BITS = 16  # pixels, their weights and grey values are counted in steps of 2^-16
UNIT = 1 << UNIT_BITS
WITHOUT_WHOLE_IMAGES = {"flip", "levels", "operands"}  # what can be done to some of the pixels
FIRST_OPERATOR, BRACKET = listops.VOCABULARY.index("[MAX"), listops.VOCABULARY.index("]")


class AugmentedTask(TaskModule):
    """A task whose training batches are augmented; `with_objective` puts it before the task and its objective.

    Raises:
        UsageError: the task has no such augmentation.
    """

    def __init__(self, run: RunConfig, step: OptimisationStep):
        self.check_augmentation(run)
        super().__init__(run, step)

    @classmethod
    def check_augmentation(cls, run: RunConfig) -> None:
        """Raises a UsageError for fields of `augment` that the task can't have."""
        changes, task = run.augment.changes(), run.task
        given = ", ".join(f"augment.{name}={format_value(value)}" for name, value in changes.items())
        if "operands" in changes and tuple(cls.Data.vocabulary) != listops.VOCABULARY:
            raise UsageError(f"{given}: task={task.name} has no operators of ListOps, leave out augment.operands")
        if changes.keys() - {"operands"} and cls.grid(task) is None:
            raise UsageError(f"{given}: task={task.name} has no images, leave out what changes images")
        if (others := changes.keys() - WITHOUT_WHOLE_IMAGES) and not cls.whole_images(task):
            raise UsageError(
                f"{given}: tokens={task.tokens} leaves pixels out, set task.tokens=all, or leave out "
                + ", ".join(f"augment.{name}" for name in sorted(others))
            )

    @staticmethod
    def whole_images(task: Any) -> bool:
        """Returns whether all pixels are tokens. `task`: the task's configuration, of images."""
        return getattr(task, "tokens", "all") == "all"

    def loss(self, batch: Batch) -> Tensor:
        """The loss of the objective on an augmented batch."""
        return super().loss(self.augment(batch))

    def augment(self, batch: Batch) -> Batch:
        """Returns the batch with other tokens in the same rows. Needs a batch with a seed, as in training."""
        config, white = self.run.augment, len(self.Data.vocabulary) - 1
        if config.operands:
            return dataclasses.replace(batch, tokens=permute_operands(batch, self.run.task.max_length))
        grid = self.grid(self.run.task)
        assert grid is not None, "check_augmentation lets no other change through"
        if not self.whole_images(self.run.task):
            batch = mirror_places(batch, config, grid, self.model.encoder.prefix is not None)
        elif config.changes().keys() - {"levels"}:
            batch = dataclasses.replace(batch, tokens=transform_images(batch, config, grid, white))
        if config.levels:
            batch = dataclasses.replace(batch, tokens=shift_levels(batch, config.levels, white))
        return batch


def transform_images(batch: Batch, config: AugmentConfig, grid: tuple[int, int], white: int) -> Tensor:
    """Returns the tokens of images that are changed as `config` says, `[T]`: one affine map for each image.

    Args:
        batch: whole images, with or without a first token that is no pixel.
        grid: height and width.
        white: the largest id of a pixel; 0 is black.
    """
    count = grid[0] * grid[1]
    rows_BN = batch.tokens.view(batch.size, -1)
    others, image_BP = rows_BN.split((rows_BN.shape[1] - count, count), 1)
    keys_B = sequence_keys(batch.index, _seed(batch))
    grey_BP = change_grey_values(image_BP.long(), config, keys_B, white)
    changed_BP = sample_images(grey_BP, *draw_inverse_maps(config, keys_B, grid), grid)
    return torch.cat((others, changed_BP.to(others.dtype)), 1).flatten()


def draw_inverse_maps(config: AugmentConfig, keys_B: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Draws for each image the map from a place in the new image to its place in the old one.

    The new image is the old one mirrored, scaled, sheared along the rows, turned about its centre and shifted.

    Returns:
        The matrices, fp64 `[B, 2, 2]`, and the summands, fp64 `[B, 2]`, in pixels. Places are column and row, counted
        from the centre of the image.
    """
    angle_B = math.radians(config.rotate) * _draw(keys_B, ROTATE_SITE)
    slant_B = (math.radians(config.shear) * _draw(keys_B, SHEAR_SITE)).tan()
    sine_B, cosine_B = angle_B.sin(), angle_B.cos()
    matrix_B22 = torch.stack((cosine_B + slant_B * sine_B, sine_B - slant_B * cosine_B, -sine_B, cosine_B), 1)
    mirrored_B2 = draw_mirrors(config, keys_B)
    size_B1 = 1 + config.scale * _draw(keys_B, SCALE_SITE)[:, None]
    matrix_B22 = matrix_B22.unflatten(1, (2, 2)) * (mirrored_B2 / size_B1)[:, :, None]
    height, width = grid
    sides = (COLUMN_SITE, width), (ROW_SITE, height)
    shift_B2 = torch.stack([config.shift * side * _draw(keys_B, site) for site, side in sides], 1)
    return matrix_B22, -(matrix_B22 * shift_B2[:, None]).sum(2)


def draw_mirrors(config: AugmentConfig, keys_B: Tensor) -> Tensor:
    """Draws whether columns and rows of each image are mirrored: -1 if so, else 1, fp64 `[B, 2]`."""
    mirrors = (HORIZONTAL_SITE, config.flip != "none"), (VERTICAL_SITE, config.flip == "both")
    return torch.stack([_draw_mirror(keys_B, site, mirrored) for site, mirrored in mirrors], 1)


def mirror_places(batch: Batch, config: AugmentConfig, grid: tuple[int, int], prefixed: bool) -> Batch:
    """Returns the batch of mirrored images of which some pixels are tokens. These have new places, in row-major order.

    Args:
        batch: pixels with their positions, with or without a first token that is no pixel.
        config: says how images are mirrored.
        grid: height and width.
        prefixed: whether there is such a first token.
    """
    if config.flip == "none":
        return batch
    assert batch.positions is not None, "pixels that are not all have positions"
    place_T2 = token_coordinates(batch, 2, grid[1], prefixed)
    mirrored_B2 = draw_mirrors(config, sequence_keys(batch.index, _seed(batch))).flip(1) < 0  # rows, then columns
    row_T, column_T = (
        torch.where(batch.per_row(mirrored_B2[:, axis]), side - 1 - place_T2[:, axis], place_T2[:, axis])
        for axis, side in enumerate(grid)
    )
    position_T = row_T * grid[1] + column_T + int(prefixed)
    if prefixed:
        position_T = torch.where(batch.positions == 0, 0, position_T)
    position_BN = batch.pad(position_T)
    order_BN = stable_order(torch.where(batch.mask(), position_BN, grid[0] * grid[1] + 1))
    tokens_T, positions_T = (
        batch.unpad(rows_BN.gather(1, order_BN)) for rows_BN in (batch.pad(batch.tokens), position_BN)
    )
    return dataclasses.replace(batch, tokens=tokens_T, positions=positions_T.to(batch.positions.dtype))


def _seed(batch: Batch) -> Tensor:
    assert batch.seed is not None, "a training batch carries its step's seed"
    return batch.seed


def sample_images(grey_BP: Tensor, matrix_B22: Tensor, summand_B2: Tensor, grid: tuple[int, int]) -> Tensor:
    """Samples images bilinearly. Pixels from outside are 0, as in Miralles-González et al.: Pathfinder's background.

    Args:
        grey_BP: the old images, int64 in steps of 1 / UNIT.
        matrix_B22, summand_B2: see `draw_inverse_maps`.
        grid: height and width.

    Returns:
        The ids of the new images, int64 `[B, P]`, rounded.
    """
    height, width = grid
    place_P = torch.arange(height * width, device=grey_BP.device)
    # twice the distance from the centre is an integer
    column_P, row_P = 2 * (place_P % width) - (width - 1), 2 * (place_P // width) - (height - 1)
    half_B22 = (matrix_B22 * (UNIT // 2)).round().long()
    summand_B2 = (summand_B2 * UNIT).round().long()
    column_BP, row_BP = (
        half_B22[:, axis, 0, None] * column_P
        + half_B22[:, axis, 1, None] * row_P
        + summand_B2[:, axis, None]
        + (side - 1) * (UNIT // 2)
        for axis, side in enumerate((width, height))
    )
    total_BP = torch.zeros_like(grey_BP)
    for down in (0, 1):
        for right in (0, 1):
            of_column_BP, of_row_BP = (column_BP >> UNIT_BITS) + right, (row_BP >> UNIT_BITS) + down
            inside_BP = (of_column_BP >= 0) & (of_column_BP < width) & (of_row_BP >= 0) & (of_row_BP < height)
            found_BP = grey_BP.gather(1, torch.where(inside_BP, of_row_BP * width + of_column_BP, 0))
            weight_BP = _weight(column_BP, right) * _weight(row_BP, down)
            total_BP = total_BP + torch.where(inside_BP, found_BP * weight_BP, 0)
    return (total_BP + (1 << 3 * UNIT_BITS - 1)) >> 3 * UNIT_BITS


def _weight(coordinate: Tensor, later: int) -> Tensor:
    """The share that the earlier or the later of two neighbouring pixels has, in steps of 1 / UNIT."""
    fraction = coordinate & (UNIT - 1)
    return fraction if later else UNIT - fraction


def change_grey_values(image_BP: Tensor, config: AugmentConfig, keys_B: Tensor, white: int) -> Tensor:
    """Draws brightness and contrast. The result is of ids `[B, P]`, from 0 to `white`, int64 in steps of 1 / UNIT.

    The distance of the grey values from the image's mean is multiplied, then the values themselves.
    """
    brightness_B = 1 + config.brightness * _draw(keys_B, BRIGHTNESS_SITE)
    contrast_B = 1 + config.contrast * _draw(keys_B, CONTRAST_SITE)
    mean_B = image_BP.sum(1).double() / image_BP.shape[1]
    factor_B = (UNIT * brightness_B * contrast_B).round().long()
    summand_B = (UNIT * brightness_B * (1 - contrast_B) * mean_B).round().long()
    return (image_BP * factor_B[:, None] + summand_B[:, None]).clamp(0, white * UNIT)


def shift_levels(batch: Batch, most: int, white: int) -> Tensor:
    """Returns tokens whose grey levels are changed by -most to most, `[T]`. Each pixel draws its own, uniformly.

    Args:
        batch: pixels, all of an image or some, with or without a first token that is no pixel.
        most: the largest change, in grey levels.
        white: the largest id of a pixel; 0 is black.
    """
    bits_T = mix_keys(row_keys(batch) + LEVEL_SITE).long() & (1 << 16) - 1
    level_T = batch.tokens.long()
    shifted_T = (level_T + (bits_T * (2 * most + 1) >> 16) - most).clamp(0, white)
    return torch.where(level_T > white, level_T, shifted_T).to(batch.tokens.dtype)


def _draw(keys_B: Tensor, site: int) -> Tensor:
    """Returns a number from -1 to 1 for each sequence, fp64 `[B]`."""
    return _draw_once(keys_B, site)


# an operator, because torch.compile would compute the hashes again for every pixel, and take minutes to compile that
_draw_once = define_operator(
    "draw_number", "(Tensor keys, int site) -> Tensor", lambda keys, site: mix_keys(keys + site).double() / (1 << 31),
    lambda keys, site: keys.new_empty(keys.shape, dtype=torch.float64),
)  # fmt: skip


def _draw_mirror(keys_B: Tensor, site: int, mirrored: bool) -> Tensor:
    """Returns 1 or -1 for each sequence, each with probability 1/2, fp64 `[B]`; only 1 unless they are `mirrored`."""
    return torch.where((_draw(keys_B, site) < 0) & mirrored, -1.0, 1.0).double()


def permute_operands(batch: Batch, max_length: int) -> Tensor:
    """Returns the tokens of expressions whose operators have their operands in random order, `[T]`.

    All operators are symmetric, so the value stays. Tokens that are not one or more whole expressions, because a
    bracket lacks its partner, stay as they are.

    Args:
        batch: sequences of ListOps' tokens, with or without others between the expressions.
        max_length: most tokens of an expression.
    """
    token_BN, real_BN = batch.pad(batch.tokens), batch.mask()
    opens_BN = real_BN & (token_BN >= FIRST_OPERATOR) & (token_BN < BRACKET)
    closes_BN = real_BN & (token_BN == BRACKET)
    step_BN = opens_BN.long() - closes_BN.long()
    depth_BN = step_BN.cumsum(1)
    whole_B1 = (depth_BN.amin(1, keepdim=True) >= 0) & (depth_BN[:, -1:] == 0)
    opens_BN, closes_BN = opens_BN & whole_B1, closes_BN & whole_B1
    level_BN = torch.where(whole_B1, depth_BN - step_BN, 0)  # operators that are open before the token

    # Siblings and the bracket after them are a group. From level to level, the k-th operator owns the k-th bracket:
    # so it owns group k. Group 0 has what is in no operator.
    order_BN = stable_order(level_BN)
    opened_BN, closed_BN = (each_BN.long().gather(1, order_BN) for each_BN in (opens_BN, closes_BN))
    own_BN = torch.where(opens_BN, _from_order(opened_BN.cumsum(1), order_BN), 0)
    group_BN = torch.where(level_BN > 0, _from_order(closed_BN.cumsum(1) - closed_BN + 1, order_BN), 0)
    place_BN = torch.arange(token_BN.shape[1], device=token_BN.device).expand_as(token_BN)
    operator_BN = _at_groups(place_BN, own_BN).gather(1, group_BN)  # the place of each token's operator
    bracket_BG = _at_groups(place_BN, torch.where(closes_BN, group_BN, 0))
    bracket_BN = bracket_BG.gather(1, group_BN)
    size_BN = torch.where(opens_BN, bracket_BG.gather(1, own_BN) - place_BN + 1, 1)

    # the new order within each group: what is in no operator keeps its own, and a bracket comes last
    key_BN = batch.pad(mix_keys(row_keys(batch) + OPERANDS_SITE)).long() & (1 << 32) - 1
    key_BN = torch.where(group_BN > 0, torch.where(closes_BN, 1 << 32, key_BN), 0)
    order_BN = stable_order(group_BN * (1 << 33) + key_BN)
    sizes_BN = size_BN.gather(1, order_BN)
    before_BN = _from_order(sizes_BN.cumsum(1) - sizes_BN, order_BN)  # tokens of earlier siblings and groups

    # A token's distance from its operator is known, and the bracket's is. Add the distances up to the outermost.
    within_BN = group_BN > 0
    distance_BN = before_BN - before_BN.gather(1, bracket_BN) + bracket_BN - operator_BN
    distance_BN = torch.where(within_BN, distance_BN, 0)
    above_BN = torch.where(within_BN, operator_BN, place_BN)
    for _ in range((max_length // 2).bit_length()):  # each time twice as many levels; a level takes two tokens
        distance_BN = distance_BN + distance_BN.gather(1, above_BN)
        above_BN = above_BN.gather(1, above_BN)
    new_BN = before_BN.gather(1, above_BN) + distance_BN
    return batch.unpad(_from_order(token_BN, new_BN))


def _from_order(values_BN: Tensor, order_BN: Tensor) -> Tensor:
    """Returns the values at the places that `order_BN`, a permutation, gives them: the inverse of `gather`."""
    return torch.zeros_like(values_BN).scatter(1, order_BN, values_BN)


def _at_groups(place_BN: Tensor, group_BN: Tensor) -> Tensor:
    """Returns the place of the token that has each group, `[B, N + 1]`. Of group 0 it is arbitrary."""
    return place_BN.new_zeros(len(place_BN), place_BN.shape[1] + 1).scatter(1, group_BN, place_BN)
