"""Do engines, layouts and numbers of devices learn the same? Runs of `lra fit` that differ in nothing else.

    python -m benchmarks.studies.learning.study [--part exact noise] [--tasks listops image] [--seeds 3]
        [--repeats 1] [--per-device 1] [--out FILE] [field=value …]

`exact` compares the losses of 200 steps, in fp32 without dropout, with those of the eager engine on packed batches.
`eager, halves` differs from it by rounding alone. A difference of these two says nothing of engines, layouts and
devices. `noise` compares test accuracy, in bf16 with the recipe's dropout. Both have several seeds. Repeats of a run
show how much it differs from itself, as attention adds the gradients of queries in any order.

Runs share the visible GPUs, each in its own folder, which is removed. Further fields are given to every run:
`trainer.accelerator=cpu`. The same command again runs what FILE lacks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.command import command
from lra import environment
from lra.bench.output import write_measurement
from lra.experiments.grid.local_launcher import list_slots
from lra.training import curves
from lra.training.fit import configure

EAGER = ("engine=eager",)
HALVES = "batch.micro={half}"  # of the batch
# what differs from the first of each part
VARIANTS = {
    "exact": {
        "eager": EAGER,
        "eager, halves": (*EAGER, HALVES),
        "captured": (),
        "eager, padded": (*EAGER, "batch.layout=padded"),
        "captured, padded": ("batch.layout=padded",),
        "captured, 2 devices": ("trainer.devices=2",),
        "eager, 2 devices": (*EAGER, "trainer.devices=2"),
    },
    "noise": {
        "eager": EAGER,
        "captured": (),
        "captured, padded": ("batch.layout=padded",),
        "captured, 2 devices": ("trainer.devices=2",),
    },
}
FIELDS = {
    "exact": ("trainer.precision=fp32", "model.dropout=0", "model.attn_dropout=0", "trainer.log_every=1",
              "trainer.steps=200", "trainer.eval_every=200"),
    "noise": (),
}  # fmt: skip
TASKS = {
    "listops": ("recipe=xiong2021",),
    "image": ("recipe=xiong2021", "trainer.steps=3000", "trainer.eval_every=500"),
}


class Job(NamedTuple):
    """One run."""

    part: str
    task: str
    variant: str
    seed: int
    args: tuple[str, ...]

    @property
    def devices(self) -> int:
        return 2 if "trainer.devices=2" in self.args else 1


class Pool:
    """GPUs by name that jobs take and give back, so many jobs on each; without GPUs one place for one job."""

    def __init__(self, names: Sequence[str], each: int):
        self.count, self.free, self.change = len(names), Counter(dict.fromkeys(names, each)), threading.Condition()

    def take(self, count: int) -> list[str]:
        with self.change:
            self.change.wait_for(lambda: sum(free > 0 for free in self.free.values()) >= count)
            taken = [gpu for gpu, _ in self.free.most_common(count)]
            self.free.subtract(taken)
            return taken

    def give(self, gpus: list[str]) -> None:
        with self.change:
            self.free.update(gpus)
            self.change.notify_all()


def combined(*given: str) -> tuple[str, ...]:
    """Fields of `lra fit`. The last one of a name counts, and HALVES means half of the given batch."""
    fields = tuple({arg.partition("=")[0]: arg for arg in given}.values())
    if HALVES not in fields:
        return fields
    half = configure([arg for arg in fields if arg != HALVES]).config.batch.size // 2
    return tuple(arg.format(half=half) for arg in fields)


def jobs(parts: Sequence[str], tasks: Sequence[str], seeds: int, fields: Sequence[str]) -> list[Job]:
    """All jobs, the longest first, so that no GPU waits for one of them at the end."""
    made = [
        Job(part, task, name, seed, combined(
            f"task={task}", "attn=flash", *TASKS[task], *FIELDS[part], *variant, *fields, f"seed={seed}"
        ))
        for part in parts
        for task in tasks
        for name, variant in VARIANTS[part].items()
        for seed in range(seeds)
    ]  # fmt: skip
    return sorted(made, key=lambda job: (job.part == "exact", "engine=eager" not in job.args, -job.devices))


def run(job: Job, pool: Pool) -> dict[str, Any]:
    """What a run ended with: its test accuracy, or the losses of all its steps."""
    gpus = pool.take(min(job.devices, pool.count))
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
    try:
        with tempfile.TemporaryDirectory(prefix="lra-learning-") as folder:
            command = [sys.executable, "-m", "lra", "fit", *job.args, "name=run"]
            done = subprocess.run(command, cwd=folder, env=os.environ | visible, capture_output=True, text=True)
            record = job._asdict() | {"environment": environment.describe()}
            files = list(Path(folder).rglob("result.json"))
            if not files:
                return record | {"status": "failed", "error": done.stderr[-2000:]}
            result = json.loads(files[0].read_text(encoding="utf-8"))
            record |= {key: result.get(key) for key in ("status", "error", "engine", "steps_per_second")}
            if result["status"] != "finished":
                return record
            if job.part == "noise":
                return record | {"accuracy": result["test"]["accuracy"], "plus_minus": result["test"]["plus_minus"]}
            return record | {"losses": losses_of(files[0].with_name("metrics.csv"))}
    finally:
        pool.give(gpus)


def losses_of(path: Path) -> list[float]:
    """The losses in a run's curves."""
    return [float(row["train/loss"]) for row in curves.read_curves(path) if row["train/loss"]]


def difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of any step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))


def compare(records: list[dict[str, Any]]) -> None:
    """Adds how far a run's losses are from those of the first variant of its part and seed, if that has ended."""
    reference = {(r["task"], r["seed"]): r["losses"] for r in records if "losses" in r and r["variant"] == "eager"}
    for record in records:
        losses, expected = record.get("losses"), reference.get((record["task"], record["seed"]))
        if losses and expected:
            record["difference"] = difference(losses, expected)


@command
def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Do engines, layouts and devices learn the same?")
    parser.add_argument("--part", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1, help="runs of the same arguments")
    parser.add_argument("--per-device", type=int, default=1, help="runs that share a GPU")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("fields", nargs="*", metavar="field=value")
    options = parser.parse_args(arguments)
    if options.per_device < 1:
        parser.error("--per-device must be at least 1")
    pool = Pool([name for name in list_slots(None) if name], options.per_device)
    planned = jobs(options.part, options.tasks, options.seeds, options.fields)
    found = json.loads(options.out.read_text(encoding="utf-8"))["runs"] if options.out and options.out.exists() else []
    records: list[dict[str, Any]] = [record for record in found if record["status"] == "finished"]
    done = Counter(tuple(record["args"]) for record in records)
    planned = [job for job in planned for _ in range(options.repeats - done[job.args])]
    with ThreadPoolExecutor(max(1, pool.count * options.per_device)) as executor:
        for future in as_completed([executor.submit(run, job, pool) for job in planned]):
            records.append(future.result())
            compare(records)
            if options.out:  # rewritten after each run
                write_measurement(options.out, {"runs": records})
    for task, name in sorted({(r["task"], r["variant"]) for r in records}):
        found = [r for r in records if (r["task"], r["variant"]) == (task, name)]
        accuracies = [r["accuracy"] for r in found if r.get("accuracy") is not None]
        mean = f"{100 * statistics.mean(accuracies):.2f}% over {len(accuracies)} runs" if accuracies else ""
        differences = [f"{r['difference']:.1e}" for r in found if "difference" in r]
        failures = [r["status"] for r in found if r["status"] != "finished"]
        print(task, f"{name}:", *differences, mean, *failures)
    return int(any(record["status"] != "finished" for record in records))


if __name__ == "__main__":
    sys.exit(main())
