"""Makes README.md's table and figure, the pages of docs, the cards of released weights and the list of runs: make docs.

    python -m benchmarks.pages [--check]

With --check nothing is written. The exit code is then 1 if a page is not what would be made now.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.command import command
from benchmarks.pages import (
    ablation,
    attentions,
    cards,
    fields,
    fig3,
    headline,
    measured,
    pictures,
    readme,
    runs,
    sota,
    tables,
    training,
    tutorial,
)

MAKERS = (ablation, attentions, cards, fields, fig3, headline, pictures, readme, runs, sota, tables, training, tutorial)


def pages() -> dict[Path, str]:
    """The text of every page, by its file."""
    return {path: text for maker in MAKERS for path, text in maker.make().items()}


def stale(made: Mapping[Path, str]) -> list[Path]:
    """The files that are missing or hold another text."""
    return [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]


@command
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pages", description="Make the pages that are generated."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if a page is stale")
    check = parser.parse_args(arguments).check
    made = pages()
    found = stale(made)
    for path in found:
        if check:
            print(f"{path.relative_to(measured.ROOT)} is stale: run make docs", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(made[path], encoding="utf-8")
    return int(check and bool(found))


if __name__ == "__main__":
    sys.exit(main())
