"""What `lra reproduce` gives back, whatever it measures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

Table = tuple[str, list[str], list[list[str]]]  # title, header, rows

# of the environment: no measurement depends on the first three, and a file states every commit that measured some of it
NOT_COMPARED = ("command", "date", "gpus", "commit")


class Reproduction(NamedTuple):
    """What is printed, and whether something is wrong: the command's exit code is 1 then."""

    tables: list[Table]
    lines: list[str]
    wrong: bool = False


def number(value: float | None) -> str:
    """To a tenth; empty if it is not known."""
    return "" if value is None else f"{value:.1f}"


def spread(values: Sequence[float], digits: int) -> str:
    """Their mean, and the standard deviation where there are several; empty without any."""
    parts = [statistics.mean(values)] if values else []
    parts += [statistics.stdev(values)] if len(values) > 1 else []
    return " ± ".join(f"{part:.{digits}f}" for part in parts)
