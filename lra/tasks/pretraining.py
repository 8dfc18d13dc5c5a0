"""What objectives without labels share: a decoder, scores by counts, and the commonest token as their baseline."""

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
from lra.tasks.hiding import token_decoder


class TokenModel(nn.Module):
    """An encoder and a linear decoder. Returns what is decoded from each row: see `Hiding`."""

    def __init__(self, encoder: Encoder, decoder: nn.Module):
        super().__init__()
        self.encoder, self.decoder = encoder, decoder

    def forward(self, batch: Batch) -> Tensor:
        return self.decoder(self.encoder.rows(batch))


class PretrainingTask(TaskModule):
    """The pretraining of a task. A subclass says what is to be found, and what the loss is."""

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__(run, step)
        self.counts: dict[str, list[float]] = {}  # for each test set: how often each token was to be found
        self.commonest: int | None = None

    def network(self) -> nn.Module:
        return TokenModel(self.encoder(), token_decoder(self.run, len(self.Data.vocabulary)))

    def score_rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Returns for each row the predicted token, the token to find or IGNORED, and the loss, fp32: each `[T]`."""
        raise NotImplementedError

    def explain_no_target(self, split: str) -> str:
        """Says why there is no token to find in a split, and the mend."""
        raise NotImplementedError

    def forward(self, batch: Batch) -> Tensor:
        """Returns the counts of a batch, fp64 `[2 + V]`: tokens found, the sum of their losses, and how often each
        token of the vocabulary was to be found. `self.model` decodes each row."""
        predicted_T, target_T, loss_T = self.score_rows(batch)
        found = (predicted_T == target_T).sum()
        # compared, not scattered: all rows would be added to a few numbers, one after the other
        counts_V = (target_T[:, None] == torch.arange(len(self.Data.vocabulary), device=target_T.device)).sum(0)
        return torch.cat((torch.stack((found.double(), loss_T.sum().double())), counts_V.double()))

    def _score(self, split: str) -> None:
        sums = torch.stack([each for each, _ in self.scored.pop(split)])
        total = self.trainer.strategy.reduce(sums.sum(0), reduce_op="sum")
        found, loss, *counts = total.tolist()
        if not sum(counts):
            raise UsageError(self.explain_no_target(split))
        refuse_diverged(loss, split, self.run.optim.steadier)
        self.counts[split] = counts
        for name, value in (("accuracy", found), ("loss", loss)):
            mean = value / sum(counts)
            self.log(f"{split}/{name}", mean, logger=False, on_step=False, on_epoch=True, sync_dist=True)

    def reference(self, data: TaskData, split: str) -> tuple[int, dict[str, float]]:
        """Returns the number of tokens to find, and the share of train's commonest token among them."""
        if self.commonest is None:
            options = data.collate_options().items()
            plain = {name: value for name, value in options if name not in ("layout", "prefix")}
            self.commonest = commonest_token(data.parts["train"], plain)
        counts = self.counts[split]
        return int(sum(counts)), {"majority": counts[self.commonest] / sum(counts)}


def commonest_token(train: Examples, options: Mapping[str, Any], at_once: int = 1024) -> int:
    """Returns the most frequent token of a split, as training sees it."""
    counts = np.zeros(1, np.int64)
    for first in range(0, len(train), at_once):
        rows = np.arange(first, min(first + at_once, len(train)))
        found = np.bincount(train.collate(rows, **options).to("cpu").tokens.numpy(), minlength=len(counts))
        counts = np.pad(counts, (0, len(found) - len(counts))) + found
    return int(counts.argmax())
