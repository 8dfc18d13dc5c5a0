"""Tables of a report that are about accuracy: means, intervals over seeds, differences to the paper, and seeds."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lra.environment import UNCLEAN_MARK
from lra.experiments.grid.grid import Grid
from lra.experiments.reproduction import TextTable, format_mean_std, format_tenth
from lra.experiments.results.ledger import ReportRow, known_values
from lra.experiments.results.significance import INTERVAL_METHOD, LEAST_SEEDS, bootstrap_interval
from lra.terminal import Bold

BOLD_RULE = (
    "bold: a column's best mean, and each mean whose 95% interval contains it; the interval is over seeds "
    f"({INTERVAL_METHOD}), with fewer than {LEAST_SEEDS} seeds that of sampling the test set"
)
AVERAGE = "average"
SEEDS_TITLE = "seeds: how many finished"


@dataclass(frozen=True)
class SeedScores:
    """An accuracy in % by seed, and its 95% bound from sampling the test set, if that is known."""

    scores: Mapping[int, float]
    bound: float | None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.scores.values())

    @functools.cached_property
    def interval(self) -> tuple[float, float]:
        """The 95% interval of the mean."""
        bound = self.bound or 0.0
        return bootstrap_interval(tuple(self.scores.values())) or (self.mean - bound, self.mean + bound)


def accuracy_tables(
    table: Grid, rows: Sequence[ReportRow], columns: Sequence[str], attns: Sequence[str]
) -> Iterator[TextTable]:
    """Test accuracy, its intervals, its difference to the paper, the fresh test set, and how many seeds there are.

    A table without a figure is left out.
    """
    averages = table.averages(columns)
    header = ["attention", *columns, *averages]
    found = {(attn, column): _seed_scores(rows, attn, column, "accuracy") for attn in attns for column in columns}
    known = {place: scores for place, scores in found.items() if scores is not None}
    for attn in attns:
        for name, names in averages.items():
            if scores := _average([known.get((attn, column)) for column in names]):
                known[attn, name] = scores
    covered = {column: averages.get(column, [column]) for column in header[1:]}

    def lines(cell: Mapping[tuple[str, str], str]) -> list[list[str]]:
        return [[a, *(marked(cell.get((a, c), ""), rows, a, *covered[c]) for c in header[1:])] for a in attns]

    leagues = ["league", *(_league(rows, *covered[c]) for c in header[1:])]
    means = {place: _format_scores(scores, place[1] in averages) for place, scores in known.items()}
    if means or table.published:
        stopped = {(a, c): _stopped(rows, a, c) for a in attns for c in columns}
        made = _bold_best(lines(stopped | means), header, known)
        baselines = ["strongest baseline", *(_baselines(rows, c, "baseline") for c in columns), *("" for _ in averages)]
        title = "test accuracy, %: mean ± standard deviation over seeds"
        yield title, *with_published(table, header, [*made, baselines, leagues])
    intervals = {
        place: f"{scores.interval[0]:.1f} to {scores.interval[1]:.1f}"
        for place, scores in known.items()
        if len(scores.scores) >= LEAST_SEEDS
    }
    if intervals:
        title = f"95% interval of the mean test accuracy over seeds, % ({INTERVAL_METHOD})"
        yield title, header, [line for line in lines(intervals) if any(line[1:])]
    against = {
        (a, c): _against(known.get((a, c)), table.average(a, averages[c]) if c == AVERAGE else table.figure(a, c))
        for a, c in _places(attns, header)
    }
    if any(against.values()):
        yield f"difference to {table.source} (its accuracy, %)", header, [*lines(against), leagues]
    yield from _fresh_tables(rows, columns, attns)
    counts = {(a, c): _count_seeds(rows, a, c) for a in attns for c in columns}
    counts |= {(a, c): str(len(known[a, c].scores)) for a in attns for c in averages if (a, c) in known}
    if any(counts.values()):
        shown = [[a, *(counts.get((a, c), "") for c in header[1:])] for a in attns]
        title = f"{SEEDS_TITLE}, and how many of these are stuck at chance"
        yield title, header, [line for line in shown if any(line[1:])]


def with_published(table: Grid, header: list[str], lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """A header and its lines with a line for each published model, and the league and source of these."""
    if not table.published:
        return header, lines
    below = []
    for name, model in table.published.items():
        averages = {
            mean: statistics.fmean(known)
            for mean, names in table.means.items()
            if len(known := [model.figures[column] for column in names if column in model.figures]) == len(names)
        }
        figures = {**model.figures, **averages}
        shown = (f"{figures[column]:.2f}" if column in figures else "" for column in header[1:])
        below.append([name, *shown, f"{model.league}: {model.source}"])
    return [*header, "published"], [*([*line, ""] for line in lines), *below]


def time_tables(rows: Sequence[ReportRow], columns: Sequence[str], attns: Sequence[str]) -> Iterator[TextTable]:
    """How long each accuracy takes, a table for each hardware."""
    for place in dict.fromkeys(row.hardware for row in rows if row.chain_minutes is not None):
        here = [row for row in rows if row.hardware == place]
        title = (
            f"GPU-minutes to these accuracies on {place}, from prepared data to scores, with all stages and "
            "compilation: the slowest seed that had its GPU alone (≤: none had, the fastest)"
        )
        lines = [[a, *(marked(_minutes(here, a, c), here, a, c) for c in columns)] for a in attns]
        yield title, ["attention", *columns], [line for line in lines if any(line[1:])]


def _minutes(rows: Sequence[ReportRow], attn: str, column: str) -> str:
    alone, shared = (
        known_values(rows, "chain_minutes", attention=attn, column=column, chain_alone=kind) for kind in (True, False)
    )
    if alone:
        return format_tenth(max(alone))
    return f"≤ {format_tenth(min(shared))}" if shared else ""


def marked(text: str, rows: Sequence[ReportRow], attn: str, *columns: str) -> str:
    """A figure of these columns, with a mark unless all its results are of clean commits."""
    unclean = any(row.clean is False for row in rows if row.attention == attn and row.column in columns)
    ours = text and not text.startswith("(")  # a figure in brackets is the paper's alone
    return text + UNCLEAN_MARK if unclean and ours else text


def _fresh_tables(rows: Sequence[ReportRow], columns: Sequence[str], attns: Sequence[str]) -> Iterator[TextTable]:
    fresh = [c for c in columns if known_values(rows, "fresh", column=c)]
    if not fresh:
        return
    header = ["attention", *fresh]
    found = {(a, c): _seed_scores(rows, a, c, "fresh") for a, c in _places(attns, header)}
    known = {place: scores for place, scores in found.items() if scores is not None}
    lines = [
        [a, *(marked(_format_scores(known[a, c]) if (a, c) in known else "", rows, a, c) for c in fresh)] for a in attns
    ]
    baselines = ["strongest baseline", *(_baselines(rows, c, "fresh_baseline") for c in fresh)]
    title = "accuracy on the fresh test set, %: mean ± standard deviation over seeds"
    yield title, header, [*_bold_best(lines, header, known), baselines]


def _places(attns: Sequence[str], header: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield from ((attn, column) for attn in attns for column in header[1:])


def _seed_scores(rows: Sequence[ReportRow], attn: str, column: str, field: str) -> SeedScores | None:
    """The scores of a cell; None without one."""
    own = [row for row in rows if (row.attention, row.column) == (attn, column) and getattr(row, field) is not None]
    bounds = [b for row in own if (b := getattr(row, {"accuracy": "bound", "fresh": "fresh_bound"}[field])) is not None]
    return SeedScores({row.seed: getattr(row, field) for row in own}, max(bounds, default=None)) if own else None


def _average(columns: Sequence[SeedScores | None]) -> SeedScores | None:
    """The mean over columns, of the seeds that all of them have; None without such a seed."""
    if not (known := [column for column in columns if column is not None]) or len(known) < len(columns):
        return None
    seeds = set.intersection(*(set(column.scores) for column in known))
    scores = {seed: statistics.fmean(column.scores[seed] for column in known) for seed in sorted(seeds)}
    bound = math.hypot(*(column.bound or 0.0 for column in known)) / len(known)
    return SeedScores(scores, bound) if scores else None


def _format_scores(scores: SeedScores, average: bool = False) -> str:
    return format_tenth(scores.mean) if average else format_mean_std(tuple(scores.scores.values()), 1)


def _bold_best(
    lines: Sequence[list[str]], header: Sequence[str], known: Mapping[tuple[str, str], SeedScores]
) -> list[list[str]]:
    """The lines with the best of each column in bold, by `BOLD_RULE`; nothing where one attention alone has a score."""
    best: dict[str, float] = {}
    for column in header[1:]:
        means = [scores.mean for (_, c), scores in known.items() if c == column]
        if len(means) > 1:
            best[column] = max(means)

    def shown(attn: str, column: str, cell: str) -> str:
        scores = known.get((attn, column))
        return Bold(cell) if scores and column in best and scores.interval[1] >= best[column] else cell

    return [
        [line[0], *(shown(line[0], column, cell) for column, cell in zip(header[1:], line[1:], strict=True))]
        for line in lines
    ]


def _stopped(rows: Sequence[ReportRow], attn: str, column: str) -> str:
    """How runs of a cell ended of which none finished."""
    states = {row.status for row in rows if (row.attention, row.column) == (attn, column)}
    return "OOM" if "oom" in states else "failed" if "failed" in states else ""


def _count_seeds(rows: Sequence[ReportRow], attn: str, column: str) -> str:
    """How many seeds of a cell finished, how many of these are stuck, and how many failed or were out of memory."""
    states = [row.status for row in rows if (row.attention, row.column) == (attn, column) and row.status]
    if not states:
        return ""
    finished = sum(state in ("finished", "stuck") for state in states)
    parts = [str(finished)] if finished else []
    shown = {"stuck": "stuck", "failed": "failed", "oom": "OOM"}
    return ", ".join([*parts, *(f"{states.count(s)} {name}" for s, name in shown.items() if s in states)])


def _baselines(rows: Sequence[ReportRow], column: str, field: str) -> str:
    """The strongest baseline; several if runs met different test sets."""
    found = {(getattr(row, field), getattr(row, f"{field}_accuracy")) for row in rows if row.column == column}
    return ", ".join(f"{value:.1f} {name}" for name, value in sorted(found, key=str) if name)


def _league(rows: Sequence[ReportRow], *columns: str) -> str:
    """The league of the figures of these columns; mixed, if they are not of one."""
    found = {row.league for row in rows if row.column in columns}
    return found.pop() if len(found) == 1 else "mixed" if found else ""


def _against(ours: SeedScores | None, paper: float | None) -> str:
    if paper is None:
        return ""
    return f"({paper:.1f})" if ours is None else f"{ours.mean - paper:+.1f} ({paper:.1f})"
