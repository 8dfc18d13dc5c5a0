"""`lra reproduce table3 speed=true`: how much faster a training step is than with standard attention.

Each attention is measured alone on the device in every column, in two ways. `attention` gives all of them the same
padded, captured engine, which is the paper's meaning (FlashAttention, arXiv 2205.14135, Table 3). `product` measures
what `lra fit` runs. The JSON file is rewritten after each measurement. The same command again measures what the file
lacks, also after a fault of the GPU, which ends the command.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lra import environment
from lra.bench import step
from lra.bench.output import lock_output, write_measurement
from lra.bench.records import (
    MeasurementFile,
    SessionFacts,
    StepMeasurement,
    read_measurements,
    round_figure,
    session_of,
)
from lra.bench.step import StepOptions
from lra.bench.timing import clear_gpu
from lra.config.compose import ComposedConfig
from lra.config.options import refuse_repeats
from lra.config.override import Override
from lra.errors import UsageError
from lra.experiments.grid.cells import with_stages
from lra.experiments.grid.grid import Cell, Grid
from lra.experiments.reproduction import (
    Reproduction,
    TextTable,
    add_footnote,
    format_tenth,
    refuse_other_environment,
    refuse_other_options,
)
from lra.models.attention import ATTENTIONS
from lra.training.assembly import build_modules, resolve_attention
from lra.training.lightning import silence_lightning
from lra.training.run_directory import RUNS_FOLDER

SpeedKey = tuple[str, str, str]  # column, attention and way
BASELINE = "standard"  # what the paper's speed is compared with


class Way(NamedTuple):
    """How a step is measured."""

    loop: str  # of lra.bench.loops
    fields: tuple[str, ...]  # of the run
    about: str


PRODUCT = "product"
WAYS = {
    "attention": Way("captured", ("batch.layout=padded",), "the same padded engine for all"),
    PRODUCT: Way("fit", (), "as lra fit runs it"),
}
_BOTH = f"it is set by the two ways that are measured, {' and '.join(WAYS)}: leave it out"
_ALONE = "one process measures each cell once, alone on one device: leave it out"
GROWING_OPTIONS = ("tasks", "attns")  # options of a file, to which later commands add
# of `lra fit` or of the runs, but set or of no use here
REFUSED_FIELDS = {"task": "give tasks=", "attn": "give attns=", "engine": _BOTH, "batch.layout": _BOTH} | dict.fromkeys(
    ("seed", "seeds", "launcher", "devices", "per_device", "trainer.devices"), _ALONE
)


@dataclass(frozen=True)
class SpeedOptions:
    """What is measured. Every other field is one of `lra fit`, for every cell."""

    tasks: tuple[str, ...] | None = None  # columns of the grid; by default those of the paper
    attns: tuple[str, ...] | None = None  # all by default
    recipe: str | None = None
    steps: int = StepOptions.steps
    warmup: int = StepOptions.warmup
    stages: bool = False  # of runs that cells start from, too, as `product`: what --dry-run tells their time by
    out: str | None = None  # JSON file; checkpoints/<table>-speed.json by default

    def __post_init__(self) -> None:
        refuse_repeats(tasks=self.tasks, attns=self.attns)


@dataclass(frozen=True, kw_only=True)
class SpeedMeasurement(StepMeasurement):
    """The measurement of a cell's step in one way."""

    column: str
    attention: str
    way: str  # of WAYS
    steps_per_second: float | None = None

    @property
    def key(self) -> SpeedKey:
        return self.column, self.attention, self.way

    def saved(self) -> dict[str, Any]:
        """The JSON object. It begins with what it is of; nothing is profiled."""
        record = super().saved()
        del record["where"]
        return {"column": self.column, "attention": self.attention, "way": self.way} | record

    @property
    def is_whole(self) -> bool:
        """Whether it has numbers exactly if it is ok."""
        numbers = [number or 0.0 for number in (self.ms, self.steps_per_second, self.rows)]
        return min(numbers) > 0 if self.ok else not any(numbers)


SpeedFile = MeasurementFile[SpeedMeasurement]


class PendingMeasurement(NamedTuple):
    """A measurement that is yet to be made."""

    cell: Cell
    way: str
    options: StepOptions
    composed: ComposedConfig

    @property
    def key(self) -> SpeedKey:
        return self.cell.column, self.cell.attn, self.way


