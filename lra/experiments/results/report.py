"""`lra report`: a grid's accuracies, speed and memory beside the paper's, from the results that there are.

Every number is of a result or of the grid's YAML. All formats show the same tables, which are made of the same rows,
one for each cell and seed: those of the CSV file. What was not run is empty.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lra.config.options import refuse_repeats, take
from lra.config.override import Override
from lra.config.recipes import read_recipe
from lra.environment import MARK
from lra.errors import UsageError
from lra.experiments import speed
from lra.experiments.grid import grid, plan
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.reproduction import Table, footnoted, mean_over_common_seeds, number, spread
from lra.experiments.results import html, ledger
from lra.experiments.results.ledger import Entry, Row, hardware, mean, values
from lra.experiments.speed import STANDARD, mean_ratio
from lra.terminal import visible
from lra.training.run_directory import RUNS_FOLDER, write_text


@dataclass(frozen=True)
class Options:
    """What is shown; by default the whole grid, under its own recipe. What is not a field here is one of `lra fit`."""

    results: str = str(RUNS_FOLDER)  # folder
    recipe: str | None = None
    tasks: tuple[str, ...] | None = None  # columns
    attns: tuple[str, ...] | None = None
    seeds: int | None = None  # so many, from 0
    speed: str | None = None  # file of lra reproduce table3 speed=true: adds what it measured
    out: str | None = None  # folder for Markdown, CSV, LaTeX and HTML

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"seeds={self.seeds} is no number of seeds: use at least 1")
        refuse_repeats(tasks=self.tasks, attns=self.attns)


class Report(NamedTuple):
    """What is printed, and what the page is made from."""

    tables: list[Table]
    notes: list[str]
    rows: list[Row]
    entries: dict[Cell, Entry]
    alone: dict[tuple[str, str, str], float]  # steps per second that were measured alone, by hardware


def parse_fields(name: str, args: Sequence[str]) -> tuple[Grid, Options, list[Override]]:
    """The table, what is shown of it, and the fields of `lra fit` that all cells were run with."""
    return grid.read(name), *take(Options, args)


def run(name: str, args: Sequence[str]) -> Report:
    """The report on a grid: `name`, `field=value` of Options, and of `lra fit` those that all cells were run with.

    Writes four files if `out` is given. Raises UsageError for what is unknown or cannot be read or written.
    """
    table, options, fields = parse_fields(name, args)
    recipe = options.recipe or table.recipe
    measured = None if options.speed is None else speed.named(table, Path(options.speed), recipe)
    columns = options.tasks or table.together()
    cells, notes = _cells(table, columns, options, fields)
    shown = table.under(cells)
    found = ledger.match(cells, options.results)
    rows = [ledger.row(shown, cell, found) for cell in cells]
    attns = options.attns or table.attns
    tables = [footnoted(*made) for made in _tables(shown, rows, columns, attns) if made[2]]
    under = " ".join((f"recipe: {recipe}", *map(str, fields)))
    notes = [under, *_summary(rows), *notes, *_engines(rows), *_portions(rows), *found.notes]
    if shown.others:
        notes.insert(1, shown.cited)
    alone = {}
    if measured is not None:
        try:
            compared = table.under(cell for cell in speed.cells(table, measured) if cell.column in columns)
            tables += (footnoted(*made) for made in speed.tables(compared, measured, columns, attns))
            paces = plan.Alone(speed.paces(table, measured))
        except UsageError as error:
            raise UsageError(f"{options.speed} can't be compared ({error}): remove it, or name another file") from None
        notes += [f"speed: {options.speed}, {speed.made_with(measured)}", *speed.notes(measured.cells)]
        place = speed.hardware_of(measured)
        firsts = [cell for cell in cells if cell.seed == 0]
        alone = {(place, cell.column, cell.attn): pace for cell in firsts if (pace := paces.pace(cell))}
    report = Report(tables, notes, rows, found.entries, alone)
    if options.out is not None:
        notes.append(f"written: {', '.join(map(str, _write(shown, report, Path(options.out))))}")
    return report


def _cells(
    table: Grid, columns: Sequence[str], options: Options, fields: Sequence[Override]
) -> tuple[list[Cell], list[str]]:
    """The cells; columns that the recipe does not have stay empty, or are refused if they were asked for."""
    recipe = options.recipe or table.recipe
    covered = read_recipe(recipe)["tasks"]
    table.cells(columns, options.attns, 1, recipe, fields)  # unknown names are refused first
    lacking = [name for name in columns if table.columns[name].task not in covered]
    if options.tasks and lacking:
        raise UsageError(f"recipe '{recipe}' has no {', '.join(lacking)}: it covers {', '.join(sorted(covered))}")
    having = [name for name in columns if name not in lacking]
    notes = [f"recipe {recipe} has no {', '.join(lacking)}: left empty"] if lacking else []
    return table.cells(having, options.attns, options.seeds, recipe, fields), notes


def _tables(table: Grid, rows: list[Row], columns: Sequence[str], attns: Sequence[str]) -> Iterator[Table]:
    averaged = table.averaged(columns)
    header = ["attention", *columns, *(["average"] if averaged else [])]
    lines, against = [], []
    for attn in attns:
        own = [row for row in rows if row.attention == attn and row.accuracy is not None]
        scores = [{row.seed: row.accuracy or 0.0 for row in own if row.column == column} for column in averaged]
        average, seeds = mean_over_common_seeds(scores)
        shown = f"{number(average)} ({seeds})" if seeds else ""
        accuracies = [_accuracy(rows, attn, column, "accuracy") for column in columns]
        lines.append([attn, *accuracies, _marked(shown, rows, attn, *averaged)])
        pairs = [(mean(rows, "accuracy", attention=attn, column=c), table.figure(attn, c)) for c in columns]
        shown = [_marked(_against(*pair), rows, attn, c) for pair, c in zip(pairs, columns, strict=True)]
        last = _against(average, table.average(attn, averaged))
        against.append([attn, *shown, _marked(last, rows, attn, *averaged)])
    lines.append(["strongest baseline", *(_baselines(rows, c, "baseline") for c in columns), ""])
    figures = any(any(line[1:]) for line in against)
    for title, made in (
        ("test accuracy, %: mean ± standard deviation (seeds)", lines),
        (f"difference to {table.source} (its accuracy, %)", against if figures else []),
    ):
        yield title, header, [line[: len(header)] for line in made]
    fresh = [c for c in columns if values(rows, "fresh", column=c)]
    if fresh:
        lines = [[a, *(_accuracy(rows, a, c, "fresh") for c in fresh)] for a in attns]
        lines.append(["strongest baseline", *(_baselines(rows, c, "fresh_baseline") for c in fresh)])
        yield "accuracy on the fresh test set, %: mean ± standard deviation (seeds)", ["attention", *fresh], lines
    stated = ["paper"] if any(table.figure(a, "speedup") for a in attns) else []
    compared = table.together(columns)
    for place in hardware(rows):
        here = [row for row in rows if row.hardware == place]
        if values(here, "steps_per_second"):
            yield (
                f"steps per second on {place} (times {STANDARD}); speedup: geometric mean (columns)"
                + (", the paper's" if stated else ""),
                ["attention", *columns, "speedup", *stated],
                [
                    [
                        a, *(_speed(here, a, c) for c in columns),
                        _marked(_speedup(here, a, compared), here, a, *compared),
                        *(number(table.figure(a, "speedup")) for _ in stated),
                    ]
                    for a in attns
                ],
            )  # fmt: skip
        if values(here, "memory_gb"):
            yield (
                f"peak memory of one GPU, GB, on {place}", ["attention", *columns],
                [[a, *(_peak(here, a, c) for c in columns)] for a in attns],
            )  # fmt: skip


def _accuracy(rows: list[Row], attn: str, column: str, field: str) -> str:
    """Mean, deviation and number of the seeds found, and what else became of seeds."""
    found = values(rows, field, attention=attn, column=column)
    parts = [f"{spread(found, 1)} ({len(found)})"] if found else []
    states = [row.status for row in rows if (row.attention, row.column) == (attn, column)]
    shown = {"stuck": "stuck", "failed": "failed", "oom": "OOM"} if field == "accuracy" else {}
    parts += [f"{states.count(state)} {label}" for state, label in shown.items() if state in states]
    return _marked(", ".join(parts), rows, attn, column)


def _marked(text: str, rows: list[Row], attn: str, *columns: str) -> str:
    """A figure of these columns, with a mark if not all of its results are of clean commits."""
    unclean = any(row.clean is False for row in rows if row.attention == attn and row.column in columns)
    return text + MARK if unclean and text and not text.startswith("(") else text  # in brackets: the paper's alone


def _baselines(rows: list[Row], column: str, field: str) -> str:
    """The strongest baseline; more than one if runs met different test sets."""
    found = {(getattr(row, field), getattr(row, f"{field}_accuracy")) for row in rows if row.column == column}
    return ", ".join(f"{value:.1f} {name}" for name, value in sorted(found, key=str) if name)


def _against(ours: float | None, paper: float | None) -> str:
    if paper is None:
        return ""
    return f"({paper:.1f})" if ours is None else f"{ours - paper:+.1f} ({paper:.1f})"


def ratio(rows: Sequence[Row], attn: str, column: str) -> float | None:
    """How many times the steps per second of `standard`, in rows of one hardware; None if either is not known."""
    ours, standard = (mean(rows, "steps_per_second", attention=a, column=column) for a in (attn, STANDARD))
    return ours / standard if ours and standard else None


def _speed(rows: list[Row], attn: str, column: str) -> str:
    speed, times = mean(rows, "steps_per_second", attention=attn, column=column), ratio(rows, attn, column)
    return _marked(number(speed) + ("" if times is None else f" ({times:.2f}×)"), rows, attn, column)


def _speedup(rows: list[Row], attn: str, columns: Sequence[str]) -> str:
    ratios = [times for column in columns if (times := ratio(rows, attn, column)) is not None]
    return mean_ratio(ratios)


def _peak(rows: list[Row], attn: str, column: str) -> str:
    found = values(rows, "memory_gb", attention=attn, column=column)
    return _marked(f"{max(found):.2f}" if found else "", rows, attn, column)


def _summary(rows: list[Row]) -> Iterator[str]:
    """What there is, and what it was made with."""
    states = [row.status for row in rows]
    counts = [f"{states.count(state)} {state}" for state in ("stuck", "oom", "failed") if state in states]
    finished = sum(state in ("finished", "stuck") for state in states)
    yield ", ".join([f"{finished} of {len(rows)} runs finished", *counts])
    for what in ("hardware", "commit"):
        if found := sorted({text for row in rows if (text := getattr(row, what))}):
            yield f"{what}: {', '.join(found)}"


def _engines(rows: list[Row]) -> Iterator[str]:
    """Speeds that are compared although another engine, or one not recorded, computed the steps."""
    return _unlike(rows, "speeds of different engines", lambda row: row.engine or "not recorded")


def _portions(rows: list[Row]) -> Iterator[str]:
    """Memory, and speed, of batches that were computed in portions of their own."""
    what = "memory and speed of batches in different portions"
    return _unlike(rows, what, lambda row: f"batch.micro={row.micro}" if row.micro else "whole")


def _unlike(rows: list[Row], what: str, kind: Callable[[Row], str]) -> Iterator[str]:
    for place in hardware(rows):
        for column in dict.fromkeys(row.column for row in rows):
            kinds: dict[str, list[str]] = {}
            for row in rows:
                if (row.column, row.hardware) == (column, place) and row.status in ("finished", "stuck"):
                    kinds.setdefault(kind(row), []).append(f"{row.attention} s{row.seed}")
            if len(kinds) > 1:
                parts = (f"{name}: {', '.join(runs)}" for name, runs in sorted(kinds.items()))
                yield f"{column}: {what} are compared ({'; '.join(parts)})"


def _write(table: Grid, report: Report, folder: Path) -> list[Path]:
    """Each file replaced in one step."""
    makers: dict[str, Callable[[], str]] = {
        "md": lambda: markdown(table, report),
        "csv": lambda: as_csv(report.rows),
        "tex": lambda: latex(table, report),
        "html": lambda: html.page(table, *report),
    }
    texts = {folder / f"{table.name}.{ending}": visible(make(), kept="\n") for ending, make in makers.items()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, text in texts.items():
            write_text(path, text)
    except OSError as error:
        raise UsageError(f"out={folder} can't be written to ({error.strerror}): name another folder") from None
    return list(texts)


def as_csv(rows: Sequence[Row]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows([dataclasses.asdict(row) for row in rows])
    return text.getvalue()


def markdown(table: Grid, report: Report) -> str:
    parts = [f"# {table.name}: {table.about} ({table.source})"]
    for title, header, rows in report.tables:
        lines = [header, ["---"] * len(header), *rows]
        cells = (map(_plain, line) for line in lines)
        parts.append(f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join([*parts, "\n".join(f"- {_plain(note)}" for note in report.notes)]) + "\n"


def latex(table: Grid, report: Report) -> str:
    """Tables of LaTeX without packages; the notes are comments."""
    parts = [
        f"% {table.name}: {table.about} ({table.source})",
        *(f"% {_line(note)}" for note in report.notes),
    ]
    for title, header, rows in report.tables:
        lines = [r"\hline", _tex(header), r"\hline", *map(_tex, rows), r"\hline"]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
        parts.append("\n".join([f"\n% {title}", begin, *lines, r"\end{tabular}"]))
    return "\n".join(parts) + "\n"


_TEX = {"\\": r"\textbackslash{}", "±": r"$\pm$", "×": r"$\times$", "~": r"\textasciitilde{}", "^": r"\^{}"}
_TEX |= {MARK: r"\dag{}"} | {character: f"\\{character}" for character in "&%$#_{}"}


def _tex(cells: Sequence[str]) -> str:
    return " & ".join("".join(_TEX.get(character, character) for character in _line(cell)) for cell in cells) + r" \\"


def _line(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


def _plain(text: str) -> str:
    """On one line, as Markdown that is neither a table's edge nor HTML."""
    return _line(text).translate({ord(character): f"\\{character}" for character in "\\|<"})
