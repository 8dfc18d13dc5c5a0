"""From pooled sequences to class scores."""

from torch import nn


def classifier(d_model: int, d_hidden: int, classes: int) -> nn.Sequential:
    """Two layers with a ReLU between, as in all three public LRA codebases; `[B, d_model]` to `[B, classes]`."""
    return nn.Sequential(nn.Linear(d_model, d_hidden), nn.ReLU(), nn.Linear(d_hidden, classes))
