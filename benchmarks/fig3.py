"""Makes docs/fig3.md and its figures of what `lra reproduce fig3` measured, benchmarks/results/fig3: make docs.

    python -m benchmarks.fig3 [--check]

With --check nothing is written, and the exit code is 1 if the page or a figure is not what would be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lra.bench import plots
from lra.experiments import fig3

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "fig3"
PAGE, FIGURES = ROOT / "docs" / "fig3.md", ROOT / "docs" / "fig3"
# the paper's Figure 3: runtime of both passes with dropout and mask, and memory
DRAWN = (("dropout-mask", "runtime"), ("plain", "runtime"), ("plain", "memory"))


def page(records: fig3.Records, made_with: dict[str, Any]) -> str:
    """The whole text."""
    versions = made_with["versions"]
    return "\n\n".join([
        "# Figure 3 and Tables 9 to 21: runtime and memory of all attentions",
        "<!-- made by benchmarks/fig3.py of benchmarks/results/fig3: make docs -->",
        "Setting of FlashAttention's appendix E.6 (arXiv 2205.14135): batch 16, 8 heads, head dimension 64, N from 128 "
        "to 65,536; approximate methods at a compression to N / 8 keys, at most 256 (`Attention.budget`; the options "
        "are in the files). bf16, where the paper has fp16. *mask*: each sequence is up to 20 tokens shorter than N. "
        f"{made_with['gpu']}, PyTorch {versions['torch']}, Triton {versions['triton']}, {made_with['date'][:10]}; "
        "measured by `lra reproduce fig3`. An empty cell was not measured, OOM did not fit. Each method was "
        "checked before it was timed: exact ones and patterns against the reference, the others for finite results.",
        f"**{fig3.verdict(records)}.**",
        *(f"![{setting}, {what}]({FIGURES.name}/{_figure(setting, what)})" for setting, what in DRAWN),
        *(_table(*rows) for rows in (fig3.fastest(records), *fig3.numbered(records))),
    ]) + "\n"  # fmt: skip


def figures(records: fig3.Records) -> dict[str, str]:
    """The text of each figure by its file's name."""
    made = {}
    for setting, what in DRAWN:
        chosen = [r for r in records if fig3.setting_of(r) == setting and r["pass"] == "both"]
        with tempfile.TemporaryDirectory() as folder:
            (path,) = (path for path in plots.draw(chosen, Path(folder)) if path.name.startswith(what))
            made[_figure(setting, what)] = path.read_text(encoding="utf-8")
    return made


def _figure(setting: str, what: str) -> str:
    return f"{what}-{setting}.svg"


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table without the columns that are the same everywhere."""
    shown = [i for i, name in enumerate(header) if header[0] != "dtype" or i > 4 or name == "N"]
    lines = [[line[i] for i in shown] for line in (header, ["---"] * len(header), *rows)]
    return "\n".join([f"## {title[0].upper()}{title[1:]}", "", *(f"| {' | '.join(line)} |" for line in lines)])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make docs/fig3.md and its figures.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something is stale")
    check = parser.parse_args(arguments).check
    results = [json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in fig3.SETTINGS]
    records = [record for result in results for record in result["cells"]]
    made = {PAGE: page(records, results[0]["environment"])}
    made |= {FIGURES / name: text for name, text in figures(records).items()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        print(f"{stale[0].relative_to(ROOT)} is stale: run make docs", file=sys.stderr)
        return 1
    for path in () if check else stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(made[path], encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
