"""`lra reproduce … --dry-run`: how long is left, of steps per second that `speed=true` measured."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from lra.errors import UsageError
from lra.experiments import accuracy
from lra.experiments.grid import grid
from lra.training.run_directory import claim_directory
from tests.experiments.runs import made

RESULTS = Path(__file__).parents[3] / "benchmarks/results"
ARGS = ("recipe=dao2022", "tasks=path64,pathx", "attns=flash,standard")
FILE, OWN = "speed.json", "checkpoints/table6-speed.json"
ALONE = "(each alone on NVIDIA H200, commit abc, 2026-01-01T00:00:00Z)"
UNKNOWN = "unknown, as no run of the same configuration is done"
MEND = "speed=true stages=true measures steps per second"
SPEEDS = {("path64", "flash"): 100.0, ("pathx", "flash"): 50.0, ("path64", "standard"): None}


@pytest.fixture(autouse=True)
def checkpoints(here, no_gpus):
    Path("checkpoints").mkdir()


def write(
    file: str, speeds: Mapping[tuple[str, str], float | None] = SPEEDS, recipe: str = "dao2022",
    fields: Sequence[Any] = (),
) -> None:  # fmt: skip
    """A file of `speed=true`, as fast as this in the way `product`; None was out of memory."""
    records = [
        {
            "column": column, "attention": attn, "way": way, "loop": "fit", "status": "ok" if speed else "OOM",
            "reason": "" if speed else "too much", "engine": "captured", "ms": speed and 1e3 / (speed * times),
            "rows": speed and 64.0, "memory_mb": speed and 9.5, "steps_per_second": speed and speed * times,
        }
        for (column, attn), speed in speeds.items() for way, times in (("attention", 3), ("product", 1))
    ]  # fmt: skip
    names = {"tasks": [column for column, _ in speeds], "attns": [attn for _, attn in speeds]}
    options = names | {"recipe": recipe, "fields": list(fields), "steps": 100, "warmup": 40}
    environment = {"gpu": "NVIDIA H200", "date": "2026-01-01T00:00:00Z", "commit": "abc"}
    Path(file).write_text(json.dumps({"environment": environment, "options": options, "cells": records}))


def planned(*args: str, table: str = "table6") -> tuple[dict[str, str], list[str]]:
    """The training left of each cell of seed 0, and the lines on time."""
    report = accuracy.reproduce(table, args, dry_run=True)
    left = {" ".join(row[:2]): row[4] for row in report.tables[0][2] if row[2] == "0"}
    return left, report.lines[2:]


def test_without_measurements_the_command_that_makes_them_is_named():
    command = "lra reproduce table6 tasks=path64,pathx attns=flash,standard recipe=dao2022"
    assert planned(*ARGS)[1] == [f"time for 6 of them: {UNKNOWN}; {command} {MEND}"]
    more = ("seeds=2", "per_device=2", "optim.betas=[0.9,0.95]")
    assert planned(*ARGS, *more)[1] == [f"time for 12 of them: {UNKNOWN}; {command} 'optim.betas=[0.9,0.95]' {MEND}"]
    assert planned(*ARGS, "engine=eager")[1] == [f"time for 6 of them: {UNKNOWN}"], "no measurement is of that"


@pytest.mark.parametrize("file", [FILE, OWN])
def test_cells_and_equal_stages_take_as_long_as_measured_alone(file):
    write(file, fields=["val=1000"])
    args = (*ARGS, *(["speed=speed.json"] if file == FILE else []))
    left, lines = planned(*args, "trainer.steps=100000", "trainer.eval_every=5000", "test=50")
    assert left == {
        "path64 flash": "17 min", "pathx stage 2 flash": "33 min", "pathx flash": "33 min",
        "path64 standard": "unknown", "pathx stage 2 standard": "unknown", "pathx standard": "unknown",
    }  # fmt: skip
    alone = f"{ALONE[:-1]}, with val=1000)"
    assert lines[0] == f"time for 3 of them, from steps per second of {file} {alone}: 83 min of training"
    said = rf"time for 3 of them: {UNKNOWN}; lra .* recipe=dao2022( test=50)? {MEND}"
    assert re.fullmatch(said, lines[1]), "of standard's Path-X, whatever the number of steps"
    small = [arg.replace(",pathx", "") for arg in args]
    assert planned(*small)[1][1:] == [f"time for 1 of them: {UNKNOWN}"], "it was out of memory"


def test_fields_of_one_attention_are_no_matter_to_the_others():
    write(FILE, {("path64", "local"): 100.0}, fields=["attn.window=64"])
    args = ("recipe=dao2022", "tasks=path64", "attns=local", "attn.window=64", "speed=speed.json")
    assert planned(*args)[0] == {"path64 local": "21 min"}


def finished(speed: float, runs_per_device: int | None) -> None:
    first = grid.read_grid("table6").cells(["path64"], ["flash"], 1, "dao2022")[0]
    made(first, "finished", steps_per_second=speed, runs_per_device=runs_per_device)


@pytest.mark.parametrize("runs_per_device", [1, 5, None])
def test_finished_runs_come_first_if_they_were_alone(runs_per_device):
    write(OWN)
    finished(125.0, runs_per_device)
    lines = planned("recipe=dao2022", "tasks=path64,pathx", "attns=flash", "seeds=2")[1]
    also = " and of finished runs on CPU" if runs_per_device == 1 else ""
    said = f"time for 5 of them, from steps per second of {OWN} {ALONE}{also}: "
    assert [line.startswith(said) for line in lines] == [True]


@pytest.mark.parametrize(("speed", "runs_per_device"), [(125.0, 1), (25.0, 5), (125.0, None)])
def test_runs_that_shared_a_gpu_are_an_estimate(speed, runs_per_device):
    finished(speed, runs_per_device)
    report = accuracy.reproduce("table6", ("recipe=dao2022", "tasks=path64", "attns=flash", "seeds=2"), dry_run=True)
    shared = "" if runs_per_device == 1 else " that may have shared it"
    source = f"finished runs on CPU{shared}"
    assert report.lines[2] == f"time for 1 of them, from steps per second of {source}: 17 min of training"


def test_stages_take_one_after_the_other_however_many_gpus_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    write(OWN)
    (line,) = planned("recipe=dao2022", "tasks=pathx", "attns=flash", "seeds=1")[1]
    assert line.endswith(": 5.9 h of training"), "125,000 steps of path64, then twice 500,000"


def test_a_run_on_two_gpus_takes_two_slots(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    report = accuracy.reproduce("table6", (*ARGS, "trainer.devices=2"), dry_run=True)
    assert report.lines[1] == "6 remain to be run; slots: 2"


def test_a_stage_that_runs_elsewhere_is_waited_for():
    write(OWN)
    args = ("recipe=dao2022", "tasks=path64,pathx", "attns=flash", "seeds=1")
    (alone,) = planned(*args)[1]
    held = claim_directory(made(grid.read_grid("table6").cells(["path64"], ["flash"], 1, "dao2022")[0]))
    (waiting,) = planned(*args)[1]
    os.close(held or 0)
    assert alone.rpartition(": ")[2] == waiting.rpartition(": ")[2] == "5.9 h of training"


def test_of_finished_runs_the_median_counts():
    _, *done = grid.read_grid("table3").cells(["listops"], ["flash"], 4, "demo")
    for cell, speed in zip(done, (60.0, 10.0, 20.0), strict=True):
        made(cell, "finished", steps_per_second=speed)
    left, _ = planned("recipe=demo", "tasks=listops", "attns=flash", "seeds=4", table="table3")
    assert left["listops flash"] == "75 s"


def test_what_runs_elsewhere_has_less_left():
    going, done = grid.read_grid("table3").cells(["listops"], ["flash"], 2, "demo")
    made(done, "finished", steps_per_second=100.0)
    path = made(going)
    (path / "metrics.csv").write_text("step,train/loss,lr,val/loss,val/accuracy\n500,1,1,,\n")
    held = claim_directory(path)
    left, lines = planned("recipe=demo", "tasks=listops", "attns=flash", "seeds=2", table="table3")
    os.close(held or 0)
    assert left["listops flash"] == "10 s" and not lines, "1,000 steps, which are not for this command"


LISTOPS = ("recipe=curriculum", "tasks=listops", "attns=flash", "seeds=1", "speed=speed.json")


def test_a_stage_that_is_configured_otherwise_remains_unknown():
    write(FILE, {("listops", "flash"): 255.0}, "curriculum")
    left, lines = planned(*LISTOPS, table="table3")
    assert left["listops flash"] != "unknown"
    assert left["listops stage 1 flash"] == left["listops stage 2 flash"] == "unknown"
    command = "lra reproduce table3 tasks=listops attns=flash recipe=curriculum"
    assert lines[1] == f"time for 2 of them: {UNKNOWN}; {command} {MEND}"


def test_a_stage_takes_as_long_as_measured():
    speeds = {"listops": 100.0, "listops stage 1": 400.0, "listops stage 2": 200.0}
    write(FILE, {(column, "flash"): speed for column, speed in speeds.items()}, "curriculum")
    left, lines = planned(*LISTOPS, table="table3")
    assert left == {"listops stage 1 flash": "15 s", "listops stage 2 flash": "40 s", "listops flash": "80 s"}
    assert len(lines) == 1 and lines[0].endswith("135 s of training")


def test_stages_are_measured_once_and_as_product():
    asked = ["speed=true", "recipe=curriculum", "tasks=pathfinder,pathfinder-lit", "attns=flash"]
    for more, count in ((), 4), (("stages=true",), 6):  # the last of three stages is a cell, the first two are both's
        assert (
            f"{count} of {count} remain to be measured"
            in accuracy.reproduce("table3", [*asked, *more], dry_run=True).lines
        )


@pytest.mark.parametrize(
    ("change", "fields"),
    [
        ({"recipe": "demo"}, ()),
        ({"recipe": "gone"}, ()),
        ({"fields": ["batch.size=8"]}, ()),
        ({}, ("batch.size=8",)),
    ],
)
def test_the_tables_own_file_counts_where_it_is_of_the_same_configuration(change, fields):
    write(OWN, **change)
    (line,) = planned(*ARGS, *fields)[1]
    assert OWN not in line and MEND in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["speed=none.json"], "speed=none.json is not a file: lra reproduce table6 speed=true makes it"),
        (["speed=damaged.json"], "damaged.json is not a measurement of lra reproduce"),
        (["speed=odd.json"], "odd.json is not a measurement of lra reproduce"),
        (
            ["speed=demo.json"],
            "speed=demo.json was measured with recipe=demo, not dao2022: give recipe=demo, or another file",
        ),
        (["speed=table3.json"], "speed=table3.json is of listops, no column of table6: name another"),
        (["speed=old.json"], "old.json can't be compared (unknown field 'batch.sise'"),
        (
            ["speed=speed.json", "batch.size=8"],
            f"speed=speed.json {ALONE} has no cell as it is configured here: give its fields, or another file",
        ),
        (["speed=speed.json", "tasks=path256"], "has no cell as it is configured here"),
    ],
)
def test_a_file_of_no_use_is_refused(args, message):
    write(FILE)
    write("demo.json", recipe="demo")
    write("table3.json", {("listops", "flash"): 9.0})
    write("old.json", fields=["batch.sise=8"])
    write("odd.json", fields=[8])
    Path("damaged.json").write_text("{")
    own = [arg for arg in ARGS if not any(arg.partition("=")[0] == one.partition("=")[0] for one in args)]
    with pytest.raises(UsageError, match=re.escape(message).replace("unknown", "(command line: )?unknown")):
        planned(*own, *args)


def test_a_committed_file_tells_how_long_its_cells_take():
    file = RESULTS / "speed/h200/table3-curriculum.json"
    args = ("recipe=curriculum", "tasks=text,pathfinder", "attns=flash", "seeds=1", f"speed={file}")
    left, lines = planned(*args, table="table3")
    assert len(left) == 5 and "unknown" not in left.values(), "stages are measured, too"
    assert lines[0].startswith(
        f"time for 5 of them, from steps per second of {file} (each alone on NVIDIA H200, commit"
    )
