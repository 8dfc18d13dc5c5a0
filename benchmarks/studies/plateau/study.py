"""What makes the plateau of Pathfinder end? Many small runs at once, each a pretraining and what starts from it.

    python -m benchmarks.studies.plateau.study [NAME …] [--minutes 9] [--each 3] [--seeds 0 …] [--out FOLDER]

NAMEs are those of settings.py; without any, all run in its order. Each GPU has `--each` runs at once. All pretrainings
of the chosen settings come first. When the time is over, every run is ended, and its metrics.csv counts.
FOLDER/<gpu>/NAME-sSEED.json has the curve, and the step at which validation first reached 75%.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.command import command
from benchmarks.pages import measured
from benchmarks.studies.plateau.settings import BASE, PRETRAINING, PRETRAININGS, SETTINGS, file_name
from lra import environment
from lra.bench.output import write_measurement
from lra.errors import UsageError
from lra.training.fit import configure

REACHED = 0.75
LEAST = 40  # seconds that a run needs to be worth a start
RUNS = Path("checkpoints") / "runs" / "pathfinder" / "flash"  # below the working folder


def merged(*fields: str) -> list[str]:
    """The last value of each field."""
    return [f"{name}={value}" for name, value in dict(field.split("=", 1) for field in fields).items()]


def pretraining(name: str, seed: int, extra: Sequence[str] = ()) -> list[str]:
    own = (*PRETRAINING, *PRETRAININGS[name], f"name=pretrained-{file_name(name)}", f"seed={seed}")
    return merged(*own, "init=null", *extra)


def training(name: str, seed: int, extra: Sequence[str] = ()) -> list[str]:
    setting = SETTINGS[name]
    init = "null" if setting.start is None else str(RUNS / f"pretrained-{file_name(setting.start)}-s{seed}")
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


def run_all(commands: dict[tuple[str, int], list[str]], gpus: int, each: int, deadline: float, logs: Path) -> None:
    """Runs `lra fit` with these fields, `each` at once on every GPU, until all have ended or the time is over."""
    waiting, running = list(commands.items()), {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    slots = [gpu for _ in range(each) for gpu in visible]
    while waiting or running:
        for slot, (process, gpu, log) in list(running.items()):
            if process.poll() is not None:
                del running[slot]
                slots.append(gpu)
                log.close()
        while waiting and slots and deadline - time.monotonic() > LEAST:
            ((name, seed), fields), gpu = waiting.pop(0), slots.pop(0)
            log = open(logs / f"{file_name(name)}-s{seed}.log", "w", encoding="utf-8")  # noqa: SIM115
            own = {"CUDA_VISIBLE_DEVICES": gpu} if gpus else {}
            process = subprocess.Popen(
                [sys.executable, "-m", "lra", "fit", *fields], stdout=log, stderr=log, env=os.environ | own
            )
            running[name, seed] = process, gpu, log
        if time.monotonic() > deadline:
            for process, _, _ in running.values():
                process.terminate()
            for process, _, log in running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(15)
                process.kill()
                log.close()
            return
        time.sleep(0.5)


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
    deadline = time.monotonic() + 60 * given.minutes
    described = environment.describe()
    place = given.out / measured.place(described["gpu"])
    place.mkdir(parents=True, exist_ok=True)
    gpus = torch.cuda.device_count()
    chosen: list[tuple[str, int]] = [(name, seed) for name in names for seed in given.seeds]
    starts = dict.fromkeys((start, seed) for name, seed in chosen if (start := SETTINGS[name].start))
    first = {(f"pretrained {name}", seed): pretraining(name, seed, given.fields) for name, seed in starts}
    second = {(name, seed): training(name, seed, given.fields) for name, seed in chosen}
    for fields in (*first.values(), *(fields for (name, _), fields in second.items() if not SETTINGS[name].start)):
        configure(fields)
    logs = Path("logs")
    logs.mkdir(exist_ok=True)
    run_all(first, gpus, given.each, deadline, logs)
    run_all(second, gpus, given.each, deadline, logs)
    for (name, seed), fields in (first | second).items():
        stem = f"{file_name(name)}-s{seed}"
        if not (metrics := RUNS / stem / "metrics.csv").exists():
            print(f"{name}, seed {seed}: no result, see {logs / stem}.log")
            continue
        points = curve(metrics)
        result: dict[str, Any] = {
            "setting": name, "seed": seed, "fields": fields, "curve": points,
            "step": None if (name, seed) in first else first_step(points), "environment": described,
        }  # fmt: skip
        write_measurement(place / f"{stem}.json", result)
        last = points[-1] if points else {"step": 0, "accuracy": 0.0, "loss": 0.0}
        best = max((point["accuracy"] for point in points), default=0.0)
        print(
            f"{name}, seed {seed}: {last['step']} steps, at best {100 * best:.1f}%, 75% at step {result['step']}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
