"""Figures as SVG: the style of a line, and runtime and memory against the sequence length (the paper's Figure 3)."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lra.bench.records import AttentionMeasurement
from lra.errors import UsageError

if TYPE_CHECKING:  # imported when something is drawn
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis

COLOUR_COUNT = 10  # matplotlib's; when they are used up, they come again with the next of these
DASHES = (("-", "o"), ("--", "s"), (":", "^"), ("-.", "X"))  # dash and marker
MATPLOTLIB_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lra",  # ids are those of the last time
    "pdf.fonttype": 42,  # a font that can be edited, as publishers want
    "text.parse_math": False,  # nor is a dollar sign a formula
    "path.simplify": False,  # every point stays
    "font.sans-serif": ["DejaVu Sans"],  # which matplotlib brings along
    "font.size": 9,
    "axes.titlesize": "medium",
    "axes.titlelocation": "left",
    "axes.edgecolor": "#bbbbbb",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "lines.markersize": 5,
    "figure.constrained_layout.h_pad": 0.08,
    "figure.constrained_layout.w_pad": 0.08,
    "legend.frameon": False,
    "legend.handlelength": 3,
}
UNWRITTEN = {"svg": ("Creator", "Date", "Format", "Type"), "pdf": ("Creator", "Producer", "CreationDate")}

Lines = dict[str, list[tuple[float, float]]]  # attention -> (N, value)


def render_svg(size: tuple[float, float], plot: Callable[[Axes], object]) -> str:
    """The text of a figure of this size in inches, on whose axes `plot` draws.

    The same lines give the same text, whatever the user's settings are.
    """
    return render_figure(size, plot).decode()


def render_figure(
    size: tuple[float, float], plot: Callable[..., object], kind: Literal["svg", "pdf"] = "svg", panels: int = 1
) -> bytes:
    """The content of a file with a figure of this size in inches, as `render_svg` has it.

    Args:
        plot: draws on the axes of the panels, which stand side by side.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with matplotlib.style.context(MATPLOTLIB_STYLE, after_reset=True):
        figure = Figure(size, layout="constrained")
        plot(*figure.subplots(1, panels, squeeze=False)[0])
        figure.savefig(content, format=kind, metadata=dict.fromkeys(UNWRITTEN[kind]))
    return content.getvalue()


def line_style(index: int) -> dict[str, Any]:
    """The style of an attention's line, by its place among those of a page."""
    again, colour = divmod(index, COLOUR_COUNT)
    dash, marker = DASHES[again % len(DASHES)]
    return {"color": f"C{colour}", "linestyle": dash, "marker": marker}


def set_ticks(axis: Axis) -> None:
    """Puts ticks at round numbers. On a logarithmic axis these are once, twice and five times powers of ten."""
    from matplotlib.ticker import LogLocator

    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.minorticks_off()
    axis.set_major_formatter("{x:,.10g}")


def draw_figures(records: Sequence[AttentionMeasurement], folder: Path) -> list[Path]:
    """Writes the figures. UsageError if the folder can't be made."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"plots={folder} can't be a folder ({error.strerror}): name another") from None
    made = {folder / name: text for name, text in make_figures(records).items()}
    for path, text in made.items():
        path.write_text(text, encoding="utf-8")
    return list(made)


def make_figures(records: Sequence[AttentionMeasurement]) -> dict[str, str]:
    """File name -> SVG, for each pass, dtype, head dimension, dropout and kind of lengths that was measured.

    An attention looks the same in all of them.
    """
    made, number = {}, {name: i for i, name in enumerate(dict.fromkeys(r.attention for r in records))}
    for what, unit in (("runtime", "ms"), ("memory", "MB")):
        groups: dict[tuple[Any, ...], Lines] = {}
        for record in records:
            value = record.ms if what == "runtime" else record.memory_mb
            if value is not None:
                group = record.pass_name, record.dtype, record.head_dim, record.dropout, record.ragged
                points = groups.setdefault(group, {}).setdefault(record.attention, [])
                points.append((record.length, value))
        for (name, dtype, d, dropout, ragged), lines in groups.items():
            kind = "" if ragged == "false" else f"-{ragged}"
            passes = "forward and backward" if name == "both" else name
            title = f"{what} of {passes}, {dtype}, head dimension {d}, dropout {dropout:g}"
            title += {"mask": ", padding mask", "imdb": ", lengths of IMDB"}.get(ragged, "")
            made[f"{what}-{name}-{dtype}-d{d}-p{dropout:g}{kind}.svg"] = size_chart(title, unit, lines, number)
    return made


def size_chart(title: str, unit: str, lines: Lines, number: Mapping[str, int]) -> str:
    """The SVG of positive values, log-log. Names stand in the order in which the lines end, each near its line."""

    def plot(axes: Axes) -> None:
        for name, line in sorted(lines.items(), key=lambda item: -max(item[1])[1]):
            axes.plot(*zip(*sorted(line), strict=True), label=name, gid=name, **line_style(number[name]))
        axes.set(title=title, xlabel="sequence length N", ylabel=unit, xscale="log", yscale="log")
        lengths = sorted({n for line in lines.values() for n, _ in line})
        axes.set_xticks(lengths, [f"{n / 1024:g}K" if n % 1024 == 0 else f"{n:g}" for n in lengths])
        axes.xaxis.minorticks_off()
        set_ticks(axes.yaxis)
        axes.figure.legend(loc="outside right upper")

    return render_svg((8, max(4.5, 0.6 + 0.19 * len(lines))), plot)
