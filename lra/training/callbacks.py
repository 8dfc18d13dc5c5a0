"""What a run tells its user, and how long it took."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, cast

import pytorch_lightning as pl
import torch

from lra import environment
from lra.errors import UsageError, naming, out_of_memory
from lra.tasks.base import TaskData, TaskModule
from lra.terminal import Terminal
from lra.training import faults
from lra.training.checkpoints import WholeFiles
from lra.training.step import Step

console = Terminal(soft_wrap=True)


# set for the runs of a grid: how many have a GPU at once
RUNS_PER_DEVICE = "LRA_RUNS_PER_DEVICE"


class Clock(pl.Callback):
    """What a run takes, over all its sessions, each up to the checkpoint that the next one goes on from.

    `seconds` are of `steps` training steps on what computed the last ones; `elsewhere` are those of sessions before, on
    another device, say, which tell nothing of its speed. Validation, checkpoints and the first steps are apart.
    `sharing` is how many processes have the GPU that `seconds` are of, at most, at a beginning, at an end, or when one
    looked between: before a validation, LOOK seconds apart.
    """

    LOOK = 60.0  # a look takes tenths of a second

    def __init__(self) -> None:
        self.seconds, self.steps, self.elsewhere = 0.0, 0, 0.0
        self._here = self._computed = ""  # what computes in this session, and what `seconds` are of
        self._wall: float | None = 0.0  # seconds of the sessions before; unknown where an older lra began
        self._began, self._peak = time.perf_counter(), 0  # of this session; bytes of a GPU, of those before
        self._on_gpu = False
        self.sharing, self._looked = _planned(), 0.0
        self.first: float | None = None  # seconds of this session's first stride: it compiles, allocates and captures
        self.validation = 0.0  # seconds
        self.example: float | None = None  # seconds that scoring one took when a batch was scored early
        self._entered = 0.0  # training, or validation
        self._started: tuple[float, int] | None = None  # when, and after which step

    def begin(self, trainer: pl.Trainer, computes: str) -> None:
        """Now, as all is there that a run needs; what this process had on the GPU before is not the run's.

        Args:
            computes: what the speed of steps depends on: device, engine, portions.
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
        """The seconds until now."""
        return self.seconds + (0.0 if self._started is None else time.perf_counter() - self._started[0])

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        """Not where nothing but scoring is left."""
        if self._computed != self._here:
            self.elsewhere += self.seconds
            self.seconds, self.steps, self.sharing, self._computed = 0.0, 0, 1, self._here
        self.sharing = max(self.sharing, _planned())
        self._look_around(trainer)
        self._entered = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        # not after validation: then checkpoints are written
        if self.first is not None and self._started is None:
            self._started = time.perf_counter(), trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if self.first is None:
            synchronize(trainer)
            self.first = time.perf_counter() - self._entered

    def on_validation_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.stop(trainer)
        if time.perf_counter() - self._looked >= self.LOOK:
            self._look_around(trainer)
        self._entered = time.perf_counter()

    def on_train_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.stop(trainer)
        self._look_around(trainer)

    def on_validation_end(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        self.validation += time.perf_counter() - self._entered

    def on_exception(self, trainer: pl.Trainer, _: pl.LightningModule, exception: BaseException) -> None:
        if out_of_memory(exception):  # who else has the memory that ran out, now
            self.sharing = _planned()
            self._look_around(trainer)

    def state_dict(self) -> dict[str, Any]:
        steps = {"seconds": self.seconds, "steps": self.steps, "elsewhere": self.elsewhere, "computes": self._computed}
        spent = {"validation": self.validation, "wall": self.wall(), "peak": self.peak() or 0}
        return {"sharing": self.sharing} | steps | spent

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Older checkpoints lack some of these."""
        self.seconds, self.steps, self.elsewhere = state["seconds"], state["steps"], state.get("elsewhere", 0.0)
        self.sharing, self._computed = state.get("sharing", 1), state.get("computes", "")
        self.validation = state.get("validation", 0.0)
        self._wall, self._peak = state.get("wall"), state.get("peak", 0)

    def _look_around(self, trainer: pl.Trainer) -> None:
        self._looked = time.perf_counter()
        if (device := trainer.strategy.root_device).type == "cuda":
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            self.sharing = max(self.sharing, environment.gpu_processes(uuid))


class Onward(pl.Callback):
    """Lets a run of more steps go on from a finished one, whose checkpoint says that there is no further batch."""

    def on_train_start(self, trainer: pl.Trainer, _: pl.LightningModule) -> None:
        trainer.fit_loop.epoch_loop.batch_progress.is_last_batch = False


class Rehearsal(pl.Callback):
    """Scores a batch of validation soon after the start: if there is no memory for it, an hour is not lost first.

    Before training there would be room: what its steps hold comes with them.
    """

    STEPS = 20  # before the line that says what the run will cost

    def __init__(self, clock: Clock):
        self.clock = clock
        self.due = math.inf  # the step after which it is

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
        with torch.inference_mode(), trainer.precision_plugin.val_step_context():
            loader = cast(TaskData, trainer.datamodule).val_dataloader()  # type: ignore[attr-defined]
            for _turn in range(2 if module.step.captures(module, module.device) else 1):  # the first one compiles
                began = time.perf_counter()
                batch = next(iter(loader))
                module.evaluate(batch)
                synchronize(trainer)
                self.clock.example = (time.perf_counter() - began) / len(batch.label)
        module.train()
        torch.cuda.empty_cache()  # graphs that are captured later can't have what lies there
        trainer.strategy.barrier()  # or the next step is what waits for the rank that compiled longest
        self.clock.on_validation_end(trainer, module)


class Faults(pl.Callback):
    """Ends a run, or tells its user, when steps were not finite; keeps the step's counts in checkpoints.

    Args:
        directory: where `fault.pt` goes: what reproduces the fault.
    """

    def __init__(self, directory: Path):
        self.file = directory / "fault.pt"
        self.judged = 0  # steps
        self.told = 0  # skipped updates

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._judge(trainer, cast(TaskModule, pl_module))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, pl_module)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer, pl_module)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # of a device that is gone there is nothing to read
            _step(pl_module).log(trainer)

    def _finish(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """Logs and judges what no further step does."""
        _step(module).log(trainer)
        self._judge(trainer, cast(TaskModule, module))

    def _judge(self, trainer: pl.Trainer, module: TaskModule) -> None:
        """Judges the counts that were read last, unless that is done."""
        step = _step(module)
        if step.counted == self.judged:
            return
        self.judged, counts = step.counted, step.counts
        assert counts is not None
        if module.run.trainer.on_nan == "stop":
            if counts.first >= 0:
                self._stop(trainer, module, counts.first)
        elif not counts.taken:
            self._stop(trainer, module, step.counted - module.run.trainer.log_every)
        elif counts.skipped > self.told:
            new, self.told = counts.skipped - self.told, counts.skipped
            what = f"{new} update{'s' * (new > 1)} skipped, as the loss or a gradient was not finite"
            say(trainer, f"step {step.counted}: {what}; {counts.skipped} of this run, the first at step "
                f"{counts.first + 1}")  # fmt: skip

    def _stop(self, trainer: pl.Trainer, module: TaskModule, step: int) -> None:
        """Raises a UsageError for a step, from 0, whose weights are still there."""
        message = None
        if trainer.is_global_zero:
            ranks, seeds = range(trainer.world_size), _step(module).seeds
            loader = cast(TaskData, trainer.datamodule).train_dataloader()  # type: ignore[attr-defined]
            seed = torch.tensor(seeds(step, 0)[1], device=module.device)
            fault: dict[str, Any] = {
                "step": step + 1,
                "lra": module.identity(),
                "state_dict": {name: value.cpu() for name, value in module.state_dict().items()},
                "generators": [seeds(step, rank)[0] for rank in ranks],
                "batches": [],
            }
            for rank in ranks:
                loader.rank = dataclasses.replace(loader.rank, rank=rank)
                fault["batches"].append([faults.plain(b.to(module.device).with_seed(seed)) for b in loader.step(step)])
            WholeFiles(self.file.parent).save_checkpoint(fault, self.file)
            try:
                what = faults.culprit(module, fault)
            except Exception as error:
                if not out_of_memory(error):
                    raise
                what = "the training loss or a gradient is not finite"
            message = f"{what} at step {step + 1}: {faults.ADVICE}; {self.file} has the batch and the weights before it"
        message = trainer.strategy.broadcast(message)
        if not trainer.is_global_zero:
            leave(trainer, 2)
        raise UsageError(message)

    def on_save_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        step = _step(pl_module)
        step.log(trainer)
        counts = step.counts if step.tally is None else step.tally.read()
        if counts is not None:
            checkpoint["counts"] = counts._asdict()

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if counts := checkpoint.get("counts"):
            _step(pl_module).counts = faults.Counts(**counts)
            self.told = counts["skipped"]


def leave(trainer: pl.Trainer, code: int) -> NoReturn:
    """Ends this rank with SystemExit.

    Where lra started the others, only the first says `code`: when another does, Lightning kills it.
    """
    launched = trainer.global_rank and trainer.strategy.cluster_environment.launch.by == "lra"  # type: ignore[attr-defined]
    raise SystemExit(0 if launched else code)


def say(trainer: pl.Trainer, text: str) -> None:
    """Prints a line of rank 0, above the bar if there is one."""
    if trainer.is_global_zero:
        with naming("the standard output"):
            console.print(text)  # which the bar draws on, too


def duration(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _step(module: pl.LightningModule) -> Step:
    return cast(Step, cast(TaskModule, module).step)


def memory(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return ""
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f", {peak / 1e9:.1f} of {total / 1e9:.0f} GB of GPU memory"


def _planned() -> int:
    return int(os.environ.get(RUNS_PER_DEVICE, "1"))


def synchronize(trainer: pl.Trainer) -> None:
    if trainer.strategy.root_device.type == "cuda":
        torch.cuda.synchronize()
