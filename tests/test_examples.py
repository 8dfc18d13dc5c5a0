"""The example package in examples/plugin, installed as a user installs it: its parts are full citizens of lra."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLUGIN = ROOT / "examples" / "plugin"
ATTNS = ("flash", "sigmoid", "convolution")
SHORT = ("trainer.steps=20", "trainer.eval_every=10", "trainer.log_every=10", "trainer.accelerator=cpu")


QUOTED = re.compile(r'^```\w+ title="(examples/[^"]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)


def test_the_docs_quote_its_lines():
    quotes = QUOTED.findall((ROOT / "docs" / "plugins.md").read_text(encoding="utf-8"))
    assert len({file for file, _ in quotes}) == 6
    assert not [lines for file, lines in quotes if lines not in (ROOT / file).read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An empty folder beside `site`, in which the package is installed."""
    folder = tmp_path_factory.mktemp("example")
    source = folder / "source"
    source.mkdir()
    for file in PLUGIN.rglob("*"):
        if file.suffix in (".py", ".yaml", ".toml"):  # not what an earlier build left
            copy = source / file.relative_to(PLUGIN)
            copy.parent.mkdir(exist_ok=True)
            copy.write_bytes(file.read_bytes())
    install = ("pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--target", folder / "site", source)
    done = subprocess.run([sys.executable, "-m", *map(str, install)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (folder / "work").mkdir()
    return folder


@pytest.fixture
def lra(folder, tmp_path_factory):
    """Runs `lra …` where the package is installed, and returns what it prints."""
    variables = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(folder / "site")]), "LRA_DATA": str(folder / "data"),
        "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1",
    }  # fmt: skip

    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "lra", *arguments]
        done = subprocess.run(command, cwd=folder / "work", capture_output=True, text=True, env=variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_its_parts_are_listed(lra):
    assert "Each score passes a sigmoid" in lra("ls", "attns")
    assert "Recall: which digit" in lra("ls", "tasks")
    assert "small models on a CPU" in lra("ls", "recipes") and "recall beside ListOps" in lra("reproduce")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sigmoid", "convolution"])
def test_its_attention_and_its_mixer_pass_the_checks_of_lra(lra, name):
    assert "failed" not in lra("check", f"attn={name}")


@pytest.mark.slow
def test_its_table_is_run_and_reported(lra, folder):
    lra("reproduce", "recalling", *SHORT)
    lra("report", "recalling", "out=paper", *SHORT)
    latex = (folder / "work" / "paper" / "recalling.tex").read_text()
    assert "sigmoid" in latex and "recall" in latex
    with (folder / "work" / "paper" / "recalling.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {(row["attention"], row["column"], row["seed"]) for row in rows if row["accuracy"]} == {
        (attn, column, seed) for attn in ATTNS for column in ("recall", "listops") for seed in ("0", "1")
    }
