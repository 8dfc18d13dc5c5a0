"""Scores released weights on examples of a seed that no run has seen, neither in training nor in validation.

    python -m benchmarks.studies.rescoring.study NAME … [--count 5000] [--out FOLDER] [--fields field=value …]

Fields are those of `lra test`. FOLDER/<gpu>/NAME.json has the score, and the digest of model.safetensors.
checkpoints/README.md shows what this folder has of the weights that are released.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lra
from benchmarks.command import command
from benchmarks.pages import cards, measured
from lra import environment
from lra.bench.output import write_measurement
from lra.errors import UsageError
from lra.experiments.results.card import format_accuracy

SEED = 1000


def rescore(name: str, count: int, fields: Sequence[str]) -> dict[str, Any]:
    """The result of `lra test` for checkpoints/NAME, on `count` examples of SEED."""
    if name not in (known := cards.released()):
        raise UsageError(f"{name} is none of the released weights: {', '.join(known)}")
    data = (f"task.data_seed={SEED}", "task.train=8", "task.val=1", f"task.test={count}")
    scored = lra.test(f"init={cards.RELEASES / name}", *data, *fields)
    weights = {"checkpoint": f"checkpoints/{name}", "sha256": cards.digest(cards.RELEASES / name)}
    return {"environment": environment.describe(), "seed": SEED, "fields": list(fields)} | scored | weights


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Score released weights on examples of another seed.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of a folder of checkpoints")
    parser.add_argument("--count", type=int, default=5000, help="examples")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="for the results")
    parser.add_argument("--fields", nargs="*", default=[], metavar="field=value", help="of lra test")
    given = parser.parse_args(arguments)
    for name in given.names:
        result = rescore(name, given.count, given.fields)
        write_measurement(given.out / measured.place(result["environment"]["gpu"]) / f"{name}.json", result)
        print(f"{name}: {format_accuracy(result['test'])}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
