"""README.md and docs say what is so: their results name their origin, their commands parse, their code runs."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest
import torch
import typer.core
import typer.main

from benchmarks import runs, tables
from lra.config.compose import differences
from lra.experiments.grid import grid
from lra.experiments.results import ledger
from lra.training.fit import configure
from lra.training.run import COMPUTING

ROOT = Path(__file__).parent.parent
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
README = DOCUMENTS[0].read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.fixture
def script(monkeypatch):
    """`script("readme")` imports benchmarks/readme.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module


@pytest.fixture
def run_here(tmp_path):
    """Runs Python in an empty folder, on the CPU, with the checkout's `lra`; returns the finished process."""

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = (sys.executable, *map(str, command))
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.stem)
def test_a_result_says_where_it_comes_from(file):
    text = file.read_text(encoding="utf-8")
    result = json.loads(text)
    assert not re.search(r'"/\w', text)  # a path of the machine it was measured on, which nobody else has
    measured = [result] if "environment" in result else result["runs"]  # each where they are of several days
    assert measured
    for made_with in (each["environment"] for each in measured):
        assert made_with["command"] and made_with["date"] and made_with["versions"]["torch"]
        assert "gpu" in made_with  # null on a CPU
    if "attn" in result:  # of a run
        task, name = result["task"].partition("@")[0], result["config"]["name"] or result["recipe"]
        start, end = f"{task}-{result['attn']}-{name}", f"-s{result['seed']}"
        assert file.stem.startswith(start) and file.stem.endswith(end)  # between them a stage's name


AGAIN = [file for file in RESULTS if re.search(r"-(earlier|again)-s\d+$", file.stem)]


