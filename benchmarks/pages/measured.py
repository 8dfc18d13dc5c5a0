"""Pages of docs/ that programs of this folder make, and the check that they are what would be made now."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

Measured = tuple[Path, dict[str, Any]]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def read(results: Path, ending: str) -> list[Measured]:
    """The files whose name ends so, before `.json`, and what they hold; `*` stands for anything."""
    files = sorted(results.glob(f"[!.]*{ending}.json"))
    return [(file, json.loads(file.read_text(encoding="utf-8"))) for file in files]


def main(make: Callable[[], Mapping[Path, str]], arguments: Sequence[str] | None = None) -> int:
    """Writes the files of `make` that differ; with `--check` nothing, and the exit code is 1 if there are any."""
    parser = argparse.ArgumentParser(description="Make pages of docs.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is stale")
    check = parser.parse_args(arguments).check
    made = make()
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        print(f"{stale[0].parent.name}/{stale[0].name} is stale: run make docs", file=sys.stderr)
        return 1
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(made[path], encoding="utf-8")
    return 0
