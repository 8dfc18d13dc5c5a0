"""The report as one page for a browser, without network and scripts. Plots are SVG inside it."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from lra.bench import plots
from lra.errors import UsageError
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.reproduction import TextTable
from lra.experiments.results.curve_plot import Points, read_points
from lra.experiments.results.ledger import ReportRow, ResultFile, finished_hardware, mean_value
from lra.terminal import Bold, make_visible

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEAST_ACCURACY_SPAN = 5.0  # points of accuracy: chance shall look flat
LEAST_FACTOR = 4.0  # of a logarithmic axis across: two almost equal values stand close to each other
MOST_TICKS = 5  # of a linear axis across, so that numbers do not overlap
CSS = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1220px; margin: 24px auto;
  padding: 0 16px; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 32px; } h3 { font-size: 15px; margin-bottom: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 20px 0 6px; }
th, td { padding: 4px 10px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: 12px; }
.names span { display: inline-block; margin-right: 18px; } .names img { vertical-align: middle; }
pre { background: #f6f6f6; padding: 8px; overflow-x: auto; font-size: 13px; }
"""


def report_page(
    table: Grid, tables: Sequence[TextTable], notes: Sequence[str], rows: Sequence[ReportRow],
    entries: Mapping[Cell, ResultFile], alone: Mapping[tuple[str, str, str], float],
) -> str:  # fmt: skip
    """The whole document.

    Args:
        alone: steps per second by (hardware, column, attention), in place of those of runs.
    """
    number = {name: i for i, name in enumerate(dict.fromkeys(row.attention for row in rows))}
    title, names = escape(f"{table.name}: {table.about}"), _names(number)
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{CSS}</style></head><body>",
        f"<h1>{title}</h1><p>Beside the paper's: {escape(table.source)}.</p>",
        *map(_table, tables),
        _list(notes),
        "<h2>Learning curves</h2><p>Validation accuracy, %, by step; a line for each seed.</p>",
        names,
        *_learning(rows, entries, number),
        "<h2>Speed and memory</h2><p>Test accuracy, %, a point for each attention: the mean of its seeds.</p>",
        names,
        *_against(rows, number, alone),
        "<h2>Commands</h2>",
        *_commands(rows),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def curve_chart(
    title: str, across: str, lines: Mapping[str, list[Points]], number: Mapping[str, int], log: bool
) -> str:
    """A picture of lines by name, each with a dot at its end, and the name there if a line is one point.

    Args:
        log: whether the axis across is logarithmic. Its values are then positive.
    """

    def plot(axes: Axes) -> None:
        for name, group in lines.items():
            for place, line in enumerate(group):
                look = plots.line_style(number[name])
                axes.plot(*zip(*line, strict=True), gid=f"{name}-{place}", markevery=[-1], linewidth=1.2, **look)
                if len(line) == 1:
                    axes.annotate(name, line[0], (4, 4), textcoords="offset points", fontsize=7, color=look["color"])
        axes.set(title=title, xlabel=make_visible(across, kept="\n"), xscale="log" if log else "linear")
        left, right = axes.get_xlim()
        if log and right / left < LEAST_FACTOR:
            middle, room = math.sqrt(left * right), math.sqrt(LEAST_FACTOR)
            axes.set_xlim(middle / room, middle * room)
        axes.locator_params(axis="x", nbins=MOST_TICKS) if not log else None
        plots.set_ticks(axes.xaxis)
        low, high = axes.get_ylim()
        room = max(0.0, LEAST_ACCURACY_SPAN - (high - low)) / 2
        axes.set_ylim(low - room, high + room)

    return _picture((3.96, 2.7), plot, f"{title}, by {across}: {', '.join(lines)}")


def _learning(
    rows: Sequence[ReportRow], entries: Mapping[Cell, ResultFile], number: Mapping[str, int]
) -> Iterator[str]:
    drawn, without = [], []
    for column in dict.fromkeys(row.column for row in rows):
        lines: dict[str, list[Points]] = {}
        for cell, entry in entries.items():
            if cell.column == column:
                read = [] if entry.curves is None else _validation(entry.curves)
                if isinstance(read, str):
                    without.append(f"{cell}: {read}")
                elif read:
                    lines.setdefault(cell.attn, []).append(read)
                else:
                    without.append(f"{cell}: no curves beside {entry.path}")
        if lines:
            drawn.append(curve_chart(column, "step", lines, number, log=False))
        elif not any(cell.column == column for cell in entries):
            without.append(f"{column}: no results")
    yield f'<div class="plots">{"".join(drawn)}</div>'
    if without:
        yield f"<details><summary>Without curves: {len(without)}</summary>{_list(without)}</details>"


def _validation(path: Path) -> Points | str:
    """(step, accuracy in %) of a file, thinned out; or what is wrong with the file."""
    try:
        return read_points(path, "val/accuracy", 100)
    except (OSError, UsageError) as error:
        return str(error)


def _against(
    rows: Sequence[ReportRow], number: Mapping[str, int], alone: Mapping[tuple[str, str, str], float]
) -> Iterator[str]:
    """A plot for each column, hardware and figure."""
    drawn = []
    for place in finished_hardware(rows):
        here = [row for row in rows if row.hardware == place]
        for field, label in (("steps_per_second", "steps per second"), ("memory_gb", "peak memory of one GPU, GB")):
            for column in dict.fromkeys(row.column for row in here):
                lines = {}
                for attn in number:
                    x, y = (mean_value(here, name, attention=attn, column=column) for name in (field, "accuracy"))
                    if field == "steps_per_second":
                        x = alone.get((place, column, attn), x)
                    if x and y is not None:
                        lines[attn] = [[(x, y)]]
                if lines:
                    drawn.append(curve_chart(column, f"{label}\n{place}", lines, number, log=True))
    yield f'<div class="plots">{"".join(drawn)}</div>' if drawn else "<p>No finished run.</p>"


def _commands(rows: Sequence[ReportRow]) -> Iterator[str]:
    for column in dict.fromkeys(row.column for row in rows):
        lines = [
            f"{row.command}  # {row.status}" if row.status else row.command for row in rows if row.column == column
        ]
        yield f"<h3>{escape(column)}</h3><pre>{escape(chr(10).join(lines))}</pre>"


def _table(table: TextTable) -> str:
    title, header, rows = table
    lines = "\n".join(f"<tr>{''.join(f'<td>{_cell(cell)}</td>' for cell in row)}</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in header)
    caption = f"<caption>{escape(title)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{names}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _cell(text: str) -> str:
    return f"<b>{escape(text)}</b>" if isinstance(text, Bold) else escape(text)


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _names(number: Mapping[str, int]) -> str:
    """The legend of all drawings below it."""

    def sample(index: int) -> str:
        def plot(axes: Axes) -> None:
            axes.set_axis_off()
            axes.plot([0, 1, 2], [0, 0, 0], markevery=[1], **plots.line_style(index))

        return _picture((0.6, 0.25), plot, "")

    parts = (f"<span>{sample(index)} {escape(name)}</span>" for name, index in number.items())
    return f'<p class="names">{"".join(parts)}</p>'


def _picture(size: tuple[float, float], plot: Callable[[Axes], object], text: str) -> str:
    """A picture of this size in inches, inside the page, with `text` as its description."""
    data = base64.b64encode(plots.render_svg(size, plot).encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{data}" alt="{escape(text)}">'
