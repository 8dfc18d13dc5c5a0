"""What `lra reproduce` gives back, whatever it measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from lra.environment import MARK, MARKED

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


def number(value: float | None) -> str:
    """To a tenth; empty if it is not known."""
    return "" if value is None else f"{value:.1f}"


def spread(values: Sequence[float], digits: int) -> str:
    """Their mean, and the standard deviation where there are several; empty without any."""
    parts = [statistics.mean(values)] if values else []
    parts += [statistics.stdev(values)] if len(values) > 1 else []
    return " ± ".join(f"{part:.{digits}f}" for part in parts)
