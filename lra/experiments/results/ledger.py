"""The results of runs below a folder, and the cells of a grid that they belong to.

A result is any JSON file with a `status` and a `config`: the result.json of a run's directory, or a copy with another
name. Its configuration says which cell it belongs to, never its path.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lra.config.compose import flatten, to_dict
from lra.config.override import Override
from lra.config.schema import LATER_FIELDS, UNSAVED_FIELDS, RunConfig
from lra.errors import UsageError, first_line
from lra.experiments.grid.grid import Cell, Grid
from lra.reading import read_json
from lra.tasks import versioned_name
from lra.training.run_directory import FIRST_FAILURE_FILE, HARDWARE_FIELDS, had_gpu_alone, time_and_memory
from lra.training.run_files import as_mapping, describe_ancestry, has_clean_commits, missing_fields

# Fields that leave the trained function and its scores what they are. Those of speed and memory are stated beside them.
UNCOMPARED_FIELDS = (
    "name", *UNSAVED_FIELDS,  # where a run writes, and how it was called
    *HARDWARE_FIELDS,
    "trainer.log_every",  # what is written down
)  # fmt: skip
MOST_NAMED = 5  # results of no cell, at most
RESULT_NAME = "result.json"  # of a run's directory

Identity = dict[str, Any]


@dataclass(frozen=True)
class ResultFile:
    """A result and its file."""

    path: Path
    result: Mapping[str, Any]

    @property
    def task(self) -> str:
        return self.result["task"]

    @property
    def date(self) -> str:
        return self.result["environment"]["date"]

    @property
    def curves(self) -> Path | None:
        """The CSV file of its curves, if it lies in a run's directory and they exist."""
        file = self.path.with_name("metrics.csv")
        return file if self.path.name == RESULT_NAME and file.is_file() else None


@dataclass(frozen=True)
class ReportRow:
    """A cell and seed: a line of the CSV file. Accuracies are in %. None, and an empty status, mean unknown."""

    column: str
    attention: str
    seed: int
    league: str = ""  # strict or open: lra.experiments.grid.league
    status: str = ""  # finished, stuck (finished at chance), oom or failed
    accuracy: float | None = None  # of test
    bound: float | None = None  # from sampling, 95%
    sequences: int | None = None
    paper: float | None = None
    difference: float | None = None
    baseline: str = ""  # the strongest of the test set
    baseline_accuracy: float | None = None
    majority: float | None = None
    fresh: float | None = None  # the fresh test set
    fresh_bound: float | None = None
    fresh_baseline: str = ""
    fresh_baseline_accuracy: float | None = None
    validation: float | None = None
    steps: int | None = None
    train_seconds: float | None = None
    steps_per_second: float | None = None
    # minutes of one GPU for the run and those before it, from prepared data to scores; whether each had its GPU alone
    chain_minutes: float | None = None
    chain_alone: bool | None = None
    memory_gb: float | None = None  # peak of one GPU, 10^9 bytes
    hardware: str = ""
    engine: str = ""
    micro: int | None = None  # sequences of a portion, if the batch was not computed as a whole
    commit: str = ""
    # whether its code and that of the runs before it are known, and it stands beside no result of other code or data
    clean: bool | None = None
    chain: str = ""  # those runs and it
    date: str = ""
    result: str = ""  # file
    command: str = ""  # that makes it


@dataclass
class Ledger:
    """Cells with their results, and notes on the folder."""

    entries: dict[Cell, ResultFile] = field(default_factory=dict)
    stopped: dict[Cell, ResultFile] = field(default_factory=dict)  # without one: the stage that was out of memory
    by_weights: dict[str, ResultFile] = field(default_factory=dict)  # every run by the digest of what it made
    older: dict[Cell, int] = field(default_factory=dict)  # version of the task, where the result is of an older one
    notes: list[str] = field(default_factory=list)

    @property
    def finished(self) -> dict[Cell, ResultFile]:
        """The cells whose result has scores."""
        return {cell: entry for cell, entry in self.entries.items() if entry.result["status"] == "finished"}

    def runs_before(self, entry: ResultFile) -> list[ResultFile | None]:
        """The results of the runs before one, oldest first; None for one that is not here."""
        before = as_mapping(entry.result.get("provenance")).get("ancestors") or []
        return [self.by_weights.get(as_mapping(run).get("ended") or "") for run in before]


