"""Normalisation between layers: LayerNorm, RMSNorm, or BatchNorm over the real tokens of a batch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from lra.batch import Batch
from lra.config.model import ModelConfig

EPSILON = 1e-5  # added to variances and mean squares, as PyTorch's LayerNorm has it


class BatchNorm(nn.Module):
    """Batch normalisation of each feature (Ioffe and Szegedy 2015, arXiv 1502.03167, section 3), in fp32.

    Training normalises by mean and variance over the real tokens of a batch. Rows of padding do not count, nor do rows
    that fill a packed batch up. Each micro-batch of each device has its own statistics. Those of a causal model see
    later tokens. Evaluation normalises by running statistics, so a sequence then depends on no other.

    The running statistics change once a step, by the statistics of the whole step: all micro-batches of all devices.
    `forward` only adds to `sums`, and `update_running` changes them. So a step that is left out changes nothing.
    """

    running_mean: Tensor
    running_var: Tensor
    sums: Tensor

    def __init__(self, width: int, momentum: float = 0.1):
        super().__init__()
        self.momentum = momentum
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))
        # of this step so far: rows, and the sums of x and of its square; in fp64, as their difference is a variance
        self.register_buffer("sums", torch.zeros(3, width, dtype=torch.float64), persistent=False)

    def forward(self, x_TD: Tensor, batch: Batch) -> Tensor:
        """Maps `[T, D]` to `[T, D]`. Rows that do not count get arbitrary values."""
        if not self.training:
            return (x_TD - self.running_mean) * (self.running_var + EPSILON).rsqrt() * self.weight + self.bias
        real_T1 = batch.real_rows()[:, None]
        rows = real_T1.sum()
        mean_D = x_TD.where(real_T1, 0).sum(0) / rows.clamp(min=1)
        centred_TD = x_TD - mean_D
        var_D = centred_TD.square().where(real_T1, 0).sum(0) / rows.clamp(min=1)
        with torch.no_grad():
            mean64_D = mean_D.double()
            self.sums += rows * torch.stack((torch.ones_like(mean64_D), mean64_D, var_D + mean64_D.square()))
        return centred_TD * (var_D + EPSILON).rsqrt() * self.weight + self.bias

    @torch.no_grad()
    def update_running(self, left_out: Tensor) -> None:
        """Moves the running statistics towards those of the step, unless `left_out` is 1, and begins the next step.

        The variance is the unbiased one, as PyTorch's BatchNorm keeps it. A step without a real token changes nothing.
        The host does not wait.
        """
        rows_D, sum_D, squares_D = self.sums
        mean_D = sum_D / rows_D
        var_D = (squares_D / rows_D - mean_D.square()).clamp(min=0) * rows_D / (rows_D - 1).clamp(min=1)
        kept_D = left_out.bool() | (rows_D == 0)
        for running_D, found_D in ((self.running_mean, mean_D), (self.running_var, var_D)):
            running_D.copy_(torch.where(kept_D, running_D, running_D.lerp(found_D.to(running_D.dtype), self.momentum)))
        self.sums.zero_()


def make_norm(config: ModelConfig) -> Any:
    """Returns a norm of token rows: what `normalise` takes."""
    if config.norm == "batch":
        return BatchNorm(config.d_model)
    return (nn.LayerNorm if config.norm == "layer" else nn.RMSNorm)(config.d_model, eps=EPSILON)


def normalise(norm: nn.Module, x_TD: Tensor, batch: Batch) -> Tensor:
    """Applies a norm to the rows of a batch, `[T, D]` to `[T, D]`."""
    return norm(x_TD, batch) if isinstance(norm, BatchNorm) else norm(x_TD)


def batch_norms(module: nn.Module) -> list[BatchNorm]:
    """Lists the batch norms of a module."""
    return [part for part in module.modules() if isinstance(part, BatchNorm)]


def update_statistics(norms: Iterable[BatchNorm], left_out: Tensor) -> None:
    """Calls `update_running` of each norm."""
    for norm in norms:
        norm.update_running(left_out)
