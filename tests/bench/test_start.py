"""`lra bench start`: the phases of a run add up, and its compile caches are its own if that is asked for."""

from __future__ import annotations

import inspect
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.callback import callback_handler

from lra import timeline
from lra.bench import start
from lra.bench.output import measured_run
from lra.bench.start import complete_phases, measure_start, parse_start_fields, start_notes, start_table
from lra.caches import CACHE_READERS
from lra.errors import UsageError
from lra.timeline import FILE_VARIABLE, Timeline
from lra.training import assembly
from lra.training.compiling import record_compiled_kernels, record_compiled_regions
from lra.training.fit import configure
from lra.training.step import Step
from tests.command_line import process
from tests.training.conftest import arguments

CACHES = set(CACHE_READERS.values())


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def started(here, monkeypatch):
    """The processes that would run, each with `command` and `variables`; `started.code` is what they end with."""

    class Processes(list):
        code = 0
        during = staticmethod(lambda process: None)  # what happens while it runs

        def __init__(self):
            self.killed = []  # of each that was, whether its run was still there

    found = Processes()

    class Process:
        def __init__(self, command, env):
            found.append(SimpleNamespace(command=command, variables=env))
            for name in CACHES & env.keys():
                found[-1].folder = Path(env[name]).parent
                Path(env[name]).mkdir(parents=True)
            self.run = Path("checkpoints/runs/listops/flash", f"start-{os.getpid()}-s0")
            self.run.mkdir(parents=True)
            Path(env[FILE_VARIABLE]).write_text(json.dumps(Timeline().saved()))

        def wait(self):
            found.during(self)
            return found.code

        def kill(self):
            found.killed.append(self.run.exists())

    monkeypatch.setattr(start, "subprocess", SimpleNamespace(Popen=Process))
    for name in CACHES:
        monkeypatch.delenv(name, raising=False)
    return found


@pytest.mark.slow
def test_a_run_from_its_start_to_its_end(here):
    before = time.monotonic()
    done = process("bench", "start", *arguments("trainer.eval_every=4", "cold=true", "out=new/start.json"))
    wall = time.monotonic() - before
    assert done.code == 0, done.err
    assert [path.name for path in here.iterdir()] == ["new"]  # and no run

    record = json.loads(Path("new/start.json").read_text(encoding="utf-8"))
    assert record["environment"]["versions"]["torch"] and record["environment"]["date"]
    assert record["environment"]["command"].startswith("lra bench start task=listops")
    assert record["options"] == {"cold": True} and record["run"]["trainer"]["steps"] == 12
    assert record["regions"] == [] and record["kernels"] == {}
    phases = record["phases"]
    assert list(phases) == [
        "imports", "configuration", "model", "provenance", "data", "start of training",
        "start of training: opening data", "start of training: uploading data", "first steps", "training",
        "first validation", "checkpoints", "validation", "end of training", "test", "result", "end of process",
    ]  # fmt: skip
    assert all(seconds >= 0 for seconds in phases.values()) and phases["imports"] > 0.5
    assert record["seconds"] == pytest.approx(sum(phases.values())) and 0.3 * wall < record["seconds"] < wall
    rows = {row[0]: row[1:] for row in done.rows}
    assert rows["imports"][0] == f"{phases['imports']:.3f}" and rows["all"] == [f"{record['seconds']:.3f}", "100.0%"]
    assert "recipe=demo, own, empty compile caches" in done.out


@pytest.mark.slow
def test_a_run_that_fails_ends_with_its_code(here):
    Path("checkpoints").write_text("no folder")
    done = process("bench", "start", *arguments("out=start.json"))
    assert done.code == 2 and "lra: cannot write to checkpoints/runs" in done.err and "Traceback" not in done.err
    assert sorted(path.name for path in here.iterdir()) == ["checkpoints"]


@pytest.mark.parametrize(
    ("given", "kept"), [("/somewhere/imdb", "imdb"), ("stanfordnlp/imdb", "stanfordnlp/imdb"), ("../imdb", "../imdb")]
)
def test_a_record_names_no_folder_of_the_machine(given, kept):
    run = configure(["task=text", "attn=flash", f"task.source={given}"]).config
    assert measured_run(run)["task"]["source"] == kept
    assert run.to_saved_dict()["task"]["source"] == given


@pytest.mark.parametrize(("code", "ends"), [(1, 1), (3, 3), (-15, 143)])
def test_codes(started, here, code, ends):
    started.code = code
    with pytest.raises(SystemExit) as ended:
        measure_start(arguments("out=start.json"))
    assert ended.value.code == ends and not list(here.iterdir())


def test_a_signal_stops_the_run_and_removes_it(started, here):
    before, started.during = signal.getsignal(signal.SIGTERM), lambda process: signal.raise_signal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        measure_start(arguments("out=start.json"))
    assert ended.value.code == 143 and started.killed == [True] and not list(here.iterdir())
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_fault_is_said_to_be_removed_with_its_run(started, here):
    started.code, started.during = 2, lambda process: (process.run / "fault.pt").touch()
    with pytest.raises(
        UsageError, match=r"start-\d+-s0 is removed, fault.pt too: lra fit with these fields makes it ag"
    ):
        measure_start(arguments())
    assert not list(here.iterdir())


