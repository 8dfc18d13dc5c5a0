"""The report as one page for a browser: no network, no script; drawings are SVG in the text."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from lra.bench.plots import COLOURS, DASHES
from lra.experiments.grid import Cell, Grid
from lra.experiments.ledger import Entry, Row, hardware, mean
from lra.experiments.reproduction import Table
from lra.training import curves

WIDTH, HEIGHT = 380, 260
LEFT, RIGHT, TOP, BELOW = 52, 12, 30, 40  # margins of the axes
LEAST_SPAN = 5.0  # points of accuracy: chance shall look flat
MOST_POINTS = 200  # of a line: more are narrower than its stroke
STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; background: #fff; max-width: 1220px; margin: 24px auto;
  padding: 0 16px; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 32px; } h3 { font-size: 15px; margin-bottom: 4px; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: 20px 0 6px; }
th, td { padding: 4px 10px; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #888; } th:first-child, td:first-child { text-align: left; }
.wide { overflow-x: auto; } .plots { display: flex; flex-wrap: wrap; gap: 12px; }
.plots svg { width: 380px; height: auto; } .names span { display: inline-block; margin-right: 18px; }
pre { background: #f6f6f6; padding: 8px; overflow-x: auto; font-size: 13px; }
"""

Points = list[tuple[float, float]]


def page(
    table: Grid, tables: Sequence[Table], notes: Sequence[str], rows: Sequence[Row], entries: Mapping[Cell, Entry]
) -> str:
    """The whole document."""
    number = {name: i for i, name in enumerate(dict.fromkeys(row.attention for row in rows))}
    title = escape(f"{table.name}: {table.about}")
    parts = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{STYLE}</style></head><body>",
        f"<h1>{title}</h1><p>Beside the paper's: {escape(table.source)}.</p>",
        *map(_table, tables),
        _list(notes),
        "<h2>Learning curves</h2><p>Validation accuracy, %, by step; a line for each seed.</p>",
        _names(number),
        *_learning(rows, entries, number),
        "<h2>Speed and memory</h2><p>Test accuracy, %, a point for each attention: the mean of its seeds.</p>",
        _names(number),
        *_against(rows, number),
        "<h2>Commands</h2>",
        *_commands(rows),
        "</body></html>\n",
    ]
    return "\n".join(parts)


def chart(title: str, across: str, lines: Mapping[str, list[Points]], number: Mapping[str, int], log: bool) -> str:
    """An SVG of lines by name; one of a single point is a dot. `log`: of the values across, which are then positive."""
    points = [point for group in lines.values() for line in group for point in line]
    scale = math.log10 if log else float
    low, high = _span([scale(x) for x, _ in points], 0.05)
    bottom, top = _span([y for _, y in points], 0.08, LEAST_SPAN)

    def place(x: float, y: float) -> tuple[float, float]:
        right, up = (scale(x) - low) / (high - low), (y - bottom) / (top - bottom)
        return LEFT + right * (WIDTH - LEFT - RIGHT), HEIGHT - BELOW - up * (HEIGHT - BELOW - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="sans-serif" font-size="11" role="img"><title>{escape(title)}</title>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        _text(LEFT, 18, title, "start", "13"),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 6, across, "middle"),
    ]
    for tick in _powers(low, high) if log else _ticks(low, high):
        x, _ = place(tick, bottom)
        parts += [
            f'<path d="M{x:.1f} {TOP}V{HEIGHT - BELOW}" stroke="#ddd"/>',
            _text(x, HEIGHT - BELOW + 15, f"{tick:,.10g}", "middle"),
        ]
    for tick in _ticks(bottom, top):
        _, y = place(points[0][0], tick)
        parts += [
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>',
            _text(LEFT - 6, y + 4, f"{tick:,.10g}", "end"),
        ]
    for name, group in lines.items():
        colour, dash = _look(number[name])
        for line in group:
            places = [place(*point) for point in line]
            hint = f"<title>{escape(name)}</title>"
            if len(places) == 1:
                [(x, y)] = places
                ring = f'stroke="{colour}" stroke-width="2" fill="{"white" if dash else colour}"'
                parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {ring}>{hint}</circle>')
            else:
                path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
                style = f'stroke="{colour}" stroke-width="1.5" fill="none" stroke-dasharray="{dash or "none"}"'
                parts.append(f'<polyline points="{path}" {style}>{hint}</polyline>')
    return "\n".join([*parts, "</svg>"])


