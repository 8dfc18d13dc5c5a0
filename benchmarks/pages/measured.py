"""What was measured, as pages show it: files found by a pattern, links to them, tables in Markdown."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lra import environment
from lra.experiments.results.card import markdown_table
from lra.training.run_files import has_clean_commits

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"  # results/ and studies/
RUNS = BENCHMARKS / "results" / "runs"

Measured = tuple[Path, dict[str, Any]]  # a JSON file, its path from BENCHMARKS on, and its content


def read(root: Path, pattern: str) -> list[Measured]:
    """The JSON files below `root` that match, by name and then by folder."""
    files = sorted(root.glob(pattern), key=lambda file: (file.name, file))
    return [(file.relative_to(root), json.loads(file.read_text(encoding="utf-8"))) for file in files]


def link(text: str, file: Path) -> str:
    """In Markdown, to a file of `read`, with its mark; seen from the repository's top."""
    return f"[{text}]({BENCHMARKS.name}/{file.as_posix()}){mark_of(file)}"


@functools.cache
def mark_of(file: Path) -> str:
    """The mark of what a file of `read` holds; empty if all of it is of clean commits."""
    path = BENCHMARKS / file
    return mark(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else ""


def mark(measured: Any) -> str:
    """The mark of a measurement or a run's result; empty if every commit that it states, in any part, is clean."""
    known = all(map(environment.is_clean_commit, _commits(measured)))
    return "" if known and ("provenance" not in measured or has_clean_commits(measured)) else environment.UNCLEAN_MARK


def _commits(content: Any) -> Iterator[str | None]:
    """What each part of a measurement states as its commit."""
    parts = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, part in parts:
        if key in ("environment", "made"):
            yield part.get("commit")
        else:
            yield from _commits(part)


def place(gpu: str | None) -> str:
    """The folder of what was measured on a GPU of this name: h100 of `NVIDIA H100 80GB HBM3`; cpu without one."""
    model = re.search(r"\b[A-Z]+\d+\b", gpu or "")
    return model[0].lower() if model else "cpu"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, with a footnote if something in it is marked."""
    made = bare_table(header, rows)
    note = f"\n\n{environment.UNCLEAN_MARK} {environment.UNCLEAN_NOTE}."
    return made + note if environment.UNCLEAN_MARK in made else made


def bare_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, of a table whose title says what a mark means."""
    return markdown_table(header, rows)


def from_docs(text: str) -> str:
    """A text whose links are seen from the top, as a page of docs has it."""
    return text.replace(f"]({BENCHMARKS.name}/", f"](../{BENCHMARKS.name}/")
