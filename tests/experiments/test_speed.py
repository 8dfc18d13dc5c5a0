"""`lra reproduce table3 speed=true` on the CPU: two ways, resumed, and shown beside the paper."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lra import environment
from lra.bench.records import MeasurementFile, StepMeasurement
from lra.cli import app
from lra.config.override import parse_overrides
from lra.errors import UsageError
from lra.experiments import accuracy, speed
from lra.experiments.grid import grid
from lra.experiments.grid.grid import Column
from lra.experiments.results import report
from lra.experiments.speed import SpeedMeasurement, Speeds
from lra.training import step as step_module
from lra.training.step import Step

TABLE = grid.read_grid("table3")
SMALL = replace(
    TABLE, columns={**TABLE.columns, "short": Column(parse_overrides(["task=listops", "task.max_length=32"]))}
)
TINY = (
    "speed=true", "attns=standard,flash", "recipe=demo", "steps=2", "warmup=1", "task.train=50", "task.val=10",
    "task.test=10", "trainer.accelerator=cpu", "batch.size=2", "model.d_model=32", "model.layers=1", "out=speed.json",
)  # fmt: skip
ONE = (*TINY, "tasks=listops")
TWO = (*TINY, "tasks=listops,short")
FILE = Path("speed.json")
MS = {"standard": 8.0, "flash": 2.0, "megatron": 4.0}


pytestmark = pytest.mark.usefixtures("here", "one_thread")


@pytest.fixture(scope="module", autouse=True)
def committed():
    """Whatever the tree of these tests is, what they measure is of a clean commit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "current_commit", lambda: "0123456789ab")
        yield


@pytest.fixture
def fake(monkeypatch):
    """Times that are made up; gives the loops that were called."""
    called = []

    def measured(loop, composed, options, device):
        run = composed.config
        called.append(f"{run.task.name} {run.attn.name} {loop} {run.batch.layout}")
        return StepMeasurement(
            loop=loop, engine="captured", ms=MS[run.attn.name], rows=64.0, memory_mb=9.5, tokens_per_second=1000
        )

    monkeypatch.setattr(speed.step, "measure_loop", measured)
    monkeypatch.setattr(grid, "read_grid", lambda name: SMALL)
    return called


def made(column: str, attn: str, way: str, ms: float | None, status: str = "ok", reason: str = "") -> dict[str, Any]:
    """A record, as far as it is shown."""
    return {
        "column": column, "attention": attn, "way": way, "loop": "fit", "status": status, "reason": reason,
        "engine": "captured", "ms": ms, "rows": 64.0, "memory_mb": 9.5, "tokens_per_second": 1000, "where": None,
        "steps_per_second": ms and 1e3 / ms,
    }  # fmt: skip


def result(*records: dict[str, Any]) -> dict[str, Any]:
    made_with = {"gpu": "NVIDIA\nH200", "date": "2026-01-01T00:00:00Z", "commit": "abc1234"}
    return {"environment": made_with, "options": {"recipe": "xiong2021", "fields": []}, "cells": list(records)}


def read() -> Any:
    return json.loads(FILE.read_text())


