"""`lra reproduce table3`: what it refuses, plans, shows and reports; the last tests with real runs of `lra fit`."""

from __future__ import annotations

import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from lra.cli import app
from lra.config.options import parse_options
from lra.errors import UsageError
from lra.experiments import accuracy
from lra.experiments.grid import grid, launch, local_launcher, watch
from lra.experiments.grid.cells import CellState
from lra.experiments.grid.grid import Cell
from lra.experiments.grid.local_launcher import LocalLauncher
from lra.experiments.grid.watch import GridWatch, RunPace
from lra.training.run_directory import claim_directory
from tests.experiments.runs import GRID, TINY, cells, made, stub, until

ROOT = Path(__file__).parents[2]
ONE = ("tasks=listops", "attns=flash", "seeds=1", "recipe=demo", *TINY)


@pytest.fixture(autouse=True)
def short_ticks(here, no_gpus, monkeypatch):
    monkeypatch.setattr(local_launcher, "TICK_S", 0.02)


@pytest.fixture
def stubbed(monkeypatch):
    """Makes the command work with a process that stands for `lra fit`; gives the cells of its arguments."""

    def use(*does: str, args=("tasks=listops", "attns=flash,standard", "seeds=2", "recipe=demo")):
        options = parse_options(accuracy.GridOptions, args)
        todo = accuracy.choose_cells(grid.read_grid("table3"), options, ())
        monkeypatch.setattr(launch, "LocalLauncher", functools.partial(LocalLauncher, command=stub(todo, *does)))
        return todo, args

    return use


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tasks=listop"], "unknown task 'listop': did you mean 'listops'?"),
        (["attns=flahs"], "unknown attention 'flahs': did you mean 'flash'?"),
        (["recipe=xiong"], "unknown recipe 'xiong': did you mean 'xiong2021'?"),
        (["launcher=slrm"], "launcher=slrm: write local or slurm"),
        (["seeds=0"], "seeds=0: it is how many there are, at least 1"),
        (["devices=2"], "devices=2, but this machine has 0 GPUs"),
        (["attns=flash", "tasks=listops", "optim.lrr=1"], "unknown field 'optim.lrr': did you mean 'optim.lr'?"),
        (["seeds=1000000"], "seeds=1000000: it is how many there are, at most 1000"),
        (["per_device=100000000000"], "per_device=100000000000: it is how many runs share a GPU, at most 64"),
        (["per_device=0"], "per_device=0: it is how many runs share a GPU, at least 1"),
        (["per_device=2", "launcher=slurm"], "per_device= is for launcher=local"),
        (["speed=yes"], "speed=yes: give speed=true to measure, or a file of it with --dry-run"),
        (["seed=3"], "seed=3 can't be one for every cell: give seeds="),
        (["resume=auto"], "resume=auto can't be one for every cell: give nothing, every run is resumed"),
        (["trainer.devices=2"], "trainer.devices=2, but a cell can have 1 here: lower it"),
        (
            ["pretrain=masked", "tasks=listops"],
            "pretrain=masked scores tokens, no table's figure",
        ),
        (["tasks=text,text"], "text standard seed 0 and text standard seed 0 are both checkpoints/runs/text/standard/"),
        (["tasks=pathfinder,pathfinder-lit", "name=x"], "are both checkpoints/runs/pathfinder/standard/x-s0: name"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(here, args, message):
    args = [*args, *(arg for arg in ("seeds=1", "recipe=xiong2021") if arg[:5] not in {given[:5] for given in args})]
    with pytest.raises(UsageError, match=re.escape(message)):
        accuracy.reproduce("table3", args)
    assert not list(here.iterdir())


def test_another_configuration_in_a_directory_stops_all_before_the_first(stubbed):
    todo, args = stubbed("finish")
    path = made(todo[3])
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("lr: 0.002", "lr: 0.5"))
    with pytest.raises(UsageError, match=rf"{path} holds a run with another configuration \(optim.lr: 0.5 -> 0.002\)"):
        accuracy.reproduce("table3", args)
    assert not Path("runs.txt").exists()


