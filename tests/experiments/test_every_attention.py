"""Every attention of lra that can be had here is accepted wherever a list of attentions or one attention is given."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lra import cli
from lra.bench.cases import attention_names
from lra.commands import parse_command
from lra.experiments import speed
from lra.experiments.grid.grid import read_grid
from lra.models.attention import ATTENTIONS

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
