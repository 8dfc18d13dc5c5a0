"""What `lra reproduce` can reproduce: tables of accuracies, their speeds, and Figure 3. Each has a module.

`grid` decides what runs where, and `results` reports on it. This module stays light: a list imports nothing else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from lra.config.recipes import config_names, is_config_path, read_config_yaml
from lra.config.registry import describe_unknown
from lra.errors import UsageError

MODULES = {"fig3": "FlashAttention's Figure 3 and Tables 9 to 21: runtime and memory of all attentions against N"}


def list_experiments() -> dict[str, str]:
    """A description of each by name: those with a module of their own, and the tables."""
    return MODULES | {name: describe_table(name) for name in config_names("table")}


def describe_table(table: str) -> str:
    """What a table is, or why its YAML can't be read: a broken one must not hide the others."""
    try:
        tree = read_config_yaml("table", table)
    except UsageError as error:
        return str(error)
    stated = [str(text) for text in (tree.get("about"), tree.get("source")) if text]
    return ": ".join(stated) or "accuracies, each of a run by lra fit"


def find_experiment(name: str, function: str = "reproduce") -> Callable[..., Any]:
    """A function of an experiment's module: `reproduce` or `parse_fields`.

    Raises UsageError with a suggestion for an unknown name.
    """
    if name in MODULES:
        return getattr(importlib.import_module(f"lra.experiments.{name}"), function)
    if not is_config_path(name) and name not in (tables := config_names("table")):
        raise UsageError(describe_unknown("experiment", name, [*MODULES, *tables]))
    return functools.partial(getattr(importlib.import_module("lra.experiments.accuracy"), function), name)


def parse_reproduction(args: Sequence[str]) -> Any:
    """The arguments of `lra reproduce`, parsed by its experiment; None for the list of all."""
    return find_experiment(args[0], "parse_fields")(args[1:]) if args else None


def parse_report(args: Sequence[str]) -> Any:
    """The arguments of `lra report`, parsed by the report; None for the list of all."""
    report = importlib.import_module("lra.experiments.results.report")
    return report.parse_report_fields(args[0], args[1:]) if args else None
