"""Verbs of finished runs: they compare, draw, pack and merge their results."""

from __future__ import annotations

from typing import Annotated

import typer

from lra.commands import app, results_app, verb
from lra.printing import console, print_measured


@verb(app, parser="lra.experiments.results.compare:CompareOptions")
def compare(
    first: Annotated[str, typer.Argument(metavar="A")],
    second: Annotated[str, typer.Argument(metavar="B")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[out=<file>.svg|pdf]")] = None,
) -> None:
    """Compare two runs, or the seeds of two settings: fields, scores, curves and tests of significance.

    A and B are directories of runs. Without -s<seed> at its end, a directory stands for the runs of all seeds.
    """
    from lra.experiments.results.compare import compare_runs

    made = compare_runs(first, second, fields or ())
    print_measured(made.tables, made.lines)


@verb(app, parser="lra.experiments.results.curve_plot:parse_plot")
def plot(
    fields: Annotated[list[str], typer.Argument(metavar="RUN [RUN …] out=<file>.svg|pdf")],
) -> None:
    """Draw validation accuracy and training loss of runs.

    A RUN is a directory. Without -s<seed> at its end, it stands for the runs of all seeds, which share a colour.
    """
    from lra.experiments.results.curve_plot import plot_runs

    console.print(plot_runs(fields))


@verb(results_app, "pack", "lra.experiments.results.archive:PackOptions")
def results_pack(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="out=<file>.tar.xz [runs=<folder>] [checkpoints=none|weights|last|best|all]"),
    ] = None,
) -> None:
    """Put the results of runs into an archive; with checkpoints, unfinished runs at rest too."""
    from lra.experiments.results.archive import pack_runs

    for line in pack_runs(fields or ()):
        console.print(line)


@verb(results_app, "merge", "lra.experiments.results.archive:MergeOptions")
def results_merge(
    file: Annotated[str, typer.Argument(metavar="<file>.tar.xz|checkpoints/<name>")],
    fields: Annotated[list[str] | None, typer.Argument(metavar="[runs=<folder>]")] = None,
) -> None:
    """Add the runs of an archive, or released weights, to those that are here; what is finished stays."""
    from lra.experiments.results.archive import merge_runs

    for line in merge_runs(file, fields or ()):
        console.print(line)


@verb(results_app, "push", "lra.experiments.results.push:PushOptions")
def results_push(
    run: Annotated[str, typer.Argument(metavar="<run directory>|checkpoints/<name>")],
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="repo=<owner>/<name> [private=true] [revision=<branch>] [license=<id>]"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be uploaded, and where to.")
    ] = False,
) -> None:
    """Upload a finished run to the Hugging Face Hub: weights, configuration, result, curves and a card."""
    from lra.experiments.results.push import push_run

    for line in push_run(run, fields or (), dry_run):
        console.print(line)
