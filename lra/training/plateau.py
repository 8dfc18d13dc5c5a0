"""What follows when validations bring no better score: a smaller learning rate, or the end of the run."""

from __future__ import annotations

import math
from typing import Any

import pytorch_lightning as pl

from lra.config.schema import RunConfig
from lra.training.output import print_line


class Plateau(pl.Callback):
    """Counts the validations since the best one, lowers the learning rate, and ends training.

    A score is better only if it is larger than the best before it, as for the best checkpoint. All ranks have the same
    score, so they count alike. Checkpoints hold the counts.

    The learning rate is that of PyTorch's `ReduceLROnPlateau(mode="max", threshold=0, eps=0)` with this factor and
    patience, of which each validation is a step. Validations within the warmup and the cooldown do not count for it.

    Attributes:
        best: the best score so far.
        waited: validations since the best one.
        flat: those of them that count for the learning rate, since its last reduction.
        factor: what the learning rate is multiplied by now.
    """

    def __init__(self, run: RunConfig):
        self.run = run
        self.best, self.waited, self.flat, self.factor = -math.inf, 0, 0, 1.0

    @property
    def stops(self) -> bool:
        """Whether training ends here."""
        patience = self.run.trainer.patience
        return patience is not None and self.waited >= patience

    def count(self, score: float, step: int) -> None:
        """Counts a validation. `step`: number of updates done."""
        optim = self.run.optim
        if score > self.best:
            self.best, self.waited, self.flat = score, 0, 0
            return
        self.waited += 1
        if optim.schedule == "plateau" and optim.warmup < step <= self.run.trainer.steps - optim.cooldown:
            self.flat += 1
            if self.flat > optim.plateau_patience:
                self.factor, self.flat = self.factor * optim.plateau_factor, 0

    def describe(self) -> str:
        """Says why training ends."""
        many = "validations in a row" if self.waited > 1 else "validation"
        return f"{self.waited} {many} brought no better one (trainer.patience={self.run.trainer.patience})"

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.count(float(trainer.callback_metrics["val/accuracy"]), trainer.global_step)
        if self.stops:
            trainer.should_stop = True  # Lightning ends before the next step
            print_line(trainer, f"step {trainer.global_step}: training ends, as {self.describe()}")

    def on_fit_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Leaves a run that has stopped before with only its scoring to do."""
        trainer.should_stop = self.stops

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "waited": self.waited, "flat": self.flat, "factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.waited, self.flat, self.factor = (state[name] for name in ("best", "waited", "flat", "factor"))
