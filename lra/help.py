"""What `lra fit --help` adds to Typer's help: an example, what can be named, and the fields that are set most."""

from __future__ import annotations

from typing import Any

import typer.core
from rich.table import Column, Table

from lra.completion import selector_names
from lra.terminal import Terminal

FIT_EXAMPLE = "lra fit task=listops attn=flash recipe=demo trainer.steps=500"
COMMON_FIELDS = {
    "trainer.steps": "optimisation steps",
    "trainer.devices": "GPUs of this machine",
    "optim.lr": "largest learning rate",
    "batch.size": "examples a step, over all devices",
    "batch.micro": "examples a device holds at once: smaller takes less memory",
    "model.layers": "Transformer blocks",
    "model.d_model": "width, a multiple of model.heads",
    "seed": "of weights, data order and dropout",
    "name": "names the run's folder",
    "resume": "auto goes on with an unfinished run",
}


class FitCommand(typer.core.TyperCommand):
    """The command `lra fit`. The names are looked up when its help is printed: other commands need none of them."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        console = Terminal()
        for title, rows in help_sections():
            columns = Column(no_wrap=True), Column()
            table = Table(*columns, title=title, title_justify="left", box=None, show_header=False)
            for row in rows:
                table.add_row(*row)
            console.print(table)
            console.print()


def help_sections() -> list[tuple[str, list[tuple[str, str]]]]:
    """Tables of two columns, each after its title."""
    return [
        (f"Example: {FIT_EXAMPLE}", [(f"{field}=", ", ".join(names)) for field, names in selector_names().items()]),
        ("The fields that are set most", [(f"{field}=", what) for field, what in COMMON_FIELDS.items()]),
    ]
