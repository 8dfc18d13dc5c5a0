"""`lra bench start`: where the seconds of one `lra fit` go, from the start of its process to its end."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lra import environment
from lra.bench.output import measured_run, open_output
from lra.bench.step import is_named_or_continued, one_device
from lra.caches import CACHE_READERS
from lra.config.options import recorded_options, split_options
from lra.config.override import Override
from lra.config.schema import RunConfig
from lra.errors import UsageError
from lra.timeline import FILE_VARIABLE, FIRST_PHASE
from lra.training.assembly import build_modules
from lra.training.faults import FAULT_FILE
from lra.training.fit import configure
from lra.training.run_directory import RunDirectory

SHOWN_KERNELS = 10  # of those that took longest to compile; the file has all


@dataclass(frozen=True)
class StartOptions:
    """What `lra bench start` measures. Every other argument is a field of the run, as `lra fit` takes it."""

    cold: bool = False  # give the run compile caches of its own, which are empty
    out: str | None = None  # JSON file


@dataclass
class StartResult:
    """What `lra bench start` measured of a run."""

    environment: dict[str, Any]
    options: dict[str, Any]
    run: dict[str, Any]  # its configuration
    seconds: float  # from the start of the process to its end; the sum of the phases
    phases: dict[str, float]  # seconds of each, in the order in which they ended first
    regions: list[dict[str, Any]]  # what torch.compile compiled: region, pass, seconds
    kernels: dict[str, float]  # seconds that Triton took for each kernel that no cache had

    def saved(self) -> dict[str, Any]:
        """The JSON object."""
        return dict(vars(self))


def parse_start_fields(args: Iterable[str | Override]) -> tuple[StartOptions, list[str], RunConfig]:
    """The measurement's options, and the fields and the configuration of the run. UsageError if they don't go
    together.

    A recipe that trains another run first does not do so here: that is another measurement.
    """
    options, given = split_options(StartOptions, args)
    fields = [*map(str, given), *([] if any(each.field == "init" for each in given) else ["init=null"])]
    run: RunConfig = configure(fields).config
    if is_named_or_continued(run):
        raise UsageError("name=, resume=, draws= and predictions= mean nothing to a measurement: leave them out")
    return options, fields, run


def measure_start(args: Sequence[str]) -> StartResult:
    """Runs `lra fit` in a process of its own, and removes the run. The data is prepared before.

    Args:
        args: `field=value` of StartOptions and of a run.

    Raises:
        UsageError: for wrong fields, and for a run that ended as a step was not finite.
        SystemExit: the run failed; with its exit code. Or on SIGTERM (143), when the run is stopped and removed.
    """
    options, fields, run = parse_start_fields(args)
    one_device(run, "lra bench start measures one device: set trainer.devices=1, without torchrun")
    build_modules(run)[0].prepare_data()
    fields.append(f"name=start-{os.getpid()}")
    path = RunDirectory(configure(fields)).path
    with (
        _exiting_on_sigterm(),
        open_output(options.out) as keep,
        _removed(path),
        tempfile.TemporaryDirectory(prefix="lra-bench-") as folder,
    ):
        file = Path(folder) / "timeline.json"
        caches = {name: str(Path(folder) / name.lower()) for name in {*CACHE_READERS.values()}} if options.cold else {}
        began = time.monotonic()
        variables = os.environ | caches | {FILE_VARIABLE: str(file)}
        process = subprocess.Popen([sys.executable, "-m", "lra", "fit", *fields], env=variables)
        try:
            code = process.wait()
        except KeyboardInterrupt:
            process.wait()  # it was given the same Ctrl-C, and ends after its present steps
            raise
        except SystemExit:
            process.kill()  # nothing that it would still write is kept
            process.wait()
            raise
        ended = time.monotonic()
        if (path / FAULT_FILE).exists():
            raise UsageError(f"{path} is removed, {FAULT_FILE} too: lra fit with these fields makes it again")
        if code:
            sys.exit(code if code > 0 else 128 - code)  # as shells have it: 128 + signal
        found = json.loads(file.read_text(encoding="utf-8"))
        # torch.cuda is first asked for here, because a process that has a GPU counts as one that shares it
        stated = (environment.describe(), recorded_options(options), measured_run(run))
        phases = complete_phases(found, began, ended)
        seconds = round(sum(phases.values()), 3)
        result = StartResult(*stated, seconds, phases, found.get("regions", []), found.get("kernels", {}))
        keep(result.saved())
    return result


def complete_phases(found: dict[str, Any], began: float, ended: float) -> dict[str, float]:
    """The seconds of each phase, to milliseconds.

    What comes before the first phase that a process recorded belongs to it, and what comes after the last one to that.

    Args:
        found: what `Timeline.saved` returned.
        began, ended: when the process did, in seconds of `time.monotonic`.
    """
    phases = dict(found["phases"])
    phases[FIRST_PHASE] += found["began"] - began
    phases[found["last"]] += ended - found["ended"]
    return {name: round(seconds, 3) for name, seconds in phases.items()}


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Makes SIGTERM an exit, so that what is begun is also ended. A second one changes nothing."""

    def leave(number: int, _: Any) -> None:
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _removed(run: Path) -> Iterator[None]:
    """Removes a run's directory at the end, and those above it that are empty then."""
    try:
        yield
    finally:
        shutil.rmtree(run, ignore_errors=True)
        with suppress(OSError):  # one that is not empty
            for parent in run.parents:
                parent.rmdir()


def start_table(result: StartResult) -> tuple[str, list[str], list[list[str]]]:
    """(title, header, rows) of the phases, and of all of them together."""
    run, caches = result.run, "own, empty compile caches" if result.options["cold"] else "the user's compile caches"
    rows = [
        [name, f"{seconds:.3f}", f"{100 * seconds / result.seconds:.1f}%"]
        for name, seconds in [*result.phases.items(), ("all", result.seconds)]
    ]
    title = f"lra fit task={run['task']['name']} attn={run['attn']['name']} recipe={run['recipe']}, {caches}"
    return title, ["phase", "s", "share"], rows


def start_notes(result: StartResult) -> list[str]:
    """What was compiled."""
    lines = [f"torch.compile: {each['region']}, {each['pass']}: {each['seconds']:.1f} s" for each in result.regions]
    slowest = list(result.kernels.items())[:SHOWN_KERNELS]
    if result.kernels:
        first = ", ".join(f"{name} {seconds:.1f}" for name, seconds in slowest)
        total = f"{len(result.kernels)} kernels in {sum(result.kernels.values()):.1f} s"
        lines.append(f"Triton compiled {total}; the slowest, in seconds: {first}")
    return lines
