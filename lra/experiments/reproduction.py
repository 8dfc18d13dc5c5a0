"""What `lra reproduce` gives back, whatever it measures."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lra.config.compose import differences
from lra.environment import MARK, MARKED
from lra.errors import UsageError

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows

# of the environment: no measurement depends on the first three, and a record of another commit states it
NOT_COMPARED = ("command", "date", "gpus", "commit")


class Reproduction(NamedTuple):
    """What is printed, and whether something is wrong: the command's exit code is 1 then."""

    tables: list[Table]
    lines: list[str]
    wrong: bool = False


def footnoted(title: str, header: list[str], rows: list[list[str]]) -> Table:
    """A table whose title says what a mark on figures means, if there is one."""
    marked = any(MARK in cell for row in rows for cell in row)
    return f"{title} ({MARK} {MARKED})" if marked else title, header, rows


def refuse_other_options(path: Path, found: Mapping[str, Any], asked: Mapping[str, Any], *growing: str) -> None:
    """UsageError if a file was measured with other options than are asked for, but for those that may grow."""
    if changed := differences(found, asked, growing):
        raise UsageError(
            f"{path} was measured with other options ({'; '.join(changed)}): give those, or choose another out="
        )


def refuse_other_environment(path: Path, found: Mapping[str, Any], made: Mapping[str, Any]) -> None:
    """UsageError if a file was measured in an environment unlike this."""
    if changed := differences(found, made, NOT_COMPARED):
        raise UsageError(f"{path} was measured in another environment ({'; '.join(changed)}): choose another out=")


def number(value: float | None) -> str:
    """To a tenth; empty if it is not known."""
    return "" if value is None else f"{value:.1f}"


def mean_over_common_seeds(columns: Sequence[Mapping[int, float]]) -> tuple[float | None, int]:
    """The mean of columns of scores by seed, over the seeds that all columns have, and how many those are.

    None of no such seed: a mean over other seeds in each column would compare nothing.
    """
    seeds = set.intersection(*map(set, columns)) if columns else set()
    return (statistics.fmean(scores[seed] for scores in columns for seed in seeds) if seeds else None), len(seeds)


def spread(values: Sequence[float], digits: int) -> str:
    """Their mean, and the standard deviation where there are several; empty without any."""
    parts = [statistics.mean(values)] if values else []
    parts += [statistics.stdev(values)] if len(values) > 1 else []
    return " ± ".join(f"{part:.{digits}f}" for part in parts)