@pytest.mark.parametrize("file", AGAIN, ids=lambda file: file.stem)
def test_what_ran_another_time_is_the_same_configuration(file):
    one, other = (
        json.loads(each.read_text()) for each in (file, file.with_name(re.sub("-(earlier|again)", "", file.name)))
    )
    assert differences(one["config"], other["config"], {*COMPUTING, "name", "resume"}) == []


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_of_the_readme_runs(number, run_here):
    done = run_here("-c", PYTHON[number])
    assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    """The arguments of every `lra …` in README's shell blocks and inline code."""
    lines = [line for block in re.findall(r"```sh\n(.*?)```", README, re.DOTALL) for line in block.splitlines()]
    inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    found = (re.match(r"(?:torchrun .*-m )?lra (.+)", text) for text in [*lines, *inline])
    return [match[1] for match in found if match]


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_readme_parse(command):
    from lra.bench import attention as bench
    from lra.cli import app
    from lra.config.options import parse
    from lra.experiments import accuracy, fig3
    from lra.experiments.grid import grid
    from lra.experiments.grid.slurm import resources
    from lra.experiments.results import archive, report
    from lra.training.fit import configure

    verb = typer.main.get_command(app)
    arguments, path = shlex.split(command, comments=True), []
    while isinstance(verb, typer.core.TyperGroup):
        assert arguments and arguments[0] in verb.commands, f"lra {command}"
        path.append(arguments.pop(0))
        verb = verb.commands[path[-1]]
    fields = verb.make_context(path[-1], arguments).params.get("fields") or []
    if path == ["reproduce"]:
        options = fig3.Options if fields[0] == "fig3" else accuracy.Options
        names = {field.name for field in dataclasses.fields(options)}
        chosen: Any = parse(options, [field for field in fields[1:] if field.partition("=")[0] in names])
        if fields[0] != "fig3":
            resources([field for field in fields if field.startswith("slurm.")], "slurm")
            rest = [f for f in fields[1:] if f.partition("=")[0] not in names and not f.startswith("slurm.")]
            cells = grid.read(fields[0]).cells(chosen.tasks, chosen.attns or ("flash",), 1, chosen.recipe, rest)
            assert all(cell.composed for cell in cells)
    elif path == ["report"]:
        grid.read(fields[0])
        parse(report.Options, fields[1:])
    elif path == ["results", "pack"]:
        parse(archive.PackOptions, fields)
    elif path == ["results", "merge"]:
        parse(archive.MergeOptions, fields)
    elif path == ["test"]:
        assert sum(field.startswith("init=") for field in fields) == 1
    elif path[0] == "data":
        own = ("force=", "split=", "count=", "out=")  # of these verbs, not of the configuration
        configure([*(field for field in fields if not field.startswith(own)), "attn=standard"])
    elif path == ["bench", "attention"]:
        bench.configure(fields)
    elif fields:
        configure(fields)


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    assert named and set(named) <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.name)
def test_relative_links_resolve(document):
    links = re.findall(r"\]\(([^)]+)\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if ":" not in link and not (document.parent / link.partition("#")[0]).exists()]
    assert not missing


def test_imports_go_down_the_layers_of_the_picture():
    layers = ("cli",), ("experiments",), ("bench",), ("training", "doctor"), ("tasks",), ("data", "models")
    layers += ("kernels", "config", "ranks"), ("batch", "errors", "environment")
    layers = *layers[:-1], (*layers[-1], "reading", "terminal", "caches", "streams")
    level = {name: depth for depth, names in enumerate(layers) for name in names}
    for file in (ROOT / "lra").rglob("*.py"):
        own = file.relative_to(ROOT / "lra").parts[0].removesuffix(".py")
        if own in ("__init__", "__main__"):  # above all
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "lra":
                continue
            parts = str(node.module).split(".")
            for name in parts[1:2] or [alias.name for alias in node.names]:
                assert name == own or level[name] > level[own], f"{file} imports lra.{name}"


def test_runs_show_every_result(tmp_path):
    """A run that ended badly keeps its row; what was not measured is an empty cell."""
    made_with = {"gpu": "GPU", "date": "2026-01-02T03:04:05Z", "versions": {"torch": "2.0", "triton": "3.0"}}
    base = {
        "task": "listops@1", "attn": "flash", "recipe": "xiong2021", "overrides": ["optim.lr=0.1", "task.source=/here"],
        "seed": 0, "train_seconds": 60.0, "session_seconds": 90.0, "peak_gpu_bytes": None, "world_size": 1,
        "resumed": False, "environment": made_with, "config": {"task": {"name": "listops"}},
    }  # fmt: skip
    scores = {
        "protocol": "heldout",
        "test": {
            "accuracy": 0.375, "plus_minus": 0.0212, "n": 2000,
            "baselines": {"majority": 0.171, "root operator": 0.363},
        },
    }  # fmt: skip
    results = {
        "a": base | scores | {"status": "finished"},
        "b": base | {"status": "oom", "seed": 1, "peak_gpu_bytes": 2 * 10**9, "world_size": 4},
        "c": base | {"status": "failed", "seed": 2, "peak_gpu_bytes": 10**9, "resumed": True},
        "d": base | {"status": "oom", "seed": 3, "config": {"task": {"name": "listops", "dataset": "other"}}},
    }
    for name, result in results.items():
        (tmp_path / f"{name}-s0.json").write_text(json.dumps(result))
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in runs.runs(tmp_path).splitlines()[2:]]
    recipe = "xiong2021 `optim.lr=0.1`"
    score = "37.50 ± 2.12 of 2,000; root operator 36.30"
    names = ["listops@1", "listops@1", "listops@1", "listops@1, data set other"]
    assert [row[0].partition("]")[0].removeprefix("[") for row in rows] == names
    assert [row[1:] for row in rows] == [
        ["flash", recipe, "0", "heldout", score, "", "", "1.0 min", "1.5 min", "GPU"],
        ["flash", recipe, "1", "", "OOM", "", "2.00 GB", "1.0 min", "1.5 min", "4 × GPU"],
        ["flash", recipe, "2", "", "failed", "", "", "1.0 min", "", "GPU"],
        ["flash", recipe, "3", "", "OOM", "", "", "1.0 min", "1.5 min", "GPU"],
    ]
    assert len(runs.runs(tmp_path / "nothing").splitlines()) == 2


def test_gpu_hours_are_of_all_gpus_and_of_a_runs_part_of_a_shared_one():
    """Two figures where runs shared a GPU: by the most that were seen there, and as if each had been alone."""
    hour = {"wall_seconds": 3600.0, "train_seconds": 1800.0}
    assert tables._gpu_hours([hour]) == "1.0"
    assert tables._gpu_hours([hour | {"world_size": 4}]) == "4.0"
    assert tables._gpu_hours([hour, hour | {"world_size": 2}, hour | {"world_size": None}]) == "4.0"
    assert tables._gpu_hours([hour | {"world_size": 4, "runs_per_device": 2}, hour]) == "3.0 to 5.0"
    assert tables._gpu_hours([{"train_seconds": 1800.0, "resumed": True, "session_seconds": 60.0}]) == "0.5"
    assert tables._gpu_hours([]) == "0.0"


