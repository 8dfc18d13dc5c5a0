"""Self-pretraining on any task, without labels: the encoder learns to find hidden tokens from the others.

Amos et al. 2024, "Never Train from Scratch" (arXiv 2310.02980, section 2): training uses the task's own training set,
each token is hidden independently, and only hidden tokens have a loss. Here a hidden token has the id MASK. Options
replace some by random tokens and take the loss of all tokens (Devlin et al. 2019, arXiv 1810.04805, section 3.1, and
Miralles-González et al. 2025, arXiv 2501.14850), or hide spans. The scores are always of hidden tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.data.split import Examples
from lra.errors import UsageError, refuse_diverged
from lra.models.transformer import Encoder
from lra.tasks.base import OptimisationStep, TaskData, TaskModule
from lra.tasks.hiding import Hiding, token_decoder


class Denoiser(nn.Module):
    """An encoder and a linear decoder. Returns what is decoded from each row: see `Hiding`."""

    def __init__(self, encoder: Encoder, decoder: nn.Module):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(self.encoder.rows(batch))


class MaskedTask(TaskModule):
    """The pretraining of a task; `with_objective` combines it with the task's module."""

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__(run, step)
        self.hiding = Hiding(run, self.facts.mask, self.model.encoder)
        self.found: dict[str, list[float]] = {}  # for each test set: how often each token was hidden
        self.commonest: int | None = None

    def network(self) -> nn.Module:
        return Denoiser(self.encoder(masked=True), token_decoder(self.run, len(self.Data.vocabulary)))

    def find(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns what is decoded from each row, fp32 (see `Hiding`), and which rows are hidden, bool `[T]`."""
        shown, hidden_T = self.hiding.hide(batch)
        return self.model(shown).float(), hidden_T

    def loss(self, batch: Batch) -> Tensor:
        """Loss of the tokens, summed over the examples: `Hiding.loss`."""
        decoded, hidden_T = self.find(batch)
        return self.hiding.loss(decoded, batch, hidden_T)

    def forward(self, batch: Batch) -> Tensor:
        """Returns the counts of a batch, fp64 `[2 + V]`: hidden tokens found, the sum of their losses, and how often
        each token of the vocabulary is hidden. `self.model` decodes each row."""
        decoded, hidden_T = self.find(batch)
        target_T, loss_T = self.hiding.losses(decoded, batch, hidden_T)
        found = (self.hiding.predicted_tokens(decoded) == target_T).sum()
        # compared, not scattered: all rows would be added to a few numbers, one after the other
        counts_V = (target_T[:, None] == torch.arange(self.hiding.vocabulary, device=target_T.device)).sum(0)
        return torch.cat((torch.stack((found.double(), loss_T.sum().double())), counts_V.double()))

    def _score(self, split: str) -> None:
        sums = torch.stack([each for each, _ in self.scored.pop(split)])
        total = self.trainer.strategy.reduce(sums.sum(0), reduce_op="sum")
        found, loss, *counts = total.tolist()
        if not sum(counts):
            raise UsageError(f"mask={self.hiding.share} hides no token of {split}: raise mask=, or take more sequences")
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


def commonest_token(train: Examples, options: Mapping[str, Any], at_once: int = 1024) -> int:
    """Returns the most frequent token of a split, as training sees it."""
    counts = np.zeros(1, np.int64)
    for first in range(0, len(train), at_once):
        rows = np.arange(first, min(first + at_once, len(train)))
        found = np.bincount(train.collate(rows, **options).to("cpu").tokens.numpy(), minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    return int(counts.argmax())
