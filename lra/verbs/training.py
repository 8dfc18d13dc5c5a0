"""Verbs that train and score, and those that look at the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lra import timeline
from lra.commands import app, verb
from lra.help import FitCommand
from lra.imports import uncollected_imports
from lra.printing import console, print_scores
from lra.verbs.fields import Fields


@verb(app, parser="lra.training.fit:configure", command=FitCommand)
def fit(fields: Fields = None) -> None:
    """Train, then score the test set once with the best checkpoint of validation.

    The same command again prints the result of a finished run; resume=auto goes on with an unfinished one.
    """
    from lra.training.fit import fit as run
    from lra.training.run_files import read_links

    result = run(*(fields or ()))
    timeline.mark_phase("end of process")
    if result:  # only rank 0 has one
        print_scores(result)
        folder = result["directory"]
        for what, file in (("checkpoint", "best.ckpt"), ("curves", "metrics.csv"), ("config", "config.yaml")):
            console.print(f"{what:11} {folder}/{file}")
        if (Path(folder) / "tensorboard").is_dir():
            console.print(f"{'tensorboard':11} tensorboard --logdir {folder}")
        for service, there in read_links(Path(folder)).items():
            console.print(f"{service:11} {there['link']}")


@verb(app, parser="lra.training.evaluate:parse_test")
def test(
    fields: Annotated[
        list[str] | None, typer.Argument(metavar="init=<run, checkpoint or hf://owner/name> [field=value …]")
    ] = None,
) -> None:
    """Score a checkpoint on its task's test sets."""
    with uncollected_imports():
        from lra.training.evaluate import test as run

    if result := run(*(fields or ())):  # only rank 0 has one
        print_scores(result)


@verb(app)
def doctor() -> None:
    """What this machine has: GPU, versions, usable kernels, prepared data."""
    from lra.doctor import diagnose

    table = Table(show_header=False, box=None)
    for name, state in diagnose():
        table.add_row(name, state)
    console.print(table)


@verb(app, parser="lra.bench.tune:TuneOptions")
def tune(
    fields: Annotated[
        list[str] | None,
        typer.Argument(metavar="[kernels=…,…] [dtypes=…] [head_dims=…] [dropout=true,false] [out=<file>]"),
    ] = None,
) -> None:
    """Measure the attention kernels' tiles on this GPU and keep the fastest for every later run: minutes, once."""
    from lra.bench.tune import tune_tiles as run

    written = run(fields or (), progress=lambda trial: console.print(str(trial)))
    console.print(f"written: {written}")
