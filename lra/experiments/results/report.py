"""`lra report`: a grid's accuracies, speed and memory beside the paper's, made of the results that exist.

Every number comes from a result or from the grid's YAML. All formats show the same tables. They are made of the same
rows, one for each cell and seed, which are those of the CSV file. What was not run is empty.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lra.config.options import refuse_repeats, split_options
from lra.config.override import Override
from lra.config.recipes import read_recipe
from lra.environment import UNCLEAN_NOTE
from lra.errors import UsageError
from lra.experiments import speed
from lra.experiments.grid import grid, league, plan
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.reproduction import (
    TextTable,
    add_footnote,
    format_tenth,
    stand_upright,
)
from lra.experiments.results import formats, html, ledger
from lra.experiments.results.accuracy_tables import BOLD_RULE, accuracy_tables, marked, time_tables
from lra.experiments.results.ledger import ReportRow, ResultFile, finished_hardware, known_values, mean_value
from lra.experiments.results.unlike import UNLIKE_NOTE, unlike_code, unlike_data
from lra.experiments.speed import BASELINE, mean_ratio
from lra.tasks import TASKS
from lra.terminal import Bold, make_visible
from lra.training.run_directory import RUNS_FOLDER, write_text
from lra.training.run_files import as_mapping


@dataclass(frozen=True)
class ReportOptions:
    """What is shown; by default the whole grid with its own recipe. Every other field is one of `lra fit`."""

    results: str = str(RUNS_FOLDER)  # folder
    recipe: str | None = None
    tasks: tuple[str, ...] | None = None  # columns
    attns: tuple[str, ...] | None = None
    seeds: int | None = None  # so many, from 0
    speed: str | None = None  # file of lra reproduce table3 speed=true: adds what it measured
    out: str | None = None  # folder for Markdown, CSV, LaTeX and HTML

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"seeds={self.seeds} is not a number of seeds: use at least 1")
        refuse_repeats(tasks=self.tasks, attns=self.attns)


class Report(NamedTuple):
    """What is printed, and what the page is made of."""

    tables: list[TextTable]
    notes: list[str]
    rows: list[ReportRow]
    entries: dict[Cell, ResultFile]
    alone: dict[tuple[str, str, str], float]  # steps per second that were measured alone, by hardware


def parse_report_fields(name: str, args: Sequence[str]) -> tuple[Grid, ReportOptions, list[Override]]:
    """The table, the options, and the fields of `lra fit` with which all cells were run."""
    return grid.read_grid(name), *split_options(ReportOptions, args)


def make_report(name: str, args: Sequence[str]) -> Report:
    """The report on a grid.

    Args:
        name: of the table.
        args: `field=value` of ReportOptions, and of `lra fit` those with which all cells were run.

    Writes four files if `out` is given. Raises UsageError for what is unknown, or cannot be read or written.
    """
    table, options, fields = parse_report_fields(name, args)
    recipe = options.recipe or table.recipe
    measured = None if options.speed is None else speed.read_named_file(table, Path(options.speed), recipe)
    columns = options.tasks or table.together()
    cells, notes = _cells(table, columns, options, fields)
    shown = table.under(cells)
    found = ledger.match_results(cells, options.results)
    opened = {(cell.column, cell.attn): league.open_reasons(cell) for cell in cells if cell.seed == cells[0].seed}
    leagues = {place: league.league_of(reasons) for place, reasons in opened.items()}
    unlike = [*unlike_code(found), *unlike_data(found)]
    doubted = {cell for _, named in unlike for cell in named}
    rows = []
    for cell in cells:
        row = ledger.make_row(shown, cell, found)
        clean = False if cell in doubted else row.clean
        rows.append(dataclasses.replace(row, league=leagues[cell.column, cell.attn], clean=clean))
    attns = table.rows(options.attns)
    mark = UNCLEAN_NOTE + UNLIKE_NOTE if unlike else UNCLEAN_NOTE
    tables = [stand_upright(add_footnote(*made, mark)) for made in _tables(shown, rows, columns, attns) if made[2]]
    under = " ".join((f"recipe: {recipe}", *map(str, fields)))
    others = {column: own for column in columns if (own := table.columns[column].recipe)}
    under += "".join(f"; of {column}: {own}" for column, own in others.items())
    notes = [under, *_summary(rows), *_reasons(opened), *notes, *_unlike(rows), *(note for note, _ in unlike)]
    notes += [*_other_data(found), *found.notes]
    if any(isinstance(cell, Bold) for _, _, lines in tables for line in lines for cell in line):
        notes.insert(1, BOLD_RULE)
    if shown.others:
        notes.insert(1, shown.cited)
    alone = {}
    if measured is not None:
        try:
            compared = table.under(cell for cell in speed.measured_cells(table, measured) if cell.column in columns)
            tables += (add_footnote(*made) for made in speed.speed_tables(compared, measured, columns, attns))
            paces = plan.MeasuredSpeeds(speed.measured_paces(table, measured))
        except UsageError as error:
            raise UsageError(f"{options.speed} can't be compared ({error}): remove it, or name another file") from None
        notes += [f"speed: {options.speed}, {speed.describe_origin(measured)}", *speed.speed_notes(measured.cells)]
        place = speed.hardware_of(measured)
        firsts = [cell for cell in cells if cell.seed == 0]
        alone = {(place, cell.column, cell.attn): pace for cell in firsts if (pace := paces.pace(cell))}
    report = Report(tables, notes, rows, found.entries, alone)
    if options.out is not None:
        notes.append(f"written: {', '.join(map(str, _write(shown, report, Path(options.out))))}")
    return report


def _cells(
    table: Grid, columns: Sequence[str], options: ReportOptions, fields: Sequence[Override]
) -> tuple[list[Cell], list[str]]:
    """The cells. Columns that the recipe does not have stay empty, or are refused if they were asked for."""
    recipe = options.recipe or table.recipe
    table.cells(columns, options.attns, 1, None, fields)  # unknown names are refused first
    having = table.covered(columns, options.recipe)
    lacking = [name for name in columns if name not in having]
    if lacking and (options.tasks or not having):
        covered = sorted(TASKS.name_of(str(task)) for task in read_recipe(recipe)["tasks"])
        raise UsageError(f"recipe '{recipe}' has no {', '.join(lacking)}: it covers {', '.join(covered)}")
    notes = [f"recipe {recipe} has no {', '.join(lacking)}: left empty"] if lacking else []
    return table.cells(having, options.attns, options.seeds, options.recipe, fields), notes


def _tables(table: Grid, rows: list[ReportRow], columns: Sequence[str], attns: Sequence[str]) -> Iterator[TextTable]:
    yield from accuracy_tables(table, rows, columns, attns)
    yield from time_tables(rows, columns, attns)
    stated = ["paper"] if any(table.figure(a, "speedup") for a in attns) else []
    compared = table.together(columns)
    for place in finished_hardware(rows):
        here = [row for row in rows if row.hardware == place]
        if known_values(here, "steps_per_second"):
            yield (
                f"steps per second on {place} (times {BASELINE}); speedup: geometric mean (columns)"
                + (", the paper's" if stated else ""),
                ["attention", *columns, "speedup", *stated],
                [
                    [
                        a, *speeds, marked(_speedup(here, a, compared), here, a, *compared),
                        *(format_tenth(table.figure(a, "speedup")) for _ in stated),
                    ]
                    for a in attns if any(speeds := [_speed(here, a, c) for c in columns])
                ],
            )  # fmt: skip
        if known_values(here, "memory_gb"):
            yield (
                f"peak memory of one GPU, GB, on {place}", ["attention", *columns],
                [[a, *peaks] for a in attns if any(peaks := [_peak(here, a, c) for c in columns])],
            )  # fmt: skip


def speed_ratio(rows: Sequence[ReportRow], attn: str, column: str) -> float | None:
    """The factor over the steps per second of `standard`, in rows of one hardware; None if either is not known."""
    ours, standard = (mean_value(rows, "steps_per_second", attention=a, column=column) for a in (attn, BASELINE))
    return ours / standard if ours and standard else None


def _speed(rows: list[ReportRow], attn: str, column: str) -> str:
    speed, times = mean_value(rows, "steps_per_second", attention=attn, column=column), speed_ratio(rows, attn, column)
    return marked(format_tenth(speed) + ("" if times is None else f" ({times:.2f}×)"), rows, attn, column)


def _speedup(rows: list[ReportRow], attn: str, columns: Sequence[str]) -> str:
    ratios = [times for column in columns if (times := speed_ratio(rows, attn, column)) is not None]
    return mean_ratio(ratios)


def _peak(rows: list[ReportRow], attn: str, column: str) -> str:
    found = known_values(rows, "memory_gb", attention=attn, column=column)
    return marked(f"{max(found):.2f}" if found else "", rows, attn, column)


def _summary(rows: list[ReportRow]) -> Iterator[str]:
    """How many runs there are in which state, and their hardware and commits."""
    states = [row.status for row in rows]
    counts = [f"{states.count(state)} {state}" for state in ("stuck", "oom", "failed") if state in states]
    finished = sum(state in ("finished", "stuck") for state in states)
    yield ", ".join([f"{finished} of {len(rows)} runs finished", *counts])
    for what in ("hardware", "commit"):
        if found := sorted({text for row in rows if (text := getattr(row, what))}):
            yield f"{what}: {', '.join(found)}"


def _reasons(opened: Mapping[tuple[str, str], list[str]]) -> Iterator[str]:
    """Why figures are of the open league, a note for each column."""
    for column in dict.fromkeys(column for column, _ in opened):
        found = dict.fromkeys(reason for (c, _), reasons in opened.items() if c == column for reason in reasons)
        if found:
            yield f"{column} is of the open league: {'; '.join(found)}"


def _unlike(rows: list[ReportRow]) -> Iterator[str]:
    """Notes figures of a column that are compared although engines, or portions of a batch, differ."""
    kinds_of: dict[str, Callable[[ReportRow], str]] = {
        "speeds of different engines": lambda row: row.engine or "not recorded",
        "memory and speed of batches in different portions": lambda row: (
            f"batch.micro={row.micro}" if row.micro else "whole"
        ),
    }
    for (what, kind), place in itertools.product(kinds_of.items(), finished_hardware(rows)):
        for column in dict.fromkeys(row.column for row in rows):
            kinds: dict[str, list[str]] = {}
            for row in rows:
                if (row.column, row.hardware) == (column, place) and row.status in ("finished", "stuck"):
                    kinds.setdefault(kind(row), []).append(f"{row.attention} s{row.seed}")
            if len(kinds) > 1:
                parts = (f"{name}: {', '.join(runs)}" for name, runs in sorted(kinds.items()))
                yield f"{column}: {what} are compared ({'; '.join(parts)})"


def _other_data(found: ledger.Ledger) -> Iterator[str]:
    """How the data of results differ from the task's, such as a part of its pairs: a note for each column."""
    said: dict[str, dict[str, None]] = {}
    for cell, entry in found.entries.items():
        differences = as_mapping(entry.result.get("data")).get("differences") or ()
        said.setdefault(cell.column, {}).update(dict.fromkeys(map(str, differences)))
    yield from (f"{column}: {'; '.join(texts)}" for column, texts in said.items() if texts)


def _write(table: Grid, report: Report, folder: Path) -> list[Path]:
    """Writes the files, each replaced in one step."""
    makers: dict[str, Callable[[], str]] = {
        "md": lambda: formats.format_markdown(table, report.tables, report.notes),
        "csv": lambda: formats.format_csv(report.rows),
        "tex": lambda: formats.format_latex(table, report.tables, report.notes),
        "html": lambda: html.report_page(table, *report),
    }
    texts = {folder / f"{table.name}.{ending}": make_visible(make(), kept="\n") for ending, make in makers.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_text(path, text)
    except OSError as error:
        raise UsageError(f"out={folder} can't be written to ({error.strerror}): name another folder") from None
    return list(texts)
