"""Where a recipe or fields make a column another task than the paper's, it is named and has none of its figures."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from lra.config.options import parse_options
from lra.config.override import Override
from lra.experiments import accuracy
from lra.experiments.grid import grid
from lra.experiments.grid.cells import CellState
from lra.experiments.grid.grid import Cell
from lra.experiments.results import report
from tests.experiments.results.test_ledger import put, result
from tests.experiments.results.test_report import cells, table
from tests.experiments.runs import GRID, made
from tests.experiments.test_speed import FILE, shown
from tests.experiments.test_speed import made as measurement
from tests.experiments.test_speed import result as measured

pytestmark = pytest.mark.usefixtures("here", "no_gpus")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("task.tokens=lit", "task.tokens: all -> lit"),
        ("tokens=lit", "task.tokens: all -> lit"),
        ("level=easy", "task.level: hard -> easy"),
    ],
)
def test_what_changes_a_task_is_named_and_the_papers_figures_are_left_out(here, field, change):
    args = ("tasks=pathfinder", "attns=flash", "seeds=1", "recipe=xiong2021", field)
    (cell,) = accuracy.choose_cells(grid.read_grid("table3"), parse_options(accuracy.GridOptions, args[:-1]), [field])
    made(cell, "finished", 0.7689)
    report = accuracy.reproduce("table3", args)
    assert report.tables[0][0] == "table3: test accuracy, %; of other tasks: pathfinder"
    assert "five tasks; of other tasks: pathfinder" in Path("checkpoints/table3.txt").read_text()
    assert report.tables[0][2] == [["flash", "76.89", ""]]
    out = f"its figures, averages too, are left out where the task is another: pathfinder ({change})"
    assert report.lines[0] == f"paper: FlashAttention, arXiv 2205.14135, Table 3; {out}"


def test_a_smaller_data_set_is_the_same_task():
    table = grid.read_grid("table3")
    for fields in (["train=50", "task.data_seed=1"], ["model.layers=1"], ["task.source=/data"]):
        assert table.under(table.cells(["listops"], ["flash"], 1, fields=fields)) == table
    lit = table.cells(["pathfinder-lit", "scisumm"], ["flash"], 1, "curriculum")
    assert table.under(lit) == table, "what a column is made by is no change"


def test_what_a_recipe_makes_of_a_task_is_found_column_by_column():
    def others(recipe: str, name: str = "table3") -> list[str]:
        table = grid.read_grid(name)
        return list(table.under(table.cells(None, None, 1, recipe)).others)

    assert others("xiong2021") == others("curriculum") == others("curriculum", "table6") == []
    assert others("tay2021") == ["text"] and others("demo") == ["listops", "text", "retrieval", "pathfinder"]
    table = grid.read_grid("table3").under(grid.read_grid("table3").cells(None, ["flash"], 1, "demo"))
    assert [table.figure("flash", name) for name in ("listops", "image")] == [None, 43.5]
    assert [table.figure("flash", name) for name in ("average", "speedup")] == [None, None]
    assert table.average("flash", ["image", "text"]) is None and table.average("flash", ["image"]) == 43.5


def test_one_attention_of_another_task_is_enough():
    one, other = GRID.cells(["text"], None, 1, "xiong2021")
    short = Cell("text", "standard", 0, (*other.args, Override("max_length", "9")))
    assert GRID.under([one, short]).others == {"text": "task.max_length: 4096 -> 9"}
    assert GRID.under([one, other]) == GRID


def test_the_own_average_stays_where_the_papers_figures_are_left_out():
    todo = GRID.cells(["listops", "text"], ["flash"], 1, "xiong2021", ["max_length=1000"])
    states = {cell: CellState("done", {"test": {"accuracy": 0.1 * i}}, True) for i, cell in enumerate(todo)}
    _, header, rows = accuracy.accuracy_table(GRID.under(todo), states)
    assert header == ["attention", "listops", "paper", "text", "paper", "average", "paper"]
    assert rows == [["flash", "0.00", "", "10.00", "", "5.00", ""]]


def test_a_recipe_of_other_tasks_stands_beside_no_figure_of_the_papers(tmp_path):
    for place, cell in enumerate(cells(["listops", "image"], ["standard", "flash"], recipe="demo")):
        put(tmp_path / f"{place}.json", result(cell, 0.5, steps_per_second=100.0))
    args = [f"results={tmp_path}", "recipe=demo", "attns=standard,flash", "seeds=1"]
    made = report.make_report("table3", [*args, "tasks=listops,image", f"out={tmp_path / 'out'}"])
    assert table(made, "difference")["flash"] == {"listops": "", "image": "+6.5 (43.5)", "average": ""}
    assert table(made, "test accuracy")["flash"]["average"] == "50.0"
    assert list(table(made, "steps per second")["flash"]) == ["listops", "image", "speedup"]
    named = "listops (task.max_length: 1999 -> 64; task.min_length: 501 -> 8)"
    assert made.notes[1].startswith("paper: FlashAttention") and made.notes[1].endswith(f"is another: {named}")
    rows = csv.DictReader((tmp_path / "out" / "table3.csv").read_text().splitlines())
    assert [row["paper"] for row in rows if row["attention"] == "flash"] == ["", "43.5"]
    assert "; of other tasks: listops" in (tmp_path / "out" / "table3.html").read_text().partition("</title>")[0]
    image = report.make_report("table3", [*args, "tasks=image"])
    assert table(image, "steps per second")["flash"]["paper"] == "2.4" and "paper" not in image.notes[1]


def test_tasks_that_are_not_the_papers_stand_beside_none_of_its_figures():
    arguments = ["speed=true", "tasks=pathfinder", "attns=flash"]
    for more, figure, named in (
        (["recipe=curriculum"], "2.4", ""),
        (["recipe=curriculum", "tokens=lit"], "", "pathfinder (task.tokens: all -> lit)"),
        (["recipe=demo"], "", "pathfinder (task.level: hard -> easy; task.tokens: all -> lit)"),
    ):
        made = accuracy.reproduce("table3", arguments + more, dry_run=True)
        title, _, rows = made.tables[0]
        assert rows[0][-1] == figure and named in made.lines[0]
        assert title.endswith("(columns); of other tasks: pathfinder" if named else "(columns)")


@pytest.mark.parametrize(("fields", "figure"), [([], "2.4"), (["data_seed=1"], "2.4"), (["max_length=1000"], "")])
def test_the_report_leaves_the_papers_speedup_out_of_other_tasks_that_were_measured(here, fields, figure):
    Path("runs").mkdir()
    found = measured(measurement("text", "flash", "product", 4.0))
    found["options"]["fields"] = fields
    FILE.write_text(json.dumps(found))
    beside = report.make_report("table3", ["results=runs", "tasks=text", "attns=flash", "seeds=1", f"speed={FILE}"])
    assert shown(beside, "speedup over standard")["flash"][-1] == figure
    found["cells"].append(measurement("listops", "flash", "product", 4.0))
    found["options"]["fields"] = ["max_length=1000"]
    FILE.write_text(json.dumps(found))
    image = report.make_report("table3", ["results=runs", "tasks=image", "attns=flash", "seeds=1", f"speed={FILE}"])
    assert shown(image, "speedup over standard")["flash"][-1] == "2.4", "of what is shown nothing is another task"
    assert shown(beside, "difference")["flash"] == ["(63.9)"], "of runs without these fields"
