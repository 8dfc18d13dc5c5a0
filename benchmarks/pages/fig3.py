"""docs/fig3.md and its figures, of what `lra reproduce fig3` measured on one GPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages.measured import BENCHMARKS, ROOT, bare_table
from lra.bench import plots
from lra.bench.records import AttentionMeasurement, read_measurements
from lra.experiments import fig3

RESULTS = BENCHMARKS / "results" / "fig3" / "h200"
PAGE, FIGURES = ROOT / "docs" / "fig3.md", ROOT / "docs" / "fig3"
# the paper's Figure 3: runtime of both passes with dropout and mask, and memory
DRAWN = (("dropout-mask", "runtime"), ("plain", "runtime"), ("plain", "memory"))


def page(records: Sequence[AttentionMeasurement], made_with: dict[str, Any]) -> str:
    """The whole text."""
    versions = made_with["versions"]
    return "\n\n".join([
        "# Figure 3 and Tables 9 to 21: runtime and memory of all attentions",
        "<!-- made by benchmarks/pages/fig3.py of benchmarks/results/fig3: make docs -->",
        "The setting is that of FlashAttention's appendix E.6 (arXiv 2205.14135): batch 16, 8 heads, head dimension "
        "64, N from 128 to 65,536. The dtype is bf16, where the paper has fp16. Approximate methods see N / 8 keys, at "
        "most 256; the files have their options. `openai_sparse` also sees the ends of segments, which are N / 8 keys "
        "more. *mask*: each sequence is up to 20 tokens shorter than N.",
        f"`lra reproduce fig3` measured it on {made_with['gpu']}, PyTorch {versions['torch']}, Triton "
        f"{versions['triton']}, {made_with['date'][:10]}. An empty cell was not measured, OOM did not fit. Each method "
        "was checked before it was timed: exact ones and patterns against the reference, the others for finite "
        "results.",
        "Two things would be measured otherwise today, and were not measured again. Up to N = 512 the time of an "
        "attention that consists of many small kernels includes launches. The backward passes of `linformer` and "
        "`lsformer` lack the gradients of their own parameters.",
        f"**{fig3.compare_with_claim(records)}.**",
        *(f"![{setting}, {what}]({FIGURES.name}/{_figure(setting, what)})" for setting, what in DRAWN),
        *(_table(*rows) for rows in (fig3.fastest_table(records), *fig3.paper_tables(records))),
    ]) + "\n"  # fmt: skip


def figures(records: Sequence[AttentionMeasurement]) -> dict[str, str]:
    """The text of each figure by its file's name."""
    made = {}
    for setting, what in DRAWN:
        chosen = [r for r in records if fig3.setting_of(r) == setting and r.pass_name == "both"]
        drawn = plots.make_figures(chosen)
        made[_figure(setting, what)] = next(text for name, text in drawn.items() if name.startswith(what))
    return made


def _figure(setting: str, what: str) -> str:
    return f"{what}-{setting}.svg"


def _table(title: str, header: list[str], rows: list[list[str]]) -> str:
    """A table without the columns that are the same everywhere."""
    shown = [i for i, name in enumerate(header) if header[0] != "dtype" or i > 4 or name == "N"]
    kept, *lines = ([line[i] for i in shown] for line in (header, *rows))
    return f"## {title[0].upper()}{title[1:]}\n\n{bare_table(kept, lines)}"


def make() -> dict[Path, str]:
    """The text of each file."""
    parts = [read_measurements(RESULTS / f"{name}.json", AttentionMeasurement) for name in fig3.SETTINGS]
    records = [record for part in parts for record in part.cells]
    drawn = {FIGURES / name: text for name, text in figures(records).items()}
    return {PAGE: page(records, parts[0].environment)} | drawn
