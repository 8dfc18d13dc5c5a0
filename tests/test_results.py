"""README.md and docs say what is so: results name their origin, commands parse, code runs, links resolve."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean

import pytest

from benchmarks.pages import measured, runs, speeds, tables
from lra.cli import app
from lra.commands import parse_command
from lra.config.compose import list_differences
from lra.experiments.grid import grid
from lra.experiments.results import ledger
from lra.models.attention import ATTENTIONS
from lra.training.run_directory import HARDWARE_FIELDS
from tests.command_line import lra

ROOT = Path(__file__).parent.parent
RESULTS = sorted(measured.BENCHMARKS.rglob("*.json"))
REPEATS = measured.BENCHMARKS / "studies" / "repeats"
DOCUMENTS = [ROOT / "README.md", *sorted(f for name in ("docs", "benchmarks") for f in (ROOT / name).rglob("*.md"))]
README = DOCUMENTS[0].read_text(encoding="utf-8")
GUIDES = [README, *((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("usage", "results"))]
PYTHON = re.findall(r"```python\n(.*?)```", "\n".join(GUIDES), re.DOTALL)
(OWN,) = (block for block in PYTHON if "@ATTENTIONS.register" in block)  # the attention that README adds
(OWN_FILE,) = re.findall(r"Save this as `(\S+)`", README)
MOST_BYTES = 12 * 1024  # of README


@pytest.fixture
def run_here(tmp_path):
    """Runs Python in an empty folder, on the CPU, with the checkout's `lra`; returns the finished process."""

    def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
        command = (sys.executable, *map(str, command))
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    return run


def called(file: Path) -> str:
    return file.relative_to(measured.BENCHMARKS).as_posix()


@pytest.mark.parametrize("file", RESULTS, ids=called)
def test_a_result_says_where_it_comes_from(file):
    text = file.read_text(encoding="utf-8")
    result = json.loads(text)
    assert not re.search(r'"/\w', text)  # a path of the machine it was measured on, which nobody else has
    measured_at = [result] if "environment" in result else result["runs"]  # each where they are of several days
    assert measured_at
    for made_with in (each["environment"] for each in measured_at):
        assert made_with["command"] and made_with["date"] and made_with["versions"]["torch"]
        assert "gpu" in made_with  # null on a CPU
    if file.name == "result.json":
        task, attn, run, *_ = file.relative_to(REPEATS if REPEATS in file.parents else measured.RUNS).parts
        assert (task, attn) == (result["task"].partition("@")[0], result["attn"])
        name = (result["config"]["name"] or result["recipe"]).removesuffix("-again").removesuffix("-earlier")
        assert run.startswith(name) and run.endswith(f"-s{result['seed']}")  # between them what differs
    elif len(measured_on := {measured.place(each["environment"]["gpu"]) for each in measured_at}) == 1:
        assert file.parent.name == measured_on.pop()


@pytest.mark.parametrize("file", sorted(REPEATS.rglob("result.json")), ids=called)
def test_what_ran_another_time_is_the_same_configuration(file):
    task, attn, run, began, _ = file.relative_to(REPEATS).parts
    one, other = (json.loads(each.read_text()) for each in (file, measured.RUNS / task / attn / run / file.name))
    assert list_differences(one["config"], other["config"], {*HARDWARE_FIELDS, "name", "resume"}) == []
    assert one["environment"]["date"][:16].replace(":", "") == began


def test_the_readme_is_short():
    assert len(README.encode()) <= MOST_BYTES


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_of_the_guides_runs(number, run_here):
    if PYTHON[number] != OWN:
        done = run_here("-c", PYTHON[number])
        assert done.returncode == 0, done.stderr


def commands() -> list[str]:
    """The arguments of every `lra …` in the guides' shell blocks and inline code."""
    found = []
    for guide in GUIDES:
        lines = [line for block in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL) for line in block.splitlines()]
        inline = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", guide, flags=re.DOTALL))
        found += [match[1] for text in (*lines, *inline) if (match := re.match(r"(?:torchrun .*-m )?lra (.+)", text))]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def own_attention(tmp_path_factory):
    """The current folder has the attention that README adds."""
    folder = tmp_path_factory.mktemp("own")
    (folder / OWN_FILE).write_text(OWN)
    path = [*sys.path]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield
    sys.path[:] = path
    for name in [name for name, cls in ATTENTIONS._classes.items() if cls.Config.imported_from]:
        del ATTENTIONS._classes[name]
    sys.modules.pop(Path(OWN_FILE).stem, None)


@pytest.mark.parametrize("command", commands())
def test_commands_of_the_guides_parse(command, own_attention):
    words = shlex.split(command, comments=True)
    if "=" in command or len(words) > 2:
        parse_command(app, words)
    else:  # a sentence names it
        assert lra(*words, "--help").code == 0


