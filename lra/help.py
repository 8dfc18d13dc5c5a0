"""What `lra fit --help` adds to Typer's help: an example, what can be named, and the fields that are set most."""

from __future__ import annotations

from typing import Any

import typer.core
from rich.table import Column, Table

from lra.completion import selector_names
from lra.terminal import Terminal

FIT_EXAMPLE = "lra fit task=listops attn=flash recipe=demo trainer.steps=500"
COMMON_FIELDS = (
    "trainer.steps", "trainer.devices", "optim.lr", "batch.size", "batch.micro", "model.layers", "model.d_model",
    "seed", "name", "resume",
)  # fmt: skip


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
    from lra.config.fields import describe_fields
    from lra.config.schema import RunConfig

    meanings = {field.name: field.meaning for field in describe_fields(RunConfig(task=None, attn=None))}
    return [
        (f"Example: {FIT_EXAMPLE}", [(f"{name}=", ", ".join(names)) for name, names in selector_names().items()]),
        ("The fields that are set most", [(f"{name}=", meanings[name]) for name in COMMON_FIELDS]),
    ]