def shown(made: Any, title: str) -> dict[str, list[str]]:
    """attention -> cells, of the table whose title begins so."""
    [rows] = [rows for name, _, rows in made.tables if name.startswith(title)]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """Two attentions by two columns, really measured: the folder, the report and the lines of progress."""
    folder, lines = tmp_path_factory.mktemp("speed"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(grid, "read_grid", lambda name: SMALL)
        return folder, accuracy.reproduce("table3", TWO, lines.append), lines


def test_each_cell_is_measured_in_both_ways(real):
    folder, made, lines = real
    assert [path.name for path in folder.iterdir()] == ["speed.json"]  # no run leaves anything
    found = json.loads((folder / "speed.json").read_text())
    assert [(r["column"], r["attention"], r["way"]) for r in found["cells"]] == [
        (column, attn, way)
        for column in ("listops", "short") for attn in ("standard", "flash") for way in ("attention", "product")
    ]  # fmt: skip
    for record in found["cells"]:
        padded = record["way"] == "attention"
        assert record["status"] == "ok" and record["loop"] == ("eager" if padded else "fit")
        assert record["engine"] == "eager" and record["memory_mb"] is None
        assert record["reason"] == ("engine=captured, but there is no GPU" if padded else "")
        assert record["steps_per_second"] == pytest.approx(1e3 / record["ms"], rel=1e-3)
        if padded:
            assert record["rows"] == 2 * {"listops": 64, "short": 32}[record["column"]]
        else:
            assert record["rows"] == record["tokens"] < 2 * 64  # packed
    assert found["environment"]["versions"]["torch"] and found["environment"]["gpu"] is None
    assert found["options"]["tasks"] == ["listops", "short"] and found["options"]["recipe"] == "demo"
    assert (found["options"]["steps"], found["options"]["warmup"]) == (2, 1)
    assert "batch.size=2" in found["options"]["fields"] and "speed=true" not in found["options"]["fields"]
    assert len(lines) == 8 and lines[0].startswith("listops standard, attention: eager: ")
    assert not made.wrong
    assert shown(made, "speedup over standard on CPU")["standard"] == ["1.00 (2)", "1.00 (2)", ""]
    cells = "listops standard, listops flash, short standard, short flash"
    assert made.lines[1:] == [
        "measurements: 8 ok", f"attention, eager: engine=captured, but there is no GPU ({cells})",
    ]  # fmt: skip


def test_what_can_be_captured_is(monkeypatch):
    monkeypatch.setattr(Step, "captures", lambda self, *_: self.run.engine != "eager")
    monkeypatch.setattr(step_module.torch, "compile", lambda function, **options: function)
    made = accuracy.reproduce("table3", [*(arg for arg in ONE if not arg.startswith("attns=")), "attns=flash"])
    assert [(r["loop"], r["engine"], r["reason"]) for r in read()["cells"]] == [
        ("captured", "captured", ""), ("fit", "captured", ""),
    ]  # fmt: skip
    assert made.lines[1:] == ["measurements: 2 ok"]


def test_the_same_command_goes_on_where_it_was_stopped(fake, monkeypatch):
    accuracy.reproduce("table3", TWO)
    whole = list(fake)
    assert whole[:2] == ["listops standard captured padded", "listops standard fit packed"] and len(whole) == 8
    first = read()["cells"]
    FILE.unlink()
    measured = speed.step.measure_loop

    def stopped(*args):
        if len(fake) == 2:
            raise KeyboardInterrupt
        return measured(*args)

    fake.clear()
    with monkeypatch.context() as patch:
        patch.setattr(speed.step, "measure_loop", stopped)
        with pytest.raises(KeyboardInterrupt):
            accuracy.reproduce("table3", TWO)
    assert read()["cells"] == first[:2]
    fake.clear()
    plan = accuracy.reproduce("table3", TWO, dry_run=True)
    assert plan.lines[-1] == "6 of 8 remain to be measured" and not plan.wrong and not fake
    accuracy.reproduce("table3", TWO)
    assert fake == whole[2:] and [record | {"made": None} for record in read()["cells"]] == [
        record | {"made": None} for record in first
    ]
    made = accuracy.reproduce("table3", TWO)
    assert len(fake) == 6 and shown(made, "speedup")["flash"] == ["4.00 (2)", "4.00 (2)", ""]
    assert sorted(path.name for path in FILE.absolute().parent.iterdir()) == ["speed.json"]


def test_two_commands_do_not_measure_for_one_file(fake, monkeypatch):
    measured, refusals = speed.step.measure_loop, []

    def again(*args):
        with pytest.raises(UsageError, match=r"another process measures for .*speed\.json: wait for it"):
            accuracy.reproduce("table3", TWO)
        refusals.append(args)
        return measured(*args)

    monkeypatch.setattr(speed.step, "measure_loop", again)
    accuracy.reproduce("table3", TWO)
    assert len(refusals) == len(fake) == len(read()["cells"]) == 8


def test_a_cell_out_of_memory_and_one_that_fails_leave_the_others(monkeypatch):
    def oom(*_):
        raise torch.OutOfMemoryError("much\nmore")

    def broken(name, run, watch):
        if run.attn.name == "flash":
            raise RuntimeError("a compiler\nsays much")
        return by_hand(name, run, watch)

    by_hand = speed.step.loops.time_by_hand
    monkeypatch.setattr(speed.step.loops, "time_fit", oom)
    monkeypatch.setattr(speed.step.loops, "time_by_hand", broken)
    done = CliRunner().invoke(app, ["reproduce", "table3", *ONE])
    assert done.exit_code == 1, done.output
    records = {(r["attention"], r["way"]): r for r in read()["cells"]}
    assert {key: r["status"] for key, r in records.items()} == {
        ("standard", "attention"): "ok", ("standard", "product"): "OOM",
        ("flash", "attention"): "failed", ("flash", "product"): "OOM",
    }  # fmt: skip
    assert records["flash", "attention"]["reason"] == "RuntimeError: a compiler"
    assert records["flash", "attention"]["steps_per_second"] is None
    made = accuracy.reproduce("table3", ONE, dry_run=True)
    assert "1 of 4 remain to be measured" in made.lines, "a failure may have passed"
    assert shown(made, "attention, ")["flash"] == ["failed"] and shown(made, "product, ")["standard"] == ["OOM"]
    assert shown(made, "speedup")["flash"] == ["", "", ""]
    assert "measurements: 1 ok, 2 OOM, 1 failed" in made.lines
    assert "attention, failed: RuntimeError: a compiler (listops flash)" in made.lines
    monkeypatch.setattr(speed.step.loops, "time_by_hand", by_hand)
    assert "measurements: 2 ok, 2 OOM" in accuracy.reproduce("table3", ONE).lines


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("steps=2", "steps=3"), r"other options \(steps: 2 -> 3\): give those, or choose another out="),
        (("batch.size=2", "batch.size=4"), r"other options \(fields: "),
    ],
)
def test_other_options_are_refused(fake, change, message):
    accuracy.reproduce("table3", ONE)
    with pytest.raises(UsageError, match=message):
        accuracy.reproduce("table3", [arg.replace(*change) for arg in ONE])


