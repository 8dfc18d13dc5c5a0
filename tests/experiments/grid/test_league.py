"""The league of a cell: strict or open, and why."""

import pytest

from lra.config.override import parse_overrides
from lra.experiments.grid.grid import read_grid
from lra.experiments.grid.league import league_of, open_reasons
from lra.experiments.results.report import make_report


def cell(column: str, recipe: str, *fields: str, table: str = "table3"):
    return read_grid(table).cells([column], ["flash"], 1, recipe, parse_overrides(fields))[0]


@pytest.mark.parametrize(
    ("column", "recipe", "fields", "reasons"),
    [
        ("text", "xiong2021", (), []),
        ("text", "amos2024", (), []),  # a stage on the same data
        ("listops", "miralles2025", (), []),  # trees, not images
        ("image", "miralles2025", (), ["augmented images (flip, rotate, shift, scale, shear, brightness, contrast)"]),
        ("image", "xiong2021", ("model.axes=2",), ["two axes of positions"]),
        ("pathfinder-lit", "xiong2021", (), ["task.tokens=lit"]),
        ("pathfinder", "xiong2021", ("task.level=easy",), ["task.level=easy"]),
        ("listops", "xiong2021", ("task.train=100000",), ["100,000 training examples, not 96,000"]),
        ("text", "xiong2021", ("init=elsewhere",), ["weights of another run, init="]),
    ],
)
def test_the_league_follows_from_fields_and_stages(column, recipe, fields, reasons):
    found = cell(column, recipe, *fields)
    assert open_reasons(found) == reasons
    assert league_of(open_reasons(found)) == ("open" if reasons else "strict")


def test_easier_data_in_a_stage_are_of_the_open_league():
    (reason,) = open_reasons(cell("listops", "curriculum"))
    assert reason.startswith("stages on other data (task.") and reason.count("task.max_length=") == 2


def test_a_report_says_the_league_of_each_column(tmp_path):
    asked = ("tasks=text,retrieval,image", "attns=flash", "seeds=1", "recipe=miralles2025", f"results={tmp_path}")
    report = make_report("table3", asked)
    _, header, lines = report.tables[0]
    assert header == ["attention", "text", "retrieval", "image", "average"]
    assert lines[-1] == ["league", "strict", "strict", "open", "mixed"]
    assert {row.column: row.league for row in report.rows} == {"text": "strict", "retrieval": "strict", "image": "open"}
    assert any(note.startswith("image is of the open league: augmented images (") for note in report.notes)
