"""Assembles a run: data, model and trainer, and what computes its attention and its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers.logger import Logger

from lra.caches import watch_kernels
from lra.compile_caches import use_compile_caches
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.batches import Collation, Rank
from lra.tasks.objectives import with_objective
from lra.timeline import recorded_timeline
from lra.training.clock import Clock
from lra.training.compiling import record_compiled_kernels, record_compiled_regions
from lra.training.curves import Curves
from lra.training.early_validation import EarlyValidation
from lra.training.faults import NonFiniteGuard
from lra.training.hardware import trainer_hardware
from lra.training.lightning import ResetLastBatch, WholeCheckpointIO, silence_signals
from lra.training.narrator import Narrator
from lra.training.optim import parameter_groups
from lra.training.output import console
from lra.training.preemption import start_compilers
from lra.training.progress import Progress
from lra.training.remote_loggers import SERVICES, RemoteLogger
from lra.training.run_directory import CURVES_FILE, RunDirectory
from lra.training.seeding import derive_seed
from lra.training.step import Step


@dataclass(frozen=True)
class Assembly:
    """Everything that trains a run."""

    data: TaskData
    module: TaskModule
    step: Step
    trainer: pl.Trainer
    clock: Clock
    attention: str  # what computes it
    engine: str  # what computes steps


def assemble(run: RunConfig, directory: RunDirectory, later: Sequence[int] = ()) -> Assembly:
    """Assembles everything that trains a run. UsageError if it can't be trained here.

    Args:
        later: steps of each run that follows in the same command.
    """
    clock = Clock()
    step = Step(run)
    own = [callback for callback in (step.average, step.plateau) if callback is not None]
    trainer = make_trainer(run, directory.path, clock, Narrator(run, clock, later=later), *own)
    data, module = build_modules(run, make_rank(trainer), lambda: trainer.global_step, step)
    parameter_groups(run.optim, module)  # refuse bad marks now
    if run.batch.size % trainer.world_size:
        raise UsageError(f"batch.size={run.batch.size} is not a multiple of the {trainer.world_size} devices")
    device = trainer.strategy.root_device
    attention, engine = resolve_attention(module, device), resolve_engine(module, step, device)
    return Assembly(data, module, step, trainer, clock, attention, engine)


def build_modules(
    run: RunConfig, rank: Rank | None = None, number: Callable[[], int] = lambda: 0, step: Step | None = None
) -> tuple[TaskData, TaskModule]:
    """Returns the data module and the newly initialised LightningModule of a run.

    Args:
        rank: the rank for which the data makes batches. Without it there are none.
        number: returns the number of the next training step, from 0.
        step: trains the module. Default: a new step.
    """
    cls = with_objective(TASKS.get(run.task.name), run)
    data = cls.Data(run)  # refuses a task that lacks something, before the model needs it
    torch.manual_seed(derive_seed(run.seed, "weights"))
    step = step or Step(run)
    module = cls(run, step)
    if rank is not None:
        data.collation = Collation(rank, module.model.encoder.prefix, step.captures(module, rank.device), number)
    return data, module


def make_rank(trainer: pl.Trainer) -> Rank:
    return Rank(trainer.global_rank, trainer.world_size, trainer.strategy.root_device)


def make_trainer(run: RunConfig, folder: Path, clock: Clock, *callbacks: pl.Callback) -> pl.Trainer:
    """The trainer of a run.

    Args:
        folder: the trainer writes its files here.
        clock: measures the run.
        callbacks: are called after those that every run has, and before checkpoints are written.
    """
    shared: dict[str, Any] = dict(dirpath=folder, save_on_train_epoch_end=False, enable_version_counter=False)
    trainer = pl.Trainer(
        **trainer_hardware(run, WholeCheckpointIO(folder)),
        max_steps=run.trainer.steps,
        max_epochs=1,  # data is one endless pass, cut into epochs by lra.data.order
        val_check_interval=run.trainer.eval_every // run.trainer.stride,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        inference_mode=False,  # validation in a fit never has it, and torch.compile compiles anew for the other mode
        log_every_n_steps=1,  # Lightning logs nothing here, and warns of more than the number of batches
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=console.is_terminal,
        logger=make_loggers(run, folder),
        callbacks=[
            clock,
            ResetLastBatch(),
            NonFiniteGuard(folder),
            EarlyValidation(clock),
            *callbacks,
            *([Progress(console)] if console.is_terminal else []),
            ModelCheckpoint(filename="best", monitor="val/accuracy", mode="max", **shared),
            ModelCheckpoint(filename="last", **shared),
        ],
    )
    silence_signals(trainer)
    return trainer


def make_loggers(run: RunConfig, folder: Path) -> list[Logger]:
    """The loggers of a run, whose files lie in its folder. UsageError if the package of one is not installed."""
    curves = Curves(folder / CURVES_FILE, run.trainer.log_grad_norm, "tensorboard" in run.logger)
    return [curves, *(RemoteLogger(name, folder) for name in run.logger if name in SERVICES)]


def resolve_attention(module: TaskModule, device: torch.device) -> str:
    """Describes what computes attention on the device. UsageError if nothing can."""
    mixers = (block.attention for block in module.model.encoder.blocks)
    used = {mixer.resolve(device, module.run.trainer.precision) for mixer in mixers}
    return ", ".join(sorted(used))


def resolve_engine(module: TaskModule, step: Step, device: torch.device) -> str:
    """Returns the engine of the training steps and prepares it and evaluation. UsageError if it can't run here."""
    use_compile_caches(device)
    if device.type == "cuda":
        watch_kernels(device.index or 0)
    timeline = recorded_timeline()
    if timeline is not None and device.type == "cuda":
        record_compiled_kernels(timeline)
    if not step.captures(module, device):
        return "eager"
    start_compilers()
    if timeline is not None:
        record_compiled_regions(timeline)
    torch.compiler.reset()  # models that this process compiled before count against Dynamo's limits
    step.compile_evaluation(module)
    return "captured"