def test_a_file_grows_by_attentions_and_tasks(fake):
    flash, both = ([arg.replace("standard,flash", attns) for arg in ONE] for attns in ("flash", "flash,standard"))
    accuracy.reproduce("table3", flash)
    assert len(fake) == 2 and read()["options"]["attns"] == ["flash"]
    made = accuracy.reproduce("table3", both)
    assert len(fake) == 4 and sorted(read()["options"]["attns"]) == ["flash", "standard"]
    assert accuracy.reproduce("table3", flash).tables[0][2] == made.tables[0][2][-1:], "its row alone"


def test_an_attention_that_is_not_the_papers_is_measured_beside_standard(fake):
    made = accuracy.reproduce("table3", [arg.replace("standard,flash", "standard,megatron") for arg in ONE])
    assert read()["options"]["attns"] == ["standard", "megatron"]
    assert shown(made, "speedup")["megatron"][0] == "2.00 (1)"


def test_a_gpu_that_others_use_is_refused(monkeypatch):
    monkeypatch.setattr(speed.torch, "zeros", lambda *_, **__: None)
    monkeypatch.setattr(speed.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-1"))
    monkeypatch.setattr(speed.environment, "gpu_processes", lambda uuid: 2 * (uuid == "GPU-1"))
    with pytest.raises(UsageError, match="another process is on this GPU: wait for it"):
        speed._refuse_company(torch.device("cuda", 0))
    speed._refuse_company(torch.device("cpu"))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"gpu": "another"}, "gpu: another -> None"), ({"versions": {"torch": "1"}}, r"versions.torch: 1 -> \d")],
)
def test_another_environment_is_refused_where_something_is_lacking(fake, change, message):
    accuracy.reproduce("table3", ONE)
    found = read()
    found["environment"] |= change
    FILE.write_text(json.dumps(found))
    accuracy.reproduce("table3", ONE)
    found["cells"].pop()
    FILE.write_text(json.dumps(found))
    with pytest.raises(UsageError, match=f"measured in another environment .*{message}"):
        accuracy.reproduce("table3", ONE)
    assert len(fake) == 4


def test_what_is_measured_later_states_its_own_date_command_and_commit(fake, monkeypatch):
    monkeypatch.setattr(environment, "current_commit", lambda: "b")
    accuracy.reproduce("table3", ONE)
    found = read()
    assert not any("made" in record for record in found["cells"])
    begun = {"commit": "a", "date": "2026-01-01", "command": "lra"}
    found["environment"] |= begun | {"gpus": 9}
    kept = found["cells"][:-1]
    FILE.write_text(json.dumps(found | {"cells": kept}))
    accuracy.reproduce("table3", ONE)
    found = read()
    assert len(fake) == 5 and found["environment"].items() >= begun.items()
    assert found["cells"][:-1] == kept, "as they are, without a word"
    result = speed.read_speeds(FILE)
    *older, last = (record.made or {} for record in result.cells)
    assert last["commit"] == "b" and last["command"] == environment.current_command() and last["date"] > begun["date"]
    assert older == [begun] * 3
    assert speed.describe_origin(result).startswith(f"CPU, commit a, b, 2026-01-01 to {last['date']}")


