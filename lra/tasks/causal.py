"""Self-pretraining on any task, without labels: the encoder learns to find each next token from those before it.

Radford et al. 2018, "Improving Language Understanding by Generative Pre-Training" (section 3.1). Amos et al. 2024
(arXiv 2310.02980, section 2) pretrain so on the task's own training set. The encoder is causal for that. Fine-tuning
keeps it causal only with `model.causal=true`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from lra.batch import IGNORED_LABEL, Batch
from lra.tasks.hiding import findable_rows, sum_of_means
from lra.tasks.pretraining import PretrainingTask


class CausalTask(PretrainingTask):
    """Pretraining by next tokens; `with_objective` combines it with the task's module."""

    def score_rows(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        scores_TV, target_T = self.model(batch).float(), next_tokens(batch)
        return scores_TV.argmax(1), target_T, F.cross_entropy(scores_TV, target_T, reduction="none")

    def loss(self, batch: Batch) -> Tensor:
        """Cross-entropy of the next tokens: the mean over each sequence, summed over the examples.

        CLS is the first token that has a next one. It has no loss itself.
        """
        return sum_of_means(self.score_rows(batch)[2], (batch.length - 1).clamp(min=1), batch)

    def explain_no_target(self, split: str) -> str:
        return f"pretrain=causal: no sequence of {split} has a second token: raise task.max_length, or take others"


def next_tokens(batch: Batch) -> Tensor:
    """Returns for each row the next token of its sequence, int64 `[T]`.

    The last row of a sequence, padding and filler have IGNORED.
    """
    row_T = torch.arange(batch.tokens.numel(), device=batch.tokens.device)
    has_next_T = row_T < batch.per_row(batch.start + batch.length - 1)
    return torch.where(findable_rows(batch, None) & has_next_T, batch.tokens.roll(-1).long(), IGNORED_LABEL)
