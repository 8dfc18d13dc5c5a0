"""Prints to the user, on the standard output of rank 0."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities import rank_zero_only

from lra.errors import name_file
from lra.terminal import Terminal

console = Terminal(soft_wrap=True)


def print_line(trainer: pl.Trainer, text: str) -> None:
    """Prints a line on rank 0, above the bar if there is one."""
    if trainer.is_global_zero:
        with name_file("the standard output"):
            console.print(text)  # the bar draws on the same console


@rank_zero_only
def say(text: str, *notes: str) -> None:
    """Prints a line and its notes."""
    with name_file("the standard output"):
        for line in (text, *(f"note: {note}" for note in notes)):
            console.print(line)


def format_duration(seconds: float) -> str:
    if seconds < 180:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_gpu_memory(trainer: pl.Trainer) -> str:
    device = trainer.strategy.root_device
    if device.type != "cuda":
        return ""
    peak, total = torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    return f", {peak / 1e9:.1f} of {total / 1e9:.0f} GB of GPU memory"
