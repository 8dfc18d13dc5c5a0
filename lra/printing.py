"""Tables as the command line prints them."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.table import Column, Table
from rich.text import Text

from lra.terminal import Bold, Terminal, make_visible

# a pipe has no width, so nothing is cut or folded there; what is printed may contain [brackets]
console = Terminal(soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 1000)


def print_rows(title: str, header: list[str], rows: list[list[str]]) -> None:
    table = Table(*header, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(Text(make_visible(cell), "bold") if isinstance(cell, Bold) else cell for cell in row))
    console.print(table)


def print_measured(tables: Any, lines: list[str], wrong: bool = False) -> None:
    """Exit code 1 if something was wrong, or failed."""
    for table in tables:
        print_rows(*table)
    for line in lines:
        console.print(line)
    if wrong:
        raise typer.Exit(1)


def print_catalogue(registry: Any, facts: tuple[str, ...]) -> None:
    """A row for each component; a narrow terminal folds what it is."""
    columns = (Column(header.replace("_", " "), no_wrap=True) for header in (registry.kind, *facts))
    table = Table(*columns, "what")
    for entry in registry.catalogue().values():
        cells = (_format_fact(getattr(registry.facts_of(entry), fact)) for fact in facts)
        missing = f"Needs {', '.join(entry.missing)}. " if entry.missing else ""
        table.add_row(entry.name, *cells, (missing + entry.summary).strip())
    console.print(table, soft_wrap=False)


def _format_fact(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "-".join(map(str, value)) if isinstance(value, tuple) else str(value)


def print_scores(result: dict[str, Any]) -> None:
    baselines = result["test"]["baselines"]
    of = {None: "sequences", "masked": "hidden tokens", "causal": "next tokens"}[result.get("pretrain")]
    table = Table("test set", "accuracy", "95% bound", of, *(f"baseline: {name}" for name in baselines))
    for name, score in result.items():
        if isinstance(score, dict) and "plus_minus" in score:
            bound, beside = f"± {100 * score['plus_minus']:.2f}", map(_percent, score["baselines"].values())
            table.add_row(name, _percent(score["accuracy"]), bound, f"{score['n']:,}", *beside)
    console.print(table)
    name, best = max(baselines.items(), key=lambda baseline: baseline[1])
    console.print(f"test accuracy {_percent(result['test']['accuracy'])}, strongest baseline {name} {_percent(best)}")


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"
