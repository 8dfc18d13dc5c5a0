"""Self-pretraining on any task, without labels: the encoder learns to find hidden tokens from the others.

Amos et al. 2024, "Never Train from Scratch" (arXiv 2310.02980, section 2): training uses the task's own training set,
each token is hidden independently, and only hidden tokens have a loss. Here a hidden token has the id MASK.
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
from lra.data.split import IGNORED_LABEL, Examples
from lra.errors import UsageError, refuse_diverged
from lra.models.dropout import mix_bits, row_keys
from lra.models.transformer import Encoder
from lra.tasks.base import OptimisationStep, TaskData, TaskModule

HASH_BITS = 16  # bits of the hash that are compared: the share is exact to 2^-16
HIDING_SITE = -1  # in the hash of places; the sites of dropout begin at 0


def hidden_rows(batch: Batch, share: float, prefix: int | None) -> Tensor:
    """Returns which rows are hidden, bool `[T]`: each token with probability `share`, but no CLS, padding or filler.

    Like dropout, it is a function of (seed, index of the sequence, position). Evaluation has no seed and uses 0.
    """
    if batch.seed is None:
        batch = batch.with_seed(torch.zeros((), dtype=torch.int64, device=batch.tokens.device))
    drawn_T = (mix_bits(row_keys(batch) + HIDING_SITE) & (1 << HASH_BITS) - 1) < round(share * (1 << HASH_BITS))
    wanted_B = batch.label.repeat_interleave(batch.size // batch.label.numel()) != IGNORED_LABEL
    hidden_T = drawn_T & batch.per_row(wanted_B)
    if batch.padded:
        hidden_T = hidden_T & batch.mask().flatten()
    return hidden_T if prefix is None else hidden_T & (batch.tokens != prefix)


class Denoiser(nn.Module):
    """An encoder and a linear decoder. Returns scores of the vocabulary for each row, `[T, V]`."""

    def __init__(self, encoder: Encoder, decoder: nn.Module):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(self.encoder.rows(batch))


class MaskedTask(TaskModule):
    """The pretraining of a task; `masked_task` combines it with the task's module."""

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__(run, step)
        self.share: float = self.facts.mask if run.mask is None else run.mask
        self.found: dict[str, list[float]] = {}  # for each test set: how often each token was hidden
        self.commonest: int | None = None

    def network(self) -> nn.Module:
        return Denoiser(self.encoder(masked=True), nn.Linear(self.run.model.d_model, len(self.Data.vocabulary)))

    def losses(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """For each row: scores `[T, V]`, the hidden token or IGNORED `[T]`, and the cross-entropy, fp32 `[T]`."""
        encoder: Any = self.model.encoder
        hidden_T = hidden_rows(batch, self.share, encoder.prefix)
        tokens_T = torch.where(hidden_T, encoder.mask, batch.tokens)
        scores_TV = self.model(dataclasses.replace(batch, tokens=tokens_T)).float()
        # decode all rows, because a captured graph has one shape
        target_T = torch.where(hidden_T, batch.tokens.long(), IGNORED_LABEL)
        return scores_TV, target_T, F.cross_entropy(scores_TV, target_T, reduction="none")

    def loss(self, batch: Batch) -> Tensor:
        """Sums over the examples the cross-entropy of hidden tokens, divided by their expected number.

        The expected number is `share` times the tokens of the sequence, as no micro-batch knows the number in the whole
        batch. An example of two sequences counts their mean. So each sequence weighs the same, as in classification.
        """
        prefixed = int(self.model.encoder.prefix is not None)
        expected_B = self.share * (batch.length - prefixed).clamp(min=1) * (batch.size // batch.label.numel())
        return (self.losses(batch)[2] * batch.per_row(1 / expected_B)).sum()

    def forward(self, batch: Batch) -> Tensor:
        """Returns the counts of a batch, fp64 `[2 + V]`: hidden tokens found, the sum of their cross-entropy, and how
        often each token of the vocabulary is hidden. `self.model` gives the scores of each row."""
        scores_TV, target_T, loss_T = self.losses(batch)
        found = (scores_TV.argmax(1) == target_T).sum()
        # compared, not scattered: all rows would be added to a few numbers, one after the other
        counts_V = (target_T[:, None] == torch.arange(scores_TV.shape[1], device=target_T.device)).sum(0)
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
        """Returns the number of hidden tokens, and the share of train's commonest token among them."""
        if self.commonest is None:
            options = data.collate_options().items()
            plain = {name: value for name, value in options if name not in ("layout", "prefix")}
            self.commonest = commonest_token(data.parts["train"], plain)
        counts = self.found[split]
        return int(sum(counts)), {"majority": counts[self.commonest] / sum(counts)}


def masked_task(task: type[TaskModule]) -> type[TaskModule]:
    """Returns the pretraining of a task: its module with another head, loss and scores."""
    return type(f"Masked{task.__name__}", (MaskedTask, task), {})


def commonest_token(train: Examples, options: Mapping[str, Any], at_once: int = 1024) -> int:
    """Returns the most frequent token of a split, as training sees it."""
    counts = np.zeros(1, np.int64)
    for first in range(0, len(train), at_once):
        rows = np.arange(first, min(first + at_once, len(train)))
        found = np.bincount(train.collate(rows, **options).to("cpu").tokens.numpy(), minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    return int(counts.argmax())
