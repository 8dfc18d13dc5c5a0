"""`lra bench step`: the time of a step of `lra fit` in steady state, beside loops without Lightning, and what it is
spent on.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lra import environment
from lra.bench import loops
from lra.bench.breakdown import breakdown, record_kernels
from lra.bench.output import measured_run, open_output
from lra.bench.records import StepMeasurement, round_figure
from lra.bench.timing import clear_gpu
from lra.compile_caches import use_compile_caches
from lra.config.compose import ComposedConfig
from lra.config.options import recorded_options, refuse_repeats, split_options
from lra.config.override import Override, parse_overrides
from lra.config.registry import describe_unknown
from lra.config.schema import PositionsConfig, RunConfig
from lra.config.sources import explain_own_code
from lra.errors import UsageError, is_out_of_memory, name_error
from lra.training.assembly import build_modules, resolve_attention
from lra.training.fit import configure
from lra.training.hardware import trainer_hardware
from lra.training.lightning import silence_lightning

LOOPS = ("fit", "captured", "eager", "bare")
PROFILED_LOOPS = ("captured", "bare")
PROFILED_STEPS = 10  # steps under the profiler


@dataclass(frozen=True)
class StepOptions:
    """What `lra bench step` measures. Every other argument is a field of the run, as `lra fit` takes it."""

    loops: tuple[str, ...] = LOOPS
    steps: int = 100  # timed, in blocks
    warmup: int = 40  # before them: the first compiles, and a shape is captured when it comes again
    profile: bool = True  # on a GPU: where the time of `captured` and `bare` goes
    out: str | None = None  # JSON file

    def __post_init__(self) -> None:
        if min(self.steps, self.warmup) < 1:
            raise UsageError("steps= and warmup= must be at least 1")
        for loop in self.loops:
            if loop not in LOOPS:
                raise UsageError(f"loops=: {describe_unknown('loop', loop, LOOPS)}")
        refuse_repeats(loops=self.loops)

    @property
    def total(self) -> int:
        """Steps of the longest loop."""
        return self.warmup + self.steps + loops.IDLE_STARTS + PROFILED_STEPS


@dataclass
class StepResult:
    """What `lra bench step` measured of a run."""

    environment: dict[str, Any]
    options: dict[str, Any]
    run: dict[str, Any]  # its configuration
    loops: list[StepMeasurement]

    @property
    def lightning(self) -> float | None:
        """The share by which `fit` takes longer than the loop by hand with its engine; None if one is missing."""
        times = {record.loop: record.ms for record in self.loops if record.ok}
        engine = next((record.engine for record in self.loops if record.loop == "fit"), None)
        fit, by_hand = times.get("fit"), times.get(engine or "")
        return round(fit / by_hand - 1, 4) if fit and by_hand else None

    def saved(self) -> dict[str, Any]:
        """The JSON object."""
        return vars(self) | {"loops": [record.saved() for record in self.loops], "lightning": self.lightning}


def parse_step_fields(args: Iterable[str | Override]) -> tuple[StepOptions, ComposedConfig]:
    """The measurement's options and the run's configuration. UsageError if they don't go together."""
    given = parse_overrides(args)
    options, fields = split_options(StepOptions, given)
    composed = configure(fields)
    if composed.start:  # weights from which the recipe starts, and what becomes of them, change no step
        fresh = replace(composed.config, init=None, head=None, positions=PositionsConfig())
        composed = replace(composed, config=fresh)
    run: RunConfig = composed.config
    if Override("profile", "true") in given and not set(options.loops) & set(PROFILED_LOOPS):
        raise UsageError(f"profile=true needs loops={' or '.join(PROFILED_LOOPS)}: add one, or leave it out")
    if run.init or is_named_or_continued(run):
        raise UsageError("init=, name=, resume=, draws= and predictions= mean nothing to a measurement: leave them out")
    if run.logger != RunConfig.logger:
        raise UsageError("logger= means nothing to a measurement: leave it out")
    if run.trainer.steps < options.total:
        raise UsageError(
            f"trainer.steps={run.trainer.steps}, but {options.total} are needed: raise it, or lower steps= and warmup="
        )
    return options, composed


def is_named_or_continued(run: RunConfig) -> bool:
    """Whether fields are set that name, continue or keep a run, and so mean nothing to a measurement."""
    return bool(run.name or run.resume != "false" or run.draws != "same" or run.predictions)


def measure_step(args: Sequence[str], progress: Callable[[str], None] = lambda line: None) -> StepResult:
    """Measures the loops. `out=` is rewritten after each loop.

    Args:
        args: `field=value` of StepOptions and of a run.
        progress: is called with a line for each loop when it is done.
    """
    options, composed = parse_step_fields(args)
    run: RunConfig = composed.config
    device = one_device(run, "lra bench step measures one device: set trainer.devices=1, without torchrun")
    silence_lightning()
    data, module = build_modules(run)
    resolve_attention(module, device)
    data.prepare_data()
    result = StepResult(environment.describe(), recorded_options(options), measured_run(run), [])

    with open_output(options.out) as keep:
        for loop in options.loops:
            clear_gpu(device)
            result.loops.append(measure_loop(loop, composed, options, device))
            keep(result.saved())
            progress(step_line(result.loops[-1]))
        for place, record in enumerate(result.loops):  # after all times, as a profiler may slow what follows
            if options.profile and record.loop in PROFILED_LOOPS and record.ok:
                clear_gpu(device)
                result.loops[place] = _profiled(record, run, options, device)
                keep(result.saved())
    return result


