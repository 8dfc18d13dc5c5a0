"""Makes the tables of README.md and two pages of docs from lra's registries and the measurements in benchmarks/results.

    python -m benchmarks.readme [--check]

A table stands between `<!-- made by benchmarks/readme.py: NAME -->` and `<!-- end -->`. A measurement is a JSON file:
`<what>-exactness.json`, `<what>-learnability.json`, `<what>-prepare.json` or `<what>-randomness.json` of the program
of that name here, `<what>-profile.json` of counters.py, or `<what>-attention.json`, `<what>-butterfly-attention.json`
(what is block-sparse) or `<what>-io.json` of `lra bench`. docs/table3.md and docs/table6.md, made before, have the
accuracies.
With --check nothing is written, and the exit code is 1 if one of them is not what would be.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import pages
from benchmarks.kernel_tables import choices, exactness, memory, profile, randomness, short, sparse, speed, traffic
from benchmarks.pages import read, table
from lra.config.recipes import read_recipe, recipes
from lra.config.registry import Registry
from lra.experiments import grid
from lra.experiments import speed as step_speed
from lra.experiments.reproduction import number
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS

DOCUMENTS = [pages.ROOT / name for name in ("README.md", "docs/kernels.md", "docs/pathfinder.md")]
BLOCK = re.compile(r"(<!-- made by benchmarks/readme\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Sequence[str]


def tasks(_: Path) -> str:
    def row(name: str, facts: dict[str, Any], what: str) -> Row:
        covered = [recipe for recipe in recipes() if name in read_recipe(recipe)["tasks"]]
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
        section, stated = _section(name), grid.read(name)
        header, _, *accuracies = re.findall(r"^\|.*$", section.partition("\n**difference")[0], re.MULTILINE)
        place = _cells(header).index(column)
        ours = {row[0]: row[place] for row in map(_cells, accuracies)}
        shown = stated.averaged(_cells(header))
        row = [what]
        for attn in ("flash", "butterfly"):
            paper = stated.average(attn, shown) if column == "average" else stated.figure(attn, column)
            row += [ours[attn], number(paper)]
        rows.append(row)
    return table(("test accuracy, % (seeds)", "`flash`", "paper", "`butterfly`", "paper"), rows)


def table3(_: Path) -> str:
    return _accuracies("table3")


def table6(_: Path) -> str:
    return _accuracies("table6")


def _section(name: str) -> str:
    """What docs/<name>.md has on the recipe that goes furthest."""
    section = (pages.ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8").partition("## Recipe `curriculum`")[2]
    if "\n|" not in section:
        raise ValueError(f"docs/{name}.md has no table of recipe `curriculum`: python -m benchmarks.tables")
    return section.partition("\n## ")[0]


def _cells(line: str) -> list[str]:
    """Of a table's line in Markdown."""
    return [cell.strip() for cell in line.strip("|").split("|")]


def _accuracies(name: str) -> str:
    """The first table of its page, how long its runs took, and how long they take alone."""
    section = _section(name)
    parts = (r"\n(\|.*?)\n\n", r"- hardware: ([^\n]*)")
    rows, hardware = (found[1] if (found := re.search(part, section, re.DOTALL)) else "" for part in parts)
    hours = "; ".join(re.findall(r"^- ([\d.]+(?: to [\d.]+)? GPU-hours [^\n]*)", section, re.MULTILINE))
    return f"{rows}\n\nRecipe `curriculum`, {hardware}: {hours}."


def speedup(results: Path) -> str:
    """Steps per second as a multiple of those of standard attention, each cell alone on the GPU."""
    path, stated = results / "table3-curriculum-speed.json", grid.read("table3")
    measured = step_speed.read(path)
    speeds, columns = step_speed.Speeds(measured["cells"]), measured["options"]["tasks"]
    averaged = stated.together(columns)

    def row(attn: str, way: str) -> Row:
        ratios = (speeds.ratio(column, attn, way) for column in columns)
        shown = ("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)
        paper = number(stated.figure(attn, "speedup")) if way == "attention" else ""
        return (
            f"`{attn}`", f"{way}: {step_speed.WAYS[way].about}", *shown,
            step_speed.mean_ratio(speeds.ratios(averaged, attn, way)), paper,
        )  # fmt: skip

    attns = [name for name in measured["options"]["attns"] if name != step_speed.STANDARD]
    rows = [row(attn, way) for attn in attns for way in step_speed.WAYS]
    source = f"[{path.name}](benchmarks/results/{path.name}), {step_speed.hardware_of(measured)}"
    return table(("attention", "way", *columns, "geometric mean", "paper"), rows) + f"\n\n{source}."


def learnability(results: Path) -> str:
    rows = []
    for file, result in read(results, "-learnability"):
        rows.append((
            f"[{result['task']}](benchmarks/results/{file.name})",
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


def prepare(results: Path) -> str:
    rows = [
        (
            f"[{store['task']}](benchmarks/results/{file.name})",
            " ".join(f"`{field}`" for field in store["fields"]),
            f"{store['examples']:,}",
            f"{store['bytes'] / 1e9:.2f} GB",
            f"{store['prepare_seconds']:.0f} s",
            f"{store['verify_seconds']:.0f} s",
            str(result["cores"]),
        )
        for file, result in read(results, "-prepare")
        for store in result["stores"]
    ]
    return table(("task", "fields", "examples", "size", "prepare", "verify", "CPU cores"), rows)


MADE: dict[str, Callable[[Path], str]] = {
    f.__name__: f
    for f in (
        tasks,
        attentions,
        headline,
        table3,
        table6,
        speedup,
        speed,
        sparse,
        short,
        profile,
        memory,
        traffic,
        learnability,
        prepare,
        exactness,
        randomness,
        choices,
    )
}


def make(results: Path = pages.RESULTS) -> dict[Path, str]:
    """The documents with every block made anew; ValueError if a block is missing, unknown or there twice."""
    texts = {path: path.read_text(encoding="utf-8") for path in DOCUMENTS}
    names = [match[2] for text in texts.values() for match in BLOCK.finditer(text)]
    if sorted(names) != sorted(MADE):
        raise ValueError(f"the documents have the blocks {', '.join(names)}, not {', '.join(MADE)}")

    def filled(path: Path, block: re.Match[str]) -> str:
        root = "" if path.parent == pages.ROOT else "../"
        return f"{block[1]}{MADE[block[2]](results).replace('](benchmarks/', f']({root}benchmarks/')}\n{block[3]}"

    return {path: BLOCK.sub(functools.partial(filled, path), text) for path, text in texts.items()}


def _catalogue(registry: Registry) -> Iterable[tuple[str, dict[str, Any], str]]:
    for entry in registry.builtins().values():
        yield entry.name, vars(registry.declared(entry)), entry.summary.rstrip(".")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(pages.main(make))
