"""Every YAML in configs/table is a table for `lra report` and `lra reproduce`; a broken one is one line of its own."""

from __future__ import annotations

import shutil

import pytest
import yaml

from lra.config import recipes
from lra.experiments import list_experiments
from lra.experiments.accuracy import accuracy_table
from lra.experiments.grid import grid
from lra.experiments.grid.cells import CellState
from tests.command_line import lra, refused

MINE = {
    "recipe": "demo", "attns": ["flash", "standard"],
    "columns": {"listops": {"fields": ["task=listops"]}, "text": {"fields": ["task=text"]}},
}  # fmt: skip


@pytest.fixture(autouse=True)
def configs(tmp_path, monkeypatch):
    """The shipped files, to be added to."""
    shutil.copytree(recipes.CONFIGS_FOLDER, tmp_path / "configs")
    monkeypatch.setattr(recipes, "CONFIGS_FOLDER", tmp_path / "configs")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    return tmp_path / "configs"


def write(configs, **changes):
    table = {key: value for key, value in (MINE | changes).items() if value is not None}
    (configs / "table/mine.yaml").write_text(yaml.safe_dump(table))


def test_a_table_needs_no_papers_figures(configs):
    write(configs)
    made = grid.read_grid("mine")
    assert made.seeds == 1 and made.figure("flash", "listops") is None and made.about == "accuracy on listops, text"
    assert {"mine", "table3", "table6", "sota", "ablation", "fig3"} == list_experiments().keys()
    planned = lra("reproduce", "mine", "--dry-run")
    assert planned.code == 0 and "4 remain to be run" in planned.out
    done = lra("report", "mine", "results=results", "out=out")
    assert done.code == 0 and "difference to" not in done.out and "0 of 4 runs finished" in done.out
    assert {file.suffix for file in (configs.parent / "out").iterdir()} == {".md", ".csv", ".tex", ".html"}


def test_all_tables_are_listed_with_what_they_are(configs):
    write(configs, about="two attentions", source="a paper")
    (configs / "table/broken.yaml").write_text("about: {")
    for command in ("report", "reproduce"):
        rows = {row[0]: row[1:] for row in lra(command).rows}
        assert rows["mine"] == ["two attentions: a paper"]
        assert rows["table3"][0].startswith("accuracy of nine attentions")
        assert rows["broken"][0].startswith("table/broken.yaml can't be read: ")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attns": None, "columns": None}, "it lacks attns, columns"),
        ({"recipe": None}, "it lacks recipe"),
        ({"recipe": "dem"}, "unknown recipe 'dem': did you mean 'demo'"),
        ({"attns": "flash"}, "attns is 'flash', and must be a list of attentions"),
        ({"attns": ["flahs"]}, "unknown attention 'flahs': did you mean 'flash'"),
        ({"attns": [{"flash": 1}]}, "unknown attention"),
        ({"columns": ["listops"]}, "columns is ['listops'], and must be a mapping of columns"),
        ({"columns": {"a": ["task=text"]}}, "column a needs fields"),
        ({"columns": {"a": {"fields": "task=text"}}}, "column a needs fields"),
        ({"columns": {"a": {"fields": [5]}}}, "column a needs fields"),
        ({"columns": {"a": {"fields": ["recipe=demo"]}}}, "column a needs one task="),
        ({"columns": {"a": {"fields": ["task=txt"]}}}, "column a: unknown task 'txt': did you mean 'text'"),
        ({"columns": {"a": {"fields": ["task=text"], "apart": "no"}}}, "column a has more than fields and apart"),
        ({"columns": {"a": {"fields": ["task=text"], "b": 1}}}, "column a has more than fields and apart"),
        ({"columns": {5: {"fields": ["task=text"]}}}, "the name of column 5 is not a text"),
        ({"paper": {"flash": 37.6}}, "paper's flash is 37.6"),
        ({"paper": {"flash": {"listops": "37.6"}}}, "paper's flash is {'listops': '37.6'}"),
        ({"paper": [1]}, "paper is [1], and must be a mapping of attentions"),
        ({"seeds": 0}, "seeds is 0, and must be 1 to 1000"),
        ({"seeds": "five"}, "seeds is 'five', and must be how many there are"),
        ({"seeds": True}, "seeds is True"),
        ({"source": 5}, "source is 5, and must be a text"),
        ({"papers": {}}, "unknown field 'papers': did you mean 'paper'"),
        ({"published": {"S4": {"league": "strict", "text": 86.8}}}, "published S4 needs a source, a league"),
        ({"published": {"S4": {"source": "a", "league": "both"}}}, "published S4 needs a source, a league"),
        ({"published": {"S4": {"source": "a", "league": "open", "text": "86"}}}, "published S4 needs a source"),
        ({"published": {"S4": {"source": "a", "league": "open", "txt": 86}}}, "published S4: unknown column 'txt'"),
        ({"means": {"mean": ["listops", "txt"]}}, "mean mean is ['listops', 'txt'], and must be a list of columns"),
        (
            {"means": {"listops": ["listops"]}},
            "mean listops has the name of a column or a figure of all",
        ),
        ({"means": {"average": ["listops"]}}, "mean average has the name of a column or a figure"),
        ({"columns": {"average": {"fields": ["task=text"]}}}, "column average has the name of a figure of all columns"),
    ],
)
def test_a_table_of_another_form_is_refused(configs, changes, said):
    write(configs, **changes)
    for command in (("report", "mine"), ("reproduce", "mine", "--dry-run")):
        assert f"lra: table/mine.yaml: {said}" in refused(lra(*command))


