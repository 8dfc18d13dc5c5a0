"""Runtime and memory against the sequence length as SVG, log-log, a line for each attention (the paper's Figure 3)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lra.errors import UsageError

WIDTH, LEAST_HEIGHT = 720, 400
LEFT, RIGHT, TOP, BELOW = 70, 470, 40, 50  # of the axes; the names stand to the right, and decide the height
NAME = 18  # height of a name
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
DASHES = ("", "7 3", "2 3", "9 3 2 3")  # when the colours are used up, they come again with the next of these

Lines = dict[str, list[tuple[float, float]]]  # attention -> (N, value)


def draw(records: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Writes a file for each pass, dtype, head dimension, dropout and kind of lengths; what was not measured is not
    drawn. An attention looks the same in all of them. UsageError if the folder can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"plots={folder} can't be a folder ({error.strerror}): name another") from None
    written, number = [], {name: i for i, name in enumerate(dict.fromkeys(r["attention"] for r in records))}
    for what, unit, key in (("runtime", "ms", "ms"), ("memory", "MB", "memory_mb")):
        groups: dict[tuple[Any, ...], Lines] = {}
        for record in records:
            if record[key] is not None:
                group = tuple(record[name] for name in ("pass", "dtype", "d", "dropout", "ragged"))
                points = groups.setdefault(group, {}).setdefault(record["attention"], [])
                points.append((record["N"], record[key]))
        for (name, dtype, d, dropout, ragged), lines in groups.items():
            kind = "" if ragged == "false" else f"-{ragged}"
            path = folder / f"{what}-{name}-{dtype}-d{d}-p{dropout:g}{kind}.svg"
            passes = "forward and backward" if name == "both" else name
            title = f"{what} of {passes}, {dtype}, head dimension {d}, dropout {dropout:g}"
            title += {"mask": ", padding mask", "imdb": ", lengths of IMDB"}.get(ragged, "")
            path.write_text(chart(title, unit, lines, number), encoding="utf-8")
            written.append(path)
    return written


def chart(title: str, unit: str, lines: Lines, number: Mapping[str, int] | None = None) -> str:
    """The SVG text of positive values. `number` decides how a line looks, by default its place.

    Names stand in the order in which the lines end, so that a name is near its line.
    """
    number = number or {name: i for i, name in enumerate(lines)}
    bottom = max(LEAST_HEIGHT - BELOW, TOP + NAME * len(lines))
    points = [point for line in lines.values() for point in line]
    (x_low, x_high), (y_low, y_high) = (_range([point[i] for point in points]) for i in (0, 1))

    def place(x: float, y: float) -> tuple[float, float]:
        across = math.log(x / x_low) / math.log(x_high / x_low)
        up = math.log(y / y_low) / math.log(y_high / y_low)
        return LEFT + across * (RIGHT - LEFT), bottom - up * (bottom - TOP)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + BELOW}" font-family="sans-serif" '
        f'font-size="12"><rect width="{WIDTH}" height="{bottom + BELOW}" fill="white"/>',
        _text(WIDTH / 2, 20, title, "middle"),
        _text((LEFT + RIGHT) / 2, bottom + BELOW - 12, "sequence length N", "middle"),
        _text(LEFT, TOP - 8, unit, "end"),
    ]
    for tick in _powers(2, x_low, x_high):
        x, _ = place(tick, y_low)
        parts += [
            _line((x, TOP), (x, bottom)),
            _text(x, bottom + 18, f"{tick / 1024:g}K" if tick >= 1024 else f"{tick:g}", "middle"),
        ]
    for tick in _powers(10, y_low, y_high):
        _, y = place(x_low, tick)
        parts += [_line((LEFT, y), (RIGHT, y)), _text(LEFT - 6, y + 4, f"{tick:g}", "end")]
    for place_of_name, (name, line) in enumerate(sorted(lines.items(), key=lambda item: -max(item[1])[1])):
        again, colour = divmod(number[name], len(COLOURS))
        colour, dash = COLOURS[colour], DASHES[again % len(DASHES)]
        style = f'stroke="{colour}" stroke-width="2"' + (f' stroke-dasharray="{dash}"' if dash else "")
        places = [place(*point) for point in sorted(line)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" {style}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places]
        y = TOP + 12 + NAME * place_of_name
        parts += [_line((RIGHT + 12, y - 4), (RIGHT + 42, y - 4), style), _text(RIGHT + 48, y, name, "start", colour)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _range(values: Sequence[float]) -> tuple[float, float]:
    """A little more than the values span, so that lines do not lie on the axes."""
    return min(values) / 1.2, max(values) * 1.2


def _powers(base: int, low: float, high: float) -> Iterator[float]:
    """The powers of `base` between; of 10, where there is only one of them or none, also twice and five times those."""
    exponents = range(math.floor(math.log(low, base)), math.ceil(math.log(high, base)) + 1)
    ticks = [float(base) ** e for e in exponents]
    if base == 10 and sum(low <= tick <= high for tick in ticks) < 2:
        ticks = [factor * tick for tick in ticks for factor in (1, 2, 5)]
    return (tick for tick in ticks if low <= tick <= high)


def _text(x: float, y: float, text: str, anchor: str, colour: str = "black") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">{escape(text)}</text>'


def _line(begin: tuple[float, float], end: tuple[float, float], style: str = 'stroke="#dddddd"') -> str:
    (x1, y1), (x2, y2) = begin, end
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'
