"""Hidden tokens: which tokens of a batch are hidden, what the encoder sees instead, and the loss of finding them.

All of it is a function of (seed, index of the sequence, position), like dropout. So layouts of batches, micro-batches,
devices and resumed runs change nothing. Evaluation has no seed and uses 0.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import IGNORED_LABEL, Batch
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.models.dropout import HIDING_SITE, REPLACING_SITE, SPAN_SITE, mix_keys, row_keys, sequence_keys
from lra.models.pixels import grey_values, nearest_ids
from lra.models.positions import token_coordinates
from lra.models.transformer import Encoder

HASH_BITS = 16  # bits of the hash that are compared: a share is exact to 2^-16


class Hiding:
    """How a run hides tokens (`mask` and what begins with `mask_`) and what its loss is (`mask_loss`, `pixel_loss`).

    What `token_decoder` makes of each row is here called decoded: scores of the vocabulary, fp32 `[T, V]`, or a grey
    value, fp32 `[T, 1]`.

    Args:
        run: the configuration of the run.
        share: the share of hidden tokens where `mask` is null.
        encoder: has the ids of the MASK and CLS tokens, and the size of images.

    Raises:
        UsageError: `mask_patch` hides squares, and the tokens are no pixels.
    """

    def __init__(self, run: RunConfig, share: float, encoder: Encoder):
        assert encoder.mask is not None
        self.share = share if run.mask is None else run.mask
        self.random, self.everywhere = run.mask_random, run.mask_loss == "all"
        self.side, self.width = run.mask_span, None
        if run.mask_patch > 1:
            if encoder.grid is None:
                raise UsageError(
                    f"mask_patch={run.mask_patch} hides squares of pixels: this task has no images, leave it out"
                )
            self.side, self.width = run.mask_patch, encoder.grid[1]
        self.mask, self.prefix = encoder.mask, encoder.prefix
        self.vocabulary = encoder.mask - (encoder.prefix is not None)
        self.distance = run.pixel_loss == "l1"

    def hide(self, batch: Batch) -> tuple[Batch, Tensor]:
        """Returns the batch that the encoder sees, and which rows of it are hidden, bool `[T]`."""
        hidden_T = hidden_rows(batch, self.share, self.prefix, self.side, self.width)
        shown_T: Tensor | int = self.mask
        if self.random:
            bits_T = mix_keys(row_keys(_seeded(batch)) + REPLACING_SITE)
            token_T = (bits_T >> HASH_BITS & (1 << HASH_BITS) - 1) * self.vocabulary >> HASH_BITS
            shown_T = torch.where(_drawn(bits_T, self.random), token_T.to(batch.tokens.dtype), self.mask)
        return dataclasses.replace(batch, tokens=torch.where(hidden_T, shown_T, batch.tokens)), hidden_T

    def losses(self, decoded: Tensor, batch: Batch, counted_T: Tensor) -> tuple[Tensor, Tensor]:
        """For each row: its token, or IGNORED where it does not count `[T]`, and its loss, fp32 `[T]`.

        The loss is the cross-entropy, or the distance of the grey values.

        Args:
            decoded: of each row.
            batch: the batch with the tokens to find.
            counted_T: which rows count.
        """
        # decode all rows, because a captured graph has one shape
        target_T = torch.where(counted_T, batch.tokens.long(), IGNORED_LABEL)
        if self.distance:
            distance_T = (decoded[:, 0] - grey_values(batch.tokens, self.vocabulary)).abs()
            return target_T, distance_T.where(counted_T, 0)
        return target_T, F.cross_entropy(decoded, target_T, reduction="none")

    def predicted_tokens(self, decoded: Tensor) -> Tensor:
        """Returns the token that is most likely in each row, or that of the nearest grey value, int64 `[T]`."""
        return nearest_ids(decoded[:, 0], self.vocabulary) if self.distance else decoded.argmax(1)

    def loss(self, decoded: Tensor, batch: Batch, hidden_T: Tensor) -> Tensor:
        """Sums over the examples the losses of their tokens, divided by their expected number.

        The expected number of hidden tokens is `share` times the tokens of the sequence, as no micro-batch knows the
        number in the whole batch.
        """
        counted_T, share = (findable_rows(batch, self.prefix), 1.0) if self.everywhere else (hidden_T, self.share)
        expected_B = share * (batch.length - int(self.prefix is not None)).clamp(min=1)
        return sum_of_means(self.losses(decoded, batch, counted_T)[1], expected_B, batch)


def token_decoder(run: RunConfig, vocabulary: int) -> nn.Linear:
    """Returns a decoder of the encoder's rows, `[T, d_model]`: to scores of the vocabulary, or to one grey value."""
    return nn.Linear(run.model.d_model, 1 if run.pixel_loss == "l1" else vocabulary)


def sum_of_means(loss_T: Tensor, counts_B: Tensor, batch: Batch) -> Tensor:
    """Sums over the examples the losses of rows, divided by a number for each sequence.

    An example of two sequences counts their mean. So each sequence weighs the same, as in classification.
    """
    return (loss_T * batch.per_row(1 / (counts_B * (batch.size // batch.label.numel())))).sum()


def findable_rows(batch: Batch, prefix: int | None) -> Tensor:
    """Returns which rows have a token that can be hidden or predicted, bool `[T]`: no CLS, padding or filler."""
    rows_T = batch.real_rows()
    return rows_T if prefix is None else rows_T & (batch.tokens != prefix)


def hidden_rows(batch: Batch, share: float, prefix: int | None, span: int = 1, width: int | None = None) -> Tensor:
    """Returns which rows are hidden, bool `[T]`: each token that can be, with probability `share`.

    With a `span`, so many places in a row are hidden together. The first span of a sequence begins at a random place,
    and what is left before it is a shorter span. With the `width` of an image, too, squares of that side are hidden
    together: their columns and their rows begin at random places.
    """
    seeded = _seeded(batch)
    if span > 1:
        assert seeded.seed is not None
        bits_B = mix_keys(sequence_keys(batch.index, seeded.seed) + SPAN_SITE)
        begin_B = (bits_B & (1 << 31) - 1) % span
        if width is None:
            group_T = (batch.token_positions() + batch.per_row(begin_B)) // span
        else:
            place_TA = token_coordinates(batch, 2, width, prefix is not None)
            down_B = (mix_keys(bits_B) & (1 << 31) - 1) % span
            row_T, column_T = (
                (place_TA[:, axis] + batch.per_row(first_B)) // span for axis, first_B in ((0, down_B), (1, begin_B))
            )
            group_T = row_T * (width // span + 2) + column_T
        seeded = dataclasses.replace(seeded, positions=group_T)  # all places of a group have one hash
    return _drawn(mix_keys(row_keys(seeded) + HIDING_SITE), share) & findable_rows(batch, prefix)


def _seeded(batch: Batch) -> Batch:
    if batch.seed is not None:
        return batch
    return batch.with_seed(torch.zeros((), dtype=torch.int64, device=batch.tokens.device))


def _drawn(bits: Tensor, share: float) -> Tensor:
    """Returns which hashes are drawn, with probability `share`, by their low bits."""
    return (bits & (1 << HASH_BITS) - 1) < round(share * (1 << HASH_BITS))