def test_a_dry_run_says_what_is_left_and_writes_nothing(here):
    args = ("tasks=listops,text", "attns=flash,standard", "seeds=3", "recipe=demo")
    options = parse_options(accuracy.GridOptions, args)
    todo = {str(cell): cell for cell in accuracy.choose_cells(grid.read_grid("table3"), options, ())}
    made(todo["listops flash seed 0"], "finished", steps_per_second=10.0)
    path = made(todo["listops flash seed 1"])
    torch.save({"global_step": 520, "callbacks": {}}, path / "last.ckpt")  # a signal came after the validation
    (path / "metrics.csv").write_text("step,train/loss,lr,val/loss,val/accuracy\n500,,,1,0.3\n550,1,1,,\n")
    made(todo["listops standard seed 0"], "oom")
    made(todo["listops standard seed 1"], "failed", steps_per_second=3.0)
    held = claim_directory(made(todo["text flash seed 0"]))
    before = sorted(here.rglob("*"))
    report = accuracy.reproduce("table3", args, dry_run=True)
    os.close(held or 0)
    assert sorted(here.rglob("*")) == before
    rows = {" ".join([column, attn, "seed", seed]): rest for column, attn, seed, *rest in report.tables[0][2]}
    assert rows["listops flash seed 0"] == ["done, test accuracy 40.00%", "", "checkpoints/runs/listops/flash/demo-s0"]
    assert rows["listops flash seed 1"][:2] == ["interrupted, goes on from last.ckpt", "98 s"]  # 980 steps are left
    assert rows["listops flash seed 2"][:2] == ["open", "150 s"]
    assert rows["listops standard seed 0"][:2] == ["OOM: it broke", ""]
    assert rows["listops standard seed 1"][:2] == ["failed, to be retried once: it broke", "unknown"]
    assert rows["text flash seed 0"][:2] == ["running elsewhere", "unknown"]
    assert report.lines == [
        "cells: 12, 1 done, 1 OOM, 1 failed, 1 running elsewhere, 1 interrupted, 7 open",
        "9 remain to be run; slots: 1",
        "time for 2 of them, from steps per second of finished runs on CPU: 4 min of training",
        "time for 7 of them: unknown, as no run of the same configuration is done; lra reproduce table3 "
        "tasks=listops,text attns=flash,standard recipe=demo speed=true measures steps per second",
    ]
    assert not report.wrong
    shared = accuracy.reproduce("table3", (*args, "per_device=3"), dry_run=True)
    assert shared.lines[1].endswith("slots: 3") and shared.lines[2].endswith(": 4 min of training"), "of one machine"


def test_the_report_has_means_deviations_and_what_is_missing(stubbed):
    todo, args = stubbed("finish", args=("tasks=listops", "attns=flash,standard", "seeds=2", "recipe=xiong2021"))
    made(todo[0], "finished", 0.4)
    made(todo[1], "oom")
    for status in ("failed", "failed"):
        path = made(todo[3], status)
        (path / "failed.json").touch()
    said: list[str] = []
    report = accuracy.reproduce("table3", args, said.append)
    title, header, rows = report.tables[0]
    assert title == "table3: test accuracy, %" and header == ["attention", "listops", "paper"]
    assert rows == [["flash", "45.00 ± 7.07", "37.6"], ["standard", "OOM s0, failed s1", "36.0"]]
    assert said[0] == "cells: 4, 1 done, 1 OOM, 1 failed, 1 open"
    assert said[1:] == ["listops flash seed 1: running", "listops flash seed 1: done, test accuracy 50.00%"]
    assert report.lines[0] == "paper: FlashAttention, arXiv 2205.14135, Table 3"
    assert report.lines[2:] == [
        "listops standard seed 0: OOM: it broke",
        f"listops standard seed 1: failed twice: it broke; tracebacks in {path}: remove failed.json there to try again",
    ]
    assert report.wrong


