"""What was measured, as pages show it: files found by a pattern, links to them, tables in Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"  # results/ and studies/
RUNS = BENCHMARKS / "results" / "runs"

Measured = tuple[Path, dict[str, Any]]  # a JSON file, its path from BENCHMARKS on, and its content


def read(root: Path, pattern: str) -> list[Measured]:
    """The JSON files below `root` that match, by name and then by folder."""
    files = sorted(root.glob(pattern), key=lambda file: (file.name, file))
    return [(file.relative_to(root), json.loads(file.read_text(encoding="utf-8"))) for file in files]


def link(text: str, file: Path) -> str:
    """In Markdown, to a file of `read`; seen from the repository's top."""
    return f"[{text}]({BENCHMARKS.name}/{file.as_posix()})"


def place(gpu: str | None) -> str:
    """The folder of what was measured on a GPU of this name: h100 of `NVIDIA H100 80GB HBM3`; cpu without one."""
    model = re.search(r"\b[A-Z]+\d+\b", gpu or "")
    return model[0].lower() if model else "cpu"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def from_docs(text: str) -> str:
    """A text whose links are seen from the top, as a page of docs has it."""
    return text.replace(f"]({BENCHMARKS.name}/", f"](../{BENCHMARKS.name}/")
