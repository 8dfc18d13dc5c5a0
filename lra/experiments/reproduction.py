"""What `lra reproduce` gives back, whatever it measures."""

from __future__ import annotations

from typing import Any, NamedTuple

Records = list[dict[str, Any]]
Table = tuple[str, list[str], list[list[str]]]  # title, header, rows

# of the environment: no measurement depends on the first three, and a file states every commit that measured some of it
NOT_COMPARED = ("command", "date", "gpus", "commit")


class Reproduction(NamedTuple):
    """What is printed, and what it was made from."""

    tables: list[Table]
    lines: list[str]
    records: Records
