"""Writes metrics.csv and TensorBoard's file: a row for each logged step. A resumed run continues its own file."""

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
from lra.files import replace_file
from lra.reading import read_csv
from lra.training.run_directory import write_text

CURVE_COLUMNS: tuple[str, ...] = ("step", "train/loss", "lr", "val/loss", "val/accuracy")
GRAD_NORM = "train/grad_norm"  # a column of runs that measure it


class RowLogger(Logger):
    """A logger of rows alone. Configurations reach it another way, if at all, and the run's directory is its name."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""


class Curves(RowLogger):
    """A CSV logger. Lightning's deletes the file of a resumed run; this one drops only rows that are logged again.

    Args:
        grad_norm: whether there is a column for the norm of the gradient. A file that has it keeps it.
        tensorboard: whether TensorBoard's file is written, too.
    """

    def __init__(self, path: Path, grad_norm: bool = False, tensorboard: bool = True):
        super().__init__()
        self.path, self.folder, self.tensorboard = path, path.with_name("tensorboard"), tensorboard
        self.columns = (*CURVE_COLUMNS, GRAD_NORM) if grad_norm else CURVE_COLUMNS
        self.begun = False  # after the first row
        self.events: Path | None = None  # TensorBoard's file of this session
        if path.exists():
            read_curves(path)  # refused now, not after the first steps

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        row = {key: value for key, value in metrics.items() if key in self.columns}
        if not row:
            return
        assert step is not None
        from lra.training import tensorboard  # imported with the first row, as it would delay the first line of a run

        if not self.begun:
            kept = self._start(step)
            self.events = self._start_events(kept) if self.tensorboard else None
            self.begun = True
        with name_file(self.path), self.path.open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row | {"step": step})
        if self.events is not None:
            with name_file(self.events), self.events.open("ab") as file:
                file.write(tensorboard.encode_row(row, step))

    def _start(self, step: int) -> list[dict[str, str]]:
        """Writes the rows of earlier sessions before `step`, and returns them."""
        rows = read_curves(self.path) if self.path.exists() else []
        if any(row.get(GRAD_NORM) for row in rows):
            self.columns = (*CURVE_COLUMNS, GRAD_NORM)
        kept = [{name: row[name] for name in self.columns if name in row} for row in rows if int(row["step"]) < step]
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self.columns)
        writer.writeheader()
        writer.writerows(kept)
        write_text(self.path, text.getvalue())
        return kept

    def _start_events(self, kept: list[dict[str, str]]) -> Path:
        from lra.training import tensorboard

        # one TensorBoard file with the rows of metrics.csv replaces those of earlier sessions
        with name_file(self.folder):
            self.folder.mkdir(exist_ok=True)
            before, when = [*self.folder.glob(tensorboard.EVENT_FILES)], tensorboard.read_times(self.folder)
        path = self.folder / tensorboard.event_file_name()
        with replace_file(path) as file:
            file.write(tensorboard.start_events(kept, when))
        for old in before:
            if old != path:
                old.unlink()
        return path


def log_row(trainer: pl.Trainer, metrics: dict[str, float], step: int) -> None:
    """Writes a row to all loggers. `step`: number of updates done."""
    if trainer.is_global_zero:
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step)


def read_curves(path: Path) -> list[dict[str, str]]:
    """Reads the rows of metrics.csv, with unknown columns unchanged. Drops a last row that a kill or power cut cut off.

    Raises:
        UsageError: a row has no step, or a value that is no number.
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
        columns = (*CURVE_COLUMNS, GRAD_NORM)
        numbers = {name: float(row[name].encode("ascii")) for name in columns if row.get(name)}
    except ValueError:
        return False
    return math.isfinite(numbers.get("val/accuracy", 0.0))
