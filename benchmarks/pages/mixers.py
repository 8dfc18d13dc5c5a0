"""The tables of docs/mixers.md, of results/step and results/runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.pages.measured import link, read, table

SHOWN = ("flash", "s4d", "gla")
LONG = {  # what `attn=` and options choose, and how its files end
    "`flash`": "flash-beside-mixers", "`s4d`": "s4d", "`mega`": "mega", "`mega`, `attn.value_dim=128`": "mega-value128",
}  # fmt: skip
STEPS = {"flash": "image-flash-beside-mixers", "s4d": "image-s4d", "gla": "image-gla"}  # measured one after the other


def mixers(root: Path) -> str:
    """Speed and memory of a captured step of Image, and test accuracies of the runs that were made."""
    rows = []
    for name in SHOWN:
        ((file, result),) = read(root, f"results/step/h200/{STEPS[name]}.json")
        (loop,) = result["loops"]
        rows.append((
            link(f"`{name}`", file), _ms(loop), f"{loop['tokens_per_second'] / 1e6:.1f}", _memory(loop),
            _accuracy(root, "listops", name), _accuracy(root, "image", name),
        ))  # fmt: skip
    header = (
        "`attn=`", "ms of a step", "million tokens a second", "memory", "ListOps, 5,000 steps, %",
        "Image, 3,500 steps, %",
    )  # fmt: skip
    return table(header, rows)


def long_mixers(root: Path) -> str:
    """Speed and memory of a captured step of models 128 wide, for two lengths."""
    rows = []
    for name, file in LONG.items():
        row = [name]
        for task in ("pathfinder", "pathx"):
            cells = ["", ""]
            for path, result in read(root, f"results/step/h200/{task}-{file}.json"):
                (loop,) = result["loops"]
                cells = [link(_ms(loop), path), _memory(loop)]
            row += cells
        rows.append(row)
    return table(("`attn=`", "ms, N = 1,024", "memory", "ms, N = 16,384", "memory"), rows)


def _ms(loop: dict[str, Any]) -> str:
    return f"{loop['ms']:.2f}"


def _memory(loop: dict[str, Any]) -> str:
    return f"{loop['memory_mb'] / 1e3:.1f} GB"


def _accuracy(root: Path, task: str, name: str) -> str:
    """Accuracy on the test set that has most examples, with the bound from sampling; empty without a run."""
    steps = {"listops": 5000, "image": 3500}[task]
    found = [
        (file, result)
        for file, result in read(root, f"results/runs/{task}/{name}/xiong2021*-s0/result.json")
        if result["config"]["trainer"]["steps"] == steps
    ]
    if not found:
        return ""
    ((file, result),) = found
    scored = result.get("fresh") or result["test"]
    return link(f"{100 * scored['accuracy']:.1f} ± {100 * scored['plus_minus']:.1f}", file)
