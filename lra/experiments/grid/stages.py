"""`lra config stages`: the runs that a recipe makes before one, and that one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lra.config.compose import flatten
from lra.config.fields import format_value
from lra.config.override import parse_overrides
from lra.experiments.grid.cells import cell_state
from lra.experiments.grid.grid import Cell
from lra.experiments.grid.plan import MeasuredSpeeds, steps_left, steps_per_second
from lra.experiments.reproduction import TextTable
from lra.training.fit import configure
from lra.training.output import format_duration

# fields that other columns show, or that say how often a run is looked at
LEFT_OUT = (
    "init", "pretrain", "task.name", "attn.name", "trainer.steps", "trainer.epochs", "trainer.eval_every",
    "trainer.log_every",
)  # fmt: skip


def list_stages(args: Sequence[str]) -> TextTable:
    """A row for each run of the chain, the first one first, with what changes from the run before it.

    The time is that of training what is left, from steps per second of finished runs of the same configuration. It is
    empty where there are none. Nothing is started or written.

    Args:
        args: what `lra fit` takes.

    Raises:
        UsageError: as `lra fit` would, and for a directory of another configuration.
    """
    run = configure(args).config
    last = Cell(run.task.name, run.attn.name, run.seed, tuple(parse_overrides(args)))
    rows: list[list[str]] = []
    before: dict[str, Any] = {}
    for number, cell in enumerate((*last.stages, last), 1):
        state, config = cell_state(cell), cell.composed.config
        speed = steps_per_second(cell, MeasuredSpeeds())
        time = "" if state.final or speed is None else format_duration(steps_left(cell, state) / speed[0])
        fields = {name: value for name, value in flatten(cell.directory.config) if name not in LEFT_OUT}
        changes = [f"{name}={format_value(value)}" for name, value in fields.items() if before.get(name) != value]
        task = config.task.name + (f", pretrain={config.pretrain}" if config.pretrain != "none" else "")
        steps, path = f"{config.trainer.steps:,}", str(cell.directory.path)
        shown = " ".join(changes) if before else ""
        rows.append([str(number), task, config.attn.name, steps, str(state), time, shown, path])
        before = fields
    header = ["run", "task", "attention", "steps", "state", "training left", "changes", "directory"]
    return "stages", header, rows
