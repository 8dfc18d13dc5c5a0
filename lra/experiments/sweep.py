"""`lra sweep`: runs of `lra fit` with every combination of several values of fields; validation chooses the best.

A combination without its seed is a setting. Each run lies in its ordinary directory, which is its only state. So a run
that is there already counts, and the same command continues, or prints the finished table. Several commands on one
folder, also from other machines, share the runs.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lra.config.compose import to_dict
from lra.config.fields import describe_fields, format_value
from lra.config.override import Override, parse_overrides
from lra.config.schema import MASK_FIELDS, RunConfig
from lra.config.start_rules import START
from lra.errors import UsageError, shorten
from lra.experiments.grid import cells
from lra.experiments.grid.cells import CellState
from lra.experiments.grid.grid import Cell, compose_once
from lra.experiments.grid.launch import Launch, LaunchOptions, describe_unfinished, split_launch_options
from lra.experiments.grid.local_launcher import CellStates
from lra.experiments.grid.slurm import SlurmResources
from lra.experiments.grid.watch import GridWatch, format_others, format_scores
from lra.experiments.reproduction import Reproduction, TextTable
from lra.models.attention import ATTENTIONS
from lra.tasks import TASKS
from lra.training.run_directory import RUNS_FOLDER, short_name, time_and_memory, write_text

SWEEPS_FOLDER = RUNS_FOLDER.parent / "sweeps"
MOST_RUNS = 10_000  # nobody trains more: composing them alone would take minutes
NOT_DONE = ("OOM", "failed", "running", "running elsewhere", "interrupted", "refused")
# fields that change nothing of what validation scores
UNVALIDATED_FIELDS = ("task.test", "task.fresh", "task.difference", "mask_loss")
CHOICE_NOTE = (
    "best by validation: mean ± SD over the seeds; a setting that lacks a seed comes after those that lack none. "
    "Settings that validation scores by other data, or by what pretraining finds, are ranked apart. Test must not "
    "choose: in each table its accuracy is shown of the best setting of each attention alone, when no run is left"
)


@dataclass(frozen=True)
class SweepOptions(LaunchOptions):
    """Where runs lie and compute. Every other field is one of `lra fit`, with one value or several."""

    out: str = str(SWEEPS_FOLDER)  # folder for the CSV, which has the sweep's fields as its name


class SweepRequest(NamedTuple):
    """What a command asks for."""

    name: str  # of the files
    swept: Sequence[str]  # fields that have several values, without task, attn and seed
    cells: list[Cell]
    options: SweepOptions
    resources: SlurmResources


def parse_sweep(args: Sequence[str]) -> SweepRequest:
    """The request in the arguments of `lra sweep`, with every run composed.

    Commas separate values, but not inside brackets: `optim.betas=[0.9,0.98],[0.9,0.999]` are two.

    Raises:
        UsageError: for what `lra fit` refuses, a list without brackets, and values that make no runs of their own.
    """
    options, resources, fields = split_launch_options(SweepOptions, parse_overrides(args))
    values = {override.field: split_values(override) for override in fields}
    if "resume" in values:
        raise UsageError("resume= can't be given: every run of a sweep is resumed")
    runs = math.prod(map(len, values.values()))
    if runs > MOST_RUNS:
        raise UsageError(f"these values make {runs:,} runs: at most {MOST_RUNS:,} are a sweep")
    _refuse_bare_lists(values)
    compose_once.cache_clear()  # recipes may have changed since the last command
    swept = [name for name, texts in values.items() if len(texts) > 1 and name not in ("task", "attn", "seed")]
    chosen = []
    names = sorted(values, key=lambda name: name != "seed")  # seed by seed: every setting has a first result early
    for texts in itertools.product(*(values[name] for name in names)):
        given = dict(zip(names, texts, strict=True))
        arguments = parse_overrides(f"{name}={given[name]}" for name in values)
        run = compose_once(arguments).config
        column = " ".join([run.task.name, *(f"{name}={given[name]}" for name in swept)])
        chosen.append(Cell(column, run.attn.name, run.seed, arguments))
    _refuse_equal_runs(chosen)
    others = sorted(f"{name}={','.join(texts)}" for name, texts in values.items() if name not in ("task", "attn"))
    # of an attention that is given as a file, the path is no part of the name
    tasks = dict.fromkeys(cell.composed.config.task.name for cell in chosen)
    attns = dict.fromkeys(cell.attn for cell in chosen)
    name = short_name("+".join([",".join(tasks), ",".join(attns), *others]))
    return SweepRequest(name, swept, chosen, options, resources)


def split_values(override: Override) -> list[str]:
    """The values of an argument: its text at the commas outside brackets. UsageError if one is empty."""
    texts = [text.strip() for text in re.split(r",(?![^\[]*\])", override.text)]
    if "" in texts:
        raise UsageError(f"{shorten(str(override))}: a value is empty, remove a comma")
    return texts


def _refuse_bare_lists(values: Mapping[str, Sequence[str]]) -> None:
    """UsageError for several values of a field that is itself a list, where one has no brackets."""
    for task, attn in itertools.product(values.get("task", ()), values.get("attn", ())):
        parts = (RunConfig(task=None, attn=None), ""), (TASKS.get(task).Config(), "task."), (
            ATTENTIONS.get(attn).Config(), "attn."
        )  # fmt: skip
        types = {field.name: field.type for part, section in parts for field in describe_fields(part, section)}
        for name, texts in values.items():
            field = name.removeprefix(START)
            form = types.get(field) or types.get(f"task.{field}", "")
            bare = [text for text in texts if not (text.startswith("[") or text == "null")]
            if form.startswith("[") and len(texts) > 1 and bare:
                text = ",".join(texts)
                raise UsageError(f"{name}={text}: a list needs brackets in a sweep: [{text}] is one, […],[…] are two")


def _refuse_equal_runs(chosen: Sequence[Cell]) -> None:
    """UsageError if two cells would be one run, or two with one configuration."""
    paths: dict[Path, Cell] = {}
    configs: dict[str, Cell] = {}
    for cell in chosen:
        if (same := configs.setdefault(repr(cell.directory.config), cell)) is not cell:
            raise UsageError(f"{same} and {cell} are the same run: give each value once")
        if (same := paths.setdefault(cell.directory.path, cell)) is not cell:
            raise UsageError(
                f"{same} and {cell} are both {cell.directory.path}: leave out name=, and sweep no field that names "
                "no folder, such as batch.micro"
            )


def sweep(
    args: Sequence[str], progress: Callable[[str], None] = lambda line: None, dry_run: bool = False
) -> Reproduction:
    """Runs what is left of a sweep, then reports on all of it, best by validation first.

    Args:
        args: `field=value[,value …]` of `lra fit`, and `field=value` of SweepOptions and, as `slurm.field`, of
            SlurmResources.
        progress: is called with a line for each change of a run's state, unless a terminal shows the table.
        dry_run: only report what exists and what is left. Nothing is started or written.

    Raises:
        UsageError: before anything runs, as `parse_sweep`, and for a folder that can't be written to or that holds
            another configuration.
        SystemExit: on SIGINT (130) and SIGTERM (143), when all runs have ended. A job array continues.
    """
    asked = parse_sweep(args)
    launch = Launch(asked.cells, asked.options, asked.resources)
    states: CellStates = {cell: cells.cell_state(cell) for cell in asked.cells}
    if dry_run:
        planned = launch.plan(split="val")
        return planned._replace(
            tables=[*planned.tables, *rank_settings(asked, states)], lines=[CHOICE_NOTE, *planned.lines]
        )
    file = Path(asked.options.out) / f"{asked.name}.csv"
    _write_runs(file, asked, states)  # a folder that can't be written to is refused before anything runs
    watch = GridWatch(f"sweeps/{asked.name}", f"{len(asked.cells)} runs", progress, split="val", upright=True)
    ended = launch.work(watch)
    states = {cell: ended[cell] for cell in asked.cells}
    _write_runs(file, asked, states)
    lines, wrong = describe_unfinished(ended)
    counted = cells.count_states(states.values())
    return Reproduction(rank_settings(asked, states), [CHOICE_NOTE, counted, *lines, f"written: {file}"], wrong)


def rank_settings(asked: SweepRequest, states: CellStates) -> list[TextTable]:
    """A table for each task, and apart for what else validation scores: the settings, best by validation first.

    A setting is the runs that differ in nothing but the seed. Accuracies are in %. That on the test set is shown of the
    best setting of each attention alone, and only if all its seeds are done and no run of that table and attention is
    left.
    """
    ranked: dict[str, dict[tuple[str, str], dict[Cell, CellState]]] = {}
    titles = _titles(list(states))
    for cell, state in states.items():
        ranked.setdefault(titles[cell], {}).setdefault((cell.column, cell.attn), {})[cell] = state
    header = ["attention", *asked.swept, "validation", "seeds", "test"]
    tables = []
    for title, settings in ranked.items():
        # attentions of which no further setting shows its accuracy on the test set
        shown = {attn for (_, attn), own in settings.items() if not all(state.final for state in own.values())}
        rows = []
        for own in sorted(settings.values(), key=_rank):
            cell, lacking = next(iter(own)), _lacking(own)
            done = f"{len(own) - lacking} of {len(own)}" if lacking else str(len(own))
            seeds = ", ".join(filter(None, (done, format_others(own, NOT_DONE))))
            test = "" if lacking or cell.attn in shown else format_scores(own.values())
            shown.add(cell.attn)
            rows.append([cell.attn, *_texts(cell, asked.swept), format_scores(own.values(), "val"), seeds, test])
        tables.append((f"{title}: accuracy, %", header, rows))
    return tables


def _titles(chosen: Sequence[Cell]) -> dict[Cell, str]:
    """The task of each cell, with the fields in which validation scores something else in other cells of that task."""
    scored = {cell: _scored_by_validation(cell) for cell in chosen}
    values: dict[tuple[str, str], set[str]] = {}
    for own in scored.values():
        for name, value in own.items():
            values.setdefault((own["task.name"], name), set()).add(value)
    return {
        cell: ", ".join([
            own["task.name"],
            *(f"{name}={value}" for name, value in own.items() if len(values[own["task.name"], name]) > 1),
        ])
        for cell, own in scored.items()
    }  # fmt: skip


def _scored_by_validation(cell: Cell) -> dict[str, str]:
    """The fields that say what validation scores, as text: those of the data, and of what pretraining finds."""
    run = cell.composed.config
    hides = run.pretrain == "masked"  # denoise= hides nothing from validation
    found = {f"task.{name}": value for name, value in to_dict(run.task).items()} | {"pretrain": run.pretrain}
    found |= {name: getattr(run if hides else RunConfig, name) for name in MASK_FIELDS}
    return {name: format_value(value) for name, value in found.items() if name not in UNVALIDATED_FIELDS}


def _rank(setting: CellStates) -> tuple[bool, float]:
    """Sorts settings: those that lack no seed first, then by the mean accuracy on the validation set."""
    scores = [score for state in setting.values() if (score := state.scored("val")) is not None]
    return _lacking(setting) > 0, -statistics.fmean(scores) if scores else math.inf


def _lacking(setting: CellStates) -> int:
    """How many seeds have no accuracy on the validation set."""
    return sum(state.scored("val") is None for state in setting.values())


def _texts(cell: Cell, fields: Sequence[str]) -> list[str]:
    """The values of these fields, as they were written."""
    given = {override.field: override.text for override in cell.args}
    return [given[name] for name in fields]


def format_runs(asked: SweepRequest, states: CellStates) -> str:
    """The CSV: a row for each run.

    `validation` is the best accuracy on the validation set in %, `seconds` those of all its sessions. They are empty
    where they are not known.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["task", "attn", *asked.swept, "seed", "validation", "state", "seconds", "directory"])
    for cell, state in states.items():
        task, score = cell.composed.config.task.name, state.scored("val")
        found = [None if score is None else round(100 * score, 4), state.status]
        seconds = time_and_memory(state.result)[0] if state.result else None
        writer.writerow([
            task, cell.attn, *_texts(cell, asked.swept), cell.seed, *found, seconds, cell.directory.path
        ])  # fmt: skip
    return text.getvalue()


def _write_runs(file: Path, asked: SweepRequest, states: CellStates) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, format_runs(asked, states))
    except OSError as error:
        raise UsageError(f"out={file.parent} can't be written to ({error.strerror}): name another folder") from None
