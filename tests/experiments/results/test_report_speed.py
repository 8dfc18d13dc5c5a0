"""`lra report … speed=`: what was measured alone, beside accuracies and the paper's speedups."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lra.errors import UsageError
from lra.experiments.results import report
from tests.experiments.test_speed import FILE, made, result, shown

pytestmark = pytest.mark.usefixtures("here")


def test_the_report_refuses_measurements_whose_cells_are_no_more(here):
    Path("runs").mkdir()
    measured = result(made("listops", "flash", "product", 2.0))
    measured["options"]["fields"] = ["batch.sise=8"]
    FILE.write_text(json.dumps(measured))
    with pytest.raises(UsageError, match=r"speed.json can't be compared \(.*unknown field 'batch.sise'.*remove it, or"):
        report.make_report("table3", ["results=runs", f"speed={FILE}"])


def test_the_report_shows_both_columns(here):
    Path("runs").mkdir()
    ways = {"attention": (8.0, 4.0), "product": (6.0, 2.0)}
    records = [
        made("listops", attn, way, ms)
        for way, pair in ways.items() for attn, ms in zip(("standard", "flash"), pair, strict=True)
    ]  # fmt: skip
    FILE.write_text(json.dumps(result(*records)))
    args = ["results=runs", "attns=standard,flash"]
    without, beside = (
        report.make_report("table3", args),
        report.make_report("table3", [*args, f"speed={FILE}", "out=out"]),
    )
    assert beside.tables[: len(without.tables)] == without.tables and len(beside.tables) == len(without.tables) + 3
    assert shown(beside, "speedup over standard on NVIDIA H200")["flash"] == ["2.00 (1)", "3.00 (1)", "2.4"]
    assert shown(beside, "attention, the same padded")["flash"] == ["250 (2.00×)", "", "", "", ""]
    assert without.alone == {} and beside.alone["NVIDIA H200", "listops", "flash"] == 500
    assert "speed: speed.json, NVIDIA H200, commit abc1234, 2026-01-01T00:00:00Z" in beside.notes
    for ending in ("md", "tex", "html"):
        assert "speedup over standard on NVIDIA H200" in Path(f"out/table3.{ending}").read_text()


@pytest.mark.parametrize(
    ("file", "more", "message"),
    [
        ("none.json", [], "speed=none.json is not a file: lra reproduce table3 speed=true makes it"),
        (
            "speed.json",
            ["recipe=demo"],
            "speed=speed.json was measured with recipe=xiong2021, not demo: give recipe=xiong2021",
        ),
        ("damaged.json", [], "damaged.json is not a measurement of lra reproduce with speed=true"),
        ("list.json", [], "list.json is not a measurement"),
        ("lacking.json", [], "lacking.json is not a measurement"),
    ],
)
def test_the_report_refuses_what_is_no_measurement_of_its_recipe(here, file, more, message):
    Path("runs").mkdir()
    FILE.write_text(json.dumps(result()))
    Path("damaged.json").write_text("{")
    Path("list.json").write_text("[]")
    Path("lacking.json").write_text(json.dumps(result(made("listops", "flash", "product", None))))
    with pytest.raises(UsageError, match=re.escape(message)):
        report.make_report("table3", ["results=runs", f"speed={file}", *more])


def test_the_report_refuses_what_is_of_another_table(here):
    Path("runs").mkdir()
    FILE.write_text(json.dumps(result(made("listops", "flash", "product", 2.0))))
    with pytest.raises(UsageError, match="speed=speed.json is of .*listops.*, no column of table6: name another"):
        report.make_report("table6", ["results=runs", "recipe=xiong2021", f"speed={FILE}"])
