"""`lra config stages`: the runs that a recipe makes for one."""

from __future__ import annotations

import pytest

from lra.errors import UsageError
from lra.experiments.grid.cells import with_stages
from lra.experiments.grid.grid import read_grid
from lra.experiments.grid.stages import list_stages
from tests.experiments.runs import made

CHAIN = ("task=text", "attn=flash", "recipe=amos2024")


def test_each_run_has_its_steps_and_what_changes(here):
    _, header, rows = list_stages(CHAIN)
    assert header[:5] == ["run", "task", "attention", "steps", "state"]
    assert [row[1:5] for row in rows] == [
        ["text, pretrain=masked", "flash", "24,000", "open"],
        ["text", "flash", "24,000", "open"],
    ]
    assert "model.dropout=0.1" in rows[1][6].split() and not rows[0][6]
    assert rows[1][7] == "checkpoints/runs/text/flash/amos2024-s0"


def test_a_finished_run_is_done_and_gives_a_time_to_one_like_it(here):
    first, last = with_stages(read_grid("table3").cells(["text"], ["flash"], 1, "amos2024"))
    made(first, "finished", 0.7)
    made(last, "finished", 0.7, steps_per_second=100.0)
    assert [row[4] for row in list_stages(CHAIN)[2]] == ["done, test accuracy 70.00%"] * 2
    assert [(row[4], row[5]) for row in list_stages((*CHAIN, "seed=1"))[2]] == [("open", ""), ("open", "4 min")]


def test_a_run_without_stages_is_a_chain_of_one(here):
    assert len(list_stages(("task=listops", "attn=flash", "recipe=xiong2021"))[2]) == 1
    with pytest.raises(UsageError, match="unknown recipe 'amos'"):
        list_stages(("task=text", "attn=flash", "recipe=amos"))
