"""What `lra reproduce` returns, whatever it measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any, NamedTuple

from lra.config.compose import list_differences
from lra.environment import UNCLEAN_MARK, UNCLEAN_NOTE
from lra.errors import UsageError

TextTable = tuple[str, list[str], list[list[str]]]  # title, header, rows

MOST_COLUMNS = 12  # of a table of attentions by columns: one of more columns has a row for each of them
# of the environment: no measurement depends on the first three, and a record of another commit states it
UNCOMPARED_ENVIRONMENT = ("command", "date", "gpus", "commit")


class Reproduction(NamedTuple):
    """What is printed, and whether something is wrong. If so, the command's exit code is 1."""

    tables: list[TextTable]
    lines: list[str]
    wrong: bool = False


def add_footnote(title: str, header: list[str], rows: list[list[str]], note: str = UNCLEAN_NOTE) -> TextTable:
    """A table whose title explains the mark on its figures with a note, if one has a mark."""
    marked = any(UNCLEAN_MARK in cell for row in rows for cell in row)
    return f"{title} ({UNCLEAN_MARK} {note})" if marked else title, header, rows


def stands_upright(columns: Sized, rows: Sized) -> bool:
    """Whether a table of attentions by columns has too many columns, and is read with rows and columns exchanged."""
    return len(columns) > max(MOST_COLUMNS, len(rows))


def stand_upright(made: TextTable) -> TextTable:
    """The table with a row for each of its columns, if it stands upright."""
    title, header, rows = made
    if not stands_upright(header, rows):
        return made
    return title, ["column", *(row[0] for row in rows)], [list(line) for line in zip(header, *rows, strict=True)][1:]


def refuse_other_options(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any], *growing: str) -> None:
    """UsageError if a file was measured with other options, except for those named in `growing`."""
    if changed := list_differences(found, asked, growing):
        raise UsageError(
            f"{path} was measured with other options ({'; '.join(changed)}): give those, or choose another out="
        )


def refuse_other_environment(path: Path, found: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """UsageError if a file was measured in another environment."""
    if changed := list_differences(found, made, UNCOMPARED_ENVIRONMENT):
        raise UsageError(f"{path} was measured in another environment ({'; '.join(changed)}): choose another out=")


def format_tenth(value: float | None) -> str:
    """One digit after the point; empty if the value is not known."""
    return "" if value is None else f"{value:.1f}"


def mean_over_common_seeds(columns: Sequence[Mapping[int, float]]) -> tuple[float | None, int]:
    """The mean of columns of scores by seed, over the seeds that all columns have, and how many seeds these are.

    The mean is None without such a seed.
    """
    seeds = set.intersection(*map(set, columns)) if columns else set()
    return (statistics.fmean(scores[seed] for scores in columns for seed in seeds) if seeds else None), len(seeds)


def format_mean_std(values: Sequence[float], digits: int) -> str:
    """The mean, and the standard deviation if there are several values; empty without values."""
    parts = [statistics.mean(values)] if values else []
    parts += [statistics.stdev(values)] if len(values) > 1 else []
    return " ± ".join(f"{part:.{digits}f}" for part in parts)
