"""Prints to the user, on the standard output of rank 0."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lra.errors import name_file
from lra.terminal import Terminal

if TYPE_CHECKING:
    import pytorch_lightning as pl

console = Terminal(soft_wrap=True)


def print_line(trainer: pl.Trainer, text: str) -> None:
    """Prints a line on rank 0, above the bar if there is one."""
    if trainer.is_global_zero:
        with name_file("the standard output"):
            console.print(text)  # the bar draws on the same console


def print_lines(*lines: str) -> None:
    """Prints lines on any rank."""
    with name_file("the standard output"):
        for line in lines:
            console.print(line)


def say(text: str, *notes: str) -> None:
    """Prints a line and its notes on rank 0."""
    from pytorch_lightning.utilities import rank_zero_only  # here, as a run prints its first line before this import

    rank_zero_only(print_lines)(text, *(f"note: {note}" for note in notes))


def format_duration(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
