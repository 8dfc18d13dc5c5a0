"""Measures a run: its seconds, steps and memory, and how many processes shared its GPU."""

from __future__ import annotations

import os
import time
from typing import Any

import pytorch_lightning as pl
import torch

from lra import environment
from lra.errors import is_out_of_memory
from lra.timeline import mark_phase

# a grid sets this for its runs: how many of them use one GPU at once
RUNS_PER_DEVICE = "LRA_RUNS_PER_DEVICE"


class Clock(pl.Callback):
    """Measures a run over all its sessions. A session counts up to the checkpoint from which the next one resumes.

    Attributes:
        seconds: time of `steps` training steps. Validation, checkpoints and the first steps are not included.
        steps: training steps on the hardware of the last session.
        elsewhere: seconds of training on other hardware, in earlier sessions. They say nothing about the speed here.
        sharing: the largest number of processes seen on the GPU while `seconds` accumulated. The clock counts them at
            the start, at the end, and before a validation when the last count is at least LOOK seconds old.
    """

    LOOK = 60.0  # seconds; counting takes tenths of a second

    def __init__(self) -> None:
        self.seconds, self.steps, self.elsewhere = 0.0, 0, 0.0
        self._here = self._computed = ""  # the hardware of this session, and that of `seconds`
        self._wall: float | None = 0.0  # seconds of earlier sessions; unknown if an older lra began the run
        self._began, self._peak = time.perf_counter(), 0  # of this session; most bytes on a GPU in earlier ones
        self._on_gpu = False
        self.sharing, self._looked = _planned(), 0.0
        self.first: float | None = None  # seconds of this session's first stride, which compiles and captures
        self.validation = 0.0  # seconds
        self.example: float | None = None  # seconds to score one example, measured by the early validation
        self._entered = 0.0  # when training or validation began
        self._started: tuple[float, int] | None = None  # when the steps began, and after which step

    def begin(self, trainer: pl.Trainer, computes: str) -> None:
        """Starts the clock once the run has all that it needs. Memory that the process used before does not count.

        Args:
            computes: describes what the speed of steps depends on: device, engine, micro-batches.
        """
        self._began, self._here = time.perf_counter(), computes
        self._on_gpu = trainer.strategy.root_device.type == "cuda"
        if torch.cuda.is_initialized():
            torch.cuda.reset_peak_memory_stats()

    def wall(self) -> float | None:
        return None if self._wall is None else self._wall + time.perf_counter() - self._began

    def peak(self) -> int | None:
        """The most memory of a GPU, in bytes; None without one."""
        used = torch.cuda.max_memory_allocated() if self._on_gpu else 0
        return max(self._peak, used) or None

    def stop(self, trainer: pl.Trainer) -> None:
        if self._started is not None:
            synchronize(trainer)
            began, step = self._started
            self.seconds += time.perf_counter() - began
            self.steps += trainer.global_step - step
            self._started = None

    def trained(self) -> float:
        """Seconds of training until now."""
        return self.seconds + (0.0 if self._started is None else time.perf_counter() - self._started[0])

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Lightning does not call this if only scoring is left."""
        if self._computed != self._here:
            self.elsewhere += self.seconds
            self.seconds, self.steps, self.sharing, self._computed = 0.0, 0, 1, self._here
        self.sharing = max(self.sharing, _planned())
        self._look_around(trainer)
        mark_phase("first steps")
        self._entered = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # this starts after validation has written its checkpoints
        if self.first is not None and self._started is None:
            self._started = time.perf_counter(), trainer.global_step
            mark_phase("training")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.first is None:
            synchronize(trainer)
            self.first = time.perf_counter() - self._entered
            mark_phase("training")

    def on_validation_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.stop(trainer)
        mark_phase("validation" if self.validation else "first validation")
        if time.perf_counter() - self._looked >= self.LOOK:
            self._look_around(trainer)
        self._entered = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.stop(trainer)
        mark_phase("end of training")
        self._look_around(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.validation += time.perf_counter() - self._entered
        mark_phase("checkpoints")

    def on_exception(self, trainer: pl.Trainer, _: pl.LightningModule, exception: BaseException) -> None:
        if is_out_of_memory(exception):  # count who holds the memory that ran out
            self.sharing = _planned()
            self._look_around(trainer)

    def state_dict(self) -> dict[str, Any]:
        steps = {"seconds": self.seconds, "steps": self.steps, "elsewhere": self.elsewhere, "computes": self._computed}
        spent = {"validation": self.validation, "wall": self.wall(), "peak": self.peak() or 0}
        return {"sharing": self.sharing} | steps | spent

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Checkpoints of older versions lack some of these."""
        self.seconds, self.steps, self.elsewhere = state["seconds"], state["steps"], state.get("elsewhere", 0.0)
        self.sharing, self._computed = state.get("sharing", 1), state.get("computes", "")
        self.validation = state.get("validation", 0.0)
        self._wall, self._peak = state.get("wall"), state.get("peak", 0)

    def _look_around(self, trainer: pl.Trainer) -> None:
        self._looked = time.perf_counter()
        if (device := trainer.strategy.root_device).type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.sharing = max(self.sharing, environment.gpu_processes(uuid))


def _planned() -> int:
    return int(os.environ.get(RUNS_PER_DEVICE, "1"))


def synchronize(trainer: pl.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
