"""Tests early in a run whether validation has enough memory."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import pytorch_lightning as pl
import torch

from lra.tasks.base import TaskData, TaskModule
from lra.training.clock import Clock, synchronize


class EarlyValidation(pl.Callback):
    """Scores a batch of validation soon after the start, so that a run without memory for it fails at once.

    A test before training would not show this, because the steps allocate their memory later.
    """

    STEPS = 20  # so it comes before the line that says what the run will cost

    def __init__(self, clock: Clock):
        self.clock = clock
        self.due = math.inf  # the step after which a batch is scored

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.due = trainer.global_step + self.STEPS if trainer.enable_validation else math.inf

    def on_validation_start(self, *_: Any) -> None:
        self.due = math.inf

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        if trainer.global_step < self.due:
            return
        self.due = math.inf
        module = cast(TaskModule, pl_module)
        self.clock.on_validation_start(trainer, module)
        module.eval()
        with torch.no_grad(), trainer.precision_plugin.val_step_context():
            loader = cast(TaskData, trainer.datamodule).val_dataloader()  # type: ignore[attr-defined]
            for _turn in range(2 if module.step.captures(module, module.device) else 1):  # the first one compiles
                began = time.perf_counter()
                batch = next(iter(loader))
                module.evaluate(batch)
                synchronize(trainer)
                self.clock.example = (time.perf_counter() - began) / len(batch.label)
        module.train()
        torch.cuda.empty_cache()  # graphs that are captured later can't use the cache
        trainer.strategy.barrier()  # otherwise the next step waits for the slowest rank
        self.clock.on_validation_end(trainer, module)