def test_a_column_may_have_a_recipe_of_its_own(configs):
    columns = MINE["columns"] | {"cut": {"fields": ["task=text", "recipe=xiong2021"]}}
    write(configs, columns=columns)
    table = grid.read_grid("mine")
    recipes = {cell.column: cell.composed.config.recipe for cell in table.cells()}
    assert recipes == {"listops": "demo", "text": "demo", "cut": "xiong2021"}
    assert {cell.column for cell in table.cells(recipe="rotary")} == {"listops"}
    planned = lra("reproduce", "mine", "recipe=rotary", "--dry-run")
    assert "2 remain to be run" in planned.out and "recipe rotary has no cut, text: left out" in planned.out
    refused(lra("reproduce", "mine", "tasks=cut", "recipe=tay2021"), "column cut is made by recipe=xiong2021")
    assert "recipe: demo; of cut: xiong2021" in lra("report", "mine", "results=results").out


def test_a_table_of_many_columns_stands_upright(configs):
    columns = {f"cut-{n}": {"fields": ["task=text", f"task.max_length={n}"]} for n in range(10, 23)}
    write(configs, columns=columns)
    cells = grid.read_grid("mine").cells()
    _, header, rows = accuracy_table(grid.read_grid("mine"), {cell: CellState("open") for cell in cells})
    assert header == ["column", "flash", "standard"] and [row[0] for row in rows] == [*columns]
    few = [cell for cell in cells if cell.column == "cut-10"]
    _, header, rows = accuracy_table(grid.read_grid("mine"), {cell: CellState("open") for cell in few})
    assert header == ["attention", "cut-10"] and [row[0] for row in rows] == ["flash", "standard"]


@pytest.mark.parametrize(
    "content", [b"[" * 5000, b"recipe: \xff", b"a: 1\na: 1", b"- a", b"seeds: " + b"9" * 5000, b""]
)
def test_a_table_that_cant_be_read_is_refused(configs, content):
    (configs / "table/mine.yaml").write_bytes(content)
    refused(lra("report", "mine"), "^lra: table/mine.yaml ")
    assert lra("reproduce").code == lra("report").code == 0
    refused(lra("reproduce", "mne"), "unknown experiment 'mne': did you mean 'mine'")
