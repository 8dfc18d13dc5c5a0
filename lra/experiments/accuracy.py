"""`lra reproduce table3` and `table6`: FlashAttention's tables of accuracies (arXiv 2205.14135).

A cell is one `lra fit` in its own run directory. The same command again goes on where it was stopped, and several
commands on one folder, of other machines too, share the cells. Runs from which the recipe starts a cell are stages,
cells themselves.
"""

from __future__ import annotations

import shlex
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lra.config.compose import OWN, differences
from lra.config.options import take
from lra.errors import UsageError
from lra.experiments import cells, grid, speed
from lra.experiments.cells import State
from lra.experiments.grid import SAME, Cell, Grid
from lra.experiments.launch import Local, States, slots
from lra.experiments.reproduction import Reproduction, Table
from lra.experiments.slurm import Slurm, resources
from lra.experiments.watch import Watch, others, scores
from lra.training.callbacks import duration
from lra.training.run import FIRST_FAILURE, LOG, RUNS, read_result

# of `lra fit`, but set by the grid or by the command
SET = {"task": "tasks=", "attn": "attns=", "seed": "seeds=", "resume": "nothing, every run is resumed"}
# fields that don't change what a step takes
NOT_PACE = ("seed", *OWN, *SAME, "trainer.steps", "trainer.eval_every", "trainer.log_every")
MOST_PER_DEVICE = 64  # each is a process that imports PyTorch
# a configuration, its steps per second and where they are from; None and the command that measures them, if one does
Measured = tuple[dict[str, Any], float | None, str]


@dataclass(frozen=True)
class Options:
    """Which cells, and where. What is not a field here is one of `lra fit`, for every cell."""

    tasks: tuple[str, ...] | None = None  # columns of the grid; by default those of the paper
    attns: tuple[str, ...] | None = None  # all by default
    seeds: int | None = None  # so many, from 0
    recipe: str | None = None
    launcher: Literal["local", "slurm"] = "local"
    devices: int | None = None  # GPUs, all by default; with launcher=slurm tasks of the array that run at once
    per_device: int = 1  # runs that share a GPU: small ones leave it idle, and one compiles while another trains
    # true: measure steps instead of running cells, other fields are those of speed.Options then; with --dry-run also a
    # file of such measurements
    speed: str | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise UsageError(f"seeds={self.seeds}: it is how many there are, at least 1")
        if not 1 <= self.per_device <= MOST_PER_DEVICE:
            limit = "at least 1" if self.per_device < 1 else f"at most {MOST_PER_DEVICE}"
            raise UsageError(f"per_device={self.per_device}: it is how many runs share a GPU, {limit}")
        if self.per_device > 1 and self.launcher == "slurm":
            raise UsageError("per_device= is for launcher=local: with slurm each run has what slurm.gres= asks for")


