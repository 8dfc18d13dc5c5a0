"""Self-pretraining: tokens are hidden, and the encoder learns to find them from the others. Any task, without labels.

Amos et al. 2024, "Never Train from Scratch" (arXiv 2310.02980, section 2): on the task's own training set, each token
hidden by itself, the loss on hidden tokens only. Here a hidden token has an id of its own, MASK.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data.split import IGNORED, Examples
from lra.errors import UsageError, refuse_diverged
from lra.models.dropout import mix_bits, row_keys
from lra.models.transformer import Encoder
from lra.tasks.base import OptimisationStep, TaskData, TaskModule

BITS = 16  # of a hash that decide: the share is exact to 2^-16
SITE = -1  # of the hash of places: dropout's begin at 0


def hidden(batch: Batch, share: float, prefix: int | None) -> Tensor:
    """Which rows are hidden, bool `[T]`: each token with probability `share`; no CLS, nothing past a length, no filler.

    A function of (seed, index of the sequence, position) as dropout is. Without a seed, in evaluation, it is always 0.
    """
    if batch.seed is None:
        batch = batch.with_seed(torch.zeros((), dtype=torch.int64, device=batch.tokens.device))
    drawn_T = (mix_bits(row_keys(batch) + SITE) & (1 << BITS) - 1) < round(share * (1 << BITS))
    wanted_B = batch.label.repeat_interleave(batch.size // batch.label.numel()) != IGNORED
    hidden_T = drawn_T & batch.per_row(wanted_B)
    if batch.padded:
        hidden_T = hidden_T & batch.mask().flatten()
    return hidden_T if prefix is None else hidden_T & (batch.tokens != prefix)


class Denoiser(nn.Module):
    """An encoder and a linear decoder: scores of the vocabulary for every row, `[T, V]`."""

    def __init__(self, encoder: Encoder, decoder: nn.Module):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(self.encoder.rows(batch))


class Masked(TaskModule):
    """What pretraining makes of a task's module: see `masked`."""

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__(run, step)
        self.share: float = self.facts.mask if run.mask is None else run.mask
        self.found: dict[str, list[float]] = {}  # of a test set: how often each token was hidden
        self.commonest: int | None = None

    def network(self) -> nn.Module:
        return Denoiser(self.encoder(masked=True), nn.Linear(self.run.model.d_model, len(self.Data.vocabulary)))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Of every row: scores `[T, V]`, the token, IGNORED where none is hidden, and the cross-entropy; fp32 `[T]`."""
        encoder: Any = self.model.encoder
        hidden_T = hidden(batch, self.share, encoder.prefix)
        tokens_T = torch.where(hidden_T, encoder.mask, batch.tokens)
        scores_TV = self.model(dataclasses.replace(batch, tokens=tokens_T)).float()
        # all rows, as what is captured has one shape
        target_T = torch.where(hidden_T, batch.tokens.long(), IGNORED)
        return scores_TV, target_T, F.cross_entropy(scores_TV, target_T, reduction="none")

    def loss(self, batch: Batch) -> Tensor:
        """Summed over the examples: of one the hidden tokens' cross-entropy, divided by how many are expected.

        That is `share` times the sequence's tokens: how many are hidden in the whole batch is known to no part of it.
        Of an example's two sequences the mean counts. So every sequence weighs the same, as in classification.
        """
        prefixed = int(self.model.encoder.prefix is not None)
        expected_B = self.share * (batch.length - prefixed).clamp(min=1) * (batch.size // batch.label.numel())
        return (self.losses(batch)[2] * batch.per_row(1 / expected_B)).sum()

    def forward(self, batch: Batch) -> Tensor:
        """What a batch counts for: hidden tokens found, their summed cross-entropy, and how often each token of the
        vocabulary is hidden, fp64 `[2 + V]`. `self.model` gives the scores of every row."""
        scores_TV, target_T, loss_T = self.losses(batch)
        hidden_T = target_T != IGNORED
        found = (scores_TV.argmax(1) == target_T).sum()
        counts_V = torch.zeros(scores_TV.shape[1], dtype=torch.int64, device=target_T.device)
        counts_V = counts_V.scatter_add(0, target_T.clamp(min=0), hidden_T.long())
        return torch.cat((torch.stack((found.double(), loss_T.sum().double())), counts_V.double()))

    def _score(self, split: str) -> None:
        sums = torch.stack([each for each, _ in self.scored.pop(split)])
        total = self.trainer.strategy.reduce(sums.sum(0), reduce_op="sum")
        found, loss, *counts = total.tolist()
        if not sum(counts):
            raise UsageError(f"mask={self.share} hides no token of {split}: raise mask=, or take more sequences")
        refuse_diverged(loss, split)
        self.found[split] = counts
        for name, value in (("accuracy", found), ("loss", loss)):
            mean = value / sum(counts)
            self.log(f"{split}/{name}", mean, logger=False, on_step=False, on_epoch=True, sync_dist=True)

    def reference(self, data: TaskData, split: str) -> tuple[int, dict[str, float]]:
        """How many tokens were hidden, and the share among them of the commonest one of train."""
        if self.commonest is None:
            options = data.collate_options().items()
            plain = {name: value for name, value in options if name not in ("layout", "prefix")}
            self.commonest = commonest(data.parts["train"], plain)
        counts = self.found[split]
        return int(sum(counts)), {"majority": counts[self.commonest] / sum(counts)}


def masked(task: type[TaskModule]) -> type[TaskModule]:
    """The pretraining of a task: its module with another head, another loss and other scores."""
    return type(f"Masked{task.__name__}", (Masked, task), {})


def commonest(train: Examples, options: Mapping[str, Any], at_once: int = 1024) -> int:
    """The token that a split has most of, as training sees it."""
    counts = np.zeros(1, np.int64)
    for first in range(0, len(train), at_once):
        rows = np.arange(first, min(first + at_once, len(train)))
        found = np.bincount(train.collate(rows, **options).to("cpu").tokens.numpy(), minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    return int(counts.argmax())
