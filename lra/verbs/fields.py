"""Arguments and options that several verbs take."""

from __future__ import annotations

from typing import Annotated

import typer

from lra.completion import complete_fields

Fields = Annotated[list[str] | None, typer.Argument(
    metavar="task=… attn=… [recipe=…] [field=value …]", help="lra config show lists all.",
    autocompletion=complete_fields,
)]  # fmt: skip
TaskFields = Annotated[list[str] | None, typer.Argument(
    metavar="task=… [recipe=…] [field=value …]", help="Fields of the task.", autocompletion=complete_fields
)]  # fmt: skip
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only print what is there, what is left and how long that takes.")
]
