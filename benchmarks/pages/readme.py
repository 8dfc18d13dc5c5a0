"""The tables within README.md and pages of docs, of lra's registry of tasks and of what was measured.

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
from benchmarks.pages.headline import headline
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
from benchmarks.pages.mixers import long_mixers, mixers
from benchmarks.pages.speeds import materialised, speedup
from benchmarks.pages.tables import OVERLAP, caveats, sections, with_seeds
from benchmarks.studies.plateau.settings import SETTINGS, file_name
from lra.config.recipes import recipes_of
from lra.config.registry import Registry
from lra.experiments.results.ledger import finished_hardware
from lra.tasks import TASKS

DOCUMENTS = [
    measured.ROOT / name
    for name in (
        "README.md",
        "docs/usage.md",
        "docs/results.md",
        "docs/kernels.md",
        "docs/mixers.md",
        "docs/pathfinder.md",
    )
]
RAN_BY_ALL = "curriculum"  # the recipe that every attention of the tables ran
BLOCK = re.compile(r"(<!-- made by benchmarks/pages/readme\.py: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)

Row = Sequence[str]


def tasks(_: Path) -> str:
    def row(name: str, facts: dict[str, Any], what: str) -> Row:
        version = f"`{name}@{facts['version']}`"
        return version, what, f"{facts['length']:,}", str(facts["classes"]), " ".join(recipes_of(name)), facts["paper"]

    header = ("task", "what", "longest", "classes", "recipes", "source")
    return table(header, (row(*entry) for entry in _catalogue(TASKS)))


def overlap(root: Path) -> str:
    rows = [
        (
            link(store["task"], file), " ".join(f"`{field}`" for field in store["fields"]),
            f"{store['in_train']:,}", f"{store['test']:,}",
        )
        for file, result in read(root, OVERLAP)
        for store in result["stores"]
    ]  # fmt: skip
    return table(("task", "fields", "test examples that are in train", "test examples"), rows)


def table3(_: Path) -> str:
    return _accuracies("table3")


def table6(_: Path) -> str:
    return _accuracies("table6")


def _accuracies(name: str) -> str:
    """The first table of a table's page, how long its runs took, and how long they take alone."""
    section = sections(name)[RAN_BY_ALL]
    header, rows = with_seeds(section.report)
    made = ", ".join(finished_hardware(section.report.rows))
    hours = "\n".join(f"- {each[0].upper()}{each[1:]}." for each in section.hours)
    return f"{caveats(name)}\n\n{table(header, rows)}\n\nRecipe `{RAN_BY_ALL}`, {made}.\n\n{hours}"


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


def plateau(root: Path) -> str:
    rows = []
    for name, setting in SETTINGS.items():
        found = read(root, f"studies/plateau/*/{file_name(name)}-s*.json")
        for file, result in sorted(found, key=lambda pair: pair[1]["seed"]):
            step, best = result["step"], max(point["accuracy"] for point in result["curve"])
            rows.append((
                name, link(str(result["seed"]), file), setting.why, f"{result['curve'][-1]['step']:,}",
                "never" if step is None else f"{step:,}", f"{100 * best:.1f}",
            ))  # fmt: skip
    return table(("setting", "seed", "what it is", "steps", "75% at step", "best of validation, %"), rows)


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
        headline, tasks, table3, table6, speedup, materialised, overlap, speed, sparse, short, profile, memory,
        traffic, turns, learnability, plateau, prepare, exactness, randomness, choices, mixers, long_mixers,
    )
}  # fmt: skip


def make(root: Path = measured.BENCHMARKS) -> dict[Path, str]:
    """The documents with every block made again; ValueError if a block is missing, unknown or there twice."""
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