def run(
    name: str, args: Sequence[str], progress: Callable[[str], None] = lambda line: None, dry_run: bool = False
) -> Reproduction:
    """Runs what is left of the grid, then reports on all of it.

    Args:
        name: of the table.
        args: `field=value` of Options and of `lra fit`, and `slurm.field=value` of Resources.
        progress: is given a line for each change of a cell's state, unless a terminal shows the table.
        dry_run: only report what there is and what is left: nothing is started or written.

    Raises:
        UsageError: before anything runs, for what is unknown or of no use here, and for a run's directory that holds
            another configuration.
        SystemExit: on SIGINT (130) and SIGTERM (143), when all runs have ended; a job array goes on.
    """
    table = grid.read(name)
    options, rest = take(Options, args)
    asked = resources(given := [arg for arg in rest if arg.startswith("slurm.")], options.launcher)
    if options.speed == "true":
        return speed.run(table, [arg for arg in args if not arg.startswith("speed=")], progress, dry_run)
    if options.speed and not dry_run:
        raise UsageError(f"speed={options.speed}: give speed=true to measure, or a file of it with --dry-run")
    slurm = options.launcher == "slurm"
    available = [] if slurm else [*slots(options.devices)] * options.per_device
    chosen = choose(table, options, fields := [arg for arg in rest if arg not in given])
    measured = _measured(table, options, chosen, fields) if dry_run else []
    table = table.under(chosen[0], fields)
    wide = max(cell.composed.config.trainer.devices for cell in chosen)
    most = asked.gpus or wide if slurm else len({*available})
    if wide > most:
        more = f", or give slurm.gres=gpu:{wide}" if slurm else ""
        raise UsageError(f"trainer.devices={wide}, but a cell can have {most} here: lower it{more}")
    todo = chosen if slurm else cells.with_stages(chosen)  # an array's task runs its cell's stages itself
    if dry_run:
        states = {cell: cells.look(cell) for cell in todo}
        if not slurm:
            return plan(states, len(available) if wide == 1 else most // wide, measured)
        submission = Slurm(todo, asked, options.devices).plan()
        made = plan(states, options.devices or len(todo), measured)
        return made._replace(lines=[*made.lines, *submission])
    with Watch(table, progress) as watch:
        launcher = (
            Slurm(todo, asked, options.devices, watch, watch.say) if slurm else Local(todo, available, watch, watch.say)
        )
        states = launcher.work()
    return report(table, states)


def choose(table: Grid, options: Options, fields: Sequence[str]) -> list[Cell]:
    """The cells, all composed; UsageError if one is not possible, or two would be one run."""
    for field in fields:
        name = field.partition("=")[0]
        if name in SET:
            raise UsageError(f"{field} can't be one for every cell: give {SET[name]}")
    chosen = table.cells(options.tasks, options.attns, options.seeds, options.recipe, fields)
    owners: dict[Any, Cell] = {}
    for cell in chosen:
        if (asked := cell.composed.config.pretrain) != "none":
            raise UsageError(f"pretrain={asked} scores hidden tokens, no table's figure: lra fit pretrains, for init=")
        if (path := cell.directory.path) in owners:
            raise UsageError(f"{owners[path]} and {cell} are both {path}: name each once, and leave out name=")
        owners[path] = cell
    return chosen


def plan(states: States, devices: int, measured: Sequence[Measured]) -> Reproduction:
    """What there is and what is left, and how long that takes as measured with other seeds, or else alone."""
    paces: dict[tuple[str, str], tuple[float | None, str]] = {}
    sources, mends = Counter[str](), Counter[str]()
    rows: list[list[str]] = []
    times: dict[Path, float] = {}  # of what is left, as far as they are known
    left = [cell for cell, state in states.items() if not state.final and state.status != "running elsewhere"]
    for cell, state in states.items():
        text = ""
        if not state.final:
            if (place := (cell.column, cell.attn)) not in paces:
                own, alone = pace(cell), ((each, by) for config, each, by in measured if _same(config, cell))
                paces[place] = (own, "other seeds") if own else next(alone, (None, ""))
            seconds = _seconds(cell, state, paces[place][0])
            text = "unknown" if seconds is None else duration(seconds)
            if cell in left:
                (mends if seconds is None else sources)[paces[place][1]] += 1
                if seconds is not None:
                    times[cell.directory.path] = seconds
        rows.append([cell.column, cell.attn, str(cell.seed), str(state), text, str(cell.directory.path)])
    lines = [cells.counted(states.values()), f"{len(left)} remain to be run; slots: {devices}"]
    if times:
        # one run takes one slot, and a chain of stages one after the other
        chains = [sum(times.get(run.directory.path, 0.0) for run in (*cell.stages, cell)) for cell in left]
        spent = duration(max(*chains, sum(times.values()) / devices))
        named = " and of ".join(sources)
        lines.append(f"time for {len(times)} of them, from steps per second of {named}: {spent} of training")
    if unknown := len(left) - len(times):
        mend = [f"; {command} measures {count} of them" for command, count in mends.items() if command]
        lines.append("".join((f"time for {unknown} of them: unknown, as no other seed of theirs is done", *mend)))
    header = ["column", "attention", "seed", "state", "training left", "directory"]
    return Reproduction([("cells", header, rows)], lines, [])


def pace(cell: Cell) -> float | None:
    """Steps per second of finished runs that differ in nothing that a step takes; None if there are none."""
    run = cell.composed.config
    results = map(read_result, sorted((RUNS / run.task.name / run.attn.name).glob("*/result.json")))
    found = [
        result["steps_per_second"]
        for result in results
        if result and result["status"] == "finished" and isinstance(result.get("steps_per_second"), int | float)
        and result["steps_per_second"] > 0
        and _same(result["config"], cell)
    ]  # fmt: skip
    return statistics.median(found) if found else None


def _same(config: dict[str, Any], cell: Cell) -> bool:
    """Whether a step of the cell takes what it takes with this configuration."""
    return not differences(config, cell.directory.config, NOT_PACE)


def _measured(table: Grid, options: Options, chosen: Sequence[Cell], fields: Sequence[str]) -> list[Measured]:
    """What is known of cells from the file in `speed=`, or from the table's own if it is of the recipe.

    Raises UsageError for a file that is of no use.
    """
    file, recipe = Path(options.speed or speed.file_of(table)), options.recipe or table.recipe
    result = speed.named(table, file, recipe) if options.speed else speed.read(file) if file.is_file() else None
    found, source = list[Measured](), ""
    if result and result["options"]["recipe"] == recipe:
        source = f"{file} (each alone on {speed.made_with(result)})"
        try:
            found = [(config, each, source if each else "") for config, each in speed.paces(table, result)]
        except UsageError as error:
            raise UsageError(f"{file} can't be compared ({error}): remove it, or name another file") from None
    distinct = {(cell.column, cell.attn): cell for cell in chosen}.values()  # seeds have one pace
    lacking = [cell.directory.config for cell in distinct if not any(_same(config, cell) for config, *_ in found)]
    if options.speed and len(lacking) == len(distinct):
        raise UsageError(f"speed={source} has no cell as it is configured here: give its fields, or another file")
    if {field.partition("=")[0] for field in fields} & {*speed.REFUSED, *OWN}:
        return found
    own = (f"{name}={','.join(given)}" for name in ("tasks", "attns") if (given := getattr(options, name)))
    command = shlex.join(("lra", "reproduce", table.name, *own, f"recipe={recipe}", *fields, "speed=true"))
    return [*found, *((config, None, command) for config in lacking)]


def report(table: Grid, states: States) -> Reproduction:
    """The table of accuracies, and what is missing of it with the reason."""
    lines = [f"paper: {table.source}", cells.counted(states.values())]
    if table.given:
        lines[0] += f"; its figures are left out, as they are not of {', '.join(table.given)}"
    for cell, state in states.items():
        path, log = cell.directory.path, cell.directory.path / LOG
        if state.status == "failed":
            lines.append(f"{cell}: {state}; tracebacks in {path}: remove {FIRST_FAILURE} there to try again")
        elif state.status != "done":
            ended = state.status in ("interrupted", "refused", "open") and log.exists()
            lines.append(f"{cell}: {state}" + (f"; see {log}" if ended else ""))
    records = [
        {
            "column": cell.column, "attention": cell.attn, "seed": cell.seed, "state": state.status,
            "accuracy": state.accuracy,
            # for the exit code
            "status": "ok" if state.final and state.status not in ("failed", "refused") else "WRONG",
        }
        for cell, state in states.items()
    ]  # fmt: skip
    return Reproduction([accuracies(table, states)], lines, records)


def accuracies(table: Grid, states: States) -> Table:
    """Mean test accuracy over the seeds of each cell in %, and the average of the columns, beside the paper's."""
    columns, attns = (list(dict.fromkeys(getattr(cell, name) for cell in states)) for name in ("column", "attn"))
    averaged = table.averaged(columns)
    rows = []
    for attn in attns:
        row = [attn]
        means: dict[str, float] = {}
        paper = table.paper.get(attn, {})
        for column in columns:
            own = {cell: state for cell, state in states.items() if (cell.column, cell.attn) == (column, attn)}
            if found := [100 * state.accuracy for state in own.values() if state.accuracy is not None]:
                means[column] = statistics.mean(found)
            named = others(own, ("OOM", "failed", "interrupted", "refused"))
            row += [", ".join(filter(None, (scores(own.values()), named))), _figure(paper.get(column))]
        whole = averaged and all(column in means for column in averaged)
        average = f"{statistics.mean(means[column] for column in averaged):.2f}" if whole else ""
        rows.append([*row, *([average, _figure(table.average(attn, averaged))] if averaged else [])])
    shown = (*columns, "average") if averaged else columns
    header = ["attention", *(text for name in shown for text in (name, "paper"))]
    return ", ".join((f"{table.name}: test accuracy, %", *table.given)), header, rows


def _seconds(cell: Cell, state: State, pace: float | None) -> float | None:
    """Of training that is left."""
    if pace is None:
        return None
    step, validated, _ = cells.reached(cell)
    done = step if state.status == "running elsewhere" else validated if state.resumes else 0
    return (cell.composed.config.trainer.steps - done) / pace


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
