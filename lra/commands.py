"""Verbs of the command line. Each names what parses its arguments, so that a command can be parsed and not run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar

import typer.core
import typer.main

from lra.config.options import parse
from lra.config.registry import unknown
from lra.errors import UsageError

Function = TypeVar("Function", bound=Callable[..., Any])


def verb(group: typer.Typer, name: str | None = None, parser: str = "") -> Callable[[Function], Function]:
    """Makes a function a verb of a group, under its own name unless one is given.

    Args:
        parser: "module:name" of the function that parses the verb's `fields` and raises UsageError for what is wrong
            with them, or of the dataclass that has them; empty for a verb without fields.
    """

    def add(function: Function) -> Function:
        group.command(name)(function)
        function.parser = parser  # type: ignore[attr-defined]
        return function

    return add


def parse_command(app: typer.Typer, arguments: Sequence[str]) -> Any:
    """What the arguments of a command are parsed to, without running it: its options, or the composed configuration.

    Args:
        arguments: what follows `lra`: a verb, options and fields.

    Raises UsageError for wrong fields, and click's own for wrong verbs and options, as the command itself does.
    """
    command: Any = typer.main.get_command(app)
    names = list(arguments)
    while isinstance(command, typer.core.TyperGroup):
        name = names.pop(0) if names else ""
        if name not in command.commands:
            raise UsageError(unknown("command", name, command.commands))
        command = command.commands[name]
    fields = command.make_context(command.name, names).params.get("fields") or []
    module, _, attribute = inspect.unwrap(command.callback).parser.partition(":")
    if not module:
        return None
    parser = getattr(import_module(module), attribute)
    return parse(parser, fields) if inspect.isclass(parser) else parser(fields)
