"""Makes the content of result.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl

from lra import environment
from lra.config.compose import ComposedConfig
from lra.config.schema import UNSAVED_FIELDS
from lra.kernels import operators
from lra.tasks.base import TaskData, TaskModule
from lra.training.clock import Clock

FINAL_COSTS = ("parameters", "steps_per_second", "train_seconds", "wall_seconds", "peak_gpu_bytes")


def result_facts(composed: ComposedConfig, module: TaskModule, trainer: pl.Trainer, clock: Clock) -> dict[str, Any]:
    """Returns the facts of every result, no matter how the run ended."""
    identity, run = module.identity(), composed.config
    return {
        "task": identity["task"],
        "attn": run.attn.name,
        "recipe": run.recipe,
        # the other fields say how the last session was started, not what the run computes
        "overrides": [str(override) for override in composed.overrides if override.field not in UNSAVED_FIELDS],
        "seed": run.seed,
        "parameters": count_parameters(module),
        "steps": trainer.global_step,
        "train_seconds": round(clock.elsewhere + clock.seconds, 1),
        # on the hardware of the last steps: a run may have begun on another device
        "steps_per_second": round(clock.steps / clock.seconds, 2) if clock.seconds else None,
        "first_step_seconds": None if clock.first is None else round(clock.first, 1),
        "validation_seconds": round(clock.validation, 1),
        "world_size": trainer.world_size,
        "runs_per_device": clock.sharing,
        # those of lra that ran in this session on this rank; an empty list means PyTorch or another library
        "kernels": {part: sorted(names) for part, names in operators.kernels_run.items()},
        "environment": environment.describe(),
        "provenance": module.provenance,
        "config": identity["config"],
    }


def result_costs(clock: Clock) -> dict[str, Any]:
    """Returns the seconds of all sessions so far and the peak memory of one GPU."""
    wall = clock.wall()
    return {"wall_seconds": None if wall is None else round(wall, 1), "peak_gpu_bytes": clock.peak()}


def test_scores(module: TaskModule, data: TaskData, trainer: pl.Trainer) -> dict[str, Any]:
    """Returns for each test set: accuracy, its 95% sampling bound, loss, size, and the accuracy of the baselines.

    In a pretraining run all of these are about hidden or next tokens. The bound treats the tokens of a sequence as
    independent.
    """
    pretrain = module.run.pretrain
    scored: dict[str, Any] = {} if pretrain == "none" else {"pretrain": pretrain}
    for split in data.test_sets:
        n, reached = module.reference(data, split)
        p, loss = (float(trainer.callback_metrics[f"{split}/{name}"]) for name in ("accuracy", "loss"))
        baselines = {name: round(value, 4) for name, value in reached.items()}
        bound = sampling_bound(p, n)
        scored[split] = {"accuracy": p, "plus_minus": bound, "loss": loss, "n": n, "baselines": baselines}
    store, manifest = data.store, data.store.manifest
    differences = list(manifest.get("differences", ()))
    return scored | {
        "protocol": getattr(module.run.task, "protocol", None),  # None: the task has only one
        # only the manifest needs the place of a path
        "data": {
            "source": environment.drop_folder(manifest["source"]),
            "store": store.path.name,
            "digest": store.digest,  # two copies of the data have stores of one name
        }
        | ({"differences": differences} if differences else {}),
    }


def final_row(result: Mapping[str, Any]) -> dict[str, float]:
    """Returns the scores and costs of a finished run, by the names under which loggers show them."""
    sets = {name: score for name, score in result.items() if isinstance(score, dict) and "plus_minus" in score}
    scores = {f"{name}/{what}": score[what] for name, score in sets.items() for what in ("accuracy", "loss")}
    return scores | {f"final/{name}": result[name] for name in FINAL_COSTS if result.get(name) is not None}


def sampling_bound(accuracy: float, n: int) -> float:
    """Returns the 95% error bound of an accuracy on `n` sequences, to four places.

    It is the normal approximation. That is 0 for an accuracy of 0 or 1, so the bound is at least what the score
    interval gives there (Wilson 1927, doi:10.1080/01621459.1927.10502953).
    """
    z = 1.96
    return round(max(z * math.sqrt(accuracy * (1 - accuracy) / n), z**2 / (n + z**2)), 4)


def count_parameters(module: TaskModule) -> int:
    return sum(p.numel() for p in module.parameters())