class Speeds:
    """The measurements, for lookup."""

    def __init__(self, records: Sequence[SpeedMeasurement]):
        self.records = {record.key: record for record in records}

    def per_second(self, column: str, attn: str, way: str) -> float | None:
        """Steps per second; None if they are not known."""
        record = self.records.get((column, attn, way))
        return record and record.steps_per_second

    def ratio(self, column: str, attn: str, way: str) -> float | None:
        """The factor over the steps per second of `standard`; None if either is not known."""
        ours, standard = (self.per_second(column, name, way) for name in (attn, BASELINE))
        return ours / standard if ours and standard else None

    def ratios(self, columns: Sequence[str], attn: str, way: str) -> list[float]:
        """The ratios of the columns in which both are known."""
        return [times for column in columns if (times := self.ratio(column, attn, way)) is not None]

    def speedup(self, columns: Sequence[str], attn: str, way: str) -> str:
        """The geometric mean of `ratios`, and their number, with a mark if a record of these has one."""
        used = (self.records.get((column, name, way)) for column in columns for name in (attn, BASELINE))
        text = mean_ratio(self.ratios(columns, attn, way))
        return text and text + max((record.mark for record in used if record), default="")


def measure_speeds(
    table: Grid, options: SpeedOptions, fields: Sequence[Override], asked: Sequence[Cell],
    progress: Callable[[str], None] = lambda line: None, dry_run: bool = False,
) -> Reproduction:  # fmt: skip
    """Measures what is missing, then reports on everything.

    Args:
        table: gives columns, attentions and the paper's figures.
        fields: those of `lra fit`, for the cells that are `asked` for.
        progress: is called with a line for each measurement when it is made.
        dry_run: only report what exists and what is left. Nothing is measured or written.

    Raises:
        UsageError: before anything is measured, for data that can't be prepared, for a file of other options and, if
            something is missing, for a file of another environment.
    """
    wanted = [_pending(cell, way, options) for cell in asked for way in WAYS]
    if options.stages:
        stages = [cell for cell in with_stages(asked, begun=lambda cell: False) if cell not in asked]
        wanted += [_pending(stage, PRODUCT, options) for stage in stages]
    refusal = "speed=true measures one device: start it without torchrun"
    device = step.one_device(wanted[0].composed.config, refusal)
    chosen = {getattr(cell, kind) for cell in asked for kind in ("column", "attn")}
    known = (table.columns, dict.fromkeys((*table.rows(), *(cell.attn for cell in asked))))
    columns, attns = ([name for name in names if name in chosen] for names in known)
    references = [ATTENTIONS.find(name).reference for name in attns]
    stated = {
        "tasks": columns, "attns": references, "recipe": options.recipe or table.recipe,
        "fields": sorted(map(str, fields)), "steps": options.steps, "warmup": options.warmup,
    }  # fmt: skip
    path, made = Path(options.out or default_file(table)), environment.describe()
    if device.type == "cpu":
        made["gpu"] = None  # it may be there, and is not what is measured
    result = _open(path, stated, made)
    if _lacking(wanted, result) and not dry_run:
        with lock_output(path):
            result = _open(path, stated, made)
            refuse_other_environment(path, result.environment, made)
            _measure(path, result, _lacking(wanted, result), device, session_of(made), progress)
    lacking = _lacking(wanted, result)
    table = table.under(asked)
    lines = [table.cited, *speed_notes(result.cells)]
    if lacking:
        lines.append(f"{len(lacking)} of {len(wanted)} remain to be measured")
        try:
            refuse_other_environment(path, result.environment, made)
        except UsageError as error:
            lines.append(f"but not here: {error}")
    wrong = not dry_run and not all(record.status in ("ok", "OOM") for record in result.cells)
    shown = [add_footnote(*made) for made in (*speed_tables(table, result, columns, attns), detail_table(result.cells))]
    return Reproduction(shown, lines, wrong)


def default_file(table: Grid) -> Path:
    """The default path of a table's measurements."""
    return RUNS_FOLDER.parent / f"{table.name}-speed.json"


def read_named_file(table: Grid, file: Path, recipe: str) -> SpeedFile:
    """The file in `speed=`, as `read_speeds`. UsageError if it is of another recipe, or of no column of the table."""
    if not file.is_file():
        raise UsageError(f"speed={file} is not a file: lra reproduce {table.argument} speed=true makes it")
    result = read_speeds(file)
    if (other := result.options["recipe"]) != recipe:
        raise UsageError(
            f"speed={file} was measured with recipe={other}, not {recipe}: give recipe={other}, or another file"
        )
    measured = {record.column for record in result.cells}
    if measured.isdisjoint(table.columns):
        raise UsageError(f"speed={file} is of {', '.join(sorted(measured))}, no column of {table.name}: name another")
    return result


