"""Makes the tables of README.md and two pages of docs from lra's registries and the measurements in benchmarks/results.

    python -m benchmarks.readme [--check]

A table stands between `<!-- made by benchmarks/readme.py: NAME -->` and `<!-- end -->`. A measurement is a JSON file:
`<what>-exactness.json`, `<what>-learnability.json` or `<what>-prepare.json` of the program of that name here,
`<what>-profile.json` of counters.py, or `<what>-attention.json`, `<what>-butterfly-attention.json` (what is
block-sparse) or `<what>-io.json` of `lra bench`. docs/table3.md and docs/table6.md, made before, have the accuracies.
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
from benchmarks.kernel_tables import exactness, memory, profile, short, sparse, speed, traffic
from benchmarks.pages import read, table
from lra.config.compose import read_recipe, recipes
from lra.config.registry import Registry
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
    """Exact and block-sparse FlashAttention where the paper has both, or where nobody else has one."""
    average, larger = _section("table3"), _section("table6")
    rows = []
    for what, section, column in (
        ("mean of ListOps, Text, Image and Pathfinder", average, "average"),
        ("Path-X: 16,384 pixels", larger, "pathx"),
        ("Path-256: 65,536 pixels", larger, "path256"),
    ):
        cells = (_cell(section, number, attn, column) for attn in ("flash", "butterfly") for number in (0, 1))
        rows.append((what, *(cell.rpartition("(")[2].rstrip(")") if i % 2 else cell for i, cell in enumerate(cells))))
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


def _cell(section: str, number: int, attn: str, column: str) -> str:
    """A cell of the table of this number: 0 has accuracies, 1 differences to the paper's."""
    header, _, *rows = re.findall(r"\n((?:\|[^\n]*\n)+)", section)[number].splitlines()
    row = next(row for row in rows if row.startswith(f"| {attn} |"))
    return row.split("|")[header.split("|").index(f" {column} ")].strip()


def _accuracies(name: str) -> str:
    """The first table of its page, and how long its runs took."""
    parts = (r"\n(\|.*?)\n\n", r"- hardware: ([^\n]*)", r"- ([\d.]+ GPU-hours [^\n]*)")
    found = (re.search(part, _section(name), re.DOTALL) for part in parts)
    rows, hardware, hours = (each[1] if each else "" for each in found)
    return f"{rows}\n\nRecipe `curriculum`, {hardware}: {hours}."


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
        speed,
        sparse,
        short,
        profile,
        memory,
        traffic,
        learnability,
        prepare,
        exactness,
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
        return f"{block[1]}{MADE[block[2]](results).replace('](', f']({root}')}\n{block[3]}"

    return {path: BLOCK.sub(functools.partial(filled, path), text) for path, text in texts.items()}


def _catalogue(registry: Registry) -> Iterable[tuple[str, dict[str, Any], str]]:
    for entry in registry.builtins().values():
        yield entry.name, vars(registry.declared(entry)), entry.summary.rstrip(".")


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    sys.exit(pages.main(make))
