"""The devices that a run is on, and whether their processes can be there."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

from lra.config.schema import RunConfig
from lra.errors import UsageError


def hardware(run: RunConfig) -> dict[str, Any]:
    """Lightning's devices: torchrun's where it launched this process, the configuration's otherwise."""
    local = world = run.trainer.devices
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    elif world > 1 and not _starts_again():
        raise UsageError(
            f"trainer.devices={world} needs a script file, `lra fit` or torchrun: each starts this program"
        )
    accelerator = run.trainer.accelerator
    if accelerator == "gpu" and not torch.cuda.is_available():
        raise UsageError("trainer.accelerator=gpu, but PyTorch finds no GPU: lra doctor says what it sees")
    if accelerator == "auto":
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
    if accelerator == "gpu" and local > torch.cuda.device_count():
        raise UsageError(f"trainer.devices={local}, but this machine has {torch.cuda.device_count()} GPUs")
    precision = {"fp32": "32-true", "bf16": "bf16-mixed"}[run.trainer.precision]
    return {"accelerator": accelerator, "devices": local, "num_nodes": world // local, "precision": precision}


def _starts_again() -> bool:
    """Whether a launcher has started all processes, or Lightning can: by `python -m`, or the file that runs."""
    if "LOCAL_RANK" in os.environ or SLURMEnvironment.detect():
        return True
    return sys.modules["__main__"].__spec__ is not None or os.path.isfile(sys.argv[0])
