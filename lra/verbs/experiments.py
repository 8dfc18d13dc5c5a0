"""Verbs of papers' tables and figures."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer
from rich.table import Table

from lra.commands import app, verb
from lra.completion import complete_fields
from lra.errors import UsageError
from lra.printing import console, print_measured
from lra.verbs.fields import DryRun


@verb(app, parser="lra.experiments:parse_reproduction")
def reproduce(
    fields: Annotated[list[str] | None, typer.Argument(metavar="[<name> [field=value …]]")] = None,
    dry_run: DryRun = False,
) -> None:
    """Measure what a paper states, and say whether it holds here; without a name, list what there is."""
    from lra.experiments import find_experiment, list_experiments

    if dry_run and not fields:
        raise UsageError("--dry-run of what? lra reproduce lists the names")
    if not fields:
        table = Table("experiment", "what")
        for name, what in list_experiments().items():
            table.add_row(name, what)
        console.print(table)
        return
    run = find_experiment(fields[0])
    if dry_run and "dry_run" not in inspect.signature(run).parameters:
        raise UsageError(f"lra reproduce {fields[0]} has no --dry-run: leave it out")
    report = run(fields[1:], progress=console.print, **({"dry_run": True} if dry_run else {}))
    print_measured(report.tables, report.lines, report.wrong)


@verb(app, parser="lra.experiments.sweep:parse_sweep")
def sweep(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="task=… attn=… [recipe=…] [field=value,value …] [seed=0,1,…] [launcher=local|slurm] [out=<folder>]",
            help="Any field of lra fit, with one value or several.",
            autocompletion=complete_fields,
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Train with every combination of several values of fields; best by validation first.

    Each run is one of lra fit, in its own folder: the same command again finishes what is left.
    """  # fmt: skip
    from lra.experiments.sweep import sweep as run

    report = run(fields or (), progress=console.print, dry_run=dry_run)
    print_measured(report.tables, report.lines, report.wrong)


@verb(app, parser="lra.experiments:parse_report")
def report(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[<table> [results=<folder>] [tasks=… attns=… seeds=… recipe=… field=value …] [speed=<file>] "
            "[out=<folder>]]"
        ),
    ] = None,
) -> None:
    """Put the results of runs into a paper's table, beside its figures; without a name, list the tables."""
    from lra.config.recipes import config_names
    from lra.experiments import describe_table

    if not fields:
        table = Table("table", "what")
        for name in config_names("table"):
            table.add_row(name, describe_table(name))
        console.print(table)
        return
    from lra.experiments.results.report import make_report

    made = make_report(fields[0], fields[1:])
    print_measured(made.tables, made.notes)