def measure_loop(loop: str, composed: ComposedConfig, options: StepOptions, device: torch.device) -> StepMeasurement:
    """The record of one loop. If it has no numbers, `reason` says why."""
    use_compile_caches(device)
    try:
        return _measure(loop, composed, options, device)
    except UsageError as error:
        status, reason = "unsupported", str(error)
    except Exception as error:  # whatever a compiler or a driver raises: the other loops are still worth having
        status, reason = "failed", explain_own_code(error) or name_error(error)
        if is_out_of_memory(error):
            batch = composed.config.batch
            status, reason = "OOM", f"batch.micro={batch.micro or batch.size} does not fit: halve it"
    return StepMeasurement(loop=loop, status=status, reason=reason)


def _measure(loop: str, composed: ComposedConfig, options: StepOptions, device: torch.device) -> StepMeasurement:
    watch = loops.Stopwatch(options.warmup, options.steps, device)
    run = composed.config
    done = loops.time_fit(run, watch) if loop == "fit" else loops.time_by_hand(loop, run, watch)
    blocks, steady = watch.block_ms(), watch.steady()
    ms = statistics.median(list(itertools.compress(blocks, steady)) or blocks)
    memory = watch.memory_mb()
    shapes = loops.count_shapes(done.step)
    tokens, rows = done.tokens / options.steps, done.rows / options.steps
    return StepMeasurement(
        loop=loop,
        engine="captured" if shapes else "eager",
        ms=round_figure(ms),
        blocks_ms=[round_figure(block) for block in blocks],
        steady=steady,
        host_ms=round_figure(watch.host_ms()),
        tokens_per_second=round(1e3 * tokens / ms),
        rows_per_second=round(1e3 * rows / ms),
        tokens=round_figure(tokens),
        rows=round_figure(rows),
        memory_mb=round_figure(memory),
        first_seconds=round_figure(watch.first_seconds),
        shapes=shapes and shapes[0],
        captured=shapes and shapes[1],
        loss=round_figure(done.loss),
    )


def _profiled(record: StepMeasurement, run: RunConfig, options: StepOptions, device: torch.device) -> StepMeasurement:
    """The record with where its loop spends its time after the warm-up, or with the reason why that is unknown."""
    assert record.ms is not None
    try:
        done = loops.time_by_hand(record.loop, run, loops.Stopwatch(options.warmup, 1, device))
        where = breakdown(record_kernels(done.further, PROFILED_STEPS, device), PROFILED_STEPS, record.ms)
    except Exception as error:  # the times are still worth having
        return replace(record, reason=f"not profiled: {name_error(error)}")
    if where is None:
        return replace(record, reason="not profiled: the profiler saw no kernels")
    return replace(record, where=where)


def step_tables(result: StepResult) -> Iterator[tuple[str, list[str], list[list[str]]]]:
    """(title, header, rows) of the loops, and of where the time goes if that was recorded."""
    run = result.run
    header = ["loop", "engine", "ms", "tokens/s", "rows/s", "host ms", "memory, MB", "first step, s", "shapes"]
    rows = []
    for record in result.loops:
        if not record.ok:
            rows.append([record.loop, "", record.status, *[""] * (len(header) - 3)])
            continue
        per_second = [f"{number:,}" for number in (record.tokens_per_second, record.rows_per_second)]
        numbers = (record.host_ms, record.memory_mb, record.first_seconds)
        rest = ["" if number is None else f"{number:g}" for number in numbers]
        shapes = "" if record.shapes is None else f"{record.captured} of {record.shapes} captured"
        rows.append([record.loop, record.engine or "", f"{record.ms:g}", *per_second, *rest, shapes])
    yield f"a step of task={run['task']['name']} attn={run['attn']['name']} recipe={run['recipe']}", header, rows
    profiled = [(record, record.where["groups"]) for record in result.loops if record.where]
    if profiled:
        labels = profiled[0][1]
        shares = [
            [label, *(f"{groups[label]:.3f} ({100 * groups[label] / record.ms:.0f}%)" for record, groups in profiled)]
            for label in labels
        ]
        yield "where the time goes: ms of a step", ["group", *(record.loop for record, _ in profiled)], shares


def step_notes(result: StepResult) -> list[str]:
    """What Lightning costs, and why loops have no numbers."""
    lines = [f"{record.loop}: {record.status}: {record.reason}" for record in result.loops if record.reason]
    for record in result.loops:
        steady = record.steady or [True]
        if not all(steady):
            share = f"{steady.count(False)} of {len(steady)}"
            mend = ", which do not count" if any(steady) else ": raise warmup="
            lines.append(f"{record.loop}: in {share} blocks shapes of batches were captured{mend}")
    if result.lightning is None:
        return lines
    return [f"Lightning: fit takes {100 * result.lightning:+.1f}% against its engine's loop by hand", *lines]


def one_device(run: RunConfig, refusal: str) -> torch.device:
    """The device of a run; UsageError with this text if it has several."""
    machine = trainer_hardware(run)
    if machine["devices"] * machine["num_nodes"] > 1:
        raise UsageError(refusal)
    return torch.device("cuda", 0) if machine["accelerator"] == "gpu" else torch.device("cpu")


def step_line(record: StepMeasurement) -> str:
    """A line on what was measured of a loop."""
    if not record.ok:
        return f"{record.loop}: {record.status}"
    return f"{record.loop}: {record.ms:g} ms, {record.tokens_per_second:,} tokens/s"
