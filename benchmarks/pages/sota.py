"""Makes docs/sota.md from all runs in benchmarks: what `lra report sota` shows, also where nothing ran."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import measured, tables
from lra.experiments.grid import grid

PAGE = measured.ROOT / "docs" / "sota.md"
NAME = "sota"
HEAD = (
    "# A plain Transformer beside the state of the art\n\n"
    "<!-- made by benchmarks/pages/sota.py of benchmarks/results: make docs -->\n\n"
    "{about}. `lra reproduce {name}` runs the cells, `lra reproduce {name} --dry-run` says what is left and how long "
    "it takes, and `lra report {name}` makes these tables. A cell that was not run is empty. "
    "[results.md](results.md#how-to-read-an-accuracy) says how to read them, and what the two leagues allow. "
    "Published models lie below ours, each with its league and its paper; where a paper has no such figure, the cell "
    "is empty.\n\n"
    "- `text` chooses its checkpoint on a tenth of train that is held out. `text-lra` chooses it on the test set, as "
    "LRA's own code does, and published figures are of that.\n"
    "- The strict league allows neither what `image-open` has, augmented images, nor what `pathfinder-open` has: more "
    "and easier images, two axes of positions, mirrored images.\n"
    "- `scisumm` is a small set of 20,458 pairs of papers (`dataset=scisumm`), not LRA's Retrieval. Its figures can't "
    "be compared with published ones, which are of LRA's 147,086 training pairs: the column `retrieval`.\n"
    "- {means}."
)


def page() -> str:
    table = grid.read_grid(NAME)
    about = table.about[0].upper() + table.about[1:]
    means = "; ".join(f"`{name}` is of {', '.join(f'`{c}`' for c in of)}" for name, of in table.means.items())
    made = tables.reported(NAME, f"tasks={','.join(table.columns)}")
    parts = [HEAD.format(about=about, name=NAME, means=means), tables.caveats(NAME), *tables.markdown(made)]
    return "\n\n".join(parts) + "\n"


def make() -> dict[Path, str]:
    return {PAGE: measured.from_docs(page())}
