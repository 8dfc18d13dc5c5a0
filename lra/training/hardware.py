"""The devices that a run is on, the ranks that it has there, and whether both are what was asked for."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning_fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from pytorch_lightning.utilities import rank_zero_only

from lra import ranks
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.ranks import Launch
from lra.training.rendezvous import Cluster, RankStrategy

CROWD = 8  # processes for each core of a CPU, of which more can't be meant


def join(run: RunConfig, given: bool = False) -> Launch:
    """The launch that this process belongs to; UsageError where what was asked for is not what was started.

    Lightning's functions for rank 0 ask this, too, and not the environment's variables.

    Args:
        given: whether the user named `trainer.devices`.
    """
    started = torch.distributed.get_world_size() if torch.distributed.is_initialized() else None
    launch = ranks.detect_launch(run.trainer.devices, given, started)
    for only in (rank_zero_only, fabric_rank_zero_only):
        only.rank = launch.rank  # pyright: ignore[reportFunctionMemberAccess]
    return launch


def hardware(run: RunConfig, *plugins: Any) -> dict[str, Any]:
    """What Lightning's trainer is told of devices and ranks; UsageError if they can't be had here."""
    launch = join(run)
    starts = launch.by == "lra" and launch.rank == 0 and launch.world > 1 and not torch.distributed.is_initialized()
    if starts and not _starts_again():
        raise UsageError(
            f"trainer.devices={launch.world} needs a script file, `lra fit` or torchrun: each starts this program"
        )
    accelerator = _accelerator(run, launch)
    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[run.trainer.precision]
    if starts:
        os.environ[ranks.STARTER_VARIABLE] = str(os.getpid())
    return {
        "accelerator": accelerator, "devices": launch.local, "num_nodes": launch.world // launch.local,
        "precision": precision, "plugins": [Cluster(launch), *plugins],
        "strategy": RankStrategy() if launch.world > 1 else "auto",
    }  # fmt: skip


def crowding(run: RunConfig) -> str | None:
    """What is to be said of a run whose processes have less than a core of the CPU each."""
    launch, cores = join(run), _cores()
    if launch.local <= cores or (run.trainer.accelerator != "cpu" and torch.cuda.is_available()):
        return None
    return f"trainer.devices={launch.local}: so many processes share {cores} core{'s' * (cores > 1)} of this CPU"


def _accelerator(run: RunConfig, launch: Launch) -> str:
    accelerator, cores = run.trainer.accelerator, _cores()
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UsageError("trainer.accelerator=gpu, but PyTorch finds no GPU: lra doctor says what it sees")
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        if accelerator == "cpu" and launch.world > 1:
            raise UsageError(
                f"trainer.devices={launch.local}, but PyTorch finds no GPU: leave it out, or add "
                f"trainer.accelerator=cpu for {launch.local} processes on {cores} core{'s' * (cores > 1)}"
            )
    if accelerator == "gpu" and launch.local > (gpus := torch.cuda.device_count()):
        mend = "set trainer.devices to at most that"
        if launch.by == "srun":
            mend = "let each task see all GPUs of its node, with --gres=gpu: and without --gpus-per-task"
        raise UsageError(f"trainer.devices={launch.local}, but this machine has {gpus} GPUs: {mend}")
    if accelerator == "cpu" and launch.local > CROWD * cores:
        raise UsageError(f"trainer.devices={launch.local}, but this CPU has {cores} cores: set trainer.devices={cores}")
    return accelerator


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _starts_again() -> bool:
    """Whether Lightning can start this program again: by `python -m`, or the file that runs. No notebook is that."""
    if hasattr(sys, "ps1"):
        return False
    return sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0])
