"""`lra reproduce table3` and `table6`: FlashAttention's tables of accuracies (arXiv 2205.14135).

A cell is one `lra fit` in its own run directory. The same command continues where it was stopped. Several commands on
one folder, also from other machines, share the cells. A recipe may start a cell from another run. Such a run is a
stage, and a cell itself.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lra.config.options import split_options
from lra.config.override import Override, parse_overrides
from lra.config.start_rules import RUN_FIELDS
from lra.errors import UsageError
from lra.experiments import speed
from lra.experiments.grid import cells, grid, plan
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.grid.launch import Launch, LaunchOptions, describe_unfinished, split_launch_options
from lra.experiments.grid.local_launcher import CellStates
from lra.experiments.grid.slurm import SlurmResources
from lra.experiments.grid.watch import GridWatch, format_others, format_scores
from lra.experiments.reproduction import (
    Reproduction,
    TextTable,
    format_tenth,
    mean_over_common_seeds,
    stand_upright,
    stands_upright,
)
from lra.experiments.results.accuracy_tables import with_published
from lra.models.attention import ATTENTIONS


@dataclass(frozen=True)
class GridOptions(LaunchOptions):
    """Which cells run, and where. Every other field is one of `lra fit`, for every cell."""

    tasks: tuple[str, ...] | None = None  # columns of the grid; by default those of the paper
    attns: tuple[str, ...] | None = None  # all by default
    seeds: int | None = None  # so many, from 0
    recipe: str | None = None
    # true: measure steps instead of running cells, other fields are those of speed.Options then; with --dry-run also a
    # file of such measurements
    speed: str | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"seeds={self.seeds}: it is how many there are, at least 1")
        super().__post_init__()


class GridRequest(NamedTuple):
    """What a command asks for."""

    table: Grid
    options: GridOptions
    resources: SlurmResources
    fields: list[Override]  # of `lra fit`, for every cell
    cells: list[Cell]
    measured: speed.SpeedOptions | None = None  # with speed=true


def parse_fields(name: str, args: Sequence[str]) -> GridRequest:
    """The request in the arguments of `reproduce`, with every cell composed."""
    table, overrides = grid.read_grid(name), parse_overrides(args)
    options, asked, fields = split_launch_options(GridOptions, overrides)
    if options.speed == "true":
        return _parse_speed(table, options, asked, [each for each in overrides if each.field != "speed"])
    return GridRequest(table, options, asked, fields, choose_cells(table, options, fields))


def _parse_speed(
    table: Grid, options: GridOptions, asked: SlurmResources, overrides: Sequence[Override]
) -> GridRequest:
    for override in overrides:
        if mend := speed.REFUSED_FIELDS.get(override.field):
            raise UsageError(f"{override} can't be beside speed=true: {mend}")
    measured, fields = split_options(speed.SpeedOptions, overrides)
    chosen = table.cells(measured.tasks, measured.attns, 1, measured.recipe or table.recipe, fields)
    return GridRequest(table, options, asked, fields, chosen, measured)


def reproduce(
    name: str, args: Sequence[str], progress: Callable[[str], None] = lambda line: None, dry_run: bool = False
) -> Reproduction:
    """Runs the rest of the grid, then reports on all of it.

    Args:
        name: of the table.
        args: `field=value` of GridOptions and of `lra fit`, and `slurm.field=value` of SlurmResources.
        progress: is called with a line for each change of a cell's state, unless a terminal shows the table.
        dry_run: only report what exists and what is left. Nothing is started or written.

    Raises:
        UsageError: before anything runs, for a field that is unknown or of no use here, and for a run directory that
            holds another configuration.
        SystemExit: on SIGINT (130) and SIGTERM (143), when all runs have ended. A job array continues.
    """
    table, options, asked, fields, chosen, measured = parse_fields(name, args)
    if measured:
        return speed.measure_speeds(table, measured, fields, chosen, progress, dry_run)
    if options.speed and not dry_run:
        raise UsageError(f"speed={options.speed}: give speed=true to measure, or a file of it with --dry-run")
    table, launch = table.under(chosen), Launch(chosen, options, asked)
    if dry_run:
        command = _measuring_command(table, options, fields)
        made = launch.plan(_measured_alone(table, chosen, options.speed), command)
    else:
        for name in dict.fromkeys(cell.composed.config.attn.name for cell in chosen):
            ATTENTIONS.get(name)  # refuse now what needs a package that is not here
        shown = ({getattr(cell, name) for cell in chosen} for name in ("column", "attn"))
        watch = GridWatch(table.name, table.about, progress, upright=stands_upright(*shown))
        made = summarise_states(table, launch.work(watch))
    ran = {cell.column for cell in chosen}
    if left := [name for name in table.together() if name not in ran and not options.tasks]:
        made.lines.append(f"recipe {options.recipe or table.recipe} has no {', '.join(left)}: left out")
    return made


def choose_cells(table: Grid, options: GridOptions, fields: Sequence[str | Override]) -> list[Cell]:
    """The cells, all composed. UsageError if one is not possible, or if two would be one run."""
    chosen = table.cells(options.tasks, options.attns, options.seeds, options.recipe, fields)
    owners: dict[Any, Cell] = {}
    for cell in chosen:
        if (asked := cell.composed.config.pretrain) != "none":
            raise UsageError(f"pretrain={asked} scores tokens, no table's figure: lra fit pretrains, for init=")
        if (path := cell.directory.path) in owners:
            raise UsageError(f"{owners[path]} and {cell} are both {path}: name each once, and leave out name=")
        owners[path] = cell
    return chosen


def _measured_alone(table: Grid, chosen: Sequence[Cell], file: str | None) -> plan.MeasuredSpeeds:
    """The speeds in a file of `speed=true`; by default the table's own file, if it exists and is of the cells'
    recipe.

    Raises UsageError for a file that is no such one, or of no use for the cells.
    """
    path = Path(file or speed.default_file(table))
    recipe = next(override.text for override in chosen[0].args if override.field == "recipe")
    if file is None and not path.is_file():
        return plan.MeasuredSpeeds()
    result = speed.read_speeds(path) if file is None else speed.read_named_file(table, path, recipe)
    if result.options["recipe"] != recipe:
        return plan.MeasuredSpeeds()
    try:
        source = f"{path} (each alone on {speed.describe_origin(result)})"
        alone = plan.MeasuredSpeeds(speed.measured_paces(table, result), source)
    except UsageError as error:
        raise UsageError(f"{path} can't be compared ({error}): remove it, or name another file") from None
    if file and not any(map(alone.has, chosen)):
        raise UsageError(f"speed={alone.source} has no cell as it is configured here: give its fields, or another file")
    return alone


def _measuring_command(table: Grid, options: GridOptions, fields: Sequence[Override]) -> str:
    """The command that measures a step of these cells; empty for fields that it refuses, or that change no step."""
    if {override.field for override in fields} & {*speed.REFUSED_FIELDS, *RUN_FIELDS}:
        return ""
    given = [f"{name}={','.join(names)}" for name in ("tasks", "attns") if (names := getattr(options, name))]
    recipe = [] if options.recipe is None else [f"recipe={options.recipe}"]
    kept = [str(each) for each in fields if each.field not in plan.FIELDS_WITHOUT_PACE]  # few steps would be refused
    return shlex.join(("lra", "reproduce", table.argument, *given, *recipe, *kept, "speed=true"))


def summarise_states(table: Grid, states: CellStates) -> Reproduction:
    """The table of accuracies, and a line for each cell that it lacks, with the reason."""
    lines, wrong = describe_unfinished(states)
    return Reproduction(
        [accuracy_table(table, states)], [table.cited, cells.count_states(states.values()), *lines], wrong
    )


def accuracy_table(table: Grid, states: CellStates) -> TextTable:
    """Mean test accuracy over the seeds of each cell in %, and the average of the columns, beside the paper's
    figures.
    """
    columns, attns = (list(dict.fromkeys(getattr(cell, name) for cell in states)) for name in ("column", "attn"))
    averages = table.averages(columns)
    shown = [*columns, *averages]
    stated = bool(table.paper)
    rows = []
    for attn in attns:
        row = [attn]
        scored: dict[str, dict[int, float]] = {}
        for column in columns:
            own = {cell: state for cell, state in states.items() if (cell.column, cell.attn) == (column, attn)}
            scored[column] = {
                cell.seed: 100 * state.accuracy for cell, state in own.items() if state.accuracy is not None
            }
            parts = format_scores(own.values()), format_others(own, ("OOM", "failed", "interrupted", "refused"))
            row += [", ".join(filter(None, parts)), *[format_tenth(table.figure(attn, column))] * stated]
        for name, names in averages.items():
            mean, _ = mean_over_common_seeds([scored[column] for column in names])
            paper = table.average(attn, names) if name == "average" else None
            row += ["" if mean is None else f"{mean:.2f}", *[format_tenth(paper)] * stated]
        rows.append(row)
    header = ["attention", *(text for name in shown for text in (name, *["paper"] * stated))]
    return stand_upright((table.titled(f"{table.name}: test accuracy, %"), *with_published(table, header, rows)))
