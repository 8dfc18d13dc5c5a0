"""What `lra reproduce` can reproduce, one module each. This one stays light: listing imports nothing else."""

from __future__ import annotations

import importlib
from typing import Any

from lra.config.registry import unknown
from lra.errors import UsageError

EXPERIMENTS = {
    "fig3": "FlashAttention's Figure 3 and Tables 9 to 21: runtime and memory of all attentions against N",
    "table3": "FlashAttention's Table 3: accuracy of nine attentions on five tasks, each run by lra fit",
}


def find(name: str) -> Any:
    """The module of an experiment, with its `run`; UsageError with a suggestion if there is none."""
    if name not in EXPERIMENTS:
        raise UsageError(unknown("experiment", name, EXPERIMENTS))
    return importlib.import_module(f"lra.experiments.{name}")
