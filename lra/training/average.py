"""Averages of the weights over the steps of a run. Training goes on with the weights themselves.

The average is what validation and test score and what `state_dict` of a checkpoint holds. `training_weights` there are
the weights with which training goes on.

Running statistics of batch norms are averaged like weights, as PyTorch's `AveragedModel` does with `use_buffers`.
Izmailov et al. (arXiv 1803.05407, section 3.2) compute them anew by another pass over the training set instead.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lra.config.trainer import TrainerConfig
from lra.models.norms import batch_norms
from lra.training.optim import trained_parameters


def newest_share(config: TrainerConfig, step: int) -> float:
    """Share of the newest weights in the average after update number `step` (from 0).

    `ema`: weights count `average_decay` to the power of their age in steps. The shares of all steps sum to 1, as in
    Adam's corrected moments (Kingma and Ba 2015, section 3), so a short run does not keep its first weights.
    `tail`: the mean over the last `average_share` of the steps, and before them the weights alone (stochastic weight
    averaging, Izmailov et al. 2018, arXiv 1803.05407, section 3, but over each step).
    """
    if config.average == "ema":
        return (1 - config.average_decay) / (1 - config.average_decay ** (step + 1))
    counted = max(round(config.average_share * config.steps), 1)
    return 1 / max(step + 1 - (config.steps - counted), 1)


class WeightAverage(pl.Callback):
    """Keeps the average of a module's parameters and running statistics, and puts it into the module for validation.

    All of it is tensors that keep their addresses, so a captured update can change the average. The host never waits.
    """

    def __init__(self, config: TrainerConfig):
        self.config = config
        self.averaged: list[Tensor] = []  # parameters, and running statistics
        self.average: Tensor | None = None  # of all of them, in a row; None before the first step of this session
        self.loaded: dict[str, Tensor] | None = None  # the training weights of a checkpoint, until the first step

    def start(self, module: nn.Module) -> None:
        """Prepares the first step of this session. A module from a checkpoint has the average, and gets its weights."""
        statistics = (each for norm in batch_norms(module) for each in (norm.running_mean, norm.running_var))
        self.averaged = [*trained_parameters(module), *statistics]
        self.average = self._weights()
        self.share = torch.ones((), device=self.average.device)
        if self.loaded is not None:
            module.load_state_dict(self.loaded)
            self.loaded = None

    def begin(self, step: int) -> None:
        """Sets the share of the weights that step `step` (from 0) leaves."""
        self.share.fill_(newest_share(self.config, step))

    @torch.no_grad()
    def update(self) -> None:
        """Adds the present weights to the average."""
        assert self.average is not None
        self.average.lerp_(self._weights(), self.share)

    def on_validation_start(self, *_: Any) -> None:
        self._exchange()

    def on_validation_end(self, *_: Any) -> None:
        self._exchange()  # before checkpoints are written: Lightning calls ModelCheckpoint last

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        checkpoint["training_weights"] = self.loaded or _copied(pl_module)
        self._exchange()
        checkpoint["state_dict"] = _copied(pl_module)
        self._exchange()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.loaded = checkpoint["training_weights"]

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchanges the average with the weights in the module. Before the first step they are the same."""
        if self.average is None:
            return
        weights = self._weights()
        parts = self.average.split([each.numel() for each in self.averaged])
        for each, part in zip(self.averaged, parts, strict=True):
            each.copy_(part.view_as(each))
        self.average.copy_(weights)

    def _weights(self) -> Tensor:
        return torch.cat([each.detach().flatten() for each in self.averaged])


def _copied(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}