@pytest.mark.parametrize("made", [5, {"date": 5}, {"date": "1", "commit": 5, "command": "lra"}, {}])
def test_a_record_that_states_nonsense_is_no_measurement(fake, made):
    accuracy.reproduce("table3", ONE)
    found = read()
    found["cells"][-1]["made"] = made
    FILE.write_text(json.dumps(found))
    with pytest.raises(UsageError, match="is not a measurement of lra reproduce with speed=true"):
        accuracy.reproduce("table3", ONE)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["seeds=2"], "seeds=2 can't be beside speed=true: one process measures each cell once"),
        (["launcher=local"], "launcher=local can't be beside speed=true"),
        (["devices=1"], "devices=1 can't be beside speed=true"),
        (["per_device=2"], "per_device=2 can't be beside speed=true"),
        (["slurm.partition=gpu"], "slurm.partition=gpu needs launcher=slurm"),
        (["seed=1"], "seed=1 can't be beside speed=true"),
        (["engine=eager"], "engine=eager can't be beside speed=true: it is set by the two ways"),
        (["batch.layout=packed"], "batch.layout=packed can't be beside speed=true"),
        (["attn=flash"], "attn=flash can't be beside speed=true: give attns="),
        (["name=x"], "init=, name=, resume=, draws= and predictions= mean nothing to a measurement"),
        (["optim.lrr=1"], "unknown field 'optim.lrr': did you mean 'optim.lr'?"),
        (["trainer.steps=5", "trainer.eval_every=5", "trainer.log_every=5"], "trainer.steps=5, but 23 are needed"),
        (["tasks=listop"], "unknown task 'listop'"),
        (["tasks=text,text"], "tasks=text,text names one twice"),
        (["tasks=listops", "out=file/speed.json"], "out=file/speed.json can't be written"),
        (["tasks=listops", "out=file"], "file is not a measurement of lra reproduce with speed=true: remove it"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(fake, more, message):
    Path("file").write_text('{"cells": []}')
    args = [arg for arg in TINY if not (arg.startswith("out=") and any(one.startswith("out=") for one in more))]
    with pytest.raises(UsageError, match=re.escape(message)):
        accuracy.reproduce("table3", [*args, *more])
    assert not fake and [path.name for path in Path().iterdir()] == ["file"]


def test_each_table_has_a_file_of_its_own(fake):
    accuracy.reproduce("table3", [arg for arg in ONE if not arg.startswith("out=")])
    assert Path("checkpoints/table3-speed.json").is_file() and not FILE.exists()


def test_a_recipe_that_starts_from_another_run_is_measured():
    report = accuracy.reproduce("table6", ["speed=true", "tasks=path64", "attns=flash"], dry_run=True)
    assert "2 of 2 remain to be measured" in report.lines


def test_ratios_are_of_columns_that_both_have_and_the_mean_leaves_out_what_is_apart():
    columns = ("listops", "text", "image", "scisumm")
    times = {"listops": (8.0, 2.0), "text": (9.0, 1.0), "image": (None, 1.0), "scisumm": (50.0, 1.0)}
    records = [
        made(column, attn, "product", ms, "ok" if ms else "OOM", "" if ms else "too much")
        for column, pair in times.items() for attn, ms in zip(("standard", "flash"), pair, strict=True)
    ]  # fmt: skip
    records.append(made("listops", "flash", "attention", 5.0))
    stated = result()
    cells = [SpeedMeasurement.loaded(record) for record in records]
    measured = MeasurementFile(stated["environment"], stated["options"], cells)
    speeds = Speeds(measured.cells)
    assert speeds.ratios(columns, "flash", "product") == pytest.approx([4.0, 9.0, 50.0])
    assert speeds.ratios(columns, "flash", "attention") == [] and speeds.ratio("text", "linear", "product") is None
    summary, attention, product = speed.speed_tables(TABLE, measured, columns, ["standard", "flash", "linear"])
    assert summary[0] == "speedup over standard on NVIDIA H200, each measured alone: geometric mean (columns)"
    assert summary[1] == ["attention", "speedup, attention", "speedup, product", "paper"]
    assert summary[2] == [["standard", "", "1.00 (2)", ""], ["flash", "", "6.00 (2)", "2.4"], ["linear", "", "", "2.3"]]
    assert attention[2][1] == ["flash", "200", "", "", ""] and product[2][2] == ["linear", "", "", "", ""]
    assert product[2][0] == ["standard", "125 (1.00×)", "111.111 (1.00×)", "OOM", "20 (1.00×)"]
    assert product[2][1] == ["flash", "500 (4.00×)", "1000 (9.00×)", "1000", "1000 (50.00×)"]
    assert speed.speed_notes(list(speeds.records.values()))[1:] == ["product, OOM: too much (image standard)"]


def test_a_real_file_tells_how_long_its_cells_take(real):
    fields = [arg for arg in TINY if not arg.startswith(("speed=", "steps=", "warmup=", "out="))]
    plan = accuracy.reproduce("table3", [*fields, "tasks=listops", f"speed={real[0] / 'speed.json'}"], dry_run=True)
    assert "unknown" not in str(plan) and "(each alone on CPU, " in plan.lines[2]


def test_a_real_file_is_shown_with_its_options(real):
    shutil.copy(real[0] / "speed.json", FILE)
    Path("runs").mkdir()
    beside = report.make_report("table3", ["results=runs", "recipe=demo", "tasks=listops", f"speed={FILE}"])
    [note] = [note for note in beside.notes if note.startswith("speed: ")]
    assert "CPU" in note and "batch.size=2" in note
    assert list(shown(beside, "speedup over standard on CPU")) == list(TABLE.attns)
