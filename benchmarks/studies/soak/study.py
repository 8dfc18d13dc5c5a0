"""Does a long run stay as large as it was? Memory, files and disk of one `lra fit`, sampled from outside.

    python -m benchmarks.studies.soak.study [--minutes 60] [--out FILE] [field=value …]

A small run with more steps than the time allows starts in an empty folder, and ends with SIGTERM. Growth is the slope
of a line through the samples of the second half, when everything has been compiled, captured and allocated. Fields are
given to the run: `trainer.accelerator=cpu`.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.training import curves

RUN = (
    "task=listops", "attn=flash", "recipe=demo", "name=soak", "trainer.steps=1000000000", "trainer.eval_every=1000",
    "trainer.log_every=50", "task.train=5000", "task.val=500", "task.test=100", "task.fresh=100",
)  # fmt: skip
EVERY_S = 5.0
PAGE = os.sysconf("SC_PAGE_SIZE")


def sample(process: int, run: Path) -> dict[str, float]:
    """The present size of a process and its run, in bytes and counts, and its step."""
    here = Path("/proc", str(process))
    files = [file for file in run.rglob("*") if file.is_file()]
    return {
        "step": step(run / "metrics.csv"),
        "memory": PAGE * int((here / "statm").read_text().split()[1]),
        "descriptors": len(list((here / "fd").iterdir())),
        "threads": len(list((here / "task").iterdir())),
        "files": len(files),
        "disk": sum(file.stat().st_size for file in files),
        **({"gpu_memory": used} if (used := gpu_memory(process)) is not None else {}),
    }


def step(file: Path) -> int:
    """The last step that a run has logged."""
    rows = curves.read_curves(file) if file.exists() else []
    return int(rows[-1]["step"]) if rows else 0


def gpu_memory(process: int) -> int | None:
    """Bytes that a process has on all GPUs; None without a GPU."""
    rows = environment.compute_processes("pid", "used_memory")
    return None if rows is None else sum(int(used) << 20 for owner, used in rows if owner == str(process))


def growth(samples: Sequence[dict[str, float]], name: str) -> dict[str, float]:
    """Least, most, and the slope per hour, in the second half."""
    late = samples[len(samples) // 2 :]
    values = [each[name] for each in late]
    slope = statistics.linear_regression([each["seconds"] for each in late], values).slope
    return {"least": min(values), "most": max(values), "per_hour": round(3600 * slope, 1)}


def soak(fields: Sequence[str], minutes: float) -> dict[str, Any]:
    """Samples of a run, what grew, and how it ended."""
    given = {text.partition("=")[0]: text for text in (*RUN, *fields)}
    samples: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="lra-soak-") as folder:
        log = Path(folder, "log.txt")
        with log.open("wb") as out:
            command = [sys.executable, "-m", "lra", "fit", *given.values()]
            process = subprocess.Popen(command, cwd=folder, stdout=out, stderr=subprocess.STDOUT)
        began = time.monotonic()
        while process.poll() is None and (seconds := time.monotonic() - began) < 60 * minutes:
            for run in Path(folder).glob("checkpoints/runs/*/*/*"):
                samples.append({"seconds": round(seconds, 1), **sample(process.pid, run)})
            time.sleep(EVERY_S)
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
        if code != 128 + signal.SIGTERM or len(samples) < 4:
            raise SystemExit(f"the run ended with {code}: {log.read_text(errors='replace')[-2000:]}")
    names = [name for name in samples[0] if name not in ("seconds", "step")]
    return {
        "fields": list(given.values()),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "steps": samples[-1]["step"],
        "growth": {name: growth(samples, name) for name in names},
        "samples": samples[:: max(1, len(samples) // 120)],
    }


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Does a long run stay as large as it was?")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("fields", nargs="*", metavar="field=value")
    options = parser.parse_args(arguments)
    result = {"environment": environment.describe()} | soak(options.fields, options.minutes)
    print(f"{result['steps']:,} steps in {result['minutes']} minutes")
    for name, found in result["growth"].items():
        print(f"{name}: {found['least']:,} to {found['most']:,}, {found['per_hour']:+,.0f} per hour")
    if options.out:
        write_measurement(options.out, result)


if __name__ == "__main__":
    sys.exit(main())
