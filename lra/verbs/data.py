"""Verbs of a task's data."""

from __future__ import annotations

from rich.table import Column, Table

from lra.commands import data_app, verb
from lra.printing import console
from lra.verbs.fields import TaskFields


@verb(data_app, "prepare", "lra.training.data_verbs:parse_prepare")
def data_prepare(fields: TaskFields = None) -> None:
    """Generate or import a task's data; force=true replaces what is there."""
    from lra.training.data_verbs import prepare_store

    console.print(prepare_store(fields or ()))


@verb(data_app, "verify", "lra.training.data_verbs:task_data")
def data_verify(fields: TaskFields = None) -> None:
    """Read every byte of a prepared store and compare it with the manifest."""
    from lra.training.data_verbs import verify_store

    console.print(verify_store(fields or ()))


@verb(data_app, "info", "lra.training.data_verbs:task_data")
def data_info(fields: TaskFields = None) -> None:
    """Counts, lengths, label balance and hashes of a prepared store."""
    from lra.training.data_verbs import describe_store

    table = Table(Column(), Column(overflow="fold"), show_header=False)
    for key, value in describe_store(fields or ()):
        table.add_row(key, str(value))
    console.print(table)


@verb(data_app, "show", "lra.training.data_verbs:parse_show")
def data_show(fields: TaskFields = None) -> None:
    """Show examples of each label, images as a PNG, texts in the terminal: split=train, count=, out=<file>.png."""
    from lra.training.data_verbs import show_examples

    for line in show_examples(fields or (), console.width if console.is_terminal else None):
        console.print(line)
