"""Self-pretraining on any task, without labels: the encoder learns to find hidden tokens from the others.

Amos et al. 2024, "Never Train from Scratch" (arXiv 2310.02980, section 2): training uses the task's own training set,
each token is hidden independently, and only hidden tokens have a loss. Here a hidden token has the id MASK. Options
replace some by random tokens and take the loss of all tokens (Devlin et al. 2019, arXiv 1810.04805, section 3.1, and
Miralles-González et al. 2025, arXiv 2501.14850), or hide spans. The scores are always of hidden tokens.
"""

from __future__ import annotations

from torch import Tensor

from lra.batch import Batch
from lra.config.schema import RunConfig
from lra.tasks.base import OptimisationStep
from lra.tasks.hiding import Hiding
from lra.tasks.pretraining import PretrainingTask


class MaskedTask(PretrainingTask):
    """Pretraining by hidden tokens; `with_objective` combines it with the task's module."""

    def __init__(self, run: RunConfig, step: OptimisationStep):
        super().__init__(run, step)
        self.hiding = Hiding(run, self.facts.mask, self.model.encoder)

    def find(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns what is decoded from each row, fp32 (see `Hiding`), and which rows are hidden, bool `[T]`."""
        shown, hidden_T = self.hiding.hide(batch)
        return self.model(shown).float(), hidden_T

    def loss(self, batch: Batch) -> Tensor:
        """Loss of the tokens, summed over the examples: `Hiding.loss`."""
        decoded, hidden_T = self.find(batch)
        return self.hiding.loss(decoded, batch, hidden_T)

    def score_rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        decoded, hidden_T = self.find(batch)
        return self.hiding.predicted_tokens(decoded), *self.hiding.losses(decoded, batch, hidden_T)

    def explain_no_target(self, split: str) -> str:
        return f"mask={self.hiding.share} hides no token of {split}: raise mask=, or take more sequences"
