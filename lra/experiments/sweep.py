"""`lra sweep`: runs of `lra fit` for all combinations of some fields' values, compared by validation.

A run is an ordinary one in its ordinary directory. So the same command goes on where it was stopped, several machines
may share the folder, and runs that exist already count.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import operator
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lra.config.options import split_options
from lra.config.override import Override, parse_overrides
from lra.errors import UsageError
from lra.experiments.grid import cells, plan
from lra.experiments.grid.cells import CellState
from lra.experiments.grid.grid import Cell, Column, Grid
from lra.experiments.grid.launch import Launch, LaunchOptions
from lra.experiments.grid.local_launcher import CellStates
from lra.experiments.grid.slurm import SlurmResources, split_resources
from lra.experiments.reproduction import Reproduction, TextTable, format_mean_std
from lra.training.output import format_duration
from lra.training.run_directory import RUNS_FOLDER, write_text

MOST_RUNS = 10_000  # in a sweep; more must be a mistake
DEFAULT_OUT = RUNS_FOLDER.parent / "sweep.csv"
COMMAS = re.compile(r",(?![^\[]*\])")  # those outside of brackets
BY_VALIDATION = (
    "Settings are compared by validation. Test is shown of the best one of each task alone: a setting that is chosen "
    "by test has no honest test accuracy."
)


@dataclass(frozen=True)
class SweepOptions(LaunchOptions):
    """Where the runs of a sweep are made. Every other field is one of `lra fit`, with one value or several."""

    out: str = str(DEFAULT_OUT)  # CSV file with a row for each run


class SweepRequest(NamedTuple):
    """What a command asks for."""

    options: SweepOptions
    resources: SlurmResources
    swept: tuple[str, ...]  # the fields with several values, without the seed
    cells: dict[Cell, tuple[str, ...]]  # with the values of the swept fields


def parse_sweep(args: Sequence[str]) -> SweepRequest:
    """The request in the arguments, with every run composed.

    Commas separate the values of a field. A value that is a list stands in brackets, as in
    `optim.betas=[0.9,0.98],[0.9,0.999]`.

    Raises:
        UsageError: for a run that is not possible, for two that are the same, and if there is nothing to sweep.
    """
    options, others = split_options(SweepOptions, parse_overrides(args))
    resources, fields = split_resources(others, options.launcher)
    if mend := next((each for each in fields if each.field in ("resume", "name")), None):
        raise UsageError(f"{mend}: every run of a sweep is resumed, and has a name of its own; leave it out")
    values = {each.field: _split_values(each) for each in fields}
    if all(len(texts) == 1 for texts in values.values()):
        raise UsageError("no field has several values: lra sweep task=… attn=… optim.lr=1e-4,3e-4 seed=0,1")
    if (count := math.prod(map(len, values.values()))) > MOST_RUNS:
        raise UsageError(f"these are {count:,} runs: name fewer values, at most {MOST_RUNS:,} runs")
    values.setdefault("seed", ["0"])
    swept = tuple(field for field, texts in values.items() if len(texts) > 1 and field != "seed")
    chosen: dict[Cell, tuple[str, ...]] = {}
    owners: dict[str, str] = {}
    for texts in itertools.product(*values.values()):
        given = dict(zip(values, texts, strict=True))
        cell = _make_cell(given, [f"{field}={given[field]}" for field in swept if field not in ("task", "attn")])
        configuration = json.dumps(cell.directory.config)
        if configuration in owners:
            raise UsageError(f"{owners[configuration]} and {cell} are the same run: name each value once")
        owners[configuration] = str(cell)
        chosen[cell] = tuple(given[field] for field in swept)
    # seed by seed, so that all settings have one run first
    return SweepRequest(options, resources, swept, dict(sorted(chosen.items(), key=lambda item: item[0].seed)))


def sweep(
    args: Sequence[str], progress: Callable[[str], None] = lambda line: None, dry_run: bool = False
) -> Reproduction:
    """Makes the runs that are left, then compares all of them and writes the CSV file.

    Args:
        args: `field=value[,value…]` of `lra fit`, and those of SweepOptions and SlurmResources.
        progress: is called with a line for each change of a run's state, unless a terminal shows the table.
        dry_run: only say what exists and what is left. Nothing is started or written.

    Raises:
        UsageError: before anything runs.
        SystemExit: on SIGINT (130) and SIGTERM (143), when all runs have ended.
    """
    request = parse_sweep(args)
    chosen = list(request.cells)
    columns = {cell.column: Column(()) for cell in chosen}
    grid = Grid("sweep", f"validation accuracy, %, of {len(chosen)} runs", "", "", 1, (), columns, {})
    launch = Launch(chosen, request.options, request.resources)
    if dry_run:
        return launch.plan(plan.MeasuredSpeeds())
    states = launch.run(grid, progress, operator.attrgetter("validation"))
    own = {cell: states.get(cell) or cells.cell_state(cell) for cell in chosen}
    write_text(Path(request.options.out), format_csv(request, own))
    lines = [cells.count_states(states.values()), BY_VALIDATION, f"each run: {request.options.out}"]
    lines += [f"{cell}: {state}" for cell, state in states.items() if state.status != "done"]
    wrong = any(not state.final or state.status in ("failed", "refused") for state in states.values())
    return Reproduction([settings_table(request, own)], lines, wrong)


def settings_table(request: SweepRequest, states: CellStates) -> TextTable:
    """A row for each setting, task by task, the best by mean validation accuracy first. Its test accuracy is shown."""
    settings: dict[tuple[str, tuple[str, ...]], list[CellState]] = {}
    for cell, values in request.cells.items():
        task = cell.composed.config.task.name
        settings.setdefault((task, values), []).append(states[cell])

    def rank(setting: tuple[tuple[str, tuple[str, ...]], list[CellState]]) -> tuple[str, float]:
        (task, _), runs = setting
        found = _known(runs, "validation")
        return task, -statistics.fmean(found) if found else 1.0

    rows, shown = [], set()
    for (task, values), runs in sorted(settings.items(), key=rank):
        found, best = _known(runs, "validation"), task not in shown
        shown.add(task)
        seconds = [took for state in runs if (took := (state.result or {}).get("train_seconds")) is not None]
        rows.append([
            task, *(value for field, value in zip(request.swept, values, strict=True) if field != "task"),
            format_mean_std(found, 2), f"{len(found)} of {len(runs)}",
            format_mean_std(_known(runs, "accuracy"), 2) if best and found else "",
            format_duration(statistics.fmean(seconds)) if seconds else "",
        ])  # fmt: skip
    fields = [field for field in request.swept if field != "task"]
    header = ["task", *fields, "validation, %", "runs", "test of the best, %", "training"]
    return "settings, the best first", header, rows


def format_csv(request: SweepRequest, states: CellStates) -> str:
    """A row for each run: its fields, state, scores in % and seconds of training. What is not known is empty.

    Test accuracy is left out: the file is made to choose settings.
    """
    text = io.StringIO()
    header = ("task", "attn", *(field for field in request.swept if field not in ("task", "attn")), "seed")
    out = csv.writer(text, lineterminator="\n")
    out.writerow((*header, "state", "validation", "train_seconds", "directory"))
    for cell, values in request.cells.items():
        state, run = states[cell], cell.composed.config
        given: Mapping[str, Any] = dict(zip(request.swept, values, strict=True)) | {
            "task": run.task.name, "attn": run.attn.name, "seed": cell.seed
        }  # fmt: skip
        score = "" if state.validation is None else f"{100 * state.validation:.4f}"
        seconds = (state.result or {}).get("train_seconds", "")
        out.writerow((*(given[name] for name in header), state.status, score, seconds, cell.directory.path))
    return text.getvalue()


def _make_cell(given: Mapping[str, str], swept: Sequence[str]) -> Cell:
    """The run of one value for each field. Its column names the task and the values that vary."""
    try:
        seed = int(given["seed"])
    except ValueError:
        raise UsageError(f"seed={given['seed']}: write an integer") from None
    column = " ".join((given.get("task", ""), *swept))
    return Cell(
        column, given.get("attn", ""), seed, parse_overrides(Override(field, text) for field, text in given.items())
    )


def _split_values(override: Override) -> list[str]:
    """The values of a field. UsageError for one that is empty or there twice."""
    texts = COMMAS.split(override.text)
    if not all(texts):
        raise UsageError(f"{override}: a value is empty; write {override.field}=<value>,<value>")
    if len({*texts}) < len(texts):
        raise UsageError(f"{override} names a value twice")
    return texts


def _known(runs: Iterable[CellState], score: str) -> list[float]:
    """A score of the runs that are done, in %."""
    return [100 * found for state in runs if (found := getattr(state, score)) is not None]
