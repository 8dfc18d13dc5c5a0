"""Labels with denoising beside them: one forward pass of a corrupted input classifies it and restores its tokens.

Miralles-González et al. 2025 (arXiv 2501.14850) train Text and Retrieval so. The decoder and the MASK token are for
training only. Evaluation sees the input as it is, and scores labels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.tasks.base import OptimisationStep, TaskModule
from lra.tasks.hiding import Hiding, token_decoder


class DenoisedTask(TaskModule):
    """A classifier that also learns to restore its input; `with_objective` combines it with the task's module."""

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__(run, step)
        self.hiding = Hiding(run, self.facts.mask, self.model.encoder)

    def network(self) -> nn.Module:
        network: Any = super().network()
        network.decoder = token_decoder(self.run, len(self.Data.vocabulary))
        return network

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of the labels + `denoise` times that of the tokens (`Hiding.loss`), summed over the examples.

        Both see the same corrupted input.
        """
        shown, hidden_T = self.hiding.hide(batch)
        rows_TD = self.model.encoder.rows(shown)
        scores_BC = self.model.head(self.model.encoder.pool(rows_TD, shown)).float()
        smoothing = self.run.optim.label_smoothing
        of_labels = F.cross_entropy(scores_BC, batch.label, reduction="sum", label_smoothing=smoothing)
        return of_labels + self.run.denoise * self.hiding.loss(self.model.decoder(rows_TD).float(), batch, hidden_T)
