"""The tables of README.md and of two pages of docs, of lra's registries and of what was measured.

A table stands between `<!-- made by benchmarks/pages/readme.py: NAME -->` and `<!-- end -->`. Each function makes the
table of its name; it is given the folder that has results/ and studies/.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import measured
from benchmarks.pages.kernels import (
    choices,
    exactness,
    memory,
    profile,
    randomness,
    short,
    sparse,
    speed,
    traffic,
    turns,
)
from benchmarks.pages.measured import from_docs, link, read, table
from benchmarks.pages.tables import sections
from lra.config.recipes import read_recipe, recipe_names
from lra.config.registry import Registry
from lra.experiments import speed as step_speed
from lra.experiments.grid import grid
from lra.experiments.reproduction import format_tenth
from lra.experiments.results.ledger import finished_hardware
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS

DOCUMENTS = [measured.ROOT / name for name in ("README.md", "docs/kernels.md", "docs/pathfinder.md")]
BLOCK = re.compile(r"(<!-- made by benchmarks/pages/readme\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

RECIPE = "curriculum"  # whose accuracies are shown: the one that goes furthest

Row = Sequence[str]


def tasks(_: Path) -> str:
    def row(name: str, facts: dict[str, Any], what: str) -> Row:
        covered = [recipe for recipe in recipe_names() if name in read_recipe(recipe)["tasks"]]
        version = f"`{name}@{facts['version']}`"
        return version, what, f"{facts['length']:,}", str(facts["classes"]), " ".join(covered), facts["paper"]

    header = ("task", "what", "longest", "classes", "recipes", "source")
    return table(header, (row(*entry) for entry in _catalogue(TASKS)))


def attentions(_: Path) -> str:
    def row(name: str, facts: dict[str, Any], what: str) -> Row:
        low, high = facts["head_dims"]
        return (
            f"`{name}`", what, _yes(facts["exact"]), _yes(facts["dropout"]), _yes(facts["ragged"]), f"{low} to {high}",
            facts["paper"],
        )  # fmt: skip

    header = ("attention", "what", "exact", "dropout", "ragged", "head dimension", "source")
    return table(header, (row(*entry) for entry in _catalogue(ATTENTIONS)))


def headline(_: Path) -> str:
    """Exact and block-sparse FlashAttention beside the paper's."""
    rows = []
    for what, name, column in (
        ("mean of ListOps, Text, Image and Pathfinder", "table3", "average"),
        ("Path-X: 16,384 pixels", "table6", "pathx"),
        ("Path-256: 65,536 pixels", "table6", "path256"),
    ):
        _title, header, accuracies = sections(name)[RECIPE].report.tables[0]
        place, stated = header.index(column), grid.read_grid(name)
        ours, shown = {row[0]: row[place] for row in accuracies}, stated.averaged(header)
        row = [what]
        for attn in ("flash", "butterfly"):
            paper = stated.average(attn, shown) if column == "average" else stated.figure(attn, column)
            row += [ours[attn], format_tenth(paper)]
        rows.append(row)
    return table(("test accuracy, % (seeds)", "`flash`", "paper", "`butterfly`", "paper"), rows)


def table3(_: Path) -> str:
    return _accuracies("table3")


def table6(_: Path) -> str:
    return _accuracies("table6")


def _accuracies(name: str) -> str:
    """The first table of its page, how long its runs took, and how long they take alone."""
    section = sections(name)[RECIPE]
    _title, header, rows = section.report.tables[0]
    hours = "; ".join(section.hours)
    return f"{table(header, rows)}\n\nRecipe `{RECIPE}`, {', '.join(finished_hardware(section.report.rows))}: {hours}."


def speedup(root: Path) -> str:
    """Steps per second as a multiple of those of standard attention, each cell alone on the GPU."""
    file, stated = Path("results/speed/h200/table3-curriculum.json"), grid.read_grid("table3")
    found = step_speed.read_speeds(root / file)
    speeds, columns = step_speed.Speeds(found.cells), found.options["tasks"]
    averaged = stated.together(columns)

    def row(attn: str, way: str) -> Row:
        ratios = (speeds.ratio(column, attn, way) for column in columns)
        shown = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        mean = step_speed.mean_ratio(speeds.ratios(averaged, attn, way))
        paper = format_tenth(stated.figure(attn, "speedup")) if way == "attention" else ""
        return (
            f"`{attn}`{measured.mark_of(file)}", f"{way}: {step_speed.WAYS[way].about}", *shown, mean, paper,
        )  # fmt: skip

    attns = [name for name in found.options["attns"] if name != step_speed.BASELINE]
    rows = [row(attn, way) for attn in attns for way in step_speed.WAYS]
    source = f"{link(file.name, file)}, {step_speed.hardware_of(found)}"
    return table(("attention", "way", *columns, "geometric mean", "paper"), rows) + f"\n\n{source}."


def learnability(root: Path) -> str:
    rows = []
    for file, result in read(root, "studies/learnability/*/*.json"):
        rows.append((
            link(result["task"], file),
            result["data"]["level"],
            f"{100 * result['accuracy']:.2f} of {result['n']:,}",
            f"{100 * result['curve'][-1]['train']:.2f}",
            f"{100 * max(result['baselines'].values()):.2f}",
            f"{result['steps']:,} of {result['batch']}",
            f"{result['train_seconds'] / 60:.1f} min",
            result["environment"]["gpu"] or "",
        ))  # fmt: skip
    header = ("task", "level", "test accuracy, %", "train accuracy, %", "baseline, %", "steps", "time", "GPU")
    return table(header, rows)


def prepare(root: Path) -> str:
    rows = [
        (
            link(store["task"], file),
            " ".join(f"`{field}`" for field in store["fields"]),
            f"{store['examples']:,}",
            f"{store['bytes'] / 1e9:.2f} GB",
            f"{store['prepare_seconds']:.0f} s",
            f"{store['verify_seconds']:.0f} s",
            str(result["cores"]),
        )
        for file, result in read(root, "studies/prepare/*/*.json")
        for store in result["stores"]
    ]
    return table(("task", "fields", "examples", "size", "prepare", "verify", "CPU cores"), rows)


MADE: dict[str, Callable[[Path], str]] = {
    function.__name__: function
    for function in (
        tasks, attentions, headline, table3, table6, speedup, speed, sparse, short, profile, memory, traffic, turns,
        learnability, prepare, exactness, randomness, choices,
    )
}  # fmt: skip


def make(root: Path = measured.BENCHMARKS) -> dict[Path, str]:
    """The documents with every block made anew; ValueError if a block is missing, unknown or there twice."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    names = [match[2] for text in texts.values() for match in BLOCK.finditer(text)]
    if sorted(names) != sorted(MADE):
        raise ValueError(f"the documents have the blocks {', '.join(names)}, not {', '.join(MADE)}")

    def filled(path: Path, block: re.Match[str]) -> str:
        made = MADE[block[2]](root)
        return f"{block[1]}{made if path.parent == measured.ROOT else from_docs(made)}\n{block[3]}"

    return {path: BLOCK.sub(functools.partial(filled, path), text) for path, text in texts.items()}


def _catalogue(registry: Registry) -> Iterable[tuple[str, dict[str, Any], str]]:
    for entry in registry.builtins().values():
        yield entry.name, vars(registry.facts_of(entry)), entry.summary.rstrip(".")


def _yes(value: bool) -> str:
    return "yes" if value else "no"
