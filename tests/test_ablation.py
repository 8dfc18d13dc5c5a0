"""The page on ablations: which cells make a curve."""

from __future__ import annotations

from benchmarks.pages import ablation
from lra.experiments.grid import grid
from lra.experiments.results.ledger import ReportRow
from tests.drawings import words

TABLE = grid.read_grid("ablation")


def rows(*columns: str) -> list[ReportRow]:
    """A finished run of each of these cells. The accuracy is its place in the table."""
    places = {column: float(place) for place, column in enumerate(TABLE.columns)}
    return [ReportRow(column, "flash", 0, status="finished", accuracy=places[column]) for column in columns]


def test_a_curve_is_of_cells_that_differ_in_one_thing():
    found = ablation.curves(TABLE, rows(*TABLE.columns))
    with_pretraining, without = (("text", pretrained) for pretrained in (True, False))
    axes = {panel: [x for x, _ in lines[with_pretraining]] for panel, lines in found.items()}
    assert axes == {
        "hidden": [0.05, 0.15, 0.3, 0.5], "steps": [0, 0.25, 0.5, 1, 2, 4], "width": [64, 128, 256, 512],
        "labels": [0.01, 0.03, 0.1, 0.3, 1],
    }  # fmt: skip
    assert [x for x, _ in found["labels"][without]] == axes["labels"]
    assert [len(lines) for lines in found.values()] == [2, 2, 2, 4]
    base, scratch = (rows(name)[0].accuracy for name in ("text", "text-scratch"))
    assert dict(found["steps"][with_pretraining])[0] == dict(found["labels"][without])[1] == scratch
    assert dict(found["hidden"][with_pretraining])[0.15] == dict(found["width"][with_pretraining])[128] == base


def test_a_curve_needs_two_points():
    found = ablation.curves(TABLE, rows("listops", "listops-hidden-0.3", "text"))
    assert {panel: list(lines) for panel, lines in found.items() if lines} == {"hidden": [("listops", True)]}
    drawn = words(ablation.figure(found))
    assert {"ListOps", "share of tokens hidden", "width"} <= {*drawn} and "Text" not in drawn
