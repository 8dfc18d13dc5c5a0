"""Which results of a report are not of one code: notes on them, and the cells whose figures have a mark for it."""

from __future__ import annotations

from collections.abc import Iterator

from lra.experiments.grid.grid import Cell
from lra.experiments.results.ledger import Ledger
from lra.training.run_files import stated_code

UNLIKE_NOTE = ", or runs differ in code"  # the mark's meaning, where there is such a note

UnlikeNote = tuple[str, list[Cell]]  # and the cells that it is about


def unlike_code(found: Ledger) -> Iterator[UnlikeNote]:
    """Notes where the seeds of a column and attention, with the runs before them, state different code outside lra.

    A run that states none, as of an older lra, differs from no other.
    """
    stated: dict[tuple[str, str, str], dict[str, list[Cell]]] = {}
    for cell, entry in found.entries.items():
        if entry.result["status"] == "finished":
            for name, digest in stated_code(entry.result):
                stated.setdefault((cell.column, cell.attn, name), {}).setdefault(digest, []).append(cell)
    for (column, attn, name), cells in stated.items():
        if len(cells) > 1:
            parts = (f"{digest}: {', '.join(f's{cell.seed}' for cell in its)}" for digest, its in cells.items())
            note = f"{column} {attn}: seeds of different code are pooled ({name} {'; '.join(parts)})"
            yield note, [cell for its in cells.values() for cell in its]
