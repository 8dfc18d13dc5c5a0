"""Cells that are tiny, run directories made by hand, and a process that stands for `lra fit`."""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from lra.config.override import parse_overrides
from lra.experiments.grid.grid import Cell, Column, Grid
from lra.experiments.grid.local_launcher import LocalLauncher

TINY = (
    "task.train=50", "task.val=10", "task.test=10", "task.fresh=10", "trainer.steps=4", "trainer.eval_every=2",
    "trainer.log_every=1", "trainer.accelerator=cpu", "batch.size=4",
)  # fmt: skip
GRID = Grid("small", "a small grid", "no paper", "demo", 2, ("flash", "standard"), {
    "listops": Column(parse_overrides(["task=listops"])), "text": Column(parse_overrides(["task=text"])),
    "cut": Column(parse_overrides(["task=text", "task.max_length=9"]), True),
}, {"flash": {"listops": 37.6, "average": 59.8}})  # fmt: skip

MADE_WITH = {"date": "2026-01-02T03:04:05Z"}
BESIDE = {"plus_minus": 0.1, "n": 10, "baselines": {"majority": 0.1}}  # an accuracy

# python <this> <plan> <fields of lra fit>: appends to runs.txt, then does what the plan says of that start of the cell
STUB = """
import json, os, signal, sys, time
from pathlib import Path
plan = json.loads(Path(sys.argv[1]).read_text())
entry = plan[" ".join(sys.argv[2:])]
path = Path(entry["path"])
with open("runs.txt", "a") as file:
    file.write(entry["path"] + "\\n")
starts = Path("runs.txt").read_text().splitlines().count(entry["path"])
print("start", starts, os.environ["OMP_NUM_THREADS"], flush=True)
does = entry["does"][min(starts, len(entry["does"])) - 1]
if does == "refuse":
    print("lra: no data here: prepare it")
    sys.exit(2)
(path / ".aside").write_text(entry["config"])
(path / ".aside").replace(path / "config.yaml")
if does == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if does == "wait":
    (path / "last.ckpt").touch()
    time.sleep(60)
if does == "gate":
    while not Path("gate").exists():
        time.sleep(0.02)
time.sleep(entry["seconds"])
result = entry["facts"] | {"status": "failed", "error": "oh", "traceback": f"start {starts}"}
if does == "oom":
    result = entry["facts"] | {"status": "oom", "error": "too much"}
    result["runs_per_device"] = int(os.environ["LRA_RUNS_PER_DEVICE"])
if does in ("finish", "wait", "gate"):
    result = entry["facts"] | {"status": "finished", "val": {"accuracy": 0.25}}
    result["test"] = {"accuracy": 0.5} | entry["beside"]
(path / ".aside").write_text(json.dumps(result))
(path / ".aside").replace(path / "result.json")
"""


def cells(seeds: int = 2, columns: Sequence[str] = ("listops",), attns: Sequence[str] = ("flash",)) -> list[Cell]:
    return GRID.cells(columns, attns, seeds)


def made(cell: Cell, status: str | None = None, accuracy: float = 0.4, **more: Any) -> Path:
    """The directory of a run that ended so, or has not ended."""
    path = cell.directory.path
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(cell.directory.config))
    if status:
        test = {"test": {"accuracy": accuracy} | BESIDE} if status == "finished" else {"error": "it broke\nhere"}
        result = facts(cell) | {"status": status, "runs_per_device": 1} | test | more
        (path / "result.json").write_text(json.dumps(result))
    return path


def facts(cell: Cell) -> dict[str, Any]:
    """What every result has."""
    return {"task": cell.directory.task, "config": cell.directory.config, "environment": MADE_WITH}


def stub(todo: Sequence[Cell], *does: str, seconds: float = 0.0) -> list[str]:
    """The command whose first start of a cell does the first of these, later ones the next: see STUB, or finish."""
    entries = {
        " ".join([*map(str, cell.args), "resume=auto"]): {
            "path": str(cell.directory.path), "config": yaml.safe_dump(cell.directory.config), "does": does,
            "seconds": seconds, "facts": facts(cell), "beside": BESIDE,
        }
        for cell in todo
    }  # fmt: skip
    Path("plan.json").write_text(json.dumps(entries))
    Path("stub.py").write_text(STUB)
    return [sys.executable, "stub.py", "plan.json"]


def started() -> list[str]:
    """The directories of the starts so far."""
    return Path("runs.txt").read_text().splitlines() if Path("runs.txt").exists() else []


def command(todo: Sequence[Cell], line: Sequence[str], slots: int = 1) -> Any:
    """A process that works on cells like a command does."""
    process = multiprocessing.get_context("fork").Process(target=_work, args=(todo, line, slots))
    process.start()
    return process


def until(true: Callable[[], Any], seconds: float = 20.0) -> None:
    """Waits for it."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def _work(todo: Sequence[Cell], line: Sequence[str], slots: int) -> None:
    LocalLauncher(todo, [None] * slots, command=line).work()
