"""`lra reproduce … --dry-run`: what exists of a grid, what is left, and how long that takes if it was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lra.config.compose import list_differences
from lra.config.start_rules import RUN_FIELDS
from lra.experiments.grid import cells
from lra.experiments.grid.cells import CellState, ScoredSplit
from lra.experiments.grid.grid import EQUIVALENT_TASK_FIELDS, Cell
from lra.experiments.grid.local_launcher import CellStates
from lra.experiments.reproduction import Reproduction
from lra.training import checkpoints
from lra.training.output import format_duration
from lra.training.run_directory import RUNS_FOLDER, had_gpu_alone
from lra.training.run_files import read_result

# fields that don't change what a step takes
FIELDS_WITHOUT_PACE = (
    "seed", *RUN_FIELDS, *EQUIVALENT_TASK_FIELDS, "trainer.steps", "trainer.epochs", "trainer.eval_every",
    "trainer.log_every", "trainer.patience", "optim.lr", "optim.eps", "optim.weight_decay",
    "optim.schedule", "optim.warmup", "optim.cooldown", "optim.cooldown_to",
)  # fmt: skip


@dataclass(frozen=True)
class MeasuredSpeeds:
    """What `speed=true` measured."""

    paces: Sequence[tuple[dict[str, Any], float | None]] = ()  # configurations and steps per second; None: it failed
    source: str = ""

    def has(self, cell: Cell) -> bool:
        return any(_takes_the_same(config, cell) for config, _ in self.paces)

    def pace(self, cell: Cell) -> float | None:
        return next((pace for config, pace in self.paces if _takes_the_same(config, cell)), None)


def make_plan(
    states: CellStates, slots: int, places: int, alone: MeasuredSpeeds, command: str = "", split: ScoredSplit = "test"
) -> Reproduction:
    """The cells, and the time of training that is left, by their steps per second.

    These come from finished runs that had their GPU to themselves; else from what was measured alone; else from runs
    that shared a GPU, times the number of runs on it.

    Args:
        states: of the cells, and of the stages that they still need.
        slots: how many run at once.
        places: how many run at once if each has its GPUs to itself. Runs that share a GPU are slower by as much.
        alone: what was measured of cells.
        command: measures what is missing; empty if no command does.
        split: whose accuracy is shown.
    """
    paces: dict[tuple[str, str], tuple[float, str] | None] = {}
    rows: list[list[str]] = []
    times: dict[Path, float] = {}  # of what is left, as far as they are known
    elsewhere: dict[Path, float] = {}  # what others compute, for which this waits
    sources: dict[str, None] = {}
    left = [cell for cell, state in states.items() if not state.final and state.status != "running elsewhere"]
    for cell, state in states.items():
        text = ""
        if not state.final:
            place = cell.column, cell.attn
            if place not in paces:
                paces[place] = steps_per_second(cell, alone)
            text, known = "unknown", paces[place]
            if known is not None:
                pace, source = known
                seconds = steps_left(cell, state) / pace
                text = format_duration(seconds)
                (times if cell in left else elsewhere)[cell.directory.path] = seconds
                if cell in left:
                    sources[source] = None
        rows.append([cell.column, cell.attn, str(cell.seed), state.describe(split), text, str(cell.directory.path)])
    lines = [cells.count_states(states.values()), f"{len(left)} remain to be run; slots: {slots}"]
    if times:
        # one run is in one place, and a chain of stages one after the other
        waits = times | elsewhere
        chains = [sum(waits.get(run.directory.path, 0.0) for run in (*cell.stages, cell)) for cell in left]
        spent = format_duration(max(*chains, sum(times.values()) / places))
        lines.append(
            f"time for {len(times)} of them, from steps per second of {' and of '.join(sources)}: {spent} of training"
        )
    if unknown := [cell for cell in left if cell.directory.path not in times]:
        lacking = [cell for cell in unknown if not alone.has(cell)]
        stages = {stage.directory.path for cell in states for stage in cell.stages}
        also = " stages=true" if any(cell.directory.path in stages for cell in lacking) else ""
        mend = f"; {command}{also} measures steps per second" if command and lacking else ""
        lines.append(f"time for {len(unknown)} of them: unknown, as no run of the same configuration is done{mend}")
    header = ["column", "attention", "seed", "state", "training left", "directory"]
    return Reproduction([("cells", header, rows)], lines)


def steps_per_second(cell: Cell, alone: MeasuredSpeeds) -> tuple[float, str] | None:
    """Steps per second with nothing else on the GPU, and their source; None if they are not known."""
    run = cell.composed.config
    results = map(read_result, sorted((RUNS_FOLDER / run.task.name / run.attn.name).glob("*/result.json")))
    found = [
        result
        for result in results
        if result and result["status"] == "finished" and isinstance(result.get("steps_per_second"), int | float)
        and result["steps_per_second"] > 0
        and _takes_the_same(result["config"], cell)
    ]  # fmt: skip
    if single := [result for result in found if had_gpu_alone(result)]:
        return statistics.median(result["steps_per_second"] for result in single), _finished(single)
    if (pace := alone.pace(cell)) is not None:
        return pace, alone.source
    if found:
        own = (result["steps_per_second"] * (result.get("runs_per_device") or 1) for result in found)
        return statistics.median(own), f"{_finished(found)} that may have shared it"
    return None


def _finished(results: list[dict[str, Any]]) -> str:
    gpus = {result.get("environment", {}).get("gpu") or "CPU" for result in results}
    return f"finished runs on {', '.join(sorted(gpus))}"


def _takes_the_same(config: dict[str, Any], cell: Cell) -> bool:
    """Whether a step of the cell takes as long as one of this configuration."""
    return not list_differences(config, cell.directory.config, FIELDS_WITHOUT_PACE)


def steps_left(cell: Cell, state: CellState) -> int:
    """The steps that are left."""
    done = 0
    if state.status == "running elsewhere":
        done = cells.read_progress(cell)[0]
    elif state.resumes:
        with suppress(Exception):  # of many kinds, depending on where the damage is; the run itself says so
            done = checkpoints.read_progress(cell.directory.last)[0]
    return cell.composed.config.trainer.steps - done
