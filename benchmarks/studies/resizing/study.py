"""Accuracy of a run's weights at other resolutions, without training there, for each way to adapt its positions.

    python -m benchmarks.studies.resizing.study init=RUN tasks=path64,pathx [ways=FIELD,…] [out=FILE] [field=value …]

Learned positions are resized gridwise, bilinear and bicubic. Computed ones keep a pixel's distance or the image's
extent. `ways` are other fields to compare, as task.background=0.01,task.background=0.03. Further fields are those of
`lra test`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lra
from benchmarks.command import command
from benchmarks.pages import cards
from lra import environment
from lra.bench.output import write_measurement
from lra.errors import UsageError

WAYS = {
    True: ("positions.resize=gridwise", "positions.resize=bilinear", "positions.resize=bicubic"),
    False: ("positions.scale=pixel", "positions.scale=image"),
}


def score(init: str, task: str, way: str, fields: list[str]) -> dict[str, Any]:
    """The scores on the test set, before any training. `way` is a field."""
    found = lra.test(f"init={init}", f"task={task}", way, *fields)
    digest = {"sha256": cards.digest(Path(init))} if Path(init).is_dir() else {}
    return {"init": init} | digest | {"task": task, "way": way, "fields": fields} | found


@command
def main(arguments: Sequence[str]) -> None:
    given = {name: value for name, _, value in (arg.partition("=") for arg in arguments)}
    if not (given.get("init") and given.get("tasks")):
        raise UsageError("give init=RUN and tasks=, the tasks to score it on")
    init, tasks, out = given.pop("init"), given.pop("tasks").split(","), given.pop("out", None)
    ways = WAYS[lra.load(init).run.model.positions == "learned"]
    if named := given.pop("ways", None):
        ways = tuple(named.split(","))
    runs = []
    for task in tasks:
        for way in ways:
            found = score(init, task, way, [f"{name}={value}" for name, value in given.items()])
            runs.append(found)
            print(task, way, f"{100 * found['test']['accuracy']:.2f}%", flush=True)
            if out:  # rewritten after each
                result = {"environment": environment.describe(), "runs": runs}
                write_measurement(Path(out), result)


if __name__ == "__main__":
    sys.exit(main())