def match_results(cells: Sequence[Cell], folder: str | Path) -> Ledger:
    """The results below `folder` that belong to `cells`: for each cell the newest that finished, else the newest.

    A cell without a result gets that of a stage that was out of memory, as it cannot begin. If a field chooses the
    version of the task, a column without results of the newest version shows those of an older one, and never both.
    Notes say so, and name what was left out: files that can't be read, older results of a cell, and results of no cell.

    UsageError if there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UsageError(f"results={folder} is not a folder: name one with the results of lra fit, or its parent")
    ledger, strangers = Ledger(), []
    entries, ledger.notes = find_results(folder)
    entries.sort(key=lambda entry: (entry.result["status"] == "finished", entry.date, str(entry.path)))
    ledger.by_weights = {
        ended: entry
        for entry in entries
        if isinstance(ended := as_mapping(entry.result.get("provenance")).get("ended"), str)
    }
    wanted, defaults, tasks = _identities(cells)
    owners = ((_owner(entry, wanted, defaults)[0], entry.task) for entry in entries)
    newest = {cell.column for cell, task in owners if cell and task == tasks[cell]}
    for entry in entries:
        cell, near = _owner(entry, wanted, defaults)
        if cell is None:
            strangers.append((not near, str(entry.path.relative_to(folder))))
            continue
        if entry.result["status"] == "oom" and not had_gpu_alone(entry.result):
            ledger.notes.append(f"{entry.path}: left out, as the run was out of memory beside other runs")
            continue
        if entry.task != tasks[cell]:
            if cell.column in newest:
                left = f"{entry.path} of {entry.task} is left out, as the column has {tasks[cell]}"
                ledger.notes.append(f"{cell}: {left}")
                continue
            ledger.older[cell] = int(entry.task.partition("@")[2])
        if older := ledger.entries.get(cell):
            ledger.notes.append(f"{cell}: {entry.path} of {entry.date} counts, not {older.path} of {older.date}")
        ledger.entries[cell] = entry
    shown: dict[tuple[str, str], dict[str, None]] = {}
    for cell in ledger.older:
        shown.setdefault((ledger.entries[cell].task, tasks[cell]), {})[cell.column] = None
    for (older, newer), columns in shown.items():
        ledger.notes.append(f"{', '.join(columns)}: results of {older}; the task is now {newer}")
    ledger.stopped = _blocked_by_stage([cell for cell in cells if cell not in ledger.entries], entries)
    known = {str(entry.path.relative_to(folder)) for entry in ledger.stopped.values()}
    if named := [name for _, name in sorted(strangers) if name not in known]:  # the table's tasks and attentions first
        if len(named) > MOST_NAMED:
            named[MOST_NAMED:] = [f"and {len(named) - MOST_NAMED} more"]
        ledger.notes.append(
            f"of no cell of this table with these tasks=, attns=, seeds= and fields: {', '.join(named)}"
        )
    return ledger


def find_results(folder: Path) -> tuple[list[ResultFile], list[str]]:
    """Every result below `folder`, and a note for each file that should be a result and is none."""
    entries, notes = [], []
    for path in sorted(folder.rglob("*.json")):
        if path.name == FIRST_FAILURE_FILE or any(part.startswith(".") for part in path.relative_to(folder).parts):
            continue  # of a first try, or being written
        try:
            content = read_json(path)
        except (OSError, ValueError) as error:
            notes.append(f"{path} can't be read, so it is left out: {first_line(error)}")
            continue
        if not isinstance(content, dict) or not (content.keys() & {"status", "config"} or path.name == RESULT_NAME):
            continue  # some other measurement
        if lacks := missing_fields(content):
            notes.append(f"{path} is not a whole result, so it is left out: it lacks {lacks}")
        else:
            entries.append(ResultFile(path, content))
    return entries, notes


def configuration_identity(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> Identity:
    """The fields by which a configuration is compared. Missing ones come from `LATER_FIELDS` and `defaults`."""
    known = dict(flatten(defaults))
    fields = known | {name: value for name, value in LATER_FIELDS.items() if name in known} | dict(flatten(config))
    if "task.source" in fields:  # generated, or one of the copies of what is imported: where it lies is no matter
        fields["task.source"] = "generate" if fields["task.source"] == "generate" else "imported"
    return {name: value for name, value in fields.items() if name not in UNCOMPARED_FIELDS}


def make_row(table: Grid, cell: Cell, found: Ledger) -> ReportRow:
    """The row of a cell. If the cell could not begin, it has the reason and no more."""
    paper = table.figure(cell.attn, cell.column)
    known: dict[str, Any] = {"paper": paper, "command": shlex.join(["lra", "fit", *map(str, cell.args)])}
    if stage := found.stopped.get(cell):
        known |= {
            "status": "oom",
            "clean": has_clean_commits(stage.result),
            "date": stage.date,
            "result": str(stage.path),
        }
    if (entry := found.entries.get(cell)) is None:
        return ReportRow(cell.column, cell.attn, cell.seed, **known)
    result = entry.result
    made_with, (_, peak) = result["environment"], time_and_memory(result)
    micro = as_mapping(result["config"].get("batch")).get("micro")
    known |= {
        "status": result["status"],
        "steps": result.get("steps"),
        "train_seconds": result.get("train_seconds") if had_gpu_alone(result) else None,
        "steps_per_second": result.get("steps_per_second") if had_gpu_alone(result) else None,
        **_chain_time(entry, found),
        "memory_gb": None if peak is None else peak / 1e9,
        "hardware": describe_gpus(made_with.get("gpu"), result.get("world_size") or 1),
        "engine": result.get("engine") or "",
        "micro": micro,
        "commit": made_with.get("commit") or "",
        "clean": has_clean_commits(result),
        "chain": describe_ancestry(result),
        "date": entry.date,
        "result": str(entry.path),
    }
    if cell in found.older:
        known["command"] += f" task.version={found.older[cell]}"
    if micro:  # no part of the cell, but what fits may depend on it
        known["command"] += f" batch.micro={micro}"
    if result["status"] == "finished":
        known |= _scores(result["test"], "accuracy", "bound", "baseline")
        known |= _scores(result["fresh"], "fresh", "fresh_bound", "fresh_baseline") if "fresh" in result else {}
        known["sequences"], known["majority"] = result["test"].get("n"), 100 * result["test"]["baselines"]["majority"]
        known["difference"] = None if paper is None else known["accuracy"] - paper
        known["validation"] = 100 * result["val"]["accuracy"] if "val" in result else None
        # a run may never leave chance: it counts, and is named
        if is_stuck(result["test"]):
            known["status"] = "stuck"
    return ReportRow(cell.column, cell.attn, cell.seed, **known)


def _chain_time(entry: ResultFile, found: Ledger) -> dict[str, Any]:
    """Fields of a row: how long a run and those before it took. None, unless all are there and on the same GPU."""
    result, chain = entry.result, found.runs_before(entry)
    runs = [result, *(each.result for each in chain if each)]
    times = [(time_and_memory(run)[0] or math.nan) * (run.get("world_size") or 1) / 60 for run in runs]
    gpus = {run["environment"].get("gpu") for run in runs}
    if None in chain or (as_mapping(result["config"]).get("init") and not chain) or len(gpus) > 1 or None in gpus:
        return {}
    if math.isnan(total := sum(times)):
        return {}
    return {"chain_minutes": total, "chain_alone": all(map(had_gpu_alone, runs))}


def is_stuck(test: Mapping[str, Any]) -> bool:
    """Whether a test accuracy is chance: that of the commonest class, within its own 95% bound from sampling."""
    return abs(test["accuracy"] - test["baselines"]["majority"]) <= test["plus_minus"]


def known_values(rows: Sequence[ReportRow], field: str, **where: Any) -> list[float]:
    """The known values of a field in the finished rows for which `where` holds, seed by seed."""
    chosen = (row for row in rows if row.status in ("finished", "stuck"))
    chosen = (row for row in chosen if all(getattr(row, name) == value for name, value in where.items()))
    return [value for row in chosen if (value := getattr(row, field)) is not None]


def mean_value(rows: Sequence[ReportRow], field: str, **where: Any) -> float | None:
    return statistics.fmean(found) if (found := known_values(rows, field, **where)) else None


def finished_hardware(rows: Sequence[ReportRow]) -> list[str]:
    """The hardware of the finished rows."""
    return sorted({row.hardware for row in rows if row.status in ("finished", "stuck")})


def _owner(
    entry: ResultFile, wanted: Mapping[str, Cell], defaults: Mapping[tuple[str, str], dict[str, Any]]
) -> tuple[Cell | None, bool]:
    """The cell that a result belongs to, and whether any cell has its task and attention."""
    config = entry.result["config"]
    default = defaults.get((config["task"]["name"], config["attn"]["name"]))
    return wanted.get(_key(entry.task, configuration_identity(config, default or {}))), default is not None


def _blocked_by_stage(cells: Iterable[Cell], entries: Sequence[ResultFile]) -> dict[Cell, ResultFile]:
    """Cells that cannot begin, and for each the result of its stage that was out of memory.

    Args:
        entries: in the order of `match_results`.
    """
    attns = {entry.result["config"]["attn"]["name"] for entry in entries if entry.result["status"] == "oom"}
    found: dict[Cell, ResultFile] = {}
    if not attns:
        return found  # to compose stages takes long
    for cell in cells:
        if not attns & {stage.attn for stage in cell.stages}:
            continue
        wanted, defaults, _ = _identities(cell.stages)
        newest = {owner: entry for entry in entries if (owner := _owner(entry, wanted, defaults)[0])}
        last = next((newest[stage] for stage in reversed(cell.stages) if stage in newest), None)
        if last and last.result["status"] == "oom" and had_gpu_alone(last.result):
            found[cell] = last
    return found


def _identities(
    cells: Iterable[Cell],
) -> tuple[dict[str, Cell], dict[tuple[str, str], dict[str, Any]], dict[Cell, str]]:
    """The cells by what they compute, the defaults of every field by (task, attention), and the cells' tasks.

    A run that computes the same on data of an older version of the task belongs to the same cell.
    """
    wanted: dict[str, Cell] = {}
    tasks: dict[Cell, str] = {}
    defaults: dict[tuple[str, str], dict[str, Any]] = {}
    composed: dict[tuple[Override, ...], RunConfig] = {}  # to compose takes long, and seeds differ in nothing else
    for cell in cells:
        args = tuple(override for override in cell.args if override.field != "seed")
        run = composed[args] if args in composed else composed.setdefault(args, cell.composed.config)
        default = to_dict(RunConfig(task=type(run.task)(), attn=type(run.attn)()))
        defaults[run.task.name, run.attn.name] = default
        saved, tasks[cell] = run.to_saved_dict() | {"seed": cell.seed}, versioned_name(run.task)
        if run.init:  # the recipe's start, of the same seed
            saved["init"] = run.init.removesuffix(f"-s{run.seed}") + f"-s{cell.seed}"
        own = configuration_identity(saved, default)
        for number in range(1, getattr(run.task, "version", 1)):
            wanted[_key(f"{run.task.name}@{number}", own | {"task.version": number})] = cell
        wanted[_key(tasks[cell], own)] = cell
    return wanted, defaults, tasks


def _key(version: str, fields: Identity) -> str:
    """The key of an identity. It includes the task's version: another one has other data or another protocol."""
    return json.dumps([version, fields], sort_keys=True, default=str)


def _scores(test: Any, accuracy: str, bound: str, baseline: str) -> dict[str, Any]:
    strongest = max(test["baselines"], key=lambda name: test["baselines"][name])
    return {
        accuracy: 100 * test["accuracy"],
        bound: 100 * test["plus_minus"],
        baseline: strongest,
        f"{baseline}_accuracy": 100 * test["baselines"][strongest],
    }


def describe_gpus(gpu: str | None, count: int) -> str:
    """The GPUs of a run, for people."""
    name = " ".join(gpu.split()) if gpu else "CPU"  # of one line, as it is in titles
    return name if count == 1 else f"{count} × {name}"
