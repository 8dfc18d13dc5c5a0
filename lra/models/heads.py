"""From pooled sequences to class scores."""

import torch
from torch import Tensor, nn


def classifier(d_model: int, d_hidden: int | None, classes: int) -> nn.Sequential:
    """Maps `[B, d_model]` to `[B, classes]` by two layers with a ReLU between, as in all three public LRA codebases.

    Without `d_hidden` it is one layer, as Amos et al. 2024 (arXiv 2310.02980) have it on ListOps and Pathfinder.
    """
    if d_hidden is None:
        return nn.Sequential(nn.Linear(d_model, classes))
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.ReLU(), nn.Linear(d_hidden, classes))


class PairClassifier(nn.Module):
    """Scores of pairs from their two encodings x and y, side by side: `[2B, d_model]` to `[B, classes]`.

    The classifier sees (x, y, x * y, x - y), the features of natural language inference (Mou et al. 2016, section 3.3),
    or with `absolute` |x - y| for the last (Conneau et al. 2017, arXiv 1705.02364, section 3.1). Averages over bytes
    differ little between texts; that two are alike is then in |x - y| at once, and in x - y only for hidden units
    that have learned to be a pair, of opposite signs.
    """

    def __init__(self, d_model: int, d_hidden: int | None, classes: int, absolute: bool = False):
        super().__init__()
        self.absolute = absolute
        self.classifier = classifier(4 * d_model, d_hidden, classes)

    def forward(self, encoded: Tensor) -> Tensor:
        x, y = encoded.unflatten(0, (-1, 2)).unbind(1)
        difference = (x - y).abs() if self.absolute else x - y
        return self.classifier(torch.cat((x, y, x * y, difference), -1))
