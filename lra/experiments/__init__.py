"""What `lra reproduce` can reproduce, a module for each kind. This one stays light: listing imports nothing else."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from lra.config.registry import unknown
from lra.errors import UsageError

EXPERIMENTS = {
    "fig3": "FlashAttention's Figure 3 and Tables 9 to 21: runtime and memory of all attentions against N",
    "table3": "FlashAttention's Table 3: accuracy of nine attentions on five tasks, each run by lra fit",
    "table6": "FlashAttention's Table 6: nine attentions on Path-X and Path-256, each run starting from a smaller one",
}


def find(name: str) -> Callable[..., Any]:
    """The `run` of an experiment; UsageError with a suggestion if there is none."""
    if name not in EXPERIMENTS:
        raise UsageError(unknown("experiment", name, EXPERIMENTS))
    if name.startswith("table"):
        return functools.partial(importlib.import_module("lra.experiments.accuracy").run, name)
    return importlib.import_module(f"lra.experiments.{name}").run
