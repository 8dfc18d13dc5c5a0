"""Every attention of lra that can be had here is accepted wherever a list of attentions or one attention is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import lra
from lra import cli
from lra.bench.cases import attention_names
from lra.commands import parse_command
from lra.config import registry
from lra.errors import UsageError
from lra.experiments import speed
from lra.experiments.accuracy import reproduce
from lra.experiments.grid.grid import read_grid
from lra.experiments.results import report
from lra.models.attention import ATTENTIONS
from tests.experiments.results.test_ledger import put, result

HERE = [name for name, entry in ATTENTIONS.builtins().items() if not entry.missing]
ATTNS = f"attns={','.join(HERE)}"
TIMED = f"attns={','.join(name for name in attention_names() if name in HERE)}"  # mixers have no q, k and v to time
SMALL = ("tasks=listops", "trainer.accelerator=cpu")


@pytest.mark.parametrize(
    "command",
    [
        ("reproduce", "table3", ATTNS, *SMALL),
        ("reproduce", "table3", ATTNS, *SMALL, "speed=true"),
        ("report", "table3", ATTNS, *SMALL),
        ("bench", "attention", TIMED),
        ("bench", "attention", TIMED, "table=9"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_lists_of_attentions_have_all(command):
    assert len(HERE) >= 18
    parse_command(cli.app, command)


@pytest.mark.parametrize("attn", HERE)
def test_each_is_measured_by_a_step_and_has_a_cell(attn):
    parse_command(cli.app, ("bench", "step", "task=listops", f"attn={attn}"))
    for recipe in ("xiong2021", "tay2021"):
        (cell,) = read_grid("table3").cells(["listops"], [attn], 1, recipe)
        assert cell.attn == cell.composed.config.attn.name == attn


def test_a_table_is_measured_with_attentions_that_it_lacks():
    records = [SimpleNamespace(column="listops", attention=name) for name in ("standard", "sdpa")]
    options = {"attns": ["standard", "sdpa"], "recipe": "demo", "fields": []}
    result: Any = SimpleNamespace(cells=records, options=options)
    assert [cell.attn for cell in speed.measured_cells(read_grid("table3"), result)] == ["standard", "sdpa"]


def test_results_of_an_attention_that_needs_a_missing_package_are_reported_and_not_made(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_is_installed", lambda name: False)
    (cell,) = read_grid("table3").cells(["listops"], ["flash_attn"], 1)
    put(tmp_path / "result.json", result(cell, 0.4))
    chosen = ("attns=flash_attn", "tasks=listops", "seeds=1")
    made = report.make_report("table3", [f"results={tmp_path}", *chosen])
    assert ["flash_attn", "40.0"] in made.tables[0][2]
    monkeypatch.chdir(tmp_path)
    for make in (lambda: reproduce("table3", chosen), lambda: lra.fit("task=listops", "attn=flash_attn")):
        with pytest.raises(UsageError, match="attention 'flash_attn' needs flash_attn or "):
            make()
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
