"""Times the attention of several trees of this project in turns on one GPU.

    python -m benchmarks.studies.turns.study NAME=FOLDER … [--turns 8] [--seconds 0.1] [--cases …] [--out FILE]

A FOLDER is a checkout, such as one of `git worktree add`; its commit is a good NAME. Each tree has its own process.
Each case is timed by one tree after the other, forwards and backwards through the list. So the GPU's clock and heat are
the same for all. The file has every time. The output has medians, and by how many percent they exceed those of the
first tree.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.errors import UsageError

PASSES = "forward", "backward"


class Tree:
    """A process with one tree's kernels."""

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder.resolve()
        if not (self.folder / "lra" / "kernels").is_dir():
            raise UsageError(f"{name}={folder}: not a checkout of lra")
        paths = [str(self.folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("worker.py"))],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def tell(self, message: Any) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout
        if not (line := self.process.stdout.readline()):
            raise UsageError(f"the process of {self.name} ended; what it printed is above")
        return json.loads(line)


def timed(trees: Sequence[Tree], case: str, turns: int, seconds: float) -> dict[str, list[list[float]]]:
    """Milliseconds of the passes in each turn, by tree."""
    times: dict[str, list[list[float]]] = {tree.name: [] for tree in trees}
    for turn in range(turns):
        for tree in trees if turn % 2 == 0 else reversed(trees):
            tree.tell([case, seconds])
            times[tree.name].append(tree.answer())
    return times


def line(case: str, times: dict[str, list[list[float]]]) -> str:
    medians = {tree: [statistics.median(column) for column in zip(*rows, strict=True)] for tree, rows in times.items()}
    first = next(iter(medians.values()))
    cells = (
        f"{tree}: "
        + ", ".join(f"{ms:.4f} ({100 * (ms / base - 1):+.1f}%)" for ms, base in zip(each, first, strict=True))
        for tree, each in medians.items()
    )
    return f"{case:30} " + "; ".join(cells)


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Time several trees' attention in turns.")
    parser.add_argument("trees", nargs="+", metavar="NAME=FOLDER", help="the first is what others are compared with")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=0.1, help="of a pass in a turn")
    parser.add_argument("--cases", nargs="*", default=[], help="by default all of worker.py")
    parser.add_argument("--out", type=Path, default=Path("turns.json"))
    given = parser.parse_args(arguments)
    trees = [Tree(name, Path(folder)) for name, _, folder in (tree.partition("=") for tree in given.trees)]
    for tree in trees:
        tree.tell(given.cases)
    cases = [tree.answer() for tree in trees]
    found = {}
    for case in cases[0]:
        found[case] = timed(trees, case, given.turns, given.seconds)
        print(line(case, found[case]), flush=True)
    measured = {"environment": environment.describe(), "seconds": given.seconds, "passes": PASSES, "ms": found}
    write_measurement(given.out, measured)


if __name__ == "__main__":
    sys.exit(main())
