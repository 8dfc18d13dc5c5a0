"""Checks of values that several configurations share. Each raises a UsageError that names the field."""

from __future__ import annotations

from typing import Any

from lra.errors import UsageError


def check_at_least(limit: int, section: str, config: Any, *names: str) -> None:
    """Raises a UsageError for the first field of a configuration that is below `limit`. Null passes."""
    for name in names:
        if (value := getattr(config, name)) is not None and value < limit:
            raise UsageError(f"{section}.{name}={value} must be at least {limit}")


def check_at_most(limit: int, section: str, config: Any, *names: str) -> None:
    """Raises a UsageError for the first field of a configuration that is above `limit`, or has an item above it.

    The limit is far beyond what anybody trains: a number with too many digits would end in a traceback, or take all
    memory. Null passes. `section` is empty for the options of a verb.
    """
    for name in names:
        given = getattr(config, name)
        for value in given if isinstance(given, tuple) else (given,):
            if value is not None and value > limit:
                raise UsageError(f"{section and section + '.'}{name}={value} is too large: use at most {limit}")


def round_dropout_rate(dropout: float) -> float:
    """The rate at which elements are dropped where this one is asked for: the nearest multiple of 1/256."""
    return round(256 * dropout) / 256


def check_dropout_rate(name: str, dropout: float) -> None:
    """Raises a UsageError if a dropout rate, rounded to 1/256, drops everything, or nothing although it is not 0."""
    dropped = round_dropout_rate(dropout)
    if dropped == 1 or (dropout and not dropped):
        mend = "use at most 0.998" if dropped else "use 0, or at least 0.002"
        raise UsageError(f"{name}={dropout} is {dropped:.0f} in steps of 1/256: {mend}")
