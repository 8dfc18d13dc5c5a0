"""Times the preparation of a task's data: generating or reading it, writing the store, checksums and syncing.

    python -m benchmarks.studies.prepare.study --task task=pathx --task task=image source=<mirror> [--out FILE]

It builds each store in a new folder inside LRA_DATA, verifies it and removes it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.data import store
from lra.training.data_verbs import task_data


def measure(fields: Sequence[str]) -> dict[str, Any]:
    """Seconds to prepare and to verify the store of `task=... [field=value ...]`, and what it holds."""
    data = task_data(fields)
    content = data.content()
    began = time.perf_counter()
    data.prepare_data()
    prepared = time.perf_counter()
    made = data.open()
    made.verify()
    return {
        "task": f"{content.task}@{content.version}",
        "fields": [field for field in fields if not field.startswith(("task=", "source=", "task.source="))],
        "examples": sum(split["count"] for split in made.manifest["splits"].values()),
        "bytes": sum(file["bytes"] for file in made.manifest["files"].values()),
        "prepare_seconds": round(prepared - began, 1),
        "verify_seconds": round(time.perf_counter() - prepared, 1),
        "baselines": made.manifest["baselines"],
    }


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Time the preparation of data.")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--task", nargs="+", action="append", required=True, metavar="field=value")
    options = parser.parse_args(arguments)
    store.data_root().mkdir(parents=True, exist_ok=True)
    rows = []
    for fields in options.task:
        with tempfile.TemporaryDirectory(dir=store.data_root()) as folder:
            os.environ["LRA_DATA"], before = folder, str(store.data_root())
            rows.append(measure(fields))
            os.environ["LRA_DATA"] = before
        print(json.dumps(rows[-1]), flush=True)
    result = {"stores": rows, "cores": len(os.sched_getaffinity(0)), "environment": environment.describe()}
    if options.out:
        write_measurement(options.out, result)


if __name__ == "__main__":
    sys.exit(main())
