"""The groups and verbs of the command line. A verb names its parser, so a command can be parsed without running it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, TypeVar

import typer.core
import typer.main

from lra.config.registry import describe_unknown
from lra.environment import current_commit, package_versions
from lra.errors import UsageError

app = typer.Typer(
    help="Train Transformers on the Long Range Arena, with the attention swapped by name.",
    no_args_is_help=True, pretty_exceptions_show_locals=False, rich_markup_mode="rich",
)  # fmt: skip
data_app = typer.Typer(help="Prepare, verify and inspect a task's data.", no_args_is_help=True)
ls_app = typer.Typer(help="List what can be named.", no_args_is_help=True)
config_app = typer.Typer(help="Inspect configurations.", no_args_is_help=True)
app.add_typer(ls_app, name="ls")
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")
bench_app = typer.Typer(help="Measure attentions and training steps: speed, memory, HBM traffic.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
results_app = typer.Typer(help="Carry results of runs from one machine to another.", no_args_is_help=True)
app.add_typer(results_app, name="results")
caches_app = typer.Typer(help="Carry compiled code from one machine to another.", no_args_is_help=True)
app.add_typer(caches_app, name="caches")


def _print_version(asked: bool) -> None:
    if not asked:
        return
    installed = package_versions()
    stated = [f"{name} {installed[name] or 'not installed'}" for name in ("lra", "python", "torch", "triton")]
    if found := current_commit():
        stated.insert(1, f"commit {found}")
    typer.echo(", ".join(stated))
    raise typer.Exit


@app.callback()
def global_options(
    version: Annotated[bool, typer.Option(
        "--version", callback=_print_version, is_eager=True, help="Print the versions of lra, PyTorch and Triton."
    )] = False,
) -> None:  # fmt: skip
    """What `lra` takes before a verb."""


_Verb = TypeVar("_Verb", bound=Callable[..., Any])


def verb(
    group: typer.Typer, name: str | None = None, parser: str = "", command: type[typer.core.TyperCommand] | None = None
) -> Callable[[_Verb], _Verb]:
    """Makes a function a verb of a group, under its own name unless one is given.

    Args:
        parser: "module:name" of the function that parses the verb's `fields` and raises UsageError for what is wrong
            with them, or of the dataclass that has them; empty for a verb without fields.
        command: prints the verb's help; None is Typer's own class.
    """

    def add(function: _Verb) -> _Verb:
        group.command(name, cls=command)(function)
        function.parser = parser  # type: ignore[attr-defined]
        return function

    return add


def parse_command(root: typer.Typer, arguments: Sequence[str]) -> Any:
    """Parses the arguments of a command without running it; returns its options or the composed configuration.

    Args:
        root: `app`, once its verbs are added.
        arguments: what follows `lra`: a verb, options and fields.

    Raises UsageError for wrong fields, and click's own for wrong verbs and options, as the command itself does.
    """
    command: Any = typer.main.get_command(root)
    names = list(arguments)
    while isinstance(command, typer.core.TyperGroup):
        name = names.pop(0) if names else ""
        if name not in command.commands:
            raise UsageError(describe_unknown("command", name, command.commands))
        command = command.commands[name]
    fields = command.make_context(command.name, names).params.get("fields") or []
    module, _, attribute = inspect.unwrap(command.callback).parser.partition(":")
    if not module:
        return None
    from lra.config.options import parse_options  # here, as the command line begins without it

    parser = getattr(import_module(module), attribute)
    return parse_options(parser, fields) if inspect.isclass(parser) else parser(fields)