def test_a_cold_run_has_caches_of_its_own(started, here):
    measure_start(arguments("cold=true"))
    measure_start(arguments())
    cold, warm = started
    assert cold.variables.keys() >= CACHES and not CACHES & warm.variables.keys()
    assert len({cold.variables[name] for name in CACHES}) == len(CACHES)
    assert not cold.folder.exists() and not list(here.iterdir())


def test_other_runs_stay(started, here):
    other = here / "checkpoints" / "runs" / "listops" / "other"
    other.mkdir(parents=True)
    measure_start(arguments())
    assert other.exists() and [path.name for path in other.parent.iterdir()] == ["other"]


def test_the_run_is_trained_anew_and_without_the_one_before_it():
    _, fields, run = parse_start_fields(["task=listops", "attn=flash", "recipe=amos2024-demo", "trainer.steps=40"])
    assert fields[-1] == "init=null" and run.init is None
    assert parse_start_fields(["task=listops", "attn=flash", "init=there"])[1][-1] == "init=there"
    for field in ("name=a", "resume=auto", "draws=changed"):
        with pytest.raises(UsageError, match="name=, resume=, draws= and predictions= mean nothing to a measurement"):
            parse_start_fields(arguments(field))


def test_several_devices_are_refused(monkeypatch):
    monkeypatch.setattr(sys, "argv", [__file__])  # a worker of xdist is no file
    with pytest.raises(UsageError, match="lra bench start measures one device"):
        measure_start(arguments("trainer.devices=2"))


def test_what_no_process_can_record_belongs_to_its_first_and_last_phase():
    found = {"began": 12.0, "ended": 15.0, "last": "end", "phases": {"imports": 2.0, "steps": 0.5, "end": 0.5}}
    assert complete_phases(found, 11.0, 15.25) == {"imports": 3.0, "steps": 0.5, "end": 0.75}


def test_what_is_compiled_is_recorded():
    line = Timeline()
    record_compiled_regions(line)
    line.mark("steps")
    try:

        @torch.compile(backend="aot_eager")
        def loss(x):
            return x.sin().sum()

        loss(torch.ones(3, requires_grad=True)).backward()
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(3))
    finally:
        callback_handler.clear()
        torch.compiler.reset()
    found = line.saved()
    last = found["regions"][-3:]
    passes = [("loss", "forward"), ("loss", "backward"), ("<lambda>", "forward")]
    assert [(each["region"], each["pass"]) for each in last] == passes
    assert found["phases"]["steps: compiling"] > 0 and all(each["seconds"] >= 0 for each in last)


def test_kernels_of_triton_are_recorded(monkeypatch):
    """Not those that a cache has. Compiled as Triton compiles them, they need a second."""
    knobs = pytest.importorskip("triton").knobs
    given = {*inspect.signature(knobs.CompilationListener.__call__).parameters} - {"self"}
    assert given == {"src", "metadata", "metadata_group", "times", "cache_hit"}
    now = [0.0]
    monkeypatch.setattr(knobs.compilation, "listener", None)
    line = Timeline(lambda: now[0])
    record_compiled_kernels(line)
    line.mark("steps")
    now[0] = 4.0
    for name, stage, hit in (("forward", 250_000, False), ("forward", 500_000, False), ("update", 9_000_000, True)):
        times = knobs.CompileTimes(125_000, [("ptx", stage)], 125_000)  # microseconds
        knobs.compilation.listener(src=None, metadata={"name": name}, metadata_group={}, times=times, cache_hit=hit)
    found = line.saved()
    assert found["kernels"] == {"forward": 1.25}
    assert found["phases"] == {"imports": 0.0, "steps: compiling kernels": 1.25, "steps": 2.75}


def test_the_slowest_kernels_are_named():
    kernels = {f"kernel{number}": 20.0 - number for number in range(12)}
    regions = [{"region": "loss", "pass": "backward", "seconds": 3.21}]
    result = start.StartResult({}, {"cold": False}, {}, 10.0, {"imports": 10.0}, regions, kernels)
    compiled, slowest = start_notes(result)
    assert compiled == "torch.compile: loss, backward: 3.2 s"
    assert slowest.startswith("Triton compiled 12 kernels in 174.0 s; the slowest, in seconds: kernel0 20.0, ")
    assert "kernel9" in slowest and "kernel10" not in slowest
    result.run = {"task": {"name": "text"}, "attn": {"name": "flash"}, "recipe": "demo"}
    assert start_table(result)[0] == "lra fit task=text attn=flash recipe=demo, the user's compile caches"


def test_a_captured_run_records_what_it_compiles(monkeypatch):
    recorded = Timeline()
    monkeypatch.setattr(timeline, "_recorded", recorded)
    monkeypatch.setattr(assembly, "start_compilers", lambda: None)
    monkeypatch.setattr(Step, "captures", lambda *_: True)
    run = configure(arguments()).config
    step = Step(run)
    try:
        _, module = assembly.build_modules(run, step=step)
        assert assembly.resolve_engine(module, step, torch.device("cpu")) == "captured"
    finally:
        callback_handler.clear()
    assert [*recorded.facts] == ["regions"]  # and `kernels` on a GPU