def test_the_command_line_replaces_what_a_column_sets_beside_its_task():
    def cell(*fields: str) -> Any:
        return grid.read_grid("table3").cells(["scisumm"], ["flash"], 1, "curriculum", fields)[0].composed.config

    assert (cell().trainer.steps, cell().trainer.eval_every) == (3000, 300)
    assert (cell("trainer.steps=600").trainer.steps, cell("trainer.steps=600").trainer.eval_every) == (600, 300)
    for field in ("task.dataset=lra", "dataset=lra", "dataset=scisumm"):
        mend = "column scisumm is made by task.dataset=scisumm: leave it out, or name another in tasks="
        with pytest.raises(UsageError, match=f"^{field}: {mend}$"):
            cell(field)


def test_an_average_is_there_when_all_columns_are():
    todo = GRID.cells(["listops", "text", "cut"], None, 1)
    states = {cell: CellState("done", {"test": {"accuracy": 0.1 * i}}, True) for i, cell in enumerate(todo)}
    _, header, rows = accuracy.accuracy_table(GRID, states)
    assert header == ["attention", "listops", "paper", "text", "paper", "cut", "paper", "average", "paper"]
    assert rows[0] == ["flash", "0.00", "37.6", "20.00", "", "40.00", "", "10.00", "59.8"]
    states[todo[2]] = CellState("OOM", {}, True)
    assert accuracy.accuracy_table(GRID, states)[2][0] == [
        "flash",
        "0.00",
        "37.6",
        "OOM s0",
        "",
        "40.00",
        "",
        "",
        "59.8",
    ]


@pytest.mark.parametrize(
    ("does", "state", "left"), [("fail", "failed", 0), ("die", "interrupted", 4), ("refuse", "refused", 4)]
)
def test_the_command_ends_with_1_if_a_cell_is_not_done(stubbed, does, state, left):
    _, args = stubbed(does)
    done = CliRunner().invoke(app, ["reproduce", "table3", *args])
    assert done.exit_code == 1 and f"{state} s0 s1" in done.output
    planned = CliRunner().invoke(app, ["reproduce", "table3", *args, "--dry-run"])
    assert planned.exit_code == 0 and f"{left} remain to be run" in planned.output


def test_why_a_cell_is_refused_is_in_the_report_and_in_the_view(stubbed):
    todo, args = stubbed("refuse")
    report = accuracy.reproduce("table3", args)
    why = "refused: no data here: prepare it"
    assert report.lines[2:] == [f"{cell}: {why}; see {cell.directory.path}/log.txt" for cell in todo]
    text = Path("checkpoints/table3.txt").read_text()
    assert text.count(why) == 1 and "cells: 4, 4 refused" in text and "refused s0 s1" in text


def test_a_dry_run_needs_a_name_and_is_not_ignored():
    for args, message in ((["--dry-run"], "--dry-run of what"), (["fig3", "--dry-run"], "fig3 has no --dry-run")):
        assert message in str(CliRunner().invoke(app, ["reproduce", *args]).exception)


def test_the_text_file_has_the_grid_as_it_is(stubbed):
    todo, args = stubbed("finish")
    made(todo[1], "oom")
    accuracy.reproduce("table3", args)
    text = Path("checkpoints/table3.txt").read_text()
    assert "accuracy of nine attentions on five tasks" in text and "cells: 4, 3 done, 1 OOM; 20" in text
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [["flash", "50.00 ± 0.00 (2 of 2)"], ["standard", "50.00 (1 of 2)"], ["", "OOM s0"]]
    assert not [file for file in Path("checkpoints").iterdir() if file.name.startswith(".")]


def curves(cell: Cell, *rows: str, at: float) -> None:
    """A run's metrics.csv, as written at that time."""
    file = made(cell) / "metrics.csv"
    file.write_text("\n".join(["step,train/loss,lr,val/loss,val/accuracy", *rows]) + "\n")
    os.utime(file, (at, at))


