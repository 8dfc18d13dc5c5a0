"""metrics.csv and TensorBoard's file: one row per logged step, appended, so that a resumed run continues its own."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_only

from lra.errors import UsageError, name_file
from lra.reading import read_csv
from lra.training import events
from lra.training.run import replacing, write

COLUMNS: tuple[str, ...] = ("step", "train/loss", "lr", "val/loss", "val/accuracy")


class Curves(Logger):
    """Lightning's own CSV logger deletes the file of the run it resumes; this one drops only what is done again."""

    def __init__(self, path: Path):
        super().__init__()
        self.path, self.folder = path, path.with_name("tensorboard")
        self.events: Path | None = None  # this session's file, once a row is logged
        if path.exists():
            read(path)  # refused now, not after the first steps

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {key: value for key, value in metrics.items() if key in COLUMNS}
        if not row:
            return
        assert step is not None
        if self.events is None:
            self.events = self._start(step)
        with name_file(self.path), self.path.open("a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row | {"step": step})
        with name_file(self.events), self.events.open("ab") as file:
            file.write(events.row(row, step))

    def _start(self, step: int) -> Path:
        rows = read(self.path) if self.path.exists() else []
        kept = [{name: row[name] for name in COLUMNS if name in row} for row in rows if int(row["step"]) < step]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, COLUMNS)
        writer.writeheader()
        writer.writerows(kept)
        write(self.path, text.getvalue())
        return self._start_events(kept)

    def _start_events(self, kept: list[dict[str, str]]) -> Path:
        """Replaces TensorBoard's files of earlier sessions by one that has what metrics.csv has."""
        with name_file(self.folder):
            self.folder.mkdir(exist_ok=True)
            before, when = [*self.folder.glob(events.PATTERN)], events.times(self.folder)
        path = self.folder / events.file_name()
        with replacing(path) as file:
            file.write(events.opening(kept, when))
        for old in before:
            if old != path:
                old.unlink()
        return path

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
    """The whole rows, which have a step and numbers; columns of others are there, too, as they are.

    What a kill or a power cut leaves of the last row is left out. UsageError for any other file.
    """
    try:
        rows = read_csv(path, "step")
        for number, row in enumerate(rows, start=2):
            if not _is_row(row):
                raise ValueError(f"line {number} is no row with a step and numbers")
    except ValueError as error:
        raise UsageError(f"{path} can't be read as curves ({error}): move it away, a run goes on without it") from None
    return rows


def _is_row(row: dict[str, str]) -> bool:
    step = row.get("step", "")
    if not (step.isascii() and step.isdecimal() and len(step) <= 12):
        return False
    try:
        numbers = {name: float(row[name].encode("ascii")) for name in COLUMNS if row.get(name)}
    except ValueError:
        return False
    return math.isfinite(numbers.get("val/accuracy", 0.0))