def test_hours_of_training_alone_are_steps_by_pace_and_of_all_gpus_where_the_pace_is_a_results(monkeypatch):
    table = grid.read("table3")
    cells = table.cells(["listops", "text"], ["flash"], 1)
    measured, other = cells
    steps = [cell.composed.config.trainer.steps for cell in cells]
    monkeypatch.setattr(tables.speed, "read", lambda file: {})
    monkeypatch.setattr(tables.speed, "paces", lambda *_: [(measured.directory.config, steps[0] / 7200)])
    entry = ledger.Entry(Path("x"), {"steps_per_second": steps[1] / 3600, "world_size": 4})
    said = tables._alone(table, cells, {other: entry}, Path("y"))
    assert said.startswith("2.0 GPU-hours of training for 1 of one seed's 2 runs, if each is alone; at most 4.0 for 1 ")
    assert tables._alone(table, cells[:1], {}, Path("y")).startswith(
        "2.0 GPU-hours of training for all of one seed's 1"
    )


def test_runs_stand_in_the_same_order_however_a_disk_lists_them(monkeypatch):
    made, genuine = runs.runs(ROOT / "benchmarks" / "results"), Path.glob
    monkeypatch.setattr(Path, "glob", lambda *args: reversed(list(genuine(*args))))
    assert runs.runs(ROOT / "benchmarks" / "results") == made


