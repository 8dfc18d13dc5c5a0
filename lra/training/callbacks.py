"""What a run tells its user, and how long it took."""

from __future__ import annotations

import time
from typing import Any, cast

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import RichProgressBar
from rich.console import Console

from lra.config.schema import RunConfig
from lra.tasks.base import TaskData, TaskModule
from lra.training.curves import record

console = Console(highlight=False, soft_wrap=True, markup=False)


class Clock(pl.Callback):
    """Seconds spent on training steps, over every session of the run; validation is not counted."""

    def __init__(self) -> None:
        self.seconds, self.steps = 0.0, 0
        self._started: tuple[float, int] | None = None  # when, and after which step

    def start(self, trainer: pl.Trainer) -> None:
        self._started = time.perf_counter(), trainer.global_step

    def stop(self, trainer: pl.Trainer) -> None:
        if self._started is not None:
            _synchronize(trainer)
            began, step = self._started
            self.seconds += time.perf_counter() - began
            self.steps += trainer.global_step - step
            self._started = None

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self._started is None:  # the first steps compile, allocate and capture: they are not counted
            self.start(trainer)

    def on_validation_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.stop(trainer)

    def on_train_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.start(trainer)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seconds, self.steps = state["seconds"], state["steps"]


class Progress(RichProgressBar):
    """Lightning's bar, in steps, with the training loss, without the only epoch's number and the logger's version."""

    @property
    def total_train_batches(self) -> int:
        return self.trainer.max_steps

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any) -> None:
        super().on_train_batch_end(trainer, pl_module, *args[:-1], batch_idx=trainer.global_step - 1)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        logged = cast(TaskModule, pl_module).step.logged
        return {} if logged is None else {"train/loss": logged}

    def _get_train_description(self, current_epoch: int) -> str:
        return "training"


class Narrator(pl.Callback):
    """One line when the first steps show what the run will cost, and one per validation."""

    PROBE = 20  # steps over which the pace is measured, after as many: most graphs are captured before

    def __init__(self, run: RunConfig):
        self.run = run
        self.stamps: list[tuple[float, int]] = []  # when, and after which step
        self.next = 0  # the step after which the next one is made

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.next = trainer.global_step + self.PROBE

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if len(self.stamps) == 2 or trainer.global_step < self.next:
            return
        _synchronize(trainer)
        self.stamps.append((time.perf_counter(), trainer.global_step))
        self.next = trainer.global_step + self.PROBE
        if len(self.stamps) == 2 and trainer.is_global_zero:
            (began, first), (ended, last) = self.stamps
            pace = (ended - began) / (last - first)
            left = (self.run.trainer.steps - trainer.global_step) * pace
            expected = f"expect {duration(left)} of training at {1000 * pace:.1f} ms a step{_memory(trainer)}"
            self._say(trainer, f"{expected}, {cast(TaskData, trainer.datamodule).place}")  # type: ignore[attr-defined]

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        loss, accuracy = (float(trainer.callback_metrics[f"val/{name}"]) for name in ("loss", "accuracy"))
        record(trainer, {"val/loss": loss, "val/accuracy": accuracy})
        if trainer.is_global_zero:
            done = f"step {trainer.global_step}/{self.run.trainer.steps}"
            self._say(trainer, f"{done}: val accuracy {accuracy:.4f}, val loss {loss:.4f}")

    def _say(self, trainer: pl.Trainer, text: str) -> None:
        bar = trainer.progress_bar_callback
        live = isinstance(bar, RichProgressBar) and bar.progress is not None
        (bar.progress.console if live else console).print(text, markup=False)  # type: ignore[union-attr]


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _memory(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return ""
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f", {peak / 1e9:.1f} of {total / 1e9:.0f} GB of GPU memory"


def _synchronize(trainer: pl.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
