"""metrics.csv: one row per logged step, appended, so that a resumed run continues its own file."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from lra.training.run import write

COLUMNS: tuple[str, ...] = ("step", "train/loss", "lr", "val/loss", "val/accuracy")


class Curves(Logger):
    """Lightning's own CSV logger deletes the file of the run it resumes; this one drops only what is done again."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.started = path, False

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {key: value for key, value in metrics.items() if key in COLUMNS}
        if not row:
            return
        assert step is not None
        if not self.started:
            self._start(step)
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row | {"step": step})

    def _start(self, step: int) -> None:
        rows = read(self.path) if self.path.exists() else []
        # what a power cut has left of a row is none
        kept = [row for row in rows if (row.get("step") or "").isdecimal() and int(row["step"]) < step]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)
        write(self.path, text.getvalue())
        self.started = True

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass  # config.yaml holds them

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""


def record(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    """Writes one row to every logger, under the number of updates done."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)


def read(path: Path) -> list[dict[str, str]]:
    """The whole rows: a process that is killed can leave half of one."""
    with path.open(newline="") as file:
        whole, _, _ = file.read().rpartition("\n")
    return list(csv.DictReader(whole.splitlines()))
