"""How much faster than standard attention others train, how much of that is padding, and ways to materialise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.pages import measured
from benchmarks.pages.measured import link, table
from lra.experiments import speed
from lra.experiments.grid import grid
from lra.experiments.reproduction import format_tenth
from lra.experiments.speed import BASELINE, WAYS, Speeds

STEPS = Path("results/speed/h200/table3-curriculum.json")  # training steps, each cell alone on the GPU
ALONE = Path("results/fig3/h200/dropout-mask.json")  # attention alone, with dropout and a mask
COMPARED = (BASELINE, "megatron", "flash")  # two that materialise the scores, and one that does not


def speedup(root: Path) -> str:
    """Steps per second as a multiple of those of standard attention, each cell alone on the GPU."""
    stated, found = grid.read_grid("table3"), speed.read_speeds(root / STEPS)
    speeds, columns = Speeds(found.cells), found.options["tasks"]
    averaged = stated.together(columns)
    whole = [column for column in averaged if not _padding(speeds, column)]

    def row(attn: str, way: str) -> list[str]:
        ratios = (speeds.ratio(column, attn, way) for column in columns)
        shown = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        means = (speed.mean_ratio(speeds.ratios(some, attn, way)) for some in (averaged, whole))
        paper = format_tenth(stated.figure(attn, "speedup")) if way == "attention" else ""
        return [f"`{attn}`{measured.mark_of(STEPS)}", f"{way}: {WAYS[way].about}", *shown, *means, paper]

    padding = (f"{100 * _padding(speeds, column):.0f}%" for column in columns)
    rows = [["*padding*", "of the padded batches", *padding, "", "", ""]]
    rows += [row(attn, way) for attn in found.options["attns"] if attn != BASELINE for way in WAYS]
    header = ("attention", "way", *columns, "geometric mean", f"of {' and '.join(whole)}, without padding", "paper")
    return f"{table(header, rows)}\n\n{link(STEPS.name, STEPS)}, {speed.hardware_of(found)}."


def _padding(speeds: Speeds, column: str) -> float:
    """The share of the rows of a padded batch that are no token."""
    record = speeds.records[column, BASELINE, "attention"]
    return 1 - (record.tokens or 0.0) / (record.rows or 1.0)


def materialised(root: Path) -> str:
    """What attention alone takes, by length."""
    rows = [
        (link(f"{length:,}", ALONE), *(f"{ms:.3g}" for ms in times), *(f"{ms / times[-1]:.2f}" for ms in times[:-1]))
        for length, times in _alone(root)
    ]
    header = ("N", *(f"`{name}`, ms" for name in COMPARED), *(f"`{name}` / `{COMPARED[-1]}`" for name in COMPARED[:-1]))
    made_with = json.loads((root / ALONE).read_text(encoding="utf-8"))["environment"]
    return f"{table(header, rows)}\n\n{made_with['gpu']}, {made_with['date'][:10]}."


def _alone(root: Path) -> Iterator[tuple[int, list[float]]]:
    """(N, the milliseconds of both passes of each that is COMPARED), where all were measured."""
    cells = json.loads((root / ALONE).read_text(encoding="utf-8"))["cells"]
    found = {(cell["attention"], cell["N"]): cell["ms"] for cell in cells if cell["pass"] == "both"}
    for length in sorted({length for _, length in found}):
        times = [ms for name in COMPARED if (ms := found.get((name, length)))]
        if len(times) == len(COMPARED):
            yield length, times


def in_brief(root: Path, names: dict[str, str], length: int = 1024) -> str:
    """How much faster flash trains than standard attention where nothing is padded; and both beside megatron."""
    found = speed.read_speeds(root / STEPS)
    speeds = Speeds(found.cells)
    whole = [column for column in names if not _padding(speeds, column)]
    ratios = sorted((speeds.ratio(column, "flash", "attention") or 0.0, names[column]) for column in whole)
    standard, megatron, flash = dict(_alone(root))[length]
    return (
        f"Speed on one {speed.hardware_of(found)}: where nothing is padded, `flash` trains {_listed(ratios)} times as "
        f"fast as `standard`. Attention alone at N = {length:,} takes `standard` {standard / flash:.1f} times as long, "
        f"and `megatron`, the faster way to keep the N × N scores, {megatron / flash:.1f} times."
    )


def _listed(ratios: Iterable[tuple[float, str]]) -> str:
    return " to ".join(f"{ratio:.2f} ({name})" for ratio, name in ratios)
