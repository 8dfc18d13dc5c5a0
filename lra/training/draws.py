"""Versions of all random draws in training. Checkpoints and results state them.

A run must not change its random functions halfway. So whoever changes the numbers that a seed gives raises the version
here. A test pins the numbers of each version.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lra.errors import UsageError

DRAW_VERSIONS: dict[str, int] = {
    "seeds": 1,  # for each purpose and step: training/seeding.py
    "weights": 1,  # before the first step
    "order": 1,  # order of the training rows: data/order.py
    "dropout": 1,  # between layers and of branches: models/dropout.py
    "attention": 1,  # dropout on attention probabilities: kernels/flash/reference.py
    "features": 1,  # redrawn during training: models/attention/performer.py
    "hiding": 1,  # hidden tokens and what replaces them: tasks/hiding.py
}

# `step`: steps done when these draws began; `draws`: their versions, None if unknown
DrawSession = dict[str, Any]

UNKNOWN_DRAWS: list[DrawSession] = [{"step": 0, "draws": None}]  # for a checkpoint of an older lra


class DrawHistory(pl.Callback):
    """Writes into checkpoints which draws made the run from which step. By default: the present ones from step 0."""

    def __init__(self, sessions: list[DrawSession] | None = None) -> None:
        self.sessions = sessions or [{"step": 0, "draws": dict(DRAW_VERSIONS)}]

    def resume(self, checkpoint: Path, step: int, changed: bool) -> None:
        """Resumes from a checkpoint.

        Args:
            step: number of steps that the checkpoint has completed.
            changed: whether other draws may have made the checkpoint.

        Raises:
            UsageError: other draws made it, and `changed` is false.
        """
        before = self.sessions[-1]["draws"]
        if before == DRAW_VERSIONS:
            return
        if not changed:
            raise UsageError(
                f"{checkpoint} was trained by an lra with other draws ({_compared(before)}), and its second half would "
                "not belong to its first: go on with the commit in its env.json, add draws=changed to go on with "
                "these, which result.json then states, or begin another run, name="
            )
        kept = (each for each in self.sessions if each["step"] < step)
        self.sessions = [*kept, {"step": step, "draws": dict(DRAW_VERSIONS)}]

    def on_save_checkpoint(self, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: dict[str, Any]) -> None:
        checkpoint["draws"] = self.sessions


def _compared(before: dict[str, int] | None) -> str:
    if before is None:
        return "it states none"
    names = [name for name in {**DRAW_VERSIONS, **before} if before.get(name) != DRAW_VERSIONS.get(name)]
    return ", ".join(
        f"{name} {before.get(name, 'not stated')}, here {DRAW_VERSIONS.get(name, 'unknown')}" for name in names
    )