def test_a_running_cell_shows_its_step_pace_and_best_validation():
    (cell,) = cells(1)
    curves(cell, "250,,,1.0,0.25", at=100.0)  # of an earlier session: it tells no pace
    pace = RunPace(cell)
    pace.update()
    assert str(pace) == "250/1500, val 25.00"
    curves(cell, "250,,,1.0,0.25", "300,1,1,,", at=5000.0)
    pace.update()
    assert str(pace) == "300/1500, val 25.00"
    curves(cell, "250,,,1.0,0.25", "300,1,1,,", "500,,,1.0,0.5", at=5020.0)
    pace.update()
    assert str(pace) == "500/1500, val 50.00, 10.0/s, 100 s left"


def test_the_pace_of_a_run_that_went_back_begins_there():
    (cell,) = cells(1)
    pace = RunPace(cell)
    for step, at in ((400, 100.0), (500, 110.0), (300, 1000.0)):
        curves(cell, f"{step},1,1,,", at=at)
        pace.update()
    assert str(pace) == "300/1500", "taken up from an older checkpoint"
    curves(cell, "600,1,1,,", at=1010.0)
    pace.update()
    assert str(pace) == "600/1500, 30.0/s, 30 s left"


def test_a_terminal_is_redrawn_and_gets_no_lines(here):
    (one, two), said = cells(), []
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    with GridWatch(GRID.name, GRID.about, said.append, terminal) as view:
        view({one: CellState("running"), two: CellState("running elsewhere")})
        view({one: CellState("failed", {"error": "x"}, True), two: CellState("interrupted")})
    text = terminal.file.getvalue()  # type: ignore[attr-defined]
    assert "s0: 0/1500" in text and "s1: 0/1500, elsewhere" in text and "failed s0, interrupted s1" in text
    assert said == [] and "failed s0" in (here / "checkpoints/small.txt").read_text()


def test_a_text_file_that_cannot_be_written_stops_nothing(here, monkeypatch):
    monkeypatch.setattr(watch, "FILE_S", 0.0)
    (here / "checkpoints").write_text("")
    (cell,), said = cells(1), []
    with GridWatch(GRID.name, GRID.about, said.append) as view:
        view({cell: CellState("open")})
        view({cell: CellState("open")})
    assert said == ["cells: 1, 1 open", "checkpoints/small.txt can't be written: File exists"]


def lra(here: Path, *arguments: str) -> subprocess.Popen[str]:
    """`lra reproduce table3` in a process of its own."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LRA_DATA": str(here / "data")}
    line = [sys.executable, "-m", "lra", "reproduce", "table3", *arguments]
    return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.mark.slow  # two processes that import PyTorch, one of which trains
def test_a_real_cell_is_run_and_not_again(here):
    first = lra(here, *ONE)
    out, _ = first.communicate(timeout=100)
    assert first.returncode == 0, out
    (file,) = here.glob("checkpoints/runs/listops/flash/demo+*-s0/result.json")
    scored = f"{100 * json.loads(file.read_text())['test']['accuracy']:.2f}"
    assert f"listops flash seed 0: done, test accuracy {scored}%" in out and f"│ {scored}" in out
    before = file.stat().st_mtime
    again = accuracy.reproduce("table3", ONE)
    assert again.tables[0][2][0][1] == scored and file.stat().st_mtime == before


@pytest.mark.slow  # likewise, several times
def test_a_real_cell_is_interrupted_and_goes_on(here):
    cut = [arg for arg in ONE if not arg.startswith(("trainer.steps", "trainer.eval", "trainer.log"))]
    args = (*cut, "trainer.steps=1000", "trainer.eval_every=50", "trainer.log_every=10")
    first = lra(here, *args)
    until(lambda: list(here.glob("checkpoints/runs/*/*/*/last.ckpt")), 60)
    first.send_signal(signal.SIGTERM)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 143 and "seed 0: interrupted, goes on from last.ckpt" in out, out
    plan = accuracy.reproduce("table3", args, dry_run=True)
    assert plan.tables[0][2][0][3] == "interrupted, goes on from last.ckpt"
    second = lra(here, *args)
    out, _ = second.communicate(timeout=200)
    assert second.returncode == 0, out
    (file,) = here.glob("checkpoints/runs/listops/flash/demo+*-s0/result.json")
    assert json.loads(file.read_text())["resumed"] is True
