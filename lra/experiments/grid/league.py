"""The league of a cell, which says with which published figures its accuracy may be compared.

`strict` is what Amos et al. 2024 (arXiv 2310.02980) allow: the task's own training set, one axis of positions, no
easier data, and no augmentation that knows of images. Stages may pretrain on the same data. `open` is everything else
that never sees validation or test. Tables keep the two apart.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from lra.config.schema import RunConfig
from lra.experiments.grid.grid import Cell, League


def league_of(reasons: Collection[str]) -> League:
    """Returns the league of a cell with these `open_reasons`."""
    return "open" if reasons else "strict"


def open_reasons(cell: Cell) -> list[str]:
    """Returns why the accuracy of a cell is of the open league, one short text for each reason; empty if it is not."""
    return list_reasons(cell.composed.config, [stage.composed.config for stage in cell.stages])


def list_reasons(run: RunConfig, stages: Sequence[RunConfig]) -> list[str]:
    """Returns the `open_reasons` of a run and the runs before it, the first of all first."""
    task, default = run.task, type(run.task)()
    reasons = [
        f"task.{name}={getattr(task, name)}"
        for name in ("level", "tokens")
        if getattr(task, name, None) != getattr(default, name, None)
    ]
    if getattr(task, "train", 0) > getattr(default, "train", 0):
        reasons.append(f"{task.train:,} training examples, not {default.train:,}")
    if any(each.model.axes == 2 for each in (run, *stages)):
        reasons.append("two axes of positions")
    changes = dict.fromkeys(name for each in (run, *stages) for name in each.augment.changes())
    if given := [name for name in changes if name != "operands"]:  # these are trees
        reasons.append(f"augmented images ({', '.join(given)})")
    if others := dict.fromkeys(_difference(stage.task, task) for stage in stages if stage.task != task):
        reasons.append(f"stages on other data ({'; '.join(others)})")
    if (stages[0] if stages else run).init:
        reasons.append("weights of another run, init=")
    return reasons


def _difference(there: Any, here: Any) -> str:
    """Names what the data of a stage are."""
    if there.name != here.name:
        return there.name
    fields = (name for name, value in vars(there).items() if value != getattr(here, name))
    return ", ".join(f"task.{name}={getattr(there, name)}" for name in fields)
