"""Finds the devices and ranks of a run and checks them against what was asked for."""

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

MOST_PROCESSES = 8  # processes for each CPU core; more must be a mistake


def join_launch(run: RunConfig, given: bool = False) -> Launch:
    """Returns the launch that this process belongs to, and sets the rank in Lightning's functions for rank 0.

    Args:
        given: whether the user named `trainer.devices`.

    Raises:
        UsageError: the launcher started other ranks than were asked for.
    """
    launch = ranks.detect_launch(run.trainer.devices, given, ranks.started_ranks())
    for only in (rank_zero_only, fabric_rank_zero_only):
        only.rank = launch.rank  # pyright: ignore[reportFunctionMemberAccess]
    return launch


def trainer_hardware(run: RunConfig, *plugins: Any) -> dict[str, Any]:
    """Returns the trainer's arguments for devices and ranks. UsageError if this machine does not have them."""
    launch = join_launch(run)
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


def crowding_note(run: RunConfig) -> str | None:
    """Returns a note if the processes of a run have less than a CPU core each."""
    launch, cores = join_launch(run), _cores()
    if launch.local <= cores or (run.trainer.accelerator != "cpu" and torch.cuda.is_available()):
        return None
    return f"trainer.devices={launch.local}: so many processes share {cores} core{'s' * (cores > 1)} of this CPU"


def cores_per_rank(run: RunConfig) -> int:
    """Returns how many CPU cores each rank of a run has for itself, at least 1."""
    return max(1, _cores() // join_launch(run).local)


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
    if accelerator == "cpu" and launch.local > MOST_PROCESSES * cores:
        raise UsageError(f"trainer.devices={launch.local}, but this CPU has {cores} cores: set trainer.devices={cores}")
    return accelerator


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _starts_again() -> bool:
    """Whether Lightning can start this program again, by `python -m` or as a file. A notebook can't be."""
    if hasattr(sys, "ps1"):
        return False
    return sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0])
