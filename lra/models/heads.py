"""From pooled sequences to class scores."""

import torch
from torch import Tensor, nn


def classifier(d_model: int, d_hidden: int, classes: int) -> nn.Sequential:
    """Two layers with a ReLU between, as in all three public LRA codebases; `[B, d_model]` to `[B, classes]`."""
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.ReLU(), nn.Linear(d_hidden, classes))


class PairClassifier(nn.Module):
    """Scores of pairs from their two encodings x and y, side by side: `[2B, d_model]` to `[B, classes]`.

    The classifier sees (x, y, x * y, x - y), the features of natural language inference (Mou et al. 2016, section 3.3).
    """

    def __init__(self, d_model: int, d_hidden: int, classes: int):
        super().__init__()
        self.classifier = classifier(4 * d_model, d_hidden, classes)

    def forward(self, encoded: Tensor) -> Tensor:
        x, y = encoded.unflatten(0, (-1, 2)).unbind(1)
        return self.classifier(torch.cat((x, y, x * y, x - y), -1))