def test_preparing_is_timed_and_leaves_nothing(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    fields = ["task=listops", "recipe=demo", "task.train=30", "task.val=5", "task.test=5", "task.fresh=5"]
    out = tmp_path / "cpu-prepare.json"
    assert script("prepare").main(["--task", *fields, "--task", *fields, "min_length=9", "--out", str(out)]) == 0
    stores = json.loads(out.read_text())["stores"]
    assert [store["examples"] for store in stores] == [45, 45] and all(store["bytes"] > 500 for store in stores)
    assert not list((tmp_path / "stores").iterdir()) and capsys.readouterr().out.count("\n{") == 2
    row = script("readme").prepare(tmp_path).splitlines()[2]
    assert row.startswith("| [listops@1](benchmarks/results/cpu-prepare.json) | `recipe=demo` `task.train=30`")
    assert script("prepare").main(["--task", "task=listop"]) == 2
    assert capsys.readouterr().err.startswith("prepare: unknown task 'listop'")


def test_the_mean_speedup_is_of_the_columns_that_are_averaged(script):
    header, _, *rows = script("readme").speedup(ROOT / "benchmarks" / "results").split("\n\n")[0].splitlines()
    columns, averaged = header.strip("| ").split(" | ")[2:-2], grid.read("table3").together()
    assert not set(columns) <= set(averaged) and rows
    for row in rows:
        *shown, mean, _ = row.removesuffix("|").split(" | ")[2:]
        ratios = [float(ratio) for column, ratio in zip(columns, shown, strict=True) if column in averaged]
        assert float(mean.removesuffix(f" ({len(ratios)})")) == pytest.approx(geometric_mean(ratios), rel=0.01)


def test_learnability_reports_its_curve(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("LRA_DATA", str(tmp_path / "stores"))
    cnn = script("learnability")
    for resolution in (32, 64, 128, 256):
        assert cnn.ResidualCNN(resolution).receptive_field >= resolution
    fields = ["task=pathfinder", "task.train=40", "task.val=4", "task.test=12"]
    options = ["--steps", "3", "--batch", "8", "--log-every", "2", "--out", str(tmp_path / "tiny-learnability.json")]
    assert cnn.main([*fields, *options]) == 0
    result = json.loads((tmp_path / "tiny-learnability.json").read_text())
    assert [point["step"] for point in result["curve"]] == [2, 3] and result["n"] == 12
    assert set(result["baselines"]) == {"majority", "marker distance"}
    assert script("readme").learnability(tmp_path).splitlines()[2].startswith("| [pathfinder@2]")
    assert cnn.main(["task=listops", "batch.size=0"]) == 2


def test_a_turned_image_keeps_its_pixels(script):
    batch = torch.arange(8 * 16, dtype=torch.uint8).view(8, 4, 4)
    turned = script("learnability").turned(batch, torch.Generator().manual_seed(0))
    assert [sorted(image.flatten().tolist()) for image in turned] == [
        sorted(image.flatten().tolist()) for image in batch
    ]
    assert not torch.equal(turned, batch) and torch.equal(turned[0], batch[0].flip(1)) | torch.equal(
        turned[0], batch[0]
    )


def test_exactness_leaves_no_case_out(script, tmp_path):
    from lra.kernels.testing import Case

    tables, exactness = script("kernel_tables"), script("exactness")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = Case((20, 0), dtype=torch.float16, head_dim=16, dropout=0.1)
    wide, causal = Case((9,), head_dim=200), dataclasses.replace(case, causal=True)
    outcomes = [exactness.measure(number, one, device=device) for number, one in enumerate([case, wide])]
    result = {"environment": {"gpu": "GPU", "date": "2026-01-02", "versions": {"torch": "2", "triton": "3"}}}
    result |= {"ptxas": None} | exactness.summarise(outcomes)
    assert [failure["number"] for failure in result["failures"]] == [1]
    assert "head dimensions up to 128" in result["failures"][0]["error"]
    assert all(0 < result["ratios"][name][0] <= 1 and result["ratios"][name][1] is None for name in result["ratios"])
    assert result["dtypes"]["float32"]["worst"]["out"] is None
    assert "hopper_shared_short did not run" in exactness.measure(0, causal, "shared-keys", device).error

    exactness.write(result, tmp_path / "flash-exactness.json")
    table = tables.exactness(tmp_path)
    assert table.count("\n| [flash]") == 2
    assert "2 cases, 1 with dropout, 2 packed, 0 padded, 0 causal, lengths 0 to 20" in table


def test_exactness_needs_a_gpu(run_here):
    done = run_here(ROOT / "benchmarks" / "exactness.py", "--out", "none.json")
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1


def test_losses_differ_by_the_largest_share_on_either_side(script):
    losses = {"eager": [2.0, 4.0], "captured": [1.0, 4.4], "captured, padded": [2.2, 4.0]}
    records = [
        {"task": "listops", "variant": name, "seed": seed, "losses": [loss * (1 + seed) for loss in found]}
        for seed in range(2)
        for name, found in losses.items()
    ]
    script("learning").compare(records)
    assert [record["difference"] for record in records] == pytest.approx([0.0, 0.5, 0.1] * 2)


def test_a_kink_is_a_value_of_either_sign_and_can_be_taken_alike(script):
    kinks = script("kinks")
    whole = torch.tensor([[[1.0, -2.0]], [[-1e-8, 3.0]]])  # two steps of one sample
    halves = torch.tensor([[[1.0, -2.0]], [[2e-8, 3.0]]])
    kink = kinks.first(whole, halves)
    assert kink[:3] == (1, 0, 0) and kink.whole < 0 < kink.halves and kinks.first(whole, whole) is None
    relu, hidden = torch.nn.ReLU(), []
    with kinks.watched(hidden, kink):
        for step, expected in enumerate([[1.0, 0.0], [1.0, 1.0]]):  # without the kink [0, 1]
            x = whole[step].clone().requires_grad_()
            relu(x).sum().backward()
            assert x.grad is not None and x.grad.tolist() == [expected]
        relu.eval()(whole[0])
    assert torch.equal(torch.stack(hidden), whole) and "watched" not in torch.nn.ReLU.forward.__qualname__


def test_runs_share_the_gpus_that_are_visible(script, monkeypatch):
    learning, really, found = script("learning"), subprocess.run, []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a record names the GPU, and there may be no driver
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")

    def run(command, **options):
        if "fit" not in command:
            return really(command, **options)
        found.append(options["env"]["CUDA_VISIBLE_DEVICES"])
        return subprocess.CompletedProcess(command, 1, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    assert learning.main(["--part", "noise", "--tasks", "listops", "--seeds", "2"]) == 1  # as every run failed
    assert {*found} <= {"2", "3", "2,3", "3,2"} and len(found) == 8 and any("," in gpus for gpus in found)


def test_halves_of_each_task_are_half_its_batch(script):
    learning = script("learning")
    for job in learning.jobs(["exact"], list(learning.TASKS), 1, []):
        run = configure(job.args).config
        assert run.batch.size == (2 if "halves" in job.variant else 1) * (run.batch.micro or run.batch.size)
