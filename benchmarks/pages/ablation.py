"""Makes docs/ablation.md and its figure: what `lra report ablation` shows, also where nothing ran.

A curve is made of the cells that differ from recipe `amos2024` in one thing. What that is follows from configurations.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.pages import measured, tables
from lra.bench import plots
from lra.experiments.grid import grid
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.results.ledger import ReportRow, known_values
from lra.tasks import TASKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PAGE, FIGURE = measured.ROOT / "docs" / "ablation.md", measured.ROOT / "docs" / "ablation.svg"
NAME, ATTENTION, SEEDS = "ablation", "flash", 3
PANELS = {
    "hidden": "share of tokens hidden", "steps": "steps of pretraining, times the recipe's", "width": "width",
    "labels": "share of labelled examples",
}  # fmt: skip
TASK_NAMES = {"listops": "ListOps", "text": "Text"}
LEAST_POINTS = 2  # of a curve
HEAD = f"""# What matters in self-pretraining

<!-- made by benchmarks/pages/ablation.py of benchmarks/results: make docs -->

Recipe `amos2024` on ListOps and Text, with one thing changed at a time: the share of tokens that pretraining hides, \
its steps, the model's width, and the share of labelled examples. `scratch` has no pretraining. With few labels \
pretraining still reads all examples, without their labels. The seed chooses which examples have labels.

`lra reproduce {NAME}` runs the cells, and `lra report {NAME}` makes these tables. A cell that was not run is empty, \
and a curve needs two points."""


class Setting(NamedTuple):
    """What is changed of a cell, as numbers of `PANELS`. Without pretraining the steps are 0, and the share is None."""

    hidden: float | None
    steps: float
    width: float
    labels: float


Curves = Mapping[tuple[str, bool], list[tuple[float, float]]]  # by task and whether it pretrains: x and accuracy in %


def setting_of(cell: Cell, usual: int) -> Setting:
    """Reads the setting from the configurations of a cell and of its stage, which has `usual` steps in the recipe."""
    run = cell.composed.config
    if not cell.stages:
        return Setting(None, 0.0, run.model.d_model, run.train_share)
    before = cell.stages[-1].composed.config
    hidden = before.mask or TASKS.facts_of(TASKS.catalogue()[run.task.name]).mask
    return Setting(hidden, before.trainer.steps / usual, run.model.d_model, run.train_share)


def curves(table: Grid, rows: Iterable[ReportRow]) -> dict[str, Curves]:
    """The curves of each panel: means over seeds. One with fewer than two points is left out."""
    rows = list(rows)
    cells = {cell.column: cell for cell in table.cells(attns=[ATTENTION], seeds=1)}
    found: dict[str, dict[tuple[str, bool], list[tuple[float, float]]]] = {panel: {} for panel in PANELS}
    for task in TASK_NAMES:
        own = {column: cell for column, cell in cells.items() if table.columns[column].task == task}
        usual = own[task].stages[-1].composed.config.trainer.steps
        base = setting_of(own[task], usual)
        for column, cell in own.items():
            scores = known_values(rows, "accuracy", column=column, attention=ATTENTION)
            here = setting_of(cell, usual)
            pretrained = here.steps > 0
            like = base if pretrained else base._replace(hidden=None, steps=0.0)
            changed = [panel for panel in PANELS if getattr(here, panel) != getattr(like, panel)]
            for panel in changed or PANELS:
                if scores and len(changed) < 2 and (pretrained or panel in ("steps", "labels")):
                    line = found[panel].setdefault((task, pretrained or panel == "steps"), [])
                    line.append((getattr(here, panel), statistics.fmean(scores)))
    return {
        panel: {key: sorted(line) for key, line in lines.items() if len(line) >= LEAST_POINTS}
        for panel, lines in found.items()
    }


def figure(found: Mapping[str, Curves]) -> str:
    """The SVG: a panel for each thing that is changed, in which a line is a task with or without pretraining."""

    def plot(*panels: Axes) -> None:
        for axes, (panel, label) in zip(panels, PANELS.items(), strict=True):
            for (task, pretrained), line in found[panel].items():
                colour, dash = f"C{[*TASK_NAMES].index(task)}", "-" if pretrained else "--"
                name = TASK_NAMES[task] + ("" if pretrained else ", from scratch")
                x, y = zip(*line, strict=True)
                axes.plot(x, y, marker="o", label=name, color=colour, linestyle=dash)
            axes.set(xlabel=label, xscale="log" if panel in ("width", "labels") else "linear")
            plots.set_ticks(axes.xaxis)
        panels[0].set_ylabel("test accuracy, %")
        lines = {str(line.get_label()): line for axes in panels for line in axes.get_lines()}
        panels[0].figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=max(1, len(lines)))

    return plots.render_figure((13, 3.4), plot, panels=len(PANELS)).decode()


def make() -> dict[Path, str]:
    """The page, and the figure if it has a curve."""
    table = grid.read_grid(NAME)
    made = tables.reported(NAME, f"attns={ATTENTION}", f"seeds={SEEDS}")
    found = curves(table, made.rows)
    drawn = {FIGURE: figure(found)} if any(found.values()) else {}
    shown = [f"![Accuracy by what is changed, a line for each task]({path.name})" for path in drawn]
    text = "\n\n".join([HEAD, *shown, tables.caveats(NAME), *tables.markdown(made)]) + "\n"
    return {PAGE: measured.from_docs(text), **drawn}
