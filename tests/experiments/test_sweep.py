"""`lra sweep`: what it refuses, plans, runs, ranks and writes; the last test with real runs of `lra fit`."""

from __future__ import annotations

import csv
import functools
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lra.cli import app
from lra.config.override import Override
from lra.errors import UsageError
from lra.experiments import sweep
from lra.experiments.grid import launch, local_launcher
from lra.experiments.grid.cells import with_stages
from lra.experiments.grid.local_launcher import LocalLauncher
from tests.experiments.runs import TINY, made, started, stub

RUN = ("task=listops", "attn=flash", "recipe=demo")
TWO = (*RUN, "optim.lr=1e-4,3e-4", "seed=0,1")
FILE = Path("checkpoints/sweeps/listops+flash+optim.lr=1e-4,3e-4+recipe=demo+seed=0,1.csv")


@pytest.fixture(autouse=True)
def short_ticks(here, no_gpus, monkeypatch):
    monkeypatch.setattr(local_launcher, "TICK_S", 0.02)


def rows(file: Path = FILE) -> list[dict[str, str]]:
    return list(csv.DictReader(file.open()))


def scored(cell, validation: float, test: float) -> Path:
    return made(cell, "finished", test, val={"accuracy": validation}, wall_seconds=2.5)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1e-4,3e-4", ["1e-4", "3e-4"]),
        ("[0.9,0.98]", ["[0.9,0.98]"]),
        ("[0.9,0.98], [0.9,0.999],null", ["[0.9,0.98]", "[0.9,0.999]", "null"]),
    ],
)
def test_commas_outside_brackets_separate_values(text, values):
    assert sweep.split_values(Override("optim.betas", text)) == values


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "task= and attn= missing: task= is one of image, "),
        ([*RUN, "optim.lr=1e-4,,3e-4"], "optim.lr=1e-4,,3e-4: a value is empty, remove a comma"),
        ([*RUN, "optim.lr=1e-4,big"], "optim.lr=big: write a number"),
        ([*RUN, "optim.lrr=1e-4,1e-3"], "unknown field 'optim.lrr': did you mean 'optim.lr'?"),
        (["task=listops", "attn=flash,flahs", "recipe=demo"], "'flahs': did you mean 'flash'?"),
        ([*RUN, "seeds=0,1"], "unknown field 'seeds': did you mean 'seed'?"),
        (
            [*RUN, "optim.betas=0.9,0.98"],
            "optim.betas=0.9,0.98: a list needs brackets in a sweep: [0.9,0.98] is one, […],[…] are two",
        ),
        ([*RUN, "start.optim.betas=0.9,0.98"], "start.optim.betas=0.9,0.98: a list needs brackets in a sweep"),
        ([*RUN, "start.mask=0.1,0.3"], "start.mask=0.1 is of a run before this one, and recipe/demo.yaml starts"),
        ([*RUN, "optim.lr=1e-4,0.0001"], "listops optim.lr=0.0001 flash seed 0 are the same run: give each value once"),
        ([*RUN, "seed=0,0"], "listops flash seed 0 and listops flash seed 0 are the same run"),
        ([*TWO, "name=x"], "are both checkpoints/runs/listops/flash/x-s0: leave out name="),
        ([*RUN, "batch.micro=1,2"], "sweep no field that names no folder, such as batch.micro"),
        ([*RUN, "resume=auto"], "resume= can't be given: every run of a sweep is resumed"),
        ([*RUN, f"seed={','.join(map(str, range(10_001)))}"], "these values make 10,001 runs: at most 10,000"),
        ([*RUN, "trainer.devices=2"], "trainer.devices=2, but a cell can have 1 here: lower it"),
        ([*RUN, "slurm.qos=long"], "slurm.qos=long needs launcher=slurm"),
    ],
)
def test_bad_input_is_refused_before_anything_runs(here, args, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        sweep.sweep(args)
    assert not list(here.iterdir())


def test_any_field_may_have_several_values():
    asked = sweep.parse_sweep(["task=listops,text", "attn=flash,standard", "max_length=600,700", "seed=3,1"])
    assert len(asked.cells) == 16 and [cell.seed for cell in asked.cells] == [3] * 8 + [1] * 8
    assert {cell.column for cell in asked.cells} == {
        f"{task} max_length={length}" for task in ("listops", "text") for length in (600, 700)
    }
    betas = sweep.parse_sweep([*RUN, "optim.betas=[0.9,0.98],[0.9,0.999]"]).cells
    assert [cell.composed.config.optim.betas for cell in betas] == [(0.9, 0.98), (0.9, 0.999)]


def test_a_dry_run_shows_what_is_there_and_left_and_writes_nothing(here):
    todo = sweep.parse_sweep(TWO).cells
    for cell in (todo[0], todo[2]):
        made(cell, "finished", 0.9, val={"accuracy": 0.35}, steps_per_second=10.0)
    before = sorted(here.rglob("*"))
    report = sweep.sweep(TWO, dry_run=True)
    assert sorted(here.rglob("*")) == before
    planned = report.tables[0][2]
    assert [row[3] for row in planned] == ["done, validation accuracy 35.00%", "open"] * 2
    assert planned[1][4] == "150 s", "a step with another learning rate takes as long"
    assert report.tables[1][2] == [
        ["flash", "1e-4", "35.00 ± 0.00", "2", ""], ["flash", "3e-4", "", "0 of 2", ""]
    ], "no accuracy on the test set while a run is left"  # fmt: skip
    assert not report.wrong


def test_validation_ranks_and_test_is_shown_of_the_best_alone(here):
    args = (*RUN[:1], "attn=flash,standard", *RUN[2:], "optim.lr=1e-4,3e-4,1e-3", "seed=0,1")
    accuracies = {  # validation of two seeds, and test
        ("flash", "1e-4"): (0.3, 0.4, 0.9), ("flash", "3e-4"): (0.5, 0.5, 0.1), ("flash", "1e-3"): (0.6, None, 0.8),
        ("standard", "1e-4"): (0.45, 0.45, 0.2), ("standard", "3e-4"): (0.2, 0.2, 0.7),
        ("standard", "1e-3"): (0.1, 0.1, 0.1),
    }  # fmt: skip
    asked = sweep.parse_sweep(args)
    for cell in asked.cells:
        *validation, test = accuracies[cell.attn, cell.column.partition("optim.lr=")[2]]
        if (score := validation[cell.seed]) is not None:
            scored(cell, score, test)
        else:
            made(cell, "failed")
            path = made(cell, "failed")
            (path / "failed.json").touch()
    report = sweep.sweep(args)
    assert report.tables == [
        ("listops: accuracy, %", ["attention", "optim.lr", "validation", "seeds", "test"], [
            ["flash", "3e-4", "50.00 ± 0.00", "2", "10.00 ± 0.00"],
            ["standard", "1e-4", "45.00 ± 0.00", "2", "20.00 ± 0.00"],
            ["flash", "1e-4", "35.00 ± 7.07", "2", ""],
            ["standard", "3e-4", "20.00 ± 0.00", "2", ""],
            ["standard", "1e-3", "10.00 ± 0.00", "2", ""],
            ["flash", "1e-3", "60.00", "1 of 2, failed s1", ""],
        ])
    ]  # fmt: skip
    assert report.lines[0] == sweep.CHOICE_NOTE and report.wrong
    assert not started(), "all is there"


@pytest.mark.parametrize(
    ("given", "titles"),
    [
        (["pretrain=none,masked"], ["listops, pretrain=none", "listops, pretrain=masked"]),
        (["pretrain=masked", "mask=0.1,0.3"], ["listops, mask=0.1", "listops, mask=0.3"]),
        (["pretrain=masked", "mask_loss=hidden,all"], ["listops"]),
        (["denoise=1", "mask=0.1,0.3"], ["listops"]),
        (["min_length=8,60"], ["listops, task.min_length=8", "listops, task.min_length=60"]),
        (["task.val=50,60"], ["listops, task.val=50", "listops, task.val=60"]),
        (["train=500,600"], ["listops, task.train=500", "listops, task.train=600"]),
        (["fresh=50,60", "train_share=0.5,1.0"], ["listops"]),
        (
            ["source=generate,/a/release", "train=96000"],
            ["listops, task.source=generate", "listops, task.source=/a/release"],
        ),
    ],
)
def test_settings_that_validation_scores_by_something_else_are_ranked_apart(here, given, titles):
    report = sweep.sweep([*RUN, *given], dry_run=True)
    assert [title for title, *_ in report.tables[1:]] == [f"{title}: accuracy, %" for title in titles]
    assert "are ranked apart" in report.lines[0]


def test_the_same_field_of_two_tasks_makes_no_further_tables(here):
    report = sweep.sweep(["task=listops,text", *RUN[1:], "optim.lr=1e-4,3e-4"], dry_run=True)
    assert [title for title, *_ in report.tables[1:]] == ["listops: accuracy, %", "text: accuracy, %"]


def test_test_is_shown_of_the_best_of_each_table(here):
    args = (*RUN, "pretrain=none,masked", "optim.lr=1e-4,3e-4")
    scores = iter([(0.3, 0.31), (0.2, 0.21), (0.8, 0.81), (0.9, 0.91)])
    for cell in sweep.parse_sweep(args).cells:
        scored(cell, *next(scores))
    labels, hidden = sweep.sweep(args).tables
    assert labels[1] == ["attention", "pretrain", "optim.lr", "validation", "seeds", "test"]
    assert [row[2:] for row in labels[2]] == [["1e-4", "30.00", "1", "31.00"], ["3e-4", "20.00", "1", ""]]
    assert [row[2:] for row in hidden[2]] == [["3e-4", "90.00", "1", "91.00"], ["1e-4", "80.00", "1", ""]]


def test_the_rest_runs_and_the_same_command_prints_the_finished_table(here, monkeypatch):
    todo = sweep.parse_sweep(TWO).cells
    scored(todo[0], 0.35, 0.9)
    monkeypatch.setattr(launch, "LocalLauncher", functools.partial(LocalLauncher, command=stub(todo, "finish")))
    said: list[str] = []
    first = sweep.sweep(TWO, said.append)
    assert sorted(started()) == sorted(str(cell.directory.path) for cell in todo[1:])
    assert "listops optim.lr=3e-4 flash seed 0: done, validation accuracy 25.00%" in said
    assert first.tables[0][2] == [
        ["flash", "1e-4", "30.00 ± 7.07", "2", "70.00 ± 28.28"], ["flash", "3e-4", "25.00 ± 0.00", "2", ""]
    ]  # fmt: skip
    assert first.lines[-1] == f"written: {FILE}" and not first.wrong
    assert rows()[:2] == [
        {"task": "listops", "attn": "flash", "optim.lr": "1e-4", "seed": "0", "validation": "35.0", "state": "done",
         "seconds": "2.5", "directory": str(todo[0].directory.path)},
        {"task": "listops", "attn": "flash", "optim.lr": "3e-4", "seed": "0", "validation": "25.0", "state": "done",
         "seconds": "", "directory": str(todo[1].directory.path)},
    ]  # fmt: skip
    again = sweep.sweep(TWO)
    assert again.tables == first.tables and len(started()) == 3
    text = FILE.with_suffix(".txt").read_text()
    assert "setting" in text and "listops optim.lr=1e-4" in text and "70.00" not in text


def test_stages_run_before_their_setting(here, monkeypatch):
    args = ("task=text", "attn=flash", "recipe=amos2024", "optim.lr=1e-4,3e-4")
    todo = with_stages(sweep.parse_sweep(args).cells)
    assert len(todo) == 3, "both start from one run"
    monkeypatch.setattr(launch, "LocalLauncher", functools.partial(LocalLauncher, command=stub(todo, "finish")))
    report = sweep.sweep(args)
    assert started() == [str(cell.directory.path) for cell in todo]
    assert [row[1] for row in report.tables[0][2]] == ["1e-4", "3e-4"], "stages are no settings"


def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_runs(here):
    Path("file").write_text("")
    with pytest.raises(UsageError, match=re.escape("out=file can't be written to (")):
        sweep.sweep((*TWO, "out=file"))
    assert not Path("checkpoints").exists()


@pytest.mark.slow  # two processes that import PyTorch and train
def test_real_runs_are_swept(here, monkeypatch):
    monkeypatch.setenv("LRA_DATA", str(here / "data"))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    args = ["sweep", *RUN, *TINY, "optim.lr=1e-3,1e-2", "out=there"]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    (file,) = Path("there").glob("*.csv")
    found = rows(file)
    assert [row["optim.lr"] for row in found] == ["1e-3", "1e-2"]
    assert all(row["state"] == "done" and float(row["seconds"]) > 0 and row["validation"] for row in found)
    planned = CliRunner().invoke(app, [*args, "--dry-run"])
    assert "0 remain to be run" in planned.output


def test_a_stage_is_swept_by_its_own_fields():
    asked = sweep.parse_sweep(["task=text", "attn=flash", "recipe=amos2024", "start.optim.lr=5e-4,1e-3", "seed=0,1"])
    assert {cell.column for cell in asked.cells} == {"text start.optim.lr=5e-4", "text start.optim.lr=1e-3"}
    stages = {cell.stages[-1].composed.config.optim.lr: cell.composed.config.optim.lr for cell in asked.cells}
    assert stages == {5e-4: 2e-4, 1e-3: 2e-4} and len(with_stages(asked.cells)) == 8
