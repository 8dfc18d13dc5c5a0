"""What `lra reproduce` can reproduce: tables of accuracies, their speeds, and Figure 3, a module for each.

`grid` says what is run where, and `results` what is made of it. This module stays light: listing imports nothing else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

from lra.config.recipes import config_names, read_package_yaml
from lra.config.registry import describe_unknown
from lra.errors import UsageError

MODULES = {"fig3": "FlashAttention's Figure 3 and Tables 9 to 21: runtime and memory of all attentions against N"}


def experiments() -> dict[str, str]:
    """Each by name, and what it is: those with a module of their own, and the tables of `configs/table`."""
    return MODULES | {name: described(name) for name in config_names("table")}


def described(table: str) -> str:
    """What a table is, or why its YAML can't be read: one that is broken takes no other away."""
    try:
        tree = read_package_yaml("table", table)
    except UsageError as error:
        return str(error)
    stated = [str(text) for text in (tree.get("about"), tree.get("source")) if text]
    return ": ".join(stated) or "accuracies, each of a run by lra fit"


def find(name: str, function: str = "run") -> Callable[..., Any]:
    """A function of an experiment's module, `run` or `parse_fields`; UsageError with a suggestion if there is none."""
    if name in MODULES:
        return getattr(importlib.import_module(f"lra.experiments.{name}"), function)
    if name not in (tables := config_names("table")):
        raise UsageError(describe_unknown("experiment", name, [*MODULES, *tables]))
    return functools.partial(getattr(importlib.import_module("lra.experiments.accuracy"), function), name)


def parse_fields(args: Sequence[str]) -> Any:
    """The arguments of `lra reproduce` as its experiment parses them; nothing for the list of all."""
    return find(args[0], "parse_fields")(args[1:]) if args else None


def parse_report(args: Sequence[str]) -> Any:
    """The arguments of `lra report` as the report parses them; nothing for the list of all."""
    return importlib.import_module("lra.experiments.results.report").parse_fields(args[0], args[1:]) if args else None
