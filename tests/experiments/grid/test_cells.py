"""The states of cells, read from directories made by hand, and claims."""

from __future__ import annotations

import os

import pytest

from lra.errors import UsageError
from lra.experiments.grid import grid
from lra.experiments.grid.cells import (
    CellState,
    cell_state,
    clear_result,
    count_states,
    read_progress,
    state_on_disk,
    with_stages,
)
from lra.training.run_directory import claim_directory, is_claimed
from tests.experiments.runs import GRID, cells, command, made, stub, until

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def cell():
    return cells()[0]


def test_nothing_is_open_and_looking_writes_nothing(cell, here):
    assert cell_state(cell) == CellState("open") and str(cell_state(cell)) == "open" and not list(here.iterdir())


def test_a_whole_result_of_this_configuration_is_done(cell):
    made(cell, "finished", 0.372)
    state = cell_state(cell)
    assert state.status == "done" and state.final and state.accuracy == 0.372
    assert str(state) == "done, test accuracy 37.20%"


@pytest.mark.parametrize("status", ["finished", "oom", "failed"])
def test_a_result_of_another_version_of_the_task_is_refused(cell, status):
    made(cell, status, task="listops@0")
    with pytest.raises(UsageError, match="holds a result of listops@0, and the task is now listops@1: move it away"):
        cell_state(cell)


@pytest.mark.parametrize("text", ["", '{"status": "fini', "[]", '{"status": "finished"}', '{"status": "other"}'])
def test_a_damaged_result_is_none(cell, text):
    path = made(cell)
    (path / "result.json").write_text(text)
    assert str(cell_state(cell)) == "interrupted, starts over"
    clear_result(cell)
    assert not (path / "result.json").exists() and not (path / "failed.json").exists()


def test_without_a_result_it_is_interrupted(cell):
    path = made(cell)
    assert cell_state(cell) == CellState("interrupted")
    (path / "last.ckpt").touch()
    assert str(cell_state(cell)) == "interrupted, goes on from last.ckpt"


def test_out_of_memory_is_final(cell):
    made(cell, "oom", error="halve it")
    state = cell_state(cell)
    assert state.status == "OOM" and state.final and state.accuracy is None and str(state) == "OOM: halve it"


def test_without_its_stage_for_want_of_memory_a_cell_is_out_of_memory():
    (cell,) = GRID.cells(("listops",), ("flash",), 1, "curriculum")
    first, second = cell.stages
    made(first, "oom", error="halve it", runs_per_device=2)
    assert cell_state(cell) == CellState("open")  # the stage may yet be done
    path = made(first, "oom", error="halve it")
    assert (
        cell_state(cell).final
        and str(cell_state(cell)) == str(cell_state(second)) == f"OOM: of its stage {path}: halve it"
    )
    cell.directory.path.mkdir(parents=True)
    (cell.directory.path / "log.txt").touch()
    assert cell_state(cell).status == "OOM", "a process that was refused is no begin"
    made(second, "finished")
    assert cell_state(cell) == CellState("open")


def test_stages_before_a_run_that_has_begun_are_not_needed():
    (cell,) = GRID.cells(("listops",), ("flash",), 1, "curriculum")
    first, second = cell.stages
    assert with_stages([cell]) == [first, second, cell]
    (made(second) / "last.ckpt").touch()
    assert with_stages([cell]) == [second, cell]
    made(cell, "finished")
    assert with_stages([cell]) == [cell]


def test_a_stage_that_is_a_cell_itself_is_there_as_that():
    after, before = grid.read_grid("table6").cells(["pathx", "path64"], ["flash"], 1, "dao2022")
    assert with_stages([after, before]) == [before, after.stages[1], after]


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_what_did_not_do_on_another_machine_is_run_here(cell, status):
    path = made(cell, status)
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("micro: null", "micro: 1"))
    assert cell_state(cell) == CellState("interrupted")
    made(cell, "finished")
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("micro: null", "micro: 1"))
    assert cell_state(cell).status == "done"


def test_a_failure_is_retried_once(cell):
    path = made(cell, "failed", traceback="first")
    state = cell_state(cell)
    assert not state.final and str(state) == "failed, to be retried once: it broke"
    clear_result(cell)
    assert "first" in (path / "failed.json").read_text() and cell_state(cell).status == "interrupted"
    made(cell, "failed", traceback="second")
    assert cell_state(cell).final and str(cell_state(cell)) == "failed twice: it broke"
    made(cell, "finished")
    assert cell_state(cell).status == "done"


def test_another_configuration_is_refused_with_its_fields(cell):
    path = made(cell, "finished")
    (path / "config.yaml").write_text((path / "config.yaml").read_text().replace("lr: 0.002", "lr: 0.5"))
    with pytest.raises(UsageError, match=r"demo-s0 holds a run with another configuration \(optim.lr: 0.5 -> 0.002\)"):
        cell_state(cell)
    (path / "config.yaml").write_text("a: [")
    with pytest.raises(UsageError, match=r"demo-s0/config.yaml is damaged"):
        cell_state(cell)
    (path / "config.yaml").unlink()
    with pytest.raises(UsageError, match=r"demo-s0 holds a result without a config.yaml"):
        cell_state(cell)


def test_a_claim_is_held_once_and_until_it_is_closed(cell):
    path = made(cell)
    assert not is_claimed(path)
    held = claim_directory(path)
    assert held is not None and claim_directory(path) is None
    assert cell_state(cell) == CellState("running elsewhere") and state_on_disk(cell) == CellState("interrupted")
    os.close(held)
    assert cell_state(cell) == CellState("interrupted")
    made(cell, "finished")
    held = claim_directory(path)
    assert cell_state(cell).status == "done"  # its process is just ending
    os.close(held or 0)


def test_a_claim_is_that_of_the_process_that_works(cell):
    other = command([cell], stub([cell], "gate"))
    until(lambda: (cell.directory.path / "config.yaml").exists())
    assert cell_state(cell) == CellState("running elsewhere")
    other.kill()
    other.join()
    assert cell_state(cell) == CellState("running elsewhere")  # the process works on
    (cell.directory.path.parents[4] / "gate").touch()
    until(lambda: cell_state(cell).status == "done")
    until(lambda: not is_claimed(cell.directory.path))


def test_steps_and_accuracy_are_those_of_the_curves(cell):
    assert read_progress(cell) == (0, 0, None)
    (made(cell) / "metrics.csv").write_text("step,train/loss,lr,val/loss,val/accuracy\n")
    assert read_progress(cell) == (0, 0, None)
    rows = ["step,train/loss,lr,val/loss,val/accuracy", "1,2.0,0.1,,", "2,,,1.0,0.3", "4,,,1.0,0.2", "5,2.0,0.1,,", "x"]
    (made(cell) / "metrics.csv").write_text("\n".join(rows))
    assert read_progress(cell) == (5, 4, 0.3)


@pytest.mark.parametrize("content", [b"garbage\nmore\n", b"\xff\n", b"step\nx\n"])
def test_curves_that_cant_be_read_end_nothing(cell, content):
    path = made(cell)
    (path / "metrics.csv").write_bytes(content)
    assert read_progress(cell) == (0, 0, None)


def test_states_are_counted():
    assert count_states([CellState("open"), CellState("done"), CellState("open")]) == "cells: 3, 1 done, 2 open"
