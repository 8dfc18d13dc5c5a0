"""What result.json says of a run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lra import environment
from lra.config.compose import Composed
from lra.kernels import library
from lra.tasks.base import TaskData, TaskModule
from lra.training.clock import Clock


def facts(composed: Composed, module: TaskModule, trainer: pl.Trainer, clock: Clock) -> dict[str, Any]:
    """What every result says, however the run ended."""
    identity, run = module.identity(), composed.config
    return {
        "task": identity["task"],
        "attn": run.attn.name,
        "recipe": run.recipe,
        # how a run was called last is nothing that it computes
        "overrides": [str(override) for override in composed.overrides if override.field not in ("resume", "draws")],
        "seed": run.seed,
        "parameters": count(module),
        "steps": trainer.global_step,
        "train_seconds": round(clock.elsewhere + clock.seconds, 1),
        # of what computed the last steps: a run may have begun on another device
        "steps_per_second": round(clock.steps / clock.seconds, 2) if clock.seconds else None,
        "first_step_seconds": None if clock.first is None else round(clock.first, 1),
        "validation_seconds": round(clock.validation, 1),
        "world_size": trainer.world_size,
        "runs_per_device": clock.sharing,
        # lra's own of this session, on this rank; where a list is empty, PyTorch's or another library's ran
        "kernels": {part: sorted(names) for part, names in library.kernels_run.items()},
        "environment": environment.describe(),
        "provenance": module.provenance,
        "config": identity["config"],
    }


def spent(clock: Clock) -> dict[str, Any]:
    """What the run took so far, over all its sessions: seconds, and the most memory of one GPU."""
    wall = clock.wall()
    return {"wall_seconds": None if wall is None else round(wall, 1), "peak_gpu_bytes": clock.peak()}


def scores(module: TaskModule, data: TaskData, trainer: pl.Trainer) -> dict[str, Any]:
    """Per test set: accuracy, its 95% bound from sampling, loss, size, and what the baselines reach on it.

    Of a pretraining run these are of hidden tokens, the bound as if those of one sequence were independent.
    """
    pretrain = module.run.pretrain
    scored: dict[str, Any] = {} if pretrain == "none" else {"pretrain": pretrain}
    for split in data.test_sets:
        n, reached = module.reference(data, split)
        p, loss = (float(trainer.callback_metrics[f"{split}/{name}"]) for name in ("accuracy", "loss"))
        baselines = {name: round(value, 4) for name, value in reached.items()}
        bound = sampling_bound(p, n)
        scored[split] = {"accuracy": p, "plus_minus": bound, "loss": loss, "n": n, "baselines": baselines}
    manifest = data.store.manifest
    differences = list(manifest.get("differences", ()))
    return scored | {
        "protocol": getattr(module.run.task, "protocol", None),  # None: there is only one
        # of a path the name: where it lay means nothing elsewhere, and the manifest has it
        "data": {"source": _name(manifest["source"]), "store": data.store.path.name}
        | ({"differences": differences} if differences else {}),
    }


def sampling_bound(accuracy: float, n: int) -> float:
    """What the accuracy on `n` sequences may be off by, at 95%, to four places.

    The normal approximation, which is 0 for an accuracy of 0 or 1, but no less than the score interval reaches there
    (Wilson 1927, doi:10.1080/01621459.1927.10502953).
    """
    z = 1.96
    return round(max(z * math.sqrt(accuracy * (1 - accuracy) / n), z**2 / (n + z**2)), 4)


def _name(source: str) -> str:
    return Path(source).name if Path(source).is_absolute() else source


def count(module: TaskModule) -> int:
    return sum(p.numel() for p in module.parameters())