def test_the_attention_of_the_readme_is_trained_and_enters_the_table(tmp_path):
    (tmp_path / OWN_FILE).write_text(OWN)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    sizes = [f"task.{split}=20" for split in ("train", "val", "test", "fresh")]
    small = [*sizes, "trainer.steps=2", "trainer.eval_every=2", "trainer.log_every=1", "batch.size=4"]
    shown = ""
    for command in re.findall(rf"^lra ((?:fit|report) [^#\n]*\b{re.escape(OWN_FILE)}\b[^#\n]*)", README, re.MULTILINE):
        line = (sys.executable, "-m", "lra", *command.split(), *small)
        done = subprocess.run(line, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        shown = done.stdout
    assert re.search(r"│ cosine +│ \d+\.\d†? ", shown)
    assert "cosine &" in (tmp_path / "report" / "table3.tex").read_text()


def test_make_targets_of_the_readme_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    named = re.findall(r"(?:^|`)make ([a-z-]+)", README, re.MULTILINE)
    assert named and set(named) <= set(targets)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_relative_links_resolve(document):
    text = re.sub(r"```.*?```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)]+)\)", text)
    missing = [link for link in links if ":" not in link and not (document.parent / link.partition("#")[0]).exists()]
    assert not missing


def test_imports_go_down_the_layers_of_the_picture():
    layers = [
        "cli", "verbs", "commands help printing", "completion", "experiments", "bench", "training doctor", "tasks",
        "data models compile_caches", "kernels config ranks caches files",
        "batch errors environment imports reading terminal streams timeline",
    ]  # fmt: skip
    level = {name: depth for depth, names in enumerate(layers) for name in names.split()}
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


def test_the_list_of_runs_has_every_result(tmp_path):
    """A run that ended badly keeps its row; what was not measured is empty."""
    real = json.loads((measured.RUNS / "listops/linear/xiong2021-s0/result.json").read_text())
    base = real | {
        "overrides": ["optim.lr=0.1", "task.source=/here"],
        "train_seconds": 60.0,
        "peak_gpu_bytes": 2 * 10**9,
    }
    base["test"] |= {
        "accuracy": 0.375, "plus_minus": 0.0212, "n": 2000,
        "baselines": {"majority": 0.171, "root operator": 0.363},
    }  # fmt: skip
    badly = {name: value for name, value in base.items() if name not in ("test", "val", "fresh", "protocol")}
    results = {
        "a": base,
        "b": badly | {"status": "oom", "seed": 1, "world_size": 4},
        "c": badly | {"status": "failed", "seed": 2, "resumed": True, "wall_seconds": None},
    }
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    rows = runs.rows(tmp_path)
    assert [(row["file"], row["status"], row["seed"]) for row in rows] == [
        ("a.json", "finished", 0), ("b.json", "oom", 1), ("c.json", "failed", 2)
    ]  # fmt: skip
    assert {(row["task"], row["attention"], row["changed"]) for row in rows} == {
        ("listops@1", "linear", "optim.lr=0.1")
    }
    score = {"accuracy": "37.50", "plus_minus": "2.12", "examples": 2000, "baseline": "root operator"}
    assert score.items() <= rows[0].items() and rows[0]["train_minutes"] == "1.0" and rows[0]["peak_gb"] == "2.00"
    assert [row["accuracy"] for row in rows[1:]] == [None, None] and rows[1]["gpus"] == 4
    assert rows[2]["wall_minutes"] is None and runs.rows(tmp_path / "nothing") == []


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
    table = grid.read_grid("table3")
    cells = table.cells(["listops", "text"], ["flash"], 1)
    measured, other = cells
    steps = [cell.composed.config.trainer.steps for cell in cells]
    monkeypatch.setattr(tables.speed, "read_speeds", lambda file: {})
    monkeypatch.setattr(tables.speed, "measured_paces", lambda *_: [(measured.directory.config, steps[0] / 7200)])
    entry = ledger.ResultFile(Path("x"), {"steps_per_second": steps[1] / 3600, "world_size": 4})
    said = tables._alone(table, cells, {other: entry}, Path("y"))
    alone = "runs of one seed, each alone on its GPU"
    assert said.startswith(f"2.0 GPU-hours of training for 1 of the 2 {alone}; at most 4.0 for 1 ")
    assert tables._alone(table, cells[:1], {}, Path("y")) == f"2.0 GPU-hours of training for all 1 {alone}"


def test_runs_stand_in_the_same_order_however_a_disk_lists_them(monkeypatch):
    made, genuine = runs.make(), Path.rglob
    monkeypatch.setattr(Path, "rglob", lambda *args: reversed(list(genuine(*args))))
    assert runs.make() == made


def test_the_mean_speedup_is_of_the_columns_that_are_averaged():
    header, _, *rows = speeds.speedup(measured.BENCHMARKS).split("\n\n")[0].splitlines()
    columns, averaged = header.strip("| ").split(" | ")[2:-3], grid.read_grid("table3").together()
    shares = rows[0].strip("| ").split(" | ")[2:]
    whole = [column for column, share in zip(columns, shares, strict=False) if share == "0%"]
    assert not set(columns) <= set(averaged) and 0 < len({*whole} & {*averaged}) < len({*columns} & {*averaged})
    for row in rows[1:]:
        *shown, mean, unpadded, _ = row.removesuffix("|").split(" | ")[2:]
        for text, chosen in ((mean, averaged), (unpadded, {*averaged} & {*whole})):
            ratios = [float(ratio) for column, ratio in zip(columns, shown, strict=True) if column in chosen]
            assert float(text.removesuffix(f" ({len(ratios)})")) == pytest.approx(geometric_mean(ratios), rel=0.01)
