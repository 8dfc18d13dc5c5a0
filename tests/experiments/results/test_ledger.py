"""Results are matched to cells by their configuration, and what is left out is named."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from lra.errors import UsageError
from lra.experiments.grid import grid
from lra.experiments.grid.grid import Cell
from lra.experiments.results import ledger
from lra.tasks import versioned_name

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"
REAL = json.loads((RESULTS / "runs/listops/linear/xiong2021-s0/result.json").read_text())
TABLE = grid.read_grid("table3")
CELLS = TABLE.cells(["listops"], ["standard", "flash", "linear"], 2)


def result(cell: Cell, accuracy: float = 0.36, **changes: Any) -> dict[str, Any]:
    """A finished result of a cell, in the shape of a real one."""
    made = copy.deepcopy(REAL)
    run = cell.composed.config
    made |= {"task": versioned_name(run.task), "attn": run.attn.name, "recipe": run.recipe, "seed": run.seed}
    made["runs_per_device"] = 1
    made["environment"]["commit"] = "5577a9a5dedc"
    made["config"] = json.loads(json.dumps(run.to_saved_dict()))
    made["test"] |= {"accuracy": accuracy}
    return made | changes


def dated(made: dict[str, Any], day: int) -> dict[str, Any]:
    return made | {"environment": made["environment"] | {"date": f"2026-01-{day:02}T00:00:00Z"}}


def put(path: Path, made: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(made))
    return path


def cell(attn: str, seed: int) -> Cell:
    return next(cell for cell in CELLS if (cell.attn, cell.seed) == (attn, seed))


def test_committed_results_are_found():
    found = ledger.match_results(CELLS, RESULTS)
    names = {str(cell): entry.path.relative_to(RESULTS).as_posix() for cell, entry in found.entries.items()}
    assert names == {
        f"listops {attn} seed 0": f"runs/listops/{attn}/xiong2021-s0/result.json"
        for attn in ("standard", "flash", "linear")
    }
    [note] = found.notes
    nearest = r"(runs/listops/(flash|linear|standard)/\S+/result\.json, ){5}and \d+ more"
    assert re.fullmatch(f"of no cell of this table with these tasks=, attns=, seeds= and fields: {nearest}", note)
    assert "results/attention" not in note  # no result of a run


def test_the_configuration_counts_and_not_the_path(tmp_path):
    put(tmp_path / "text" / "anything.json", result(cell("flash", 1)))
    found = ledger.match_results(CELLS, tmp_path)
    assert list(found.entries) == [cell("flash", 1)] and not found.notes


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("", "name", "mine"), ("", "engine", "eager"), ("trainer", "devices", 2), ("trainer", "accelerator", "gpu"),
     ("trainer", "log_every", 10), ("batch", "micro", 8), ("batch", "eval", 1)],
)  # fmt: skip
def test_what_does_not_change_the_computation_is_not_compared(tmp_path, section, field, value):
    made = result(cell("flash", 0))
    (made["config"][section] if section else made["config"])[field] = value
    put(tmp_path / "result.json", made)
    assert list(ledger.match_results(CELLS, tmp_path).entries) == [cell("flash", 0)]


@pytest.mark.parametrize(
    ("section", "field", "value"),
    [("", "seed", 9), ("", "init", "x"), ("optim", "lr", 1.0), ("trainer", "steps", 7),
     ("trainer", "precision", "fp32"), ("task", "source", "/lra_release"), ("batch", "layout", "padded"),
     ("task", "name", "gone")],
)  # fmt: skip
def test_another_computation_is_of_no_cell(tmp_path, section, field, value):
    made = result(cell("flash", 0))
    (made["config"][section] if section else made["config"])[field] = value
    put(tmp_path / "result.json", made)
    found = ledger.match_results(CELLS, tmp_path)
    assert not found.entries and found.notes == [
        "of no cell of this table with these tasks=, attns=, seeds= and fields: result.json"
    ]


def test_of_many_results_of_no_cell_the_nearest_are_named(tmp_path):
    for number in range(9):
        put(tmp_path / f"a{number}.json", result(cell("flash", 0), task="listops@0"))
    other = result(cell("flash", 0))
    other["config"]["task"]["name"] = "text"
    put(tmp_path / "a.json", other)
    (note,) = ledger.match_results(CELLS, tmp_path).notes
    assert note.endswith("seeds= and fields: a0.json, a1.json, a2.json, a3.json, a4.json, and 5 more")


def test_another_version_of_the_task_is_of_no_cell(tmp_path):
    put(tmp_path / "result.json", result(cell("flash", 0), task="listops@0"))
    assert not ledger.match_results(CELLS, tmp_path).entries


def test_where_imported_data_lay_does_not_matter(tmp_path):
    [wanted] = TABLE.cells(["retrieval"], ["flash"], 1)
    made = result(wanted)
    made["config"]["task"]["source"] = "/somewhere/lra_release.gz"
    put(tmp_path / "result.json", made)
    assert list(ledger.match_results([wanted], tmp_path).entries) == [wanted]


def test_a_missing_field_has_its_default(tmp_path):
    made = result(cell("flash", 0))
    assert made["config"].pop("engine") and made["config"]["model"].pop("axes") == 1
    put(tmp_path / "a.json", made)
    assert list(ledger.match_results(CELLS, tmp_path).entries) == [cell("flash", 0)]
    del made["config"]["trainer"]["precision"]  # its default is not the recipe's
    put(tmp_path / "a.json", made)
    assert not ledger.match_results(CELLS, tmp_path).entries


def test_a_recipes_start_is_of_the_same_seed(tmp_path):
    cells = TABLE.cells(["listops"], ["flash"], 2, "curriculum")
    put(tmp_path / "a.json", result(cells[1]))
    assert list(ledger.match_results(cells, tmp_path).entries) == [cells[1]]


@pytest.mark.parametrize("runs_per_device", [1, 2, None])
def test_a_speed_is_a_runs_own_if_it_is_known_to_have_been_alone(tmp_path, runs_per_device):
    [cell] = TABLE.cells(["listops"], ["flash"], 1, "curriculum")
    made = result(cell, steps_per_second=9.0, train_seconds=7.0, runs_per_device=runs_per_device)
    put(tmp_path / "a.json", {key: value for key, value in made.items() if value is not None})
    row = ledger.make_row(TABLE, cell, ledger.match_results([cell], tmp_path))
    assert (row.steps_per_second, row.train_seconds) == ((9.0, 7.0) if runs_per_device == 1 else (None, None))


def test_a_stage_that_was_out_of_memory_is_the_result_of_what_starts_from_it(tmp_path):
    [cell] = TABLE.cells(["listops"], ["flash"], 1, "curriculum")
    first, second = cell.stages
    lacking = result(first, status="oom", runs_per_device=1)
    put(tmp_path / "a.json", dated(lacking | {"runs_per_device": 2}, 1))
    assert not ledger.match_results([cell], tmp_path).stopped  # beside others it says nothing
    path = put(tmp_path / "b.json", dated(lacking, 2))
    found = ledger.match_results([cell], tmp_path)
    row = ledger.make_row(TABLE, cell, found)
    assert not found.entries and (row.status, row.result, row.memory_gb, row.steps) == ("oom", str(path), None, None)
    assert found.notes == ["of no cell of this table with these tasks=, attns=, seeds= and fields: a.json"]
    alone = ledger.match_results([first], tmp_path)
    assert [str(entry.path) for entry in alone.entries.values()] == [str(path)]
    assert alone.notes == [f"{tmp_path}/a.json: left out, as the run was out of memory beside other runs"]
    done = put(tmp_path / "c.json", dated(result(second), 3))
    assert not ledger.match_results([cell], tmp_path).stopped
    done.unlink()
    put(tmp_path / "d.json", dated(result(first), 3))
    assert not ledger.match_results([cell], tmp_path).stopped


def test_a_stage_may_be_of_another_attention(tmp_path):
    table = grid.read_grid("table6")
    cells = table.cells(["path256"], ["standard", "smyrf", "butterfly"], 1)
    path = put(tmp_path / "a.json", result(cells[0].stages[-1], status="oom", runs_per_device=1))
    found = ledger.match_results(cells, tmp_path)
    assert {cell.attn: entry.path for cell, entry in found.stopped.items()} == {"standard": path, "smyrf": path}
    assert cells[0].stages[-1].attn == "flash"


def test_the_newer_of_two_counts_and_both_are_named(tmp_path):
    old = put(tmp_path / "z.json", dated(result(cell("flash", 0)), 1))
    new = put(tmp_path / "a.json", dated(result(cell("flash", 0)), 2))
    found = ledger.match_results(CELLS, tmp_path)
    assert found.entries[cell("flash", 0)].path == new
    [note] = found.notes
    assert note.startswith("listops flash seed 0: ") and str(old) in note and str(new) in note


@pytest.mark.parametrize("status", ["finished", "failed", "oom"])
@pytest.mark.parametrize("newest", ["a.json", "b.json", "c.json"])
def test_the_newest_of_several_counts_by_the_second_whatever_the_files_are_called(tmp_path, status, newest):
    for name in ("a.json", "b.json", "c.json"):
        made = result(cell("flash", 0), status=status)
        second = 59 if name == newest else ord(name[0]) % 10
        made["environment"] |= {"date": f"2026-01-01T00:00:{second:02}Z"}
        put(tmp_path / name, made)
    assert ledger.match_results(CELLS, tmp_path).entries[cell("flash", 0)].path.name == newest


@pytest.mark.parametrize("status", ["oom", "failed"])
def test_what_finished_counts_whatever_came_after(tmp_path, status):
    finished = put(tmp_path / "h200.json", dated(result(cell("flash", 0)), 1))
    put(tmp_path / "small.json", dated(result(cell("flash", 0), status=status), 2))
    assert ledger.match_results(CELLS, tmp_path).entries[cell("flash", 0)].path == finished


def test_what_is_not_whole_is_named(tmp_path):
    good = result(cell("flash", 0))
    put(tmp_path / "huge.json", good | {"steps": 10**400})
    (tmp_path / "cut.json").write_text(json.dumps(good)[:-9])
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    put(tmp_path / "list.json", [1])
    put(tmp_path / "env.json", {"gpu": None})
    put(tmp_path / ".result.json", {"status": "finished"})
    put(tmp_path / "bare.json", {"status": "finished"})
    put(tmp_path / "state.json", good | {"status": "running"})
    put(tmp_path / "untested.json", {key: value for key, value in good.items() if key != "test"})
    put(tmp_path / "share.json", good | {"test": good["test"] | {"accuracy": 1.36}})
    put(tmp_path / "speed.json", good | {"steps_per_second": "fast"})
    put(tmp_path / "less.json", good | {"peak_gpu_bytes": -1})
    put(tmp_path / "engine.json", good | {"engine": [1]})
    put(tmp_path / "failed.json", good)  # of a first try: no result of the run
    found = ledger.match_results(CELLS, tmp_path)
    assert not found.entries
    names = ("cut", "bytes", "bare", "state", "untested", "share", "speed", "less", "engine", "huge")
    named = {name: note for note in found.notes for name in names if f"{name}.json" in note}
    assert len(named) == len(found.notes) == 10
    assert "can't be read" in named["cut"] and "can't be read" in named["bytes"]
    assert "lacks test with all scores" in named["untested"] and "steps_per_second" in named["speed"]


def test_a_run_that_failed_needs_no_scores(tmp_path):
    made = {key: value for key, value in result(cell("flash", 0)).items() if key not in ("test", "fresh", "val")}
    put(tmp_path / "result.json", made | {"status": "oom", "steps_per_second": None})
    assert ledger.match_results(CELLS, tmp_path).entries[cell("flash", 0)].result["status"] == "oom"


def test_curves_lie_beside(tmp_path):
    own, copy = put(tmp_path / "run" / "result.json", {}), put(tmp_path / "run" / "copy.json", {})
    assert ledger.ResultFile(own, {}).curves is None
    (curves := own.with_name("metrics.csv")).write_text("")
    assert ledger.ResultFile(own, {}).curves == curves
    assert ledger.ResultFile(copy, {}).curves is None


def test_a_mean_is_of_the_rows_asked_for_that_finished():
    def row(column: str, attention: str, seed: int, status: str, accuracy: float | None) -> ledger.ReportRow:
        return ledger.ReportRow(
            column, attention, seed, status=status, accuracy=accuracy, hardware=f"{column} of {status}"
        )

    rows = [
        row("text", "flash", 0, "finished", 10.0), row("text", "flash", 1, "stuck", 30.0),
        row("text", "flash", 2, "failed", 100.0), row("text", "flash", 3, "", 100.0),
        row("text", "flash", 4, "finished", None), row("text", "linear", 0, "finished", 50.0),
        row("listops", "flash", 0, "finished", 70.0), row("listops", "linear", 0, "oom", 90.0),
    ]  # fmt: skip
    assert ledger.known_values(rows, "accuracy", column="text", attention="flash") == [10.0, 30.0]
    assert ledger.mean_value(rows, "accuracy", column="text", attention="flash") == 20.0
    assert ledger.mean_value(rows, "accuracy", attention="flash") == pytest.approx(110 / 3)
    assert ledger.mean_value(rows, "accuracy") == 40.0 and ledger.mean_value(rows, "fresh") is None
    assert ledger.mean_value(rows, "accuracy", column="listops", attention="linear") is None
    assert ledger.finished_hardware(rows) == ["listops of finished", "text of finished", "text of stuck"]


def test_no_folder_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no is not a folder: name one"):
        ledger.match_results(CELLS, tmp_path / "no")


def older(cell: Cell, accuracy: float = 0.7) -> dict[str, Any]:
    """A result of version 1 of a task that has a newer one."""
    made = result(cell, accuracy)
    del made["config"]["task"]["version"]
    return made | {"task": f"{made['config']['task']['name']}@1"}


def test_results_of_an_older_version_are_shown_and_named_where_there_are_no_newer_ones(tmp_path):
    cells = TABLE.cells(["pathfinder", "pathfinder-lit"], ["flash", "linear"], 1, "curriculum")
    for number, some in enumerate(cells):
        put(tmp_path / f"{number}.json", older(some))
    found = ledger.match_results(cells, tmp_path)
    assert set(found.entries) == set(cells)
    assert found.notes == ["pathfinder, pathfinder-lit: results of pathfinder@1; the task is now pathfinder@2"]
    assert ledger.make_row(TABLE, cells[0], found).command.endswith("task.version=1")

    put(tmp_path / "newer.json", result(cells[0], 0.6))
    found = ledger.match_results(cells, tmp_path)
    column = {cell for cell in cells if cell.column == cells[0].column}
    assert set(found.entries) == {*cells} - column | {cells[0]}, "a column is never of both"
    assert found.entries[cells[0]].result["test"]["accuracy"] == 0.6
    assert not ledger.make_row(TABLE, cells[0], found).command.endswith("task.version=1")
    left = [note for note in found.notes if "is left out, as the column has pathfinder@2" in note]
    assert len(left) == 2 and found.notes[-1].startswith("pathfinder-lit: results of pathfinder@1")

    asked = TABLE.cells(["pathfinder"], ["flash", "linear"], 1, "curriculum", ["task.version=1"])
    found = ledger.match_results(asked, tmp_path)
    assert set(found.entries) == set(asked) and not found.older
