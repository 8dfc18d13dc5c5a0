"""Tells the user during a run what it will cost and what its validations find."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytorch_lightning as pl
import torch

from lra.config.schema import RunConfig
from lra.tasks.base import TaskData, TaskModule
from lra.training.clock import Clock, synchronize
from lra.training.curves import log_row
from lra.training.estimate import Estimate
from lra.training.output import format_duration, print_line
from lra.training.step import Step


class Narrator(pl.Callback):
    """Prints the cost of the run once its steps show it, again if it doubles, and a line for each validation."""

    PROBE, SOME_S = 10, 10.0  # the pace is measured over so many steps or seconds
    CLEAN = 200  # after so many steps a pace counts even if it includes compiling
    WARM_S, LONG_S = 5.0, 3600.0  # a first step so slow needs no warm-up; a run so long gets a warning

    def __init__(
        self, run: RunConfig, clock: Clock, now: Callable[[], float] = time.perf_counter, later: Sequence[int] = ()
    ):
        self.run, self.clock, self.now, self.later = run, clock, now, later
        self.estimate: Estimate | None = None
        self._mark = (0.0, 0, 0)  # seconds of training, step, and graphs at the last measurement
        self._began, self._told = 0, False
        self._validated = 0.0
        self._step: float | None = None  # when the present step began; None once the length is known
        self._steps = 0  # done in this session

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parts, world = cast(TaskData, trainer.datamodule).parts, trainer.world_size  # type: ignore[attr-defined]
        sizes = [math.ceil(len(parts[name]) / world) for name in ("val", *cast(TaskModule, pl_module).Data.test_sets)]
        self.estimate = Estimate(self.run.trainer.steps, self.run.trainer.eval_every, sizes[0], sum(sizes[1:]))
        self._began, self._step = trainer.global_step, self.now()
        self._mark = self.clock.trained(), trainer.global_step, 0

    def on_before_optimizer_step(self, trainer: pl.Trainer, *_: Any) -> None:
        """Warns at once if steps are slow, because a stride of them may take minutes."""
        if self._step is None or trainer.strategy.root_device.type != "cpu":
            return
        now = self.now()
        took, self._step, self._steps = now - self._step, now, self._steps + 1
        if self._steps == 1 and took < self.WARM_S:
            return
        self._step = None
        left = took * (self.run.trainer.steps - trainer.global_step)
        if left >= self.LONG_S:
            mend = "set fewer trainer.steps" if self.run.recipe == "demo" else "recipe=demo takes minutes on a CPU"
            cost = f"a step takes {took:.1f} s on this CPU: {self._limit}about {format_duration(left)} in all"
            print_line(trainer, f"{cost}; {mend}")

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        assert self.estimate is not None
        if self.clock.first is None or trainer.global_step == self._began:
            return
        engine = cast(Step, cast(TaskModule, pl_module).step).engine
        assert engine is not None
        graphs = engine.made
        if not self.clock.trained() or self._mark[1] == self._began:  # the first stride warms up and does not count
            self._mark = self.clock.trained(), trainer.global_step, graphs
            return
        seconds, step, before = self._mark
        if trainer.global_step - step < self.PROBE and self.clock.trained() - seconds < self.SOME_S:
            return
        if not self._told:
            synchronize(trainer)
        now = self.clock.trained()
        if self._told and now - seconds < self.SOME_S:  # the host's lead over the GPU is short against this
            return
        self._mark = now, trainer.global_step, graphs
        if graphs == before or trainer.global_step - self._began > self.CLEAN:
            self.estimate.paces.append((now - seconds) / (trainer.global_step - step))
        self.estimate.example = self.estimate.example or self.clock.example
        self._tell(trainer)

    @property
    def _limit(self) -> str:
        """Says that a time is a limit, if training may end early."""
        return "" if self.run.trainer.patience is None else "at most "

    def _tell(self, trainer: pl.Trainer) -> None:
        assert self.estimate is not None
        now, step = self.clock.trained() + self.clock.validation, trainer.global_step
        if step == self.run.trainer.steps or not self.estimate.due(now, step):
            return
        training, scoring = self.estimate.tell(now, step)
        parts = f"{format_duration(training)} of training at {1000 * self.estimate.pace:.1f} ms a step"
        again = "now " if self._told else ""
        total = f"{self._limit}{format_duration(training + scoring)}"
        cost = f"expect {total}: {parts}, {format_duration(scoring)} of scoring"
        place = cast(TaskData, trainer.datamodule).place  # type: ignore[attr-defined]
        print_line(trainer, f"{again}{cost}{_format_gpu_memory(trainer)}, {place}{self._describe_later()}")
        self._told = True

    def _describe_later(self) -> str:
        """Says what follows this run in the same command, and how long that takes if its steps are like these."""
        if not self.later:
            return ""
        assert self.estimate is not None
        steps = sum(self.later)
        runs = "another run" if len(self.later) == 1 else f"{len(self.later)} runs"
        return f"; then {runs} of {steps:,} steps in all, {format_duration(steps * self.estimate.pace)} at this pace"

    def on_validation_start(self, *_: Any) -> None:
        self._validated = self.clock.validation

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loss, accuracy = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "accuracy"))
        log_row(trainer, {"val/loss": loss, "val/accuracy": accuracy}, trainer.global_step)
        if trainer.is_global_zero:
            done = f"step {trainer.global_step}/{self.run.trainer.steps}"
            print_line(trainer, f"{done}: val accuracy {accuracy:.4f}, val loss {loss:.4f}")
        if self.estimate is not None:
            self.estimate.example = (self.clock.validation - self._validated) / self.estimate.validation
            self._tell(trainer)


def _format_gpu_memory(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return ""
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f", {peak / 1e9:.1f} of {total / 1e9:.0f} GB of GPU memory"