def measured_cells(table: Grid, result: SpeedFile) -> list[Cell]:
    """The measured cells without stages, composed anew of the file's recipe and fields."""
    found = {(record.column, record.attention) for record in result.cells}
    columns = [name for name in table.columns if name in {column for column, _ in found}]
    made = table.cells(columns, result.options.get("attns"), 1, result.options["recipe"], result.options["fields"])
    return [cell for cell in made if (cell.column, cell.attn) in found]


def measured_paces(table: Grid, result: SpeedFile) -> list[tuple[dict[str, Any], float | None]]:
    """The configuration of each cell and stage measured as `product`, and its steps per second, None if it has none.

    Configurations are composed anew of the recipe and fields that were measured. UsageError if these no longer exist.
    """
    found = {(r.column, r.attention): r.steps_per_second for r in result.cells if r.way == PRODUCT}
    runs = [run for cell in measured_cells(table, result) for run in (*cell.stages, cell)]
    return [(run.directory.config, found[key]) for run in runs if (key := (run.column, run.attn)) in found]


def read_speeds(path: Path) -> SpeedFile:
    """Reads a file of such measurements. UsageError if it is none."""
    try:
        result = read_measurements(path, SpeedMeasurement)
        made = result.environment
        texts = [result.options["recipe"], *result.options["fields"], made["date"]]
        texts += filter(None, (made["gpu"], made.get("commit")))
        if all(isinstance(text, str) for text in texts) and all(record.is_whole for record in result.cells):
            return result
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise UsageError(f"{path} is not a measurement of lra reproduce with speed=true: remove it, or name another file")


def speed_tables(table: Grid, result: SpeedFile, columns: Sequence[str], attns: Sequence[str]) -> Iterator[TextTable]:
    """The speedups in both ways beside the paper's, then each way's steps per second."""
    speeds, place = Speeds(result.cells), hardware_of(result)
    averaged = table.together(columns)
    title = f"speedup over {BASELINE} on {place}, each measured alone: geometric mean (columns)"
    paper = {attn: format_tenth(table.figure(attn, "speedup")) for attn in attns}
    rows = [[attn, *(speeds.speedup(averaged, attn, way) for way in WAYS), paper[attn]] for attn in attns]
    yield table.titled(title), ["attention", *(f"speedup, {way}" for way in WAYS), "paper"], rows
    for name, way in WAYS.items():
        title = f"{name}, {way.about}: steps per second (times {BASELINE}) on {place}"
        rows = [[attn, *(_cell(speeds, column, attn, name) for column in columns)] for attn in attns]
        yield title, ["attention", *columns], rows


def detail_table(records: Sequence[SpeedMeasurement]) -> TextTable:
    """All that was measured: a step's time, its rows with padding and filling, and its peak memory."""
    header = ["column", "attention", "way", "engine", "ms", "steps/s", "rows", "memory, MB"]
    rows = []
    for record in records:
        numbers = (record.ms, record.steps_per_second, record.rows, record.memory_mb)
        shown = ["" if number is None else f"{number:g}" for number in numbers]
        if not record.ok:
            shown[0] = record.status
        shown[0] += record.mark
        rows.append([*record.key, record.engine or "", *shown])
    return "what was measured", header, rows


def speed_notes(records: Sequence[SpeedMeasurement]) -> list[str]:
    """How many measurements are in which state, and why cells have no numbers, or not those of the captured engine."""
    counts = Counter(record.status for record in records)
    said = ", ".join(f"{count} {status}" for status, count in counts.items())
    why: dict[str, list[str]] = {}
    for record in records:
        if record.reason:
            reason = f"{record.way}, {record.engine if record.ok else record.status}: {record.reason}"
            why.setdefault(reason, []).append(f"{record.column} {record.attention}")
    return [f"measurements: {said or 'none'}", *(f"{reason} ({', '.join(cells)})" for reason, cells in why.items())]


