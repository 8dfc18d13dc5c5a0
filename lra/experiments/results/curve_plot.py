"""`lra plot`: validation accuracy and training loss of runs by step, as SVG or PDF."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from lra.bench import plots
from lra.config.options import parse_options
from lra.errors import UsageError
from lra.experiments.results.run_groups import RunGroup, group_runs, seed_of, short_names
from lra.training import curves
from lra.training.run_directory import CURVES_FILE, replace_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_POINTS = 200  # of a line: more are narrower than its stroke
PANELS = (("val/accuracy", "validation accuracy, %", 100.0), ("train/loss", "training loss", 1.0))

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class PlotOptions:
    out: str = ""  # a file that ends in .svg or .pdf

    def __post_init__(self) -> None:
        check_figure_file(self.out)


def check_figure_file(out: str) -> None:
    """UsageError if a figure can't have this name."""
    if Path(out).suffix not in (".svg", ".pdf"):
        raise UsageError(f"out={out}: name a file for the curves that ends in .svg or .pdf")
    if not (folder := Path(out).parent).is_dir():
        raise UsageError(f"out={out}: there is no folder {folder}, make it or name another file")


def parse_plot(args: Iterable[str]) -> tuple[PlotOptions, list[str]]:
    """The options and the runs of `RUN [RUN …] out=<file>`. A run's path may have `=` in it."""
    given = list(args)
    runs = [each for each in given if not each.startswith("out=")]
    if not runs:
        raise UsageError("lra plot needs runs: name their directories, or without -s<seed> for the runs of all seeds")
    return parse_options(PlotOptions, [each for each in given if each.startswith("out=")]), runs


def plot_runs(args: Sequence[str]) -> str:
    """Draws the curves of runs into a file. Returns a line to print."""
    options, places = parse_plot(args)
    groups = group_runs(places)
    draw_curves(groups, options.out)
    count = sum(len(group.runs) for group in groups)
    return f"curves of {count} {'run' if count == 1 else 'runs'}: {options.out}"


def draw_curves(groups: Sequence[RunGroup], out: str) -> None:
    """Draws validation accuracy and training loss of runs; the seeds of a setting share a colour.

    Raises:
        UsageError: a run has no curves, or they can't be read, or the file can't be written.
    """
    names = short_names(groups)
    lines: list[list[tuple[int, str, Points]]] = [[], []]  # of each panel: number of the setting, id, points
    for number, group in enumerate(groups):
        for run in group.runs:
            for panel, (column, _, factor) in zip(lines, PANELS, strict=True):
                points = read_points(run / CURVES_FILE, column, factor)
                panel.append((number, f"{names[number]}-{seed_of(run)}", points))
    for (column, label, _), panel in zip(PANELS, lines, strict=True):
        if not any(points for _, _, points in panel):
            raise UsageError(f"no run has a {label.partition(',')[0]} in its {CURVES_FILE} ({column}): train longer")

    def plot(*panels: Axes) -> None:
        for axes, panel, (_, label, _) in zip(panels, lines, PANELS, strict=True):
            named: set[int] = set()
            for number, name, points in panel:
                if not points:
                    continue
                look: dict[str, Any] = plots.line_style(number) | {"markevery": [-1], "linewidth": 1.2, "gid": name}
                if axes is panels[0] and number not in named:
                    look["label"] = names[number]
                named.add(number)
                axes.plot(*zip(*points, strict=True), **look)
            axes.set(title=label, xlabel="step")
            plots.set_ticks(axes.xaxis)
        if len(groups) > 1:
            panels[0].figure.legend(loc="outside lower left", ncols=min(3, len(groups)))

    kind = cast(Literal["svg", "pdf"], Path(out).suffix[1:])
    data = plots.render_figure((8, 3.2 + 0.19 * len(groups)), plot, kind, len(PANELS))
    try:
        with replace_file(Path(out)) as file:
            file.write(data)
    except OSError as error:
        raise UsageError(f"out={out} can't be written ({error.strerror or error}): name another file") from None


def read_points(path: Path, column: str, factor: float = 1.0) -> Points:
    """(step, value times `factor`) of a column of metrics.csv, thinned out, always with the last one.

    UsageError if the file is missing or can't be read.
    """
    try:
        rows = [row for row in curves.read_curves(path) if row.get(column)]
    except FileNotFoundError:
        raise UsageError(f"{path} is missing: the run has no curves") from None
    points = [(float(row["step"]), factor * float(row[column])) for row in rows]
    kept = points[:: math.ceil(len(points) / MOST_POINTS) or 1]
    return [*kept, points[-1]] if points and kept[-1] != points[-1] else kept
