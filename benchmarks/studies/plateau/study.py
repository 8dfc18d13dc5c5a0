"""What makes the plateau of Pathfinder end? Many small runs at once, each a pretraining and what starts from it.

    python -m benchmarks.studies.plateau.study [NAME …] [--minutes 9] [--each 3] [--seeds 0 …] [--out FOLDER]

NAMEs are those of settings.py; without any, all run in its order. Each GPU has `--each` runs at once. All pretrainings
of the chosen settings come first. When the time is over, every run is ended. FOLDER/<gpu>/NAME-sSEED.json of a
finished run has the curve, and the step at which validation first reached 75%. Another run has no file, and the exit
code is 2.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command
from benchmarks.pages import measured
from benchmarks.studies.plateau.settings import BASE, PRETRAINING, PRETRAININGS, SETTINGS, file_name
from lra import environment
from lra.bench.output import write_measurement
from lra.config.override import parse_overrides
from lra.errors import UsageError
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory

REACHED = 0.75
LEAST = 40  # seconds that a run needs to be worth a start
LOGS = Path("logs")  # below the working folder
OWN_FIELDS = ("name", "seed", "init")  # each run has others

Run = tuple[str, int]  # a setting or a pretraining, and its seed


def stem(run: Run) -> str:
    """What the files of a run are called."""
    return f"{file_name(run[0])}-s{run[1]}"


def merged(*fields: str) -> list[str]:
    """The last value of each field. Later ones of the task may lack `task.`."""
    values: dict[str, str] = {}
    for name, value in (field.split("=", 1) for field in fields):
        values[f"task.{name}" if f"task.{name}" in values else name] = value
    return [f"{name}={value}" for name, value in values.items()]


def directory(fields: Sequence[str]) -> RunDirectory:
    """Where `lra fit` puts the run with these fields. UsageError for fields that no run has."""
    return RunDirectory(configure(fields))


def pretraining(name: str, seed: int, extra: Sequence[str] = ()) -> list[str]:
    own = (*PRETRAINING, *PRETRAININGS[name], f"name=pretrained-{file_name(name)}", f"seed={seed}")
    return merged(*own, "init=null", *extra)


def training(name: str, seed: int, extra: Sequence[str] = ()) -> list[str]:
    setting = SETTINGS[name]
    init = "null" if setting.start is None else directory(pretraining(setting.start, seed, extra)).path
    own = (*BASE, *setting.fields, f"name={file_name(name)}", f"seed={seed}")
    return merged(*own, f"init={init}", *extra)


def curve(metrics: Path) -> list[dict[str, float]]:
    """The rows of metrics.csv that have a validation: step, loss and accuracy."""
    with open(metrics, encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row.get("val/accuracy")]
    return [{"step": int(row["step"]), "loss": float(row["val/loss"]), "accuracy": float(row["val/accuracy"])}
            for row in rows]  # fmt: skip


def first_step(points: Iterable[dict[str, float]], accuracy: float = REACHED) -> int | None:
    return next((int(point["step"]) for point in points if point["accuracy"] >= accuracy), None)


def run_all(commands: Mapping[Run, list[str]], gpus: int, each: int, deadline: float) -> dict[Run, int]:
    """Runs `lra fit` with these fields, `each` at once on every GPU, until all have ended or the time is over.

    Returns the exit code of each run that was started. It is 0 if the run is finished.
    """
    waiting, running, codes = list(commands.items()), {}, {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    slots = [gpu for _ in range(each) for gpu in visible]
    while waiting or running:
        for run, (process, gpu, log) in list(running.items()):
            if process.poll() is not None:
                del running[run]
                codes[run] = process.returncode
                slots.append(gpu)
                log.close()
        while waiting and slots and deadline - time.monotonic() > LEAST:
            (run, fields), gpu = waiting.pop(0), slots.pop(0)
            log = open(LOGS / f"{stem(run)}.log", "w", encoding="utf-8")  # noqa: SIM115
            own = {"CUDA_VISIBLE_DEVICES": gpu} if gpus else {}
            process = subprocess.Popen(
                [sys.executable, "-m", "lra", "fit", *fields], stdout=log, stderr=log, env=os.environ | own
            )
            running[run] = process, gpu, log
        if time.monotonic() > deadline:
            for process, _, _ in running.values():
                process.terminate()
            for run, (process, _, log) in running.items():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
                codes[run] = process.wait()
                log.close()
            break
        time.sleep(0.5)
    return codes


@command
def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description="Find what makes Pathfinder's plateau end.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="settings; default: all")
    parser.add_argument("--minutes", type=float, default=9, help="of all runs together")
    parser.add_argument("--each", type=int, default=3, help="runs at once on a GPU")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], metavar="SEED")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, metavar="FOLDER", help="for the results")
    parser.add_argument("--fields", nargs="*", default=[], metavar="field=value", help="of lra fit, for every run")
    given = parser.parse_args(arguments)
    names = given.names or list(SETTINGS)
    if unknown := [name for name in names if name not in SETTINGS]:
        raise UsageError(f"{', '.join(unknown)}: no setting, choose from {'; '.join(SETTINGS)}")
    if given.each < 1:
        raise UsageError(f"--each {given.each} must be at least 1")
    if own := [str(field) for field in parse_overrides(given.fields) if field.field in OWN_FIELDS]:
        raise UsageError(f"{' '.join(own)}: the study gives each run its own, leave it out")
    deadline = time.monotonic() + 60 * given.minutes
    chosen: list[Run] = [(name, seed) for name in names for seed in given.seeds]
    starts = {(name, seed): (start, seed) for name, seed in chosen if (start := SETTINGS[name].start)}
    first = {(f"pretrained {name}", seed): pretraining(name, seed, given.fields) for name, seed in starts.values()}
    second = {(name, seed): training(name, seed, given.fields) for name, seed in chosen}
    runs = first | second
    curves = {run: directory(fields).curves for run, fields in runs.items()}  # all fields are checked before any run
    described, gpus = environment.describe(), torch.cuda.device_count()
    place = given.out / measured.place(described["gpu"])
    for folder in (place, LOGS):
        folder.mkdir(parents=True, exist_ok=True)
    codes = run_all(first, gpus, given.each, deadline)
    there = [start for start in starts.values() if codes.get((f"pretrained {start[0]}", start[1])) == 0]
    ready = {run: fields for run, fields in second.items() if run not in starts or starts[run] in there}
    codes |= run_all(ready, gpus, given.each, deadline)
    for run, fields in runs.items():
        if codes.get(run) != 0:
            continue
        name, seed = run
        points = curve(curves[run])
        result: dict[str, Any] = {
            "setting": name, "seed": seed, "fields": fields, "curve": points,
            "step": None if run in first else first_step(points), "environment": described,
        }  # fmt: skip
        write_measurement(place / f"{stem(run)}.json", result)
        best = max(point["accuracy"] for point in points)
        print(
            f"{name}, seed {seed}: {points[-1]['step']} steps, at best {100 * best:.1f}%, 75% at step {result['step']}",
            flush=True,
        )
    if lacking := [stem(run) + ("" if run in codes else " (not begun)") for run in runs if codes.get(run) != 0]:
        raise UsageError(f"no result of {', '.join(lacking)}: see their logs in {LOGS}, or give more --minutes")


if __name__ == "__main__":
    sys.exit(main())
