"""What a user sees while data is prepared: a bar in a terminal, one line elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rich import progress
from rich.console import Console


@contextmanager
def show_preparation(task: str, source: str, params: Mapping[str, Any]) -> Iterator[Callable[[int], None]]:
    """Yields a function that counts the examples that are written. The total is known of generated data."""
    console = Console(highlight=False, soft_wrap=True, markup=False)
    generated = source == "generated"
    sizes = [params.get(name) for name in ("train", "val", "test", "fresh")] if generated else []
    total = sum(size for size in sizes if isinstance(size, int)) or None
    what = f"generating {total:,} examples" if total else "generating" if generated else f"reading {source}"
    console.print(f"preparing {task}: {what} …")
    if not console.is_terminal:
        yield lambda count: None
        return
    columns = progress.BarColumn(), progress.MofNCompleteColumn(), progress.TimeElapsedColumn()
    with progress.Progress(*columns, progress.TimeRemainingColumn(), console=console, transient=True) as bar:
        examples = bar.add_task(task, total=total)
        yield lambda count: bar.advance(examples, count)
