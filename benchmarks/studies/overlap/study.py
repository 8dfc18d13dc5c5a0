"""How many test examples of a task stand in its train split, too.

    python -m benchmarks.studies.overlap.study --task task=text source=<mirror> --task task=listops [--out FILE]

Examples are compared as they are stored, whole. A pair of documents is the same in either order.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.data.store import Store
from lra.training.data_verbs import task_data


def count(fields: Sequence[str]) -> dict[str, Any]:
    """How many test examples of `task=... [field=value ...]` there are, and how many of them are in train."""
    data = task_data(fields)
    content = data.content()
    data.prepare_data()
    made = data.open()
    train, test = (examples(made, split) for split in ("train", "test"))
    known = set(train)
    return {
        "task": f"{content.task}@{content.version}",
        "fields": [field for field in fields if not field.startswith(("task=", "source=", "task.source="))],
        "test": len(test),
        "in_train": sum(example in known for example in test),
    }


def examples(made: Store, split: str) -> list[Any]:
    """What identifies each example of a split: the bytes of its tokens, or the places of its two documents."""
    if "documents.tokens.npy" in made.manifest["files"]:
        return [tuple(sorted(pair)) for pair in made.pairs(split).pairs.tolist()]
    sequences = made.split(split)
    return [sequences[row].tobytes() for row in range(len(sequences))]


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Count the test examples that are in train, too.")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--task", nargs="+", action="append", required=True, metavar="field=value")
    options = parser.parse_args(arguments)
    rows = []
    for fields in options.task:
        rows.append(count(fields))
        print(json.dumps(rows[-1]), flush=True)
    if options.out:
        write_measurement(options.out, {"stores": rows, "environment": environment.describe()})


if __name__ == "__main__":
    sys.exit(main())
