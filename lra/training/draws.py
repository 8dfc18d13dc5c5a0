"""Which draws made a run: what is random in training has a version, which checkpoints and results state.

A run whose first half drops by one function and whose second half drops by another one is neither run. So whoever
changes what is drawn for the same seed raises its version here; a test pins the numbers that each version draws.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl

from lra.errors import UsageError

DRAW_VERSIONS: dict[str, int] = {
    "seeds": 1,  # of a purpose and step: training/seeding.py
    "weights": 1,  # before the first step
    "order": 1,  # of the training rows: data/order.py
    "dropout": 1,  # between layers: models/dropout.py
    "attention": 1,  # dropout of attention's probabilities: kernels/flash/reference.py
    "features": 1,  # of attentions that draw them in training: models/attention/performer.py
    "hiding": 1,  # of pretrain=masked: tasks/masked.py
}

DrawSession = dict[
    str, Any
]  # `step`: how many steps were done when its draws began; `draws`: None where they are unknown


UNKNOWN_DRAWS: list[DrawSession] = [{"step": 0, "draws": None}]  # of a checkpoint that an older lra wrote


class DrawHistory(pl.Callback):
    """Keeps in a run's checkpoints which draws made it, and from which step; by default these, from the first one."""

    def __init__(self, sessions: list[DrawSession] | None = None) -> None:
        self.sessions = sessions or [{"step": 0, "draws": dict(DRAW_VERSIONS)}]

    def go_on(self, checkpoint: Path, step: int, changed: bool) -> None:
        """Goes on from a checkpoint; UsageError if other draws made it, unless they may be `changed`.

        Args:
            step: how many steps it has behind it.
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
