"""The progress bar of a run in a terminal. Its steps and its clock advance within a batch of Lightning's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import pytorch_lightning as pl
from pytorch_lightning.callbacks import ProgressBar
from rich import progress
from rich.console import Console, RenderableType
from rich.text import Text

from lra.tasks.base import TaskModule

SPEED_WINDOW_S = 600.0  # the speed is measured over the last seconds, of many steps or of a few slow ones


class SpeedColumn(progress.ProgressColumn):
    """Steps per second, or seconds per step."""

    def render(self, task: progress.Task) -> Text:
        return Text(format_speed(task.speed))


def format_speed(speed: float | None) -> str:
    if not speed:
        return ""
    return f"{speed:.1f}/s" if speed >= 1 else f"{1 / speed:.1f} s each"


class LiveBars(progress.Progress):
    """Shows the trainer's step whenever it is drawn."""

    def __init__(self, trainer: pl.Trainer, module: TaskModule, console: Console):
        self.trainer, self.module = trainer, module
        self.training: progress.TaskID | None = None
        super().__init__(
            progress.TextColumn("{task.description}"), progress.BarColumn(), progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(), progress.TimeRemainingColumn(), SpeedColumn(),
            progress.TextColumn("{task.fields[said]}"),
            console=console, refresh_per_second=4, speed_estimate_period=SPEED_WINDOW_S, transient=True,
        )  # fmt: skip

    def get_renderables(self) -> Iterable[RenderableType]:
        if self.training is not None:
            loss = self.module.step.logged
            said = "" if loss is None else f"train/loss: {loss:.3f}"
            self.update(self.training, completed=self.trainer.global_step, said=said)
        yield from super().get_renderables()


class Progress(ProgressBar):
    """Shows training in steps with its loss, and validation and test in batches."""

    def __init__(self, console: Console):
        super().__init__()
        self.console = console
        self.bars: LiveBars | None = None
        self._scoring: progress.TaskID | None = None

    def disable(self) -> None:
        """Lightning does so on other ranks than the first."""
        self.stop()
        self.start = lambda *_: None  # type: ignore[method-assign]

    def start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if self.bars is None:
            self.bars = LiveBars(trainer, cast(TaskModule, module), self.console)
            self.bars.start()

    def stop(self) -> None:
        if self.bars is not None:
            self.bars.stop()
            self.bars = None

    def print(self, *args: Any, **kwargs: Any) -> None:
        self.console.print(*args, **kwargs)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start(trainer, pl_module)
        if self.bars is not None:
            total, done = trainer.max_steps, trainer.global_step
            self.bars.training = self.bars.add_task("training", total=total, completed=done, said="")

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._score("validation", sum(trainer.num_val_batches))

    def on_validation_batch_end(self, *_: Any) -> None:
        if self.bars is not None and self._scoring is not None:
            self.bars.advance(self._scoring)

    def on_validation_end(self, *_: Any) -> None:
        if self.bars is not None and self._scoring is not None:
            self.bars.remove_task(self._scoring)
            self._scoring = None

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.start(trainer, pl_module)
        self._score("test", sum(trainer.num_test_batches))

    def teardown(self, *_: Any, **__: Any) -> None:
        self.stop()

    def on_test_batch_end(self, *_: Any) -> None:
        self.on_validation_batch_end()

    def on_test_end(self, *_: Any) -> None:
        self.on_validation_end()

    def on_exception(self, *_: Any) -> None:
        self.stop()

    def _score(self, what: str, batches: float) -> None:
        if self.bars is not None:
            self._scoring = self.bars.add_task(what, total=batches, said="")


def progress_options(console: Console) -> dict[str, Any]:
    """Returns the arguments of a trainer that only scores: a bar, if the output is a terminal."""
    shown = console.is_terminal
    return {"enable_progress_bar": shown, "callbacks": [Progress(console)] if shown else []}
