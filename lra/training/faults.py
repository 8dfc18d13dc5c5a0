"""Handles steps whose loss or gradient is NaN or infinite: it tells the user and finds the cause.

The device judges each step's whole gradient and loss before the update (`tally.py`). From the first step that is not
finite no update is done, so weights and moments stay those before it. The run then ends. `fault.pt` has the weights and
the batch, and doing that step again eagerly names the loss or the first parameter. With `trainer.on_nan=skip` only the
updates of such steps are left out, and counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytorch_lightning as pl
import torch
from torch import Tensor

from lra.batch import Batch
from lra.errors import UsageError, is_out_of_memory
from lra.tasks.base import TaskData, TaskModule
from lra.training import checkpoints
from lra.training.lightning import exit_rank
from lra.training.output import print_line
from lra.training.seeding import seed_generators
from lra.training.step import Step
from lra.training.tally import StepCounts

FAULT_FILE = "fault.pt"


class NonFiniteGuard(pl.Callback):
    """Ends a run or tells its user if steps were not finite. Keeps the counts of the step in checkpoints.

    Args:
        directory: `fault.pt` is written here. It reproduces the fault.
    """

    def __init__(self, directory: Path):
        self.file = directory / FAULT_FILE
        self.judged = 0  # steps
        self.told = 0  # skipped updates

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._judge(trainer, cast(TaskModule, pl_module))

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Logs and judges the last counts."""
        _step(pl_module).log(trainer)
        self._judge(trainer, cast(TaskModule, pl_module))

    on_train_end = on_validation_start

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        with suppress(Exception):  # a lost device has nothing to read
            _step(pl_module).log(trainer)

    def _judge(self, trainer: pl.Trainer, module: TaskModule) -> None:
        """Judges the counts that were read last, once."""
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
            print_line(trainer, f"step {step.counted}: {what}; {counts.skipped} of this run, the first at step "
                f"{counts.first + 1}")  # fmt: skip

    def _stop(self, trainer: pl.Trainer, module: TaskModule, step: int) -> None:
        """Raises a UsageError for step `step` (from 0). The module must still have its weights."""
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
                fault["batches"].append([batch_to_dict(b.to(module.device).with_seed(seed)) for b in loader.step(step)])
            checkpoints.write_checkpoint(fault, self.file)
            try:
                what = find_culprit(module, fault)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                what = "the training loss or a gradient is not finite"
            mend = module.run.optim.steadier
            message = f"{what} at step {step + 1}: {mend}; {self.file} has the batch and the weights before it"
        message = trainer.strategy.broadcast(message)
        if not trainer.is_global_zero:
            exit_rank(trainer, 2)
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
            _step(pl_module).restore(StepCounts(**counts))
            self.told = counts["skipped"]


def _step(module: pl.LightningModule) -> Step:
    return cast(Step, cast(TaskModule, module).step)


def batch_to_dict(batch: Batch) -> dict[str, Any]:
    """Converts a batch to plain values that `torch.load(weights_only=True)` reads."""
    fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    # clones, because tensors may be views of one buffer with several types
    return {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in fields.items()}


def find_culprit(module: TaskModule, fault: Mapping[str, Any]) -> str:
    """Repeats a step eagerly, without an update, and describes what is not finite.

    Args:
        module: has the weights before the step, as `lra.load(<run>/fault.pt)` gives it.
        fault: the content of `fault.pt`. For each rank it has `generators`, the seed of PyTorch's generator, and
            `batches`, the micro-batches.

    Returns:
        A text that names the training loss or the first parameter whose gradient is not finite.
    """
    module.train()
    run = module.run
    named = {name: p for name, p in module.model.named_parameters() if p.requires_grad}
    device = next(iter(named.values())).device
    loss, sums = 0.0, [torch.zeros_like(p) for p in named.values()]
    for seed, batches in zip(fault["generators"], fault["batches"], strict=True):
        seed_generators(seed)
        for part in batches:
            tensors: dict[str, Any] = {name: v.to(device) for name, v in part.items() if isinstance(v, Tensor)}
            batch = Batch(**(part | tensors))
            with torch.enable_grad(), torch.autocast(device.type, torch.bfloat16, run.trainer.precision == "bf16"):
                each = module.loss(batch) / run.batch.size
            found = torch.autograd.grad(each, list(named.values()), allow_unused=True)
            loss += each.item()
            for total, gradient in zip(sums, found, strict=True):
                if gradient is not None:
                    total += gradient
    if not math.isfinite(loss):
        return f"the training loss is {loss}"
    for name, total in zip(named, sums, strict=True):
        if not total.isfinite().all():
            return f"the gradient of {name} is not finite"
    return "the training loss or a gradient was not finite, though both are when the step is done again eagerly,"