def _learning(rows: Sequence[Row], entries: Mapping[Cell, Entry], number: Mapping[str, int]) -> Iterator[str]:
    plots, without = [], []
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
            plots.append(chart(column, "step", lines, number, log=False))
        elif not any(cell.column == column for cell in entries):
            without.append(f"{column}: no results")
    yield f'<div class="plots">{"".join(plots)}</div>'
    if without:
        yield f"<details><summary>Without curves: {len(without)}</summary>{_list(without)}</details>"


def _validation(path: Path) -> Points | str:
    """(step, accuracy in %) of a file, thinned; or what is wrong with it."""
    try:
        rows = curves.read(path)
        named = [(int(row["step"]), row["val/accuracy"]) for row in rows]
        points = [(float(step), 100 * float(text)) for step, text in named if text]
        if not all(math.isfinite(y) for _, y in points):
            raise ValueError("a value is no number")
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        return f"{path} can't be read as curves ({error})"
    kept = points[:: math.ceil(len(points) / MOST_POINTS) or 1]
    return [*kept, points[-1]] if points and kept[-1] != points[-1] else kept


def _against(rows: Sequence[Row], number: Mapping[str, int]) -> Iterator[str]:
    """A plot for each column, hardware and figure."""
    drawn = []
    for place in hardware(rows):
        here = [row for row in rows if row.hardware == place]
        for field, label in (("steps_per_second", "steps per second"), ("memory_gb", "peak memory of one GPU, GB")):
            for column in dict.fromkeys(row.column for row in here):
                lines = {}
                for attn in number:
                    x, y = (mean(here, name, attention=attn, column=column) for name in (field, "accuracy"))
                    if x and y is not None:
                        lines[attn] = [[(x, y)]]
                if lines:
                    drawn.append(chart(column, f"{label}, {place}", lines, number, log=True))
    yield f'<div class="plots">{"".join(drawn)}</div>' if drawn else "<p>No finished run.</p>"


def _commands(rows: Sequence[Row]) -> Iterator[str]:
    for column in dict.fromkeys(row.column for row in rows):
        lines = [
            f"{row.command}  # {row.status}" if row.status else row.command for row in rows if row.column == column
        ]
        yield f"<h3>{escape(column)}</h3><pre>{escape(chr(10).join(lines))}</pre>"


def _table(table: Table) -> str:
    title, header, rows = table
    lines = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    names = "".join(f"<th>{escape(name)}</th>" for name in header)
    caption = f"<caption>{escape(title)}</caption>"
    return f'<div class="wide"><table>{caption}<thead><tr>{names}</tr></thead>\n<tbody>{lines}</tbody></table></div>'


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(line)}</li>' for line in lines)}</ul>"


def _names(number: Mapping[str, int]) -> str:
    """The legend of all drawings below."""

    def sample(index: int) -> str:
        colour, dash = _look(index)
        line = f'<path d="M0 6H28" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash or "none"}"/>'
        ring = f'<circle cx="38" cy="6" r="4" stroke="{colour}" stroke-width="2" fill="{"white" if dash else colour}"/>'
        return f'<svg width="46" height="12">{line}{ring}</svg>'

    parts = (f"<span>{sample(index)} {escape(name)}</span>" for name, index in number.items())
    return f'<p class="names">{"".join(parts)}</p>'


def _look(index: int) -> tuple[str, str]:
    again, colour = divmod(index, len(COLOURS))
    return COLOURS[colour], DASHES[again % len(DASHES)]


def _span(values: Sequence[float], margin: float, least: float = 0.0) -> tuple[float, float]:
    """From the least to the greatest and a little more; of one value, something around it."""
    low, high = min(values), max(values)
    room = max(margin * (high - low) or margin * (abs(high) or 1), (least - (high - low)) / 2)
    return low - room, high + room


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers."""
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [round(i * step, 10) for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    """Once, twice and five times powers of ten; the arguments are logarithms. Where these are few, round numbers."""
    exponents = range(math.floor(low), math.ceil(high) + 1)
    ticks = [factor * 10.0**e for e in exponents for factor in (1, 2, 5)]
    ticks = [tick for tick in ticks if low <= math.log10(tick) <= high]
    return ticks if len(ticks) > 2 else [tick for tick in _ticks(10**low, 10**high) if tick > 0]


def _text(x: float, y: float, text: str, anchor: str, size: str = "11") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" fill="#333">{escape(text)}</text>'
