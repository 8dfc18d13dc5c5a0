"""A report as CSV, Markdown and LaTeX."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Sequence

from lra.environment import UNCLEAN_MARK
from lra.experiments.grid.grid import Grid
from lra.experiments.reproduction import TextTable
from lra.experiments.results.ledger import ReportRow
from lra.terminal import Bold


def format_csv(rows: Sequence[ReportRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in dataclasses.fields(ReportRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows([dataclasses.asdict(row) for row in rows])
    return text.getvalue()


def format_markdown(table: Grid, tables: Sequence[TextTable], notes: Sequence[str]) -> str:
    parts = [f"# {table.name}: {table.about} ({table.source})"]
    for title, header, rows in tables:
        lines = [header, ["---"] * len(header), *rows]
        cells = (map(_plain, line) for line in lines)
        parts.append(f"**{title}**\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in cells))
    return "\n\n".join([*parts, "\n".join(f"- {_plain(note)}" for note in notes)]) + "\n"


def format_latex(table: Grid, tables: Sequence[TextTable], notes: Sequence[str]) -> str:
    r"""Tables of LaTeX with the package booktabs; `\usepackage{booktabs}` in the preamble. The notes are comments."""
    parts = [
        f"% {table.name}: {table.about} ({table.source})",
        r"% needs \usepackage{booktabs}",
        *(f"% {_line(note)}" for note in notes),
    ]
    for title, header, rows in tables:
        lines = [r"\toprule", _tex(header), r"\midrule", *map(_tex, rows), r"\bottomrule"]
        begin = rf"\begin{{tabular}}{{l{'r' * (len(header) - 1)}}}"
        parts.append("\n".join([f"\n% {title}", begin, *lines, r"\end{tabular}"]))
    return "\n".join(parts) + "\n"


_TEX = {
    "\\": r"\textbackslash{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "≤": r"$\le$",
    "~": r"\textasciitilde{}",
    "^": r"\^{}",
}
_TEX |= {UNCLEAN_MARK: r"\dag{}"} | {character: f"\\{character}" for character in "&%$#_{}"}


def _tex(cells: Sequence[str]) -> str:
    texts = ("".join(_TEX.get(character, character) for character in _line(cell)) for cell in cells)
    bold = (rf"\textbf{{{text}}}" if isinstance(cell, Bold) else text for cell, text in zip(cells, texts, strict=True))
    return " & ".join(bold) + r" \\"


def _line(text: str) -> str:
    """On one line."""
    return " ".join(text.split())


def _plain(text: str) -> str:
    """The text on one line, as Markdown that is neither a table's edge nor HTML."""
    plain = _line(text).translate({ord(character): f"\\{character}" for character in "\\|<"})
    return f"**{plain}**" if isinstance(text, Bold) else plain
