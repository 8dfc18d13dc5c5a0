"""What a run is put together from: data, model and trainer, and what computes its attention and steps."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lra.config.schema import RunConfig
from lra.models.attention.base import Attention
from lra.tasks import TASKS
from lra.tasks.base import TaskData, TaskModule
from lra.tasks.masked import masked
from lra.training.clock import Clock
from lra.training.curves import Curves
from lra.training.faults import Faults
from lra.training.hardware import hardware
from lra.training.lightning import Onward, WholeFiles, silence_signals
from lra.training.narrator import Narrator
from lra.training.output import console
from lra.training.preemption import start_compilers
from lra.training.progress import Progress
from lra.training.rehearsal import Rehearsal
from lra.training.run import RunDirectory
from lra.training.seeding import derive
from lra.training.step import Step


def build(run: RunConfig) -> tuple[TaskData, TaskModule]:
    """The data module and the freshly initialised LightningModule of a run."""
    cls = TASKS.get(run.task.name)
    cls = masked(cls) if run.pretrain == "masked" else cls
    torch.manual_seed(derive(run.seed, "weights"))
    return cls.Data(run), cls(run, Step(run))


def make_trainer(run: RunConfig, directory: RunDirectory) -> tuple[pl.Trainer, Clock]:
    shared: dict[str, Any] = {
        "dirpath": directory.path,
        "save_on_train_epoch_end": False,
        "enable_version_counter": False,
    }
    clock = Clock()
    trainer = pl.Trainer(
        **hardware(run, WholeFiles(directory.path)),
        max_steps=run.trainer.steps,
        max_epochs=1,  # data is one endless pass, cut into epochs by lra.data.order
        val_check_interval=run.trainer.eval_every // run.trainer.stride,
        check_val_every_n_epoch=None,
        num_sanity_val_steps=0,
        log_every_n_steps=1,  # nothing is logged so; more than there are batches would be a warning
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=console.is_terminal,
        logger=Curves(directory.curves),
        callbacks=[
            clock,
            Onward(),
            Faults(directory.path),
            Rehearsal(clock),
            Narrator(run, clock),
            *([Progress(console)] if console.is_terminal else []),
            ModelCheckpoint(filename="best", monitor="val/accuracy", mode="max", **shared),
            ModelCheckpoint(filename="last", **shared),
        ],
    )
    silence_signals(trainer)
    return trainer, clock


def resolve_attention(module: TaskModule, device: torch.device) -> str:
    """What computes attention on the device; UsageError if it can't."""
    used = {
        part.resolve(device, module.run.trainer.precision) for part in module.modules() if isinstance(part, Attention)
    }
    return ", ".join(sorted(used))


def resolve_engine(module: TaskModule, device: torch.device) -> str:
    """What runs training's steps on the device, and the evaluation that goes with it; UsageError if it can't be."""
    if not module.step.captures(module, device):
        return "eager"
    start_compilers()
    torch.compiler.reset()  # what this process compiled for another run's model counts against Dynamo's limits
    module.step.compile_evaluation(module)
    return "captured"
