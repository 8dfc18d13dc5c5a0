"""Timelines of a process: each moment belongs to one phase."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lra.timeline import FILE_VARIABLE, FIRST_PHASE, Timeline, inner_phase, mark_phase, recorded_timeline
from tests.command_line import ROOT


@pytest.fixture
def clock():
    """`clock.at` is the time that a timeline sees."""

    class Clock:
        at = 100.0

        def __call__(self) -> float:
            return self.at

    return Clock()


def test_phases_follow_each_other_and_have_others_inside(clock):
    line = Timeline(clock)
    clock.at = 103
    line.mark("steps")
    clock.at = 104
    line.enter("compiling")
    clock.at = 109
    line.leave()
    clock.at = 111
    line.mark("test")
    clock.at = 112
    line.mark("steps")
    clock.at = 113
    line.facts["regions"] = lambda: ["loss"]
    assert line.saved() == {
        "began": 100, "ended": 113, "last": "steps", "regions": ["loss"],
        "phases": {FIRST_PHASE: 3, "steps": 1 + 2 + 1, "steps: compiling": 5, "test": 1},
    }  # fmt: skip


def test_what_something_else_counts_is_taken_from_the_phase_in_which_it_passed(clock):
    counted = [7.0]  # before the timeline asked
    line = Timeline(clock)
    line.count("autotuning", lambda: sum(counted))
    clock.at = 104
    line.mark("steps")
    counted.append(2.0)
    clock.at = 109
    line.mark("test")
    counted.append(9.0)  # more than passed
    clock.at = 110
    assert line.saved()["phases"] == {
        FIRST_PHASE: 4, "steps: autotuning": 2, "steps": 3, "test: autotuning": 1, "test": 0
    }  # fmt: skip


def test_a_process_is_recorded_only_if_asked():
    assert recorded_timeline() is None
    mark_phase("steps")
    with inner_phase("compiling"):
        pass
    assert recorded_timeline() is None


def test_a_process_writes_its_timeline_after_everything_else(tmp_path):
    """Not those that it starts."""
    file = tmp_path / "timeline.json"
    program = (
        "import atexit, os; from lra import timeline; timeline.begin_timeline(); timeline.mark_phase('steps');"
        f"atexit.register(timeline.mark_phase, 'end'); assert {FILE_VARIABLE!r} not in os.environ"
    )
    variables = os.environ | {"PYTHONPATH": str(ROOT), FILE_VARIABLE: str(file)}
    subprocess.run([sys.executable, "-c", program], env=variables, check=True)
    found = json.loads(file.read_text())
    assert list(found["phases"]) == [FIRST_PHASE, "steps", "end"] and found["last"] == "end"
    assert sum(found["phases"].values()) == pytest.approx(found["ended"] - found["began"])
