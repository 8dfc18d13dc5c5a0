"""`lra sweep`: all combinations of values, each an ordinary run, compared by validation."""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path

import pytest

from lra.errors import UsageError
from lra.experiments import sweep as sweep_module
from lra.experiments.grid import launch, local_launcher
from lra.experiments.grid.local_launcher import LocalLauncher
from lra.experiments.sweep import parse_sweep, sweep
from tests.command_line import lra as command
from tests.experiments.runs import TINY, stub

BASE = ("task=listops", "attn=flash", "recipe=demo")


@pytest.fixture(autouse=True)
def short_ticks(here, no_gpus, monkeypatch):
    monkeypatch.setattr(local_launcher, "TICK_S", 0.02)


def test_values_are_separated_by_commas_outside_of_brackets():
    request = parse_sweep([*BASE, "optim.lr=1e-3,2e-3", "optim.betas=[0.9,0.98],[0.9,0.999]", "seed=0,1"])
    assert request.swept == ("optim.lr", "optim.betas") and len(request.cells) == 8
    assert [cell.seed for cell in request.cells] == [0] * 4 + [1] * 4, "all settings of one seed first"
    run = list(request.cells)[-1].composed.config
    assert (run.optim.lr, run.optim.betas, run.seed) == (2e-3, (0.9, 0.999), 1)


def test_tasks_attentions_and_recipes_may_vary_and_the_seed_may_be_left_out():
    request = parse_sweep(["task=listops,text", "attn=flash,linear", "recipe=demo"])
    assert {(str(cell), *values) for cell, values in request.cells.items()} == {
        (f"{task} {attn} seed 0", task, attn) for task in ("listops", "text") for attn in ("flash", "linear")
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((*BASE,), "no field has several values: lra sweep task=… attn=… optim.lr=1e-4,3e-4 seed=0,1"),
        ((*BASE, "optim.lr=1e-3,1e-3"), "optim.lr=1e-3,1e-3 names a value twice"),
        ((*BASE, "optim.lr=1e-3,"), "a value is empty; write optim.lr=<value>,<value>"),
        ((*BASE, "optim.lr=1e-3,0.001"), "are the same run: name each value once"),
        ((*BASE, "optim.lrr=1e-3,2e-3"), "unknown field 'optim.lrr': did you mean 'optim.lr'?"),
        ((*BASE, "optim.betas=0.9,0.98"), "optim.betas=0.9: write [number,number]"),
        ((*BASE, "seed=0,x"), "seed=x: write an integer"),
        ((*BASE, "seed=0,1", "name=x"), "name=x: every run of a sweep is resumed, and has a name of its own"),
        ((*BASE, "seed=0,1", "resume=auto"), "resume=auto: every run of a sweep is resumed"),
        ((*BASE, f"seed={','.join(map(str, range(10_001)))}"), "these are 10,001 runs: name fewer values"),
        ((*BASE, "seed=0,1", "slurm.qos=long"), "slurm.qos=long needs launcher=slurm"),
        ((*BASE, "seed=0,1", "trainer.devices=2"), "trainer.devices=2, but a cell can have 1 here"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(here, args, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        sweep(args)
    assert not list(here.iterdir())


def test_a_dry_run_says_what_is_left_and_writes_nothing(here):
    done = command("sweep", *BASE, "optim.lr=1e-3,2e-3", "seed=0,1", "--dry-run")
    assert done.code == 0 and "4 remain to be run" in done.out and len(done.rows) == 4
    assert not list(here.iterdir())


def test_settings_are_ordered_by_validation_and_only_the_best_shows_its_test(monkeypatch):
    args = (*BASE, "optim.lr=1e-3,2e-3", "seed=0,1")
    todo = list(parse_sweep(args).cells)
    monkeypatch.setattr(launch, "LocalLauncher", functools.partial(LocalLauncher, command=stub(todo, "finish")))
    scores = {"optim.lr=1e-3": (0.30, 0.9), "optim.lr=2e-3": (0.40, 0.2)}
    original = sweep_module.cells.CellState

    def scored(which: int):
        return property(lambda state: state.result and scores[
            next(text for text in scores if text.removeprefix("optim.lr=") in str(state.result["config"]["optim"]["lr"])
                 or float(text.removeprefix("optim.lr=")) == state.result["config"]["optim"]["lr"])
        ][which])  # fmt: skip

    monkeypatch.setattr(original, "validation", scored(0))
    monkeypatch.setattr(original, "accuracy", scored(1))
    report = sweep(args)
    (_, header, rows), _ = report.tables[0], report.lines
    assert header == ["task", "optim.lr", "validation, %", "runs", "test of the best, %", "training"]
    assert [row[:5] for row in rows] == [
        ["listops", "2e-3", "40.00 ± 0.00", "2 of 2", "20.00 ± 0.00"],
        ["listops", "1e-3", "30.00 ± 0.00", "2 of 2", ""],
    ]
    with Path("checkpoints/sweep.csv").open() as file:
        written = list(csv.DictReader(file))
    assert [(row["optim.lr"], row["seed"], row["validation"]) for row in written] == [
        ("1e-3", "0", "30.0000"), ("2e-3", "0", "40.0000"), ("1e-3", "1", "30.0000"), ("2e-3", "1", "40.0000")
    ]  # fmt: skip
    assert all(Path(row["directory"]).is_dir() for row in written) and "test" not in written[0]


@pytest.mark.slow
def test_a_sweep_of_real_runs_goes_on_where_it_stopped(here):
    args = ("sweep", *BASE, *TINY, "model.layers=1,2")
    first = command(*args)
    assert first.code == 0 and len(first.rows) == 2
    again = command(*args, "seed=0,1")
    assert again.code == 0 and [row[3] for row in again.rows] == ["2 of 2"] * 2
