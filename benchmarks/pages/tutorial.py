"""docs/tutorial.ipynb, the notebook of docs/tutorial.md: its text, its commands and its files as cells."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
from markdown_it import MarkdownIt
from nbformat import v4

from benchmarks.pages import measured

SOURCE, PAGE = measured.ROOT / "docs" / "tutorial.md", measured.ROOT / "docs" / "tutorial.ipynb"
# A notebook runs in its own folder; commands and files of the tutorial are those of the clone.
FIRST = "import os\nfrom pathlib import Path\n\nimport lra\n\nos.chdir(Path(lra.__file__).parents[1])"
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def make() -> dict[Path, str]:
    return {PAGE: notebook(SOURCE.read_text(encoding="utf-8"))}


def notebook(text: str) -> str:
    """The notebook of a Markdown page. A block of code with a title is written to the file of that name."""
    lines, cells, done = text.splitlines(), [v4.new_code_cell(FIRST)], 0
    for block in MarkdownIt().parse(text):
        if block.type == "fence" and not block.level and block.map:
            first, last = block.map
            cells += [_prose(lines[done:first]), v4.new_code_cell(_heading(block.info) + block.content.rstrip())]
            done = last
    cells = [cell for cell in (*cells, _prose(lines[done:])) if cell.source]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # else drawn at random
    made = v4.new_notebook(cells=cells, metadata=KERNEL)
    nbformat.validate(made)
    return nbformat.writes(made, indent=1) + "\n"


def _prose(lines: list[str]) -> nbformat.NotebookNode:
    return v4.new_markdown_cell("\n".join(lines).strip())


def _heading(info: str) -> str:
    """The first line of a cell, from what stands behind a block's fence."""
    if title := re.search(r'title="(.+)"', info):
        return f"%%writefile {title[1]}\n"
    return {"python": "", "sh": "%%sh -e\n"}[info]
