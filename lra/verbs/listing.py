"""Verbs that list what can be named, and show configurations."""

from __future__ import annotations

from typing import Annotated, get_args

import typer
from rich.table import Column, Table

from lra.commands import config_app, ls_app, verb
from lra.completion import complete_fields
from lra.errors import UsageError
from lra.printing import console, print_catalogue, print_rows
from lra.verbs.fields import Fields


@verb(ls_app, "tasks")
def ls_tasks() -> None:
    """The benchmark's tasks."""
    from lra.tasks import TASKS

    print_catalogue(TASKS, ("version", "classes", "length"))


@verb(ls_app, "attns")
def ls_attns() -> None:
    """The attentions, and mixers, which have no head dims."""
    from lra.models.attention import ATTENTIONS

    print_catalogue(ATTENTIONS, ("exact", "dropout", "causal", "ragged", "head_dims"))


@verb(ls_app, "recipes")
def ls_recipes() -> None:
    """The training recipes."""
    from lra.config.recipes import read_recipe, recipe_names

    table = Table("recipe", "tasks", "what")
    for name in recipe_names():
        try:
            recipe = read_recipe(name)
        except UsageError as error:  # one that is broken takes no other away
            recipe = {"about": str(error)}
        table.add_row(name, " ".join(map(str, recipe.get("tasks") or {})), recipe.get("about") or "")
    console.print(table)


@verb(ls_app, "optimizers")
def ls_optimizers() -> None:
    """The optimisers, and their options beside lr and weight_decay."""
    from lra.config.optim import OPTIM_OPTIONS, OptimizerName

    table = Table("optimiser", "options")
    for name in get_args(OptimizerName):
        table.add_row(name, " ".join(option for option, having in OPTIM_OPTIONS.items() if name in having))
    console.print(table)


@verb(ls_app, "runs", "lra.experiments.results.listing:ListOptions")
def ls_runs(
    fields: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[task=…] [attn=…] [sort=val|test|date] [runs=<folder>]", autocompletion=complete_fields
        ),
    ] = None,
) -> None:
    """The runs below a folder: what each changes of its recipe, how far it is, and what it reached."""
    from lra.experiments.results.listing import HEADER, list_runs

    columns = (Column(name, no_wrap=name not in ("changes", "state"), overflow="fold") for name in HEADER)
    table = Table(*columns)
    for run in list_runs(fields or ()):
        table.add_row(*run.cells)
    console.print(table, soft_wrap=False)


@verb(config_app, "show", "lra.training.fit:configure")
def config_show(fields: Fields = None) -> None:
    """Every field: its value, where that came from, what else it may be, and what it means."""
    from lra.config.checks import round_dropout_rate
    from lra.config.compose import flatten, to_dict
    from lra.config.fields import describe_fields, format_value
    from lra.training.fit import configure

    composed = configure(fields or ())
    values = dict(flatten(to_dict(composed.config)))
    folded = (Column(header, overflow="fold") for header in ("value", "from"))
    table = Table(Column("field", no_wrap=True), *folded, "may be; meaning")
    for field in describe_fields(composed.config):
        value, meaning = values[field.name], field.meaning
        if field.name in ("model.dropout", "model.attn_dropout") and value != (dropped := round_dropout_rate(value)):
            meaning += f"; here {dropped:.4f} is dropped"
        table.add_row(field.name, format_value(value), composed.origin[field.name], f"{field.type}; {meaning}")
    console.print(table, soft_wrap=False)


@verb(config_app, "stages", "lra.training.fit:configure")
def config_stages(fields: Fields = None) -> None:
    """The chain of runs that a recipe makes for one: their steps, state, time and changes."""
    from lra.experiments.grid.stages import list_stages

    print_rows(*list_stages(fields or ()))
