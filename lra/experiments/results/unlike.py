"""Which results of a report are not of one code or one data: notes on them, and the cells that have a mark for it.

A result that does not state its code or its data, as of an older lra, differs from no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from lra.experiments.grid.grid import Cell
from lra.experiments.results.ledger import Ledger
from lra.training.run_files import as_mapping, stated_code

UNLIKE_NOTE = ", or runs differ in code or data"  # the mark's meaning, where there is such a note

UnlikeNote = tuple[str, list[Cell]]  # and the cells that it is about
Stated = tuple[tuple[str, ...], str, Cell]  # of what, the digest, by which cell


def unlike_code(found: Ledger) -> Iterator[UnlikeNote]:
    """Notes where the seeds of a column and attention, with the runs before them, state different code outside lra."""
    stated = (
        ((cell.column, cell.attn, name), digest, cell)
        for cell, entry in found.finished.items()
        for name, digest in stated_code(entry.result)
    )
    for (column, attn, name), cells in _differing(stated):
        parts = (f"{digest}: {', '.join(f's{cell.seed}' for cell in its)}" for digest, its in cells.items())
        note = f"{column} {attn}: seeds of different code are pooled ({name} {'; '.join(parts)})"
        yield note, [cell for its in cells.values() for cell in its]


def unlike_data(found: Ledger) -> Iterator[UnlikeNote]:
    """Notes where the runs of a column, with those before them, state different data of one store."""
    for (column, store), cells in _differing(_stated_data(found)):
        parts = (f"{digest}: {', '.join(f'{c.attn} s{c.seed}' for c in its)}" for digest, its in cells.items())
        note = f"{column}: runs on different data are compared ({store} {'; '.join(parts)})"
        yield note, [cell for its in cells.values() for cell in its]


def _stated_data(found: Ledger) -> Iterator[Stated]:
    for cell, entry in found.finished.items():
        for run in (*found.runs_before(entry), entry):
            data = as_mapping(run.result.get("data")) if run else {}
            if isinstance(digest := data.get("digest"), str):
                yield (cell.column, str(data.get("store"))), digest, cell


def _differing(stated: Iterable[Stated]) -> Iterator[tuple[tuple[str, ...], dict[str, dict[Cell, None]]]]:
    """Of what several digests are stated, and the cells of each digest."""
    found: dict[tuple[str, ...], dict[str, dict[Cell, None]]] = {}
    for what, digest, cell in stated:
        found.setdefault(what, {}).setdefault(digest, {})[cell] = None
    yield from ((what, cells) for what, cells in found.items() if len(cells) > 1)