def describe_origin(result: SpeedFile) -> str:
    """Hardware, commit, date and fields of a measurement."""
    sessions, fields = result.sessions(), result.options["fields"]
    commits = ", ".join(dict.fromkeys(str(session["commit"]) for session in sessions))
    period = " to ".join(dict.fromkeys((sessions[0]["date"], sessions[-1]["date"])))
    given = f", with {' '.join(fields)}" if fields else ""
    return f"{hardware_of(result)}, commit {commits}, {period}{given}"


def hardware_of(result: SpeedFile) -> str:
    """The GPU, or CPU, that was measured."""
    return " ".join((result.environment["gpu"] or "CPU").split())  # of one line, as it is in titles


def _measure(
    path: Path, result: SpeedFile, lacking: Sequence[PendingMeasurement], device: torch.device,
    made: SessionFacts, progress: Callable[[str], None],
) -> None:  # fmt: skip
    """Adds the missing measurements to the result. The file is rewritten after each."""
    silence_lightning()
    for composed in {one.cell: one.composed for one in lacking}.values():
        data, module = build_modules(composed.config)
        resolve_attention(module, device)  # refused before the data is prepared
        data.prepare_data()
    write_measurement(path, result.saved())  # what can't be written is refused before it is measured
    for one in lacking:
        clear_gpu(device)
        _refuse_company(device)
        record = replace(_measure_one(one, device), made=made)
        result.cells = [*(other for other in result.cells if other.key != one.key), record]
        write_measurement(path, result.saved())
        progress(f"{one.cell.column} {one.cell.attn}, {one.way}: {step.step_line(record)}")


def _refuse_company(device: torch.device) -> None:
    """UsageError if another process is on the GPU: it would slow the cell, and its memory would count."""
    if device.type == "cuda":
        torch.zeros(1, device=device)  # this process is there, too
        if environment.gpu_processes(str(torch.cuda.get_device_properties(device).uuid)) > 1:
            raise UsageError("another process is on this GPU: wait for it, or choose one by CUDA_VISIBLE_DEVICES")


def _measure_one(one: PendingMeasurement, device: torch.device) -> SpeedMeasurement:
    """A record of `lra bench step`, with steps per second. What can't be captured is measured eagerly."""
    record = step.measure_loop(WAYS[one.way].loop, one.composed, one.options, device)
    if record.loop == "captured" and record.status == "unsupported":
        hinders = record.reason.rpartition(": ")[0]  # without what to set instead
        record = step.measure_loop("eager", one.composed, one.options, device)
        record = replace(record, reason=record.reason or hinders)
    per_second = record.ms and round_figure(1e3 / record.ms)
    column, attention, way = one.key
    return SpeedMeasurement(column=column, attention=attention, way=way, steps_per_second=per_second, **vars(record))


def _pending(cell: Cell, way: str, options: SpeedOptions) -> PendingMeasurement:
    fields = [f"steps={options.steps}", f"warmup={options.warmup}", *cell.args, *WAYS[way].fields]
    return PendingMeasurement(cell, way, *step.parse_step_fields(fields))


def _open(path: Path, stated: dict[str, Any], made: dict[str, Any]) -> SpeedFile:
    """The content of a file, or a result without records. UsageError if it was measured with other options."""
    if not path.exists():
        return MeasurementFile(made, stated, [])
    result = read_speeds(path)
    refuse_other_options(path, result.options, stated, *GROWING_OPTIONS)
    for name in GROWING_OPTIONS:
        result.options[name] = list(dict.fromkeys((*result.options.get(name, ()), *stated[name])))
    return result


def _lacking(wanted: Sequence[PendingMeasurement], result: SpeedFile) -> list[PendingMeasurement]:
    done = {record.key for record in result.cells if record.status != "failed"}  # which may have passed
    return [one for one in wanted if one.key not in done]


def _cell(speeds: Speeds, column: str, attn: str, way: str) -> str:
    """Steps per second and their ratio to `standard`, or why there are none; empty if it was not measured."""
    number, times = speeds.per_second(column, attn, way), speeds.ratio(column, attn, way)
    record = speeds.records.get((column, attn, way))
    if record is None:
        return ""
    text = record.status if number is None else f"{number:g}" + ("" if times is None else f" ({times:.2f}×)")
    return text + record.mark


def mean_ratio(ratios: Sequence[float]) -> str:
    """The geometric mean, and how many ratios there are."""
    return f"{statistics.geometric_mean(ratios):.2f} ({len(ratios)})" if ratios else ""
