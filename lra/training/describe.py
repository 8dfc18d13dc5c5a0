"""What a run tells people of itself: its batch, its device, its test sets, and what to do when memory runs out."""

from __future__ import annotations

import math

import pytorch_lightning as pl
import torch

from lra.config.schema import RunConfig
from lra.tasks.base import TaskData
from lra.training import result
from lra.training.assembly import Assembly


def describe_run(run: RunConfig, parts: Assembly) -> str:
    """Describes for people what the speed of steps depends on: attention, size, batch, precision, engine, device."""
    device = parts.trainer.strategy.root_device
    asked = run.engine == "auto" and device.type == "cuda"  # that there is no GPU, the device says
    hinders = parts.step.hinders(parts.module, device) if asked else ""
    engine = parts.engine + (f" as {hinders}" if hinders else "")
    return ", ".join((
        f"attention {parts.attention}", f"{result.count_parameters(parts.module):,} parameters",
        f"batch {describe_batch(run, parts.trainer)}", run.trainer.precision, f"engine {engine}",
        describe_device(parts.trainer),
    ))  # fmt: skip


def advise_smaller_batch(run: RunConfig, trainer: pl.Trainer, also: str = "") -> str:
    training = trainer.lightning_module.training  # otherwise evaluation ran out of memory
    field, count = ("micro", run.batch.divide(trainer.world_size)[1]) if training else ("eval", run.batch.eval)
    if count == 1:
        return (
            f"out of {device_kind(trainer)} memory with one sequence at a time: "
            "use attn=flash, a shorter task.max_length or a smaller model"
        )
    advice = f"out of {device_kind(trainer)} memory at batch.{field}={count}: set batch.{field}={count // 2}{also}"
    return f"{advice}, gradients are then accumulated to batch.size={run.batch.size}" if training else advice


def describe_batch(run: RunConfig, trainer: pl.Trainer) -> str:
    share, micro = run.batch.divide(trainer.world_size)
    if micro == run.batch.size:
        return f"{micro}"
    return f"{run.batch.size} ({trainer.world_size} devices, {math.ceil(share / micro)} micro-batches of {micro})"


def device_kind(trainer: pl.Trainer) -> str:
    return "GPU" if trainer.strategy.root_device.type == "cuda" else "CPU"


def describe_device(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    return (
        torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU with {torch.get_num_threads()} threads"
    )


def describe_test_sets(data: TaskData) -> str:
    """Names the test sets with their numbers of sequences or pairs."""
    return " and ".join(f"{name} of {len(data.parts[name]):,}" for name in data.test_sets)
